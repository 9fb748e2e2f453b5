"""`matmul-scaling`: time and FLOP/s of square matmuls by size and precision, beside the chip's peak.

The product of two n × n matrices takes 2 n³ FLOPs on 3 n² numbers: the larger it is, the more is done with each number that
was loaded, and the more of the chip has something to do. Every number format has a peak of its own. Inputs are random
numbers: zeros would take less power and so run faster. fp8 products accumulate fast and give bf16.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import INCONCLUSIVE, Experiment, Picture, Row, Rows, TableOf, Verdict
from flopwise.experiments.steadiness import Ratio, left_open, times, together, word
from flopwise.predict.flops import matmul_flops
from flopwise.records.experiment import Place
from flopwise.spec.gpu import find_gpu

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

CLAIM = (
    "A matmul reaches its full rate only when it is large, and narrower numbers raise that rate: "
    "fp32 < TF32 < bf16 ≈ fp16 < fp8."
)
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
ORDER = ("fp32", "tf32", "bf16", "fp8")  # each should be faster than the one before
ALIKE = ("bf16", "fp16")  # the same count of bits and the same peak
GPU_SIZES = (1024, 2048, 4096, 8192, 16384)  # the lecture's
CPU_SIZES = (64, 128, 256, 512, 1024, 2048)
FP8_CAPABILITY = (8, 9)  # from Ada and Hopper on
TOO_SLOW_NS = 0.3e9  # on a CPU: what should take longer is left out; some have no instructions for half precision
FULL_SHARE = 0.9  # of the best rate: less is not yet the full rate
KEPT_SHARE = 0.8  # of the best rate: less at the largest size is no full rate when it is large; heat costs some of it
FASTER = 1.1  # by less than that is no faster
SAME = (0.8, 1.25)  # times the other's rate
FEWEST_SIZES = 3  # of fewer, a rise to a level cannot be seen


def measure(bench: "Bench") -> Iterator[Row]:
    sizes: tuple[int, ...] = GPU_SIZES if bench.on_gpu else CPU_SIZES
    sizes = sizes[:4] if bench.quick else sizes
    for precision in PRECISIONS:
        last_ns = 0.0
        for n in sizes:
            bench.doing(f"{precision}, {n} × {n}")
            if not bench.on_gpu and 8 * last_ns > TOO_SLOW_NS:
                yield {"precision": precision, "n": n, "note": "left out: too slow here"}
                break
            product = _product(bench, precision, n)
            if isinstance(product, str):
                yield {"precision": precision, "n": n, "note": product}
                break
            timing = bench.time(product, seconds=0.03 if bench.quick else 0.12)
            last_ns = timing.device_ns
            flops = matmul_flops(n, n, n)
            yield {
                "precision": precision, "n": n, "work_flops": flops, "device_ns": timing.device_ns,
                "rate_flops_per_s": 1e9 * flops / timing.device_ns, "note": "", **timing.row(),
            }  # fmt: skip


def _product(bench: "Bench", precision: str, n: int) -> "Callable[[], torch.Tensor] | str":
    """A matmul that writes where it wrote before; or why there is none."""
    import torch

    from flopwise.lm.precision import apply_fp32_matmul, fp32_matmul_probe
    from flopwise.spec.recipe import Recipe

    if precision == "fp8":
        return _fp8_product(bench, n)
    if precision == "tf32" and not bench.on_gpu:
        return "TF32 needs a GPU"
    apply_fp32_matmul(Recipe(precision="tf32" if precision == "tf32" else "fp32"))
    if precision in ("fp32", "tf32"):
        found = fp32_matmul_probe(bench.device)
        if found != ("tf32" if precision == "tf32" else "ieee"):
            return f"an fp32 matmul computes in {found} here"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    a, b = (torch.randn(n, n, device=bench.device).to(dtype) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _fp8_product(bench: "Bench", n: int) -> "Callable[[], torch.Tensor] | str":
    import torch

    from flopwise.torch_private import scaled_mm

    if not bench.on_gpu or torch.cuda.get_device_capability(bench.device) < FP8_CAPABILITY:
        return "this chip has no fp8 matmul"
    a, b = (torch.randn(n, n, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)
    # The second matrix has to lie column by column; the scales are for the whole matrices.
    return lambda: scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def measured(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """The rows with a time, by precision, small matrices first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted((row for row in rows if row.get("rate_flops_per_s")), key=lambda row: row["n"]):
        found.setdefault(row["precision"], []).append(row)
    return {name: found[name] for name in PRECISIONS if name in found}


def with_peak(rows: Rows, place: Place) -> list[Row]:
    """The measured rows, each with its share of the chip's specified peak; None where no peak is known."""
    chip = find_gpu(place.name) if place.on_gpu else None
    told = []
    for name, some in measured(rows).items():
        peak = chip.peak(name) if chip else None
        for row in some:
            share = row["rate_flops_per_s"] / peak if peak else None
            told.append({**row, "size": str(row["n"]), "peak_flops_per_s": peak, "peak_share": share})
    return told


def judge(rows: Rows, place: Place) -> Verdict:
    excused = {row["precision"] for row in rows if row.get("note")}  # it says why there are no more of it
    several = {
        name: some for name, some in measured(rows).items() if len(some) >= (2 if name in excused else FEWEST_SIZES)
    }
    largest = max((some[-1]["n"] for some in several.values()), default=0)
    short = [
        name for name in PRECISIONS if name not in excused and (name not in several or several[name][-1]["n"] < largest)
    ]
    ranked = [name for name in ORDER if name in several]
    if short or len(ranked) < 2:
        which = f"; {', '.join(short)} not at all of them" if short else ""
        return Verdict(
            INCONCLUSIVE, f"only {', '.join(several) or 'nothing'} could be measured at several sizes{which}."
        )
    best = {name: max(some, key=lambda row: row["rate_flops_per_s"]) for name, some in several.items()}
    shares = {row["precision"]: row["peak_share"] for row in with_peak(list(best.values()), place)}
    grows = [_rate(several[name][0], best[name]).within(most=FULL_SHARE) for name in several]
    stays = [_rate(several[name][-1], best[name]).within(least=KEPT_SHARE) for name in several]
    ordered = [_rate(best[b], best[a]).within(least=FASTER) for a, b in pairwise(ranked)]
    alike = [_rate(best[ALIKE[1]], best[ALIKE[0]]).within(*SAME)] if set(ALIKE) <= set(several) else []
    told = "; ".join(_told(name, several[name][0], best[name], shares[name]) for name in several)
    missing = [name for name in PRECISIONS if name not in several]
    said = f"{told}." + (f" Not measured here: {', '.join(missing)}." if missing else "")
    answer = together(*grows, *stays, *ordered, *alike)
    if falls := [name for name, holds in zip(several, stays, strict=True) if holds is False]:
        said += f" The largest does not keep that rate: {', '.join(falls)}."
    if answer is None:
        some = (row for name in several for row in (several[name][0], best[name], several[name][-1]))
        said += " " + left_open((f"{row['precision']} of {row['n']}", row) for row in some)
    return Verdict(word(answer), said)


def _rate(row: Mapping[str, Any], other: Mapping[str, Any]) -> Ratio:
    """How many times the other's rate it has; as uncertain as their times."""
    return times(other, row).around(row["rate_flops_per_s"] / other["rate_flops_per_s"])


def _told(name: str, first: Mapping[str, Any], best: Mapping[str, Any], share: float | None) -> str:
    reached = f" ({units.percent(share, 0)} of its peak)" if share else ""
    return (
        f"{name} reaches {units.rate(first['rate_flops_per_s'], 'FLOP/s')} at {first['n']} and "
        f"{units.rate(best['rate_flops_per_s'], 'FLOP/s')} at best, at {best['n']}{reached}"
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    told = with_peak(rows, place)
    pictures = [
        Picture(
            title="Rate of square matmuls", caption="Each format levels off where the chip has enough to do.",
            kind="line", rows=told, x="size", y="rate_flops_per_s", colour="precision", x_title="rows and columns",
            y_title="rate", y_log=True,
        ),
        Picture(
            title="Time of square matmuls", caption="Twice the size is eight times the work.", kind="line", rows=told,
            x="size", y="device_ns", colour="precision", x_title="rows and columns", y_title="time", y_log=True,
        ),
    ]  # fmt: skip
    if any(row["peak_share"] for row in told):
        pictures.insert(
            1,
            Picture(
                title="Share of the specified peak", caption="The peak is the vendor's, dense, of each format.",
                kind="line", rows=told, x="size", y="peak_share", colour="precision", x_title="rows and columns",
                y_title="of the peak",
            ),
        )  # fmt: skip
    return pictures


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    told = with_peak(rows, place)
    columns = {"precision": "precision", "n": "size", "device_ns": "time", "rate_flops_per_s": "rate"}
    if any(row["peak_share"] for row in told):
        columns |= {"peak_flops_per_s": "specified peak", "peak_share": "of the peak"}
    notes = [f"{row['precision']} from {row['n']} on: {row['note']}" for row in rows if row.get("note")]
    if place.on_gpu:
        notes.append("time: the GPU's alone, with launches queued before; small matrices lie in the L2 cache")
    return [TableOf("square matmuls", columns, told, tuple(notes))]


EXPERIMENT = Experiment(
    name="matmul-scaling",
    number=1,
    line="Time and FLOP/s of square matmuls by size, in fp32, TF32, bf16, fp16 and fp8, beside the chip's peak.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
