"""`low-precision`: ReLU in fp32 and in half precision: its arithmetic intensity, and the bandwidth that follows from it.

ReLU of n numbers reads n, writes n, and makes n comparisons, one FLOP each: 1/8 FLOP per byte in fp32 and 1/4 in half precision.
Every chip's ridge lies far above that, so bandwidth is the limit and the time can be predicted: the bytes over the bandwidth
that a plain copy of the same bytes reaches here.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, Rule, bar, columns, line, table_of
from flopwise.experiments.rows import Moved, by, fields, select
from flopwise.experiments.verdict import Check, least_certain, memory_bound, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "ReLU in fp32, bf16 and fp16: arithmetic intensity, predicted and achieved bandwidth."
CLAIM = (
    "ReLU is limited by memory, so half the bytes for each number double its arithmetic intensity and halve its time."
)
FORMATS = ("fp32", "bf16", "fp16")
GPU_POWERS, GPU_QUICK = (16, 18, 20, 22, 24, 26, 28), (16, 22, 28)
CPU_POWERS, CPU_QUICK = (12, 14, 16, 18, 20, 22, 24, 25), (14, 20, 25)
CLEAR_OF_CACHE = 4  # times the cache: what is moved must not lie in it
HALVED = (1.8, 2.2)  # fp32's time over half precision's
NEAR_COPY = (0.8, 1.25)  # of a copy's bandwidth: less is limited by something else; more is not predicted by it


class Elementwise(Moved, frozen=True, kw_only=True):
    format: str
    n: int
    cache_bytes: int | None
    device_ns: float
    rate_bytes_per_s: float


class Relu(Elementwise, frozen=True, tag_field="part", tag="relu"):
    pass


class Copy(Elementwise, frozen=True, tag_field="part", tag="copy"):
    pass


Rows = Sequence[Relu | Copy]


def measure(bench: "Bench") -> Iterator[Relu | Copy]:
    import torch

    cache = bench.chip.L2_cache_size if bench.on_gpu else None
    powers = (GPU_QUICK if bench.quick else GPU_POWERS) if bench.on_gpu else (CPU_QUICK if bench.quick else CPU_POWERS)
    for n in (2**power for power in powers):
        for name in FORMATS:
            bench.doing(f"ReLU of {n} numbers in {name}")
            x = bench.randn(n, dtype=name)
            out, moved = torch.empty_like(x), 2 * x.nbytes
            # What torch.relu calls, but into allocated memory: a CPU would get new pages from the system each time.
            for kind, run in ((Relu, partial(torch.clamp_min, x, 0, out=out)), (Copy, partial(out.copy_, x))):
                timing = bench.time(run, seconds=0.03 if bench.quick else 0.08)
                took = {"device_ns": timing.took_ns, "rate_bytes_per_s": 1e9 * moved / timing.took_ns, **fields(timing)}
                yield kind(format=name, n=n, moved_bytes=moved, cache_bytes=cache, **took)


def compared(rows: Rows) -> list[dict[str, Any]]:
    """Each ReLU with the prediction from the copy of the same bytes."""
    copies = {(row.format, row.n): row.rate_bytes_per_s for row in select(rows, Copy)}
    found = []
    for row in select(rows, Relu):
        copied = copies.get((row.format, row.n))
        derived = {
            "numbers": units.count(row.n),
            "intensity": row.n / row.moved_bytes,
            "work_flops_per_s": 1e9 * row.n / row.device_ns,
            "copy_bytes_per_s": copied,
            "predicted_ns": 1e9 * row.moved_bytes / copied if copied else None,
            "copy_share": row.rate_bytes_per_s / copied if copied else None,
        }
        found.append(fields(row) | derived)
    return found


def largest(rows: Rows) -> dict[str, dict[str, Any]]:
    """The largest ReLU of each format, compared with its copy."""
    return {row["format"]: row for row in sorted(compared(rows), key=lambda row: int(row["n"]))}


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    found = largest(rows)
    there = ", ".join(found) or "nothing"
    complete = set(found) == set(FORMATS) and all(row["predicted_ns"] for row in found.values())
    yield require("formats", complete, f"only {there} could be measured together with a copy.")
    n = 2 ** (GPU_POWERS if place.on_gpu else CPU_POWERS)[-1]
    smallest = min(row["n"] for row in found.values())
    yield require("largest size", smallest >= n, f"not every format was measured at {units.count(n)} numbers.")
    relus, copies = (by((row for row in select(rows, kind) if row.n >= smallest), "format") for kind in (Relu, Copy))
    fp32, bf16, fp16 = (relus[name] for name in FORMATS)
    yield _clear_of_cache([bf16, fp16], fp32.cache_bytes or 0)
    faster = {"bf16": fp32.device / bf16.device, "fp16": fp32.device / fp16.device}
    yield said(" ".join(_described(row, place.bandwidth) for row in found.values()))
    gains = f"bf16 is {faster['bf16'].middle:.2f} and fp16 is {faster['fp16'].middle:.2f} times as fast as fp32"
    yield said(f"At {units.count(fp32.n)} numbers {gains}.")
    yield _near_copy(relus, copies)
    yield memory_bound(relus, place.bandwidth)
    yield within("halved", faster, *HALVED)
    yield least_certain({f"{kind} in {n}": of[n] for kind, of in (("relu", relus), ("copy", copies)) for n in FORMATS})


def _near_copy(relus: Mapping[str, Elementwise], copies: Mapping[str, Elementwise]) -> Check:
    shares = {name: copies[name].device / row.device for name, row in relus.items()}
    slow = "What is far from a copy's bandwidth is not limited by memory alone here."
    return within("near a copy", shares, *NEAR_COPY, refuted=slow)


def _clear_of_cache(rows: Sequence[Elementwise], cache_bytes: int) -> Check:
    moved = min(row.moved_bytes for row in rows)
    sizes = f"the largest vector moves {units.size(moved)}, and the cache holds {units.size(cache_bytes)}"
    clear = moved >= CLEAR_OF_CACHE * cache_bytes
    return require("clear of the cache", clear, f"{sizes}: its bandwidth need not be the memory's.")


def _described(row: dict[str, Any], peak: float | None) -> str:
    specified = f", {units.percent(row['rate_bytes_per_s'] / peak, 0)} of the specified" if peak else ""
    return (
        f"{row['format']} ({row['intensity']:.3g} FLOP/B): {units.duration(row['predicted_ns'])} predicted, "
        f"{units.duration(row['device_ns'])} measured, {units.rate(row['rate_bytes_per_s'], 'B/s')} "
        f"({units.percent(row['copy_share'], 0)} of a copy's{specified})."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    relus = compared(rows)
    cache = next((row["cache_bytes"] for row in relus if row["cache_bytes"]), None)
    rules = [Rule("y", place.bandwidth, "specified")] if place.bandwidth else []
    rules += [Rule("x", cache, "L2")] if cache else []
    both = [
        {"format": row["format"], "which": which, "time_ns": row[field]}
        for row in largest(rows).values()
        for which, field in (("predicted from a copy", "predicted_ns"), ("measured", "device_ns"))
    ]
    moved, bandwidth = Axis("moved_bytes", "bytes read and written", log=True), Axis("rate_bytes_per_s", "bandwidth")
    return [
        line(relus, Axis("n", "numbers", log=True), Axis("device_ns", "time", log=True), colour="format").titled(
            "Time of ReLU by the count of numbers",
            "On the right half the bytes take half the time; on the left the cost of a kernel hides it.",
        ),
        line(relus, moved, bandwidth, colour="format", rules=tuple(rules)).titled(
            "Bandwidth of ReLU by the bytes it moves",
            "By its bytes, every format has the same bandwidth: what lies in the cache is faster than memory.",
        ),
        bar(both, Axis("format", "format"), Axis("time_ns", "time"), colour="which").titled(
            "Largest ReLU, predicted and measured", "Predicted: its bytes over a copy's bandwidth."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns("format", "numbers", intensity="FLOP per byte", moved_bytes="moved", predicted_ns="predicted")
    headings |= columns(device_ns="measured", rate_bytes_per_s="bandwidth", copy_bytes_per_s="of a copy")
    headings |= columns(copy_share="share of a copy's", work_flops_per_s="rate")
    return [table_of("ReLU by format", headings, compared(rows))]


EXPERIMENT = Experiment(7, "low-precision", LINE, CLAIM, (Relu, Copy), measure, judge, draw, tabulate)
