"""`matmul-scaling`: time and FLOP/s of square matmuls by size and precision, against the chip's peak.

The product of two n × n matrices takes 2 n³ FLOPs on 3 n² numbers: the larger it is, the more is done with each number that
was loaded, and the more of the chip has something to do. Every number format has a peak of its own. Inputs are random
numbers: zeros would take less power and so run faster. fp8 products accumulate fast and give bf16.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, line, table_of
from flopwise.experiments.rows import Interval, Row, Timed, by, fields, select
from flopwise.experiments.verdict import Check, least_certain, require, said, within
from flopwise.predict.flops import matmul_flops
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

LINE = "Time and FLOP/s of square matmuls by size, in fp32, TF32, bf16, fp16 and fp8, against the chip's peak."
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


class Product(Timed, frozen=True, kw_only=True):
    precision: str
    n: int
    work_flops: int
    device_ns: float
    rate_flops_per_s: float
    note: str


class Skipped(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first size of a precision that was not measured, and why."""

    precision: str
    n: int
    note: Annotated[str, Meta(min_length=1)]


Rows = Sequence[Product | Skipped]


def measure(bench: "Bench") -> Iterator[Product | Skipped]:
    sizes: tuple[int, ...] = GPU_SIZES if bench.on_gpu else CPU_SIZES
    for precision in PRECISIONS:
        last_ns = 0.0
        for n in sizes[:4] if bench.quick else sizes:
            bench.doing(f"{precision}, {n} × {n}")
            too_slow = not bench.on_gpu and 8 * last_ns > TOO_SLOW_NS
            product = "left out: too slow here" if too_slow else _product(bench, precision, n)
            if isinstance(product, str):
                yield Skipped(precision=precision, n=n, note=product)
                break
            timing = bench.time(product, seconds=0.03 if bench.quick else 0.12)
            last_ns, flops = timing.took_ns, matmul_flops(n, n, n)
            took = {"device_ns": last_ns, "rate_flops_per_s": 1e9 * flops / last_ns, **fields(timing)}
            yield Product(precision=precision, n=n, work_flops=flops, note="", **took)


def _product(bench: "Bench", precision: str, n: int) -> "Callable[[], torch.Tensor] | str":
    """A matmul that writes where it wrote before; or why there is none."""
    import torch

    from flopwise.lm.precision import fp32_matmul_probe

    if precision == "fp8":
        return _fp8_product(bench, n)
    if precision == "tf32" and not bench.on_gpu:
        return "TF32 needs a GPU"
    bench.fp32_matmul("tf32" if precision == "tf32" else "fp32")
    if precision in ("fp32", "tf32"):
        computes_in = fp32_matmul_probe(bench.device)
        if computes_in != ("tf32" if precision == "tf32" else "ieee"):
            return f"an fp32 matmul computes in {computes_in} here"
    a, b = (bench.randn(n, n, dtype=precision) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _fp8_product(bench: "Bench", n: int) -> "Callable[[], torch.Tensor] | str":
    import torch

    from flopwise.torch_private import scaled_mm

    if not bench.on_gpu or torch.cuda.get_device_capability(bench.device) < FP8_CAPABILITY:
        return "this chip has no fp8 matmul"
    a, b = (bench.randn(n, n).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)
    # The second matrix has to lie column by column; the scales are for the whole matrices.
    return lambda: scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def by_precision(rows: Rows) -> dict[str, list[Product]]:
    """The products by precision, small matrices first."""
    products = sorted(select(rows, Product), key=lambda row: row.n)
    found = {name: [row for row in products if row.precision == name] for name in PRECISIONS}
    return {name: some for name, some in found.items() if some}


def with_peak(rows: Rows, place: Place) -> list[dict[str, Any]]:
    """The products, each with its share of the chip's specified peak; None where no peak is known."""
    found = []
    for name, some in by_precision(rows).items():
        peak = place.gpu.peak(name) if place.gpu else None
        for row in some:
            share = row.rate_flops_per_s / peak if peak else None
            found.append(fields(row) | {"size": str(row.n), "peak_flops_per_s": peak, "peak_share": share})
    return found


def rate_ratio(row: Product, other: Product) -> Interval:
    """How many times the other's rate it has; as uncertain as their times."""
    return (other.device / row.device).around(row.rate_flops_per_s / other.rate_flops_per_s)


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    excused = by(select(rows, Skipped), "precision")  # they say why there are no more of them
    enough = {name: 2 if name in excused else FEWEST_SIZES for name in PRECISIONS}
    several = {name: some for name, some in by_precision(rows).items() if len(some) >= enough[name]}
    yield _several_sizes(several, set(excused))
    first, last = ({name: some[end] for name, some in several.items()} for end in (0, -1))
    best = {name: max(some, key=attrgetter("rate_flops_per_s")) for name, some in several.items()}
    yield said("; ".join(_described(first[name], best[name], place) for name in several) + ".")
    missing = ", ".join(name for name in PRECISIONS if name not in several)
    yield said(f"Not measured here: {missing}." if missing else "")
    yield within("small is slower", {name: rate_ratio(first[name], best[name]) for name in best}, most=FULL_SHARE)
    kept = {name: rate_ratio(last[name], best[name]) for name in best}
    yield within("large keeps its rate", kept, KEPT_SHARE, refuted="The largest does not keep that rate: {}.")
    yield from _between_precisions(best)
    ends = (*first.values(), *best.values(), *last.values())
    yield least_certain({f"{row.precision} of {row.n}": row for row in ends})


def _several_sizes(several: Mapping[str, Sequence[Product]], excused: set[str]) -> Check:
    """Every precision that is not excused has to reach the largest size."""
    largest = max((some[-1].n for some in several.values()), default=0)
    reached = excused | {name for name, some in several.items() if some[-1].n == largest}
    short = ", ".join(name for name in PRECISIONS if name not in reached)
    complete = not short and len(set(ORDER) & set(several)) >= 2
    which = f"; {short} not at all of them" if short else ""
    there = ", ".join(several) or "nothing"
    return require("several sizes", complete, f"only {there} could be measured at several sizes{which}.")


def _between_precisions(best: Mapping[str, Product]) -> Iterator[Check]:
    ranked = [best[name] for name in ORDER if name in best]
    yield within("narrower is faster", {b.precision: rate_ratio(b, a) for a, b in pairwise(ranked)}, FASTER)
    if set(ALIKE) <= set(best):
        bf16, fp16 = (best[name] for name in ALIKE)
        yield within("16 bits are alike", {"fp16 over bf16": rate_ratio(fp16, bf16)}, *SAME)


def _described(first: Product, best: Product, place: Place) -> str:
    peak = place.gpu.peak(best.precision) if place.gpu else None
    reached = f" ({units.percent(best.rate_flops_per_s / peak, 0)} of its peak)" if peak else ""
    return (
        f"{best.precision} reaches {units.rate(first.rate_flops_per_s, 'FLOP/s')} at {first.n} and "
        f"{units.rate(best.rate_flops_per_s, 'FLOP/s')} at best, at {best.n}{reached}"
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    products, size = with_peak(rows, place), Axis("size", "rows and columns")
    pictures = [
        line(products, size, Axis("rate_flops_per_s", "rate", log=True), colour="precision").titled(
            "Rate of square matmuls", "Each format levels off where the chip has enough to do."
        ),
        line(products, size, Axis("peak_share", "of the peak"), colour="precision").titled(
            "Share of the specified peak", "The peak is the vendor's, dense, of each format."
        ),
        line(products, size, Axis("device_ns", "time", log=True), colour="precision").titled(
            "Time of square matmuls", "Twice the size is eight times the work."
        ),
    ]
    return pictures if any(row["peak_share"] for row in products) else [pictures[0], pictures[2]]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    products = with_peak(rows, place)
    headings = columns("precision", n="size", device_ns="time", rate_flops_per_s="rate")
    if any(row["peak_share"] for row in products):
        headings |= columns(peak_flops_per_s="specified peak", peak_share="of the peak")
    notes = [f"{row.precision} from {row.n} on: {row.note}" for row in select(rows, Skipped)]
    if place.on_gpu:
        notes.append("time: the GPU's alone, with launches queued before; small matrices lie in the L2 cache")
    return [table_of("square matmuls", headings, products, tuple(notes))]


EXPERIMENT = Experiment(1, "matmul-scaling", LINE, CLAIM, (Product, Skipped), measure, judge, draw, tabulate)
