"""`low-precision`: ReLU in fp32 and in half precision: its arithmetic intensity, and the bandwidth that follows from it.

ReLU of n numbers reads n, writes n, and makes n comparisons, one FLOP each: 1/8 FLOP per byte in fp32 and 1/4 in half precision.
Every chip has a ridge far above that, so its bandwidth is the limit and its time can be predicted: the bytes over the bandwidth
that a plain copy of the same bytes reaches here. PyTorch's ReLU writes every number, not only those that change.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import INCONCLUSIVE, Experiment, Picture, Row, Rows, Rule, TableOf, Verdict, part
from flopwise.experiments.steadiness import MOST_OF_MEMORY, left_open, of_memory, times, together, word
from flopwise.records.experiment import Place
from flopwise.spec.gpu import find_gpu

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

CLAIM = (
    "ReLU is limited by memory, so half the bytes for each number double its arithmetic intensity and halve its time."
)
RELU, COPY = "relu", "copy"
FORMATS = ("fp32", "bf16", "fp16")
GPU_POWERS, GPU_QUICK = (16, 18, 20, 22, 24, 26, 28), (16, 22, 28)
CPU_POWERS, CPU_QUICK = (12, 14, 16, 18, 20, 22, 24, 25), (14, 20, 25)
CLEAR_OF_CACHE = 4  # times the cache: what is moved must not lie in it
HALVED = (1.8, 2.2)  # fp32's time over half precision's
NEAR_COPY = (0.8, 1.25)  # of a copy's bandwidth: less is limited by something else; more is not predicted by it


def measure(bench: "Bench") -> Iterator[Row]:
    import torch

    cache = torch.cuda.get_device_properties(bench.device).L2_cache_size if bench.on_gpu else None
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    powers = (GPU_QUICK if bench.quick else GPU_POWERS) if bench.on_gpu else (CPU_QUICK if bench.quick else CPU_POWERS)
    for n in (2**power for power in powers):
        for name, dtype in dtypes.items():
            bench.doing(f"ReLU of {n} numbers in {name}")
            x = torch.randn(n, device=bench.device).to(dtype)
            out = torch.empty_like(x)
            about = {"format": name, "n": n, "moved_bytes": 2 * x.nbytes, "cache_bytes": cache}
            # What torch.relu calls, but into memory that is there: a CPU would get new pages from the system each time.
            for kind, run in ((RELU, partial(torch.clamp_min, x, 0, out=out)), (COPY, partial(out.copy_, x))):
                timing = bench.time(run, seconds=0.03 if bench.quick else 0.08)
                rate = 1e9 * about["moved_bytes"] / timing.device_ns
                yield {
                    "part": kind, **about, "device_ns": timing.device_ns, "rate_bytes_per_s": rate, **timing.row(),
                }  # fmt: skip


def relus(rows: Rows) -> list[Row]:
    """Each ReLU beside the prediction from the copy of the same bytes."""
    copies = {(row["format"], row["n"]): row["rate_bytes_per_s"] for row in part(rows, COPY)}
    told = []
    for row in part(rows, RELU):
        copied = copies.get((row["format"], row["n"]))
        more: Row = {
            "numbers": units.count(row["n"]),
            "intensity": row["n"] / row["moved_bytes"],
            "work_flops_per_s": 1e9 * row["n"] / row["device_ns"],
            "copy_bytes_per_s": copied,
            "predicted_ns": 1e9 * row["moved_bytes"] / copied if copied else None,
            "copy_share": row["rate_bytes_per_s"] / copied if copied else None,
        }
        told.append({**row, **more})
    return told


def largest(rows: Rows) -> dict[str, Row]:
    """The largest ReLU of each format."""
    found: dict[str, Row] = {}
    for row in relus(rows):
        if row["n"] >= found.get(row["format"], row)["n"]:
            found[row["format"]] = row
    return found


def judge(rows: Rows, place: Place) -> Verdict:
    found = largest(rows)
    if set(found) != set(FORMATS) or not all(row["predicted_ns"] for row in found.values()):
        return Verdict(INCONCLUSIVE, f"only {', '.join(found) or 'nothing'} could be measured beside a copy.")
    full, *halves = (found[name] for name in FORMATS)
    n = 2 ** (GPU_POWERS if place.on_gpu else CPU_POWERS)[-1]
    if any(row["n"] < n for row in found.values()):
        return Verdict(INCONCLUSIVE, f"not every format was measured at {units.count(n)} numbers.")
    cache = full["cache_bytes"]
    if cache and any(row["moved_bytes"] < CLEAR_OF_CACHE * cache for row in halves):
        return Verdict(
            INCONCLUSIVE,
            f"the largest vector moves {units.size(halves[0]['moved_bytes'])}, and the cache holds {units.size(cache)}: "
            "its bandwidth need not be the memory's.",
        )
    copies = {row["format"]: row for row in part(rows, COPY) if row["n"] == full["n"]}
    faster = [times(full, half).around(full["device_ns"] / half["device_ns"]) for half in halves]
    near = [times(copies[name], row).around(row["copy_share"]).within(*NEAR_COPY) for name, row in found.items()]
    chip = find_gpu(place.name) if place.on_gpu else None
    peak = chip.bandwidth_bytes_s if chip else None
    gains = " and ".join(f"{half['format']} is {by.middle:.2f}" for half, by in zip(halves, faster, strict=True))
    said = " ".join(_told(row, peak) for row in found.values())
    said += f" At {units.count(full['n'])} numbers {gains} times as fast as fp32."
    if False in near:
        said += " What is far from a copy's bandwidth is not limited by memory alone here."
    of_memorys = [of_memory(row, peak) for row in found.values()]
    if False in of_memorys:
        said += " At less than half of the specified bandwidth it is not the memory that limits it."
    beyond = peak is not None and any(row["rate_bytes_per_s"] > MOST_OF_MEMORY * peak for row in found.values())
    if beyond:
        said += " More than the specified bandwidth is not the memory's."
    answer = together(*near, *of_memorys, *(by.within(*HALVED) for by in faster))
    if answer is None and not beyond:
        said += " " + left_open(
            (f"{row['part']} in {row['format']}", row) for row in (*found.values(), *copies.values())
        )
    return Verdict(word(answer), said)


def _told(row: Mapping[str, Any], peak: float | None) -> str:
    specified = f", {units.percent(row['rate_bytes_per_s'] / peak, 0)} of the specified" if peak else ""
    return (
        f"{row['format']} ({row['intensity']:.3g} FLOP/B): {units.duration(row['predicted_ns'])} predicted, "
        f"{units.duration(row['device_ns'])} measured, {units.rate(row['rate_bytes_per_s'], 'B/s')} "
        f"({units.percent(row['copy_share'], 0)} of a copy's{specified})."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    told = relus(rows)
    chip = find_gpu(place.name) if place.on_gpu else None
    peak = chip.bandwidth_bytes_s if chip else None
    cache = next((row["cache_bytes"] for row in told if row["cache_bytes"]), None)
    rules = (*((Rule("y", peak, "specified"),) if peak else ()), *((Rule("x", cache, "L2"),) if cache else ()))
    both = [
        {"format": row["format"], "which": which, "time_ns": row[field]}
        for row in largest(rows).values()
        for which, field in (("predicted from a copy", "predicted_ns"), ("measured", "device_ns"))
    ]
    return [
        Picture(
            title="Time of ReLU by the count of numbers",
            caption="On the right half the bytes take half the time; on the left the cost of a kernel hides it.",
            kind="line", rows=told, x="n", y="device_ns", colour="format", x_title="numbers", y_title="time",
            x_log=True, y_log=True,
        ),
        Picture(
            title="Bandwidth of ReLU by the bytes it moves",
            caption="By its bytes, every format has the same bandwidth: what lies in the cache is faster than memory.",
            kind="line", rows=told, x="moved_bytes", y="rate_bytes_per_s", colour="format", x_title="bytes read and written",
            y_title="bandwidth", x_log=True, rules=rules,
        ),
        Picture(
            title="Largest ReLU, predicted and measured", caption="Predicted: its bytes over a copy's bandwidth.",
            kind="bar", rows=both, x="format", y="time_ns", colour="which", x_title="format", y_title="time",
        ),
    ]  # fmt: skip


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    columns = {
        "format": "format", "numbers": "numbers", "intensity": "FLOP per byte", "moved_bytes": "moved",
        "predicted_ns": "predicted", "device_ns": "measured", "rate_bytes_per_s": "bandwidth",
        "copy_bytes_per_s": "of a copy", "copy_share": "share of a copy's", "work_flops_per_s": "rate",
    }  # fmt: skip
    return [TableOf("ReLU by format", columns, relus(rows))]


EXPERIMENT = Experiment(
    name="low-precision",
    number=7,
    line="ReLU in fp32, bf16 and fp16: arithmetic intensity, predicted and achieved bandwidth.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
