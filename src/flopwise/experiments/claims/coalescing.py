"""`coalescing`: memory comes in whole bursts, and what is not used of a burst is bandwidth lost.

Two readings. Every s-th number of a long array: the bursts that hold them are moved whole. And every number of a row-major
matrix, once with reads that belong together in a row, once in a column. On a GPU those are the reads of the 32 threads of a
warp, made at the same moment; on a CPU those of one core, one after the other. The bandwidth is that of the numbers used, not
of the bursts moved.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, Rule, bar, columns, line, table_of
from flopwise.experiments.rows import Interval, Timed, fields, select
from flopwise.experiments.verdict import Check, least_certain, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "The bandwidth of reads at strides 1 to 64, and of a row-major matrix read by rows and by columns."
CLAIM = (
    "Memory comes in bursts: of every s-th number only about 1/s of the bandwidth is left for s up to 8, and no more than "
    "at 8 beyond; and a row-major matrix is read several times slower by columns than by rows."
)
STRIDES = (1, 2, 4, 8, 16, 32, 64)
BY_ROWS, BY_COLUMNS = "by rows", "by columns"
NUMBER = 4  # bytes: fp32
SECTOR = (
    32  # bytes: the least that an NVIDIA GPU reads of its memory (CUDA C++ Best Practices Guide, 'coalesced access')
)
JUDGED = SECTOR // NUMBER  # the stride from which every number has a sector of its own
ABOUT = 2.0  # times 1/s of the bandwidth, or that part of it: beyond is not 'about'
EXACTLY = 1.1  # times 1/s: as near as this it follows the law; times what is left at 8: more than this is more
SEVERAL, HARDLY = 2.0, 1.2  # times as slow
CACHES = 32  # times the L2 cache that the array takes: the sectors of its every 64th number alone are four of them
CPU_BYTES, CPU_QUICK_BYTES = 2**29, 2**28  # of the array: the cache lines of its every 64th number are a quarter of it
CPU_SIDE, CPU_QUICK_SIDE = 8192, 4096  # of the matrix
THREADS, READS, WALK = 256, 8, 64  # of a block; of a thread in the array; of a thread in the matrix
SOURCE, KERNELS = Path(__file__).with_suffix(".cu"), ("strided", "by_rows", "by_columns")


class Strided(Timed, frozen=True, kw_only=True, tag_field="part", tag="strided"):
    stride: int
    used_bytes: int
    span_bytes: int
    used_bytes_per_s: float


class Matrix(Timed, frozen=True, kw_only=True, tag_field="part", tag="matrix"):
    way: str
    side: int
    used_bytes: int
    span_bytes: int
    used_bytes_per_s: float


Rows = Sequence[Strided | Matrix]
Read = tuple[type[Strided] | type[Matrix], dict[str, Any], Callable[[], object]]


def measure(bench: "Bench") -> Iterator[Strided | Matrix]:
    for kind, about, run in _on_gpu(bench) if bench.on_gpu else _on_cpu(bench):
        bench.doing(f"a matrix {about['way']}" if kind is Matrix else f"every {about['stride']}th number")
        timing = bench.time(run, seconds=0.05 if bench.quick and bench.on_gpu else 0.1)
        yield kind(**about, **fields(timing), used_bytes_per_s=about["used_bytes"] / timing.took_ns * 1e9)


def _on_gpu(bench: "Bench") -> Iterator[Read]:
    import torch

    constants = {"THREADS": THREADS, "READS": READS, "WALK": WALK}
    strided, *walks = bench.cuda_kernels(SOURCE.read_text(), SOURCE.name, KERNELS, **constants)
    whole = 1 << (CACHES * bench.chip.L2_cache_size - 1).bit_length()  # a power of two, so that blocks divide it
    x = torch.zeros(whole // NUMBER, device=bench.device)
    out = torch.empty(1, device=bench.device)  # never written: no sum of zeros is the one that the kernels look for
    given = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out)]
    for stride in STRIDES:
        blocks = x.numel() // stride // (THREADS * READS)
        about = {"stride": stride, "used_bytes": blocks * THREADS * READS * NUMBER, "span_bytes": x.nbytes}
        yield Strided, about, partial(strided, blocks, THREADS, *given, ctypes.c_longlong(stride))
    side = 1 << (x.numel().bit_length() - 1) // 2  # of the largest square in it
    for way, kernel in zip((BY_ROWS, BY_COLUMNS), walks, strict=True):
        run = partial(kernel, side * side // WALK // THREADS, THREADS, *given, ctypes.c_uint(side))
        yield Matrix, _square(way, side), run


def _on_cpu(bench: "Bench") -> Iterator[Read]:
    """One core, by numpy: its sum takes the same code whatever the stride is; torch's has another one for stride 1."""
    import numpy

    whole, side = (CPU_QUICK_BYTES, CPU_QUICK_SIDE) if bench.quick else (CPU_BYTES, CPU_SIDE)
    x = numpy.ones(whole // NUMBER, dtype=numpy.float32)
    for stride in STRIDES:
        view = x[::stride]
        about = {"stride": stride, "used_bytes": view.nbytes, "span_bytes": x.nbytes}
        yield Strided, about, partial(numpy.add.reduce, view)
    matrix = x[: side * side].reshape(side, side)
    for way, lines in ((BY_ROWS, list(matrix)), (BY_COLUMNS, list(matrix.T))):
        run = lambda lines=lines: [numpy.add.reduce(line) for line in lines]  # noqa: E731
        yield Matrix, _square(way, side), run


def _square(way: str, side: int) -> dict[str, Any]:
    n_bytes = side * side * NUMBER
    return {"way": way, "side": side, "used_bytes": n_bytes, "span_bytes": n_bytes}


def shares(rows: Rows) -> list[dict[str, Any]]:
    """The strided rows with what is left of the bandwidth at stride 1, and what 1/s would leave of it."""
    strided = select(rows, Strided)
    full = next(row.used_bytes_per_s for row in strided if row.stride == 1)
    return [
        fields(row)
        | {"left_share": row.used_bytes_per_s / full, "expected_share": 1 / row.stride}
        | {"each_bytes": NUMBER * full / row.used_bytes_per_s}
        for row in strided
    ]


def follows_until(rows: Rows) -> int:
    """The last stride up to which the bandwidth is 1/s."""
    found = shares(rows)
    off = (row["stride"] for row in found if not 1 / EXACTLY <= row["left_share"] / row["expected_share"] <= EXACTLY)
    end = next(off, 2 * found[-1]["stride"])
    return int(max(row["stride"] for row in found if row["stride"] < end))


def _bandwidth_ratio(row: Strided | Matrix, other: Strided | Matrix) -> Interval:
    """How many times the other's bandwidth it has; as uncertain as their times."""
    return (other.device / row.device).around(row.used_bytes_per_s / other.used_bytes_per_s)


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    strides = {row.stride: row for row in select(rows, Strided)}
    ways = {row.way: row for row in select(rows, Matrix)}
    complete = set(STRIDES) <= set(strides) and {BY_ROWS, BY_COLUMNS} <= set(ways)
    counts = f"only {len(strides)} strides and {len(ways)} orders of the matrix were measured."
    yield require("all reads", complete, counts)
    left = {stride: _bandwidth_ratio(strides[stride], strides[1]) for stride in STRIDES}
    fast, slow, last = ways[BY_ROWS], ways[BY_COLUMNS], max(STRIDES)
    slower = _bandwidth_ratio(fast, slow)
    yield said(
        f"{units.rate(strides[1].used_bytes_per_s, 'B/s')} at stride 1. {_law(follows_until(rows))}; "
        f"at stride {JUDGED} {units.percent(left[JUDGED].middle)} "
        f"(1/s: {units.percent(1 / JUDGED)}), at stride {last} {units.percent(left[last].middle)} "
        f"(1/s: {units.percent(1 / last)}), as if each number cost {NUMBER / left[last].middle:.0f} bytes. A matrix of "
        f"{fast.side} × {fast.side} is read at {units.rate(fast.used_bytes_per_s, 'B/s')} by rows and at "
        f"{units.rate(slow.used_bytes_per_s, 'B/s')} by columns, {slower.middle:.1f} times slower."
    )
    # Measured over expected: 1/s up to stride 8, and what is left at 8 beyond.
    law = {str(s): left[s].around(left[s].middle * s) for s in STRIDES if 1 < s <= JUDGED}
    beyond = {str(s): _bandwidth_ratio(strides[s], strides[JUDGED]) for s in STRIDES if s > JUDGED}
    yield within("about 1/s", law, 1 / ABOUT, ABOUT, refuted="Not as claimed: stride {}.")
    yield within("no more beyond", beyond, most=EXACTLY, refuted="Not as claimed: stride {}.")
    yield within("columns are slower", {BY_COLUMNS: slower}, SEVERAL, hardly=HARDLY)
    times = {f"stride {s}": row.device for s, row in strides.items()}
    yield least_certain(times | {f"the matrix {way}": row.device for way, row in ways.items()})


def _law(until: int) -> str:
    return (
        f"1/s of the bandwidth is left up to stride {until}" if until > 1 else "What is left differs from 1/s at once"
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    measured = shares(rows)
    full = measured[0]["used_bytes_per_s"]
    # Strides as words: each of the powers of two has its tick.
    lines = [
        {"stride": str(row["stride"]), "used_bytes_per_s": rate, "what": what}
        for what in ("measured", "1/s of stride 1")
        for row in measured
        for rate in (row["used_bytes_per_s"] if what == "measured" else full * row["expected_share"],)
    ]
    burst = f"a {SECTOR}-byte sector from stride {JUDGED} on" if place.on_gpu else "a cache line at some stride"
    bandwidth = Axis("used_bytes_per_s", "of the numbers used", log=True)
    matrix = [fields(row) for row in select(rows, Matrix)]
    at_stride_1 = (Rule("y", full, "stride 1"),)
    return [
        line(lines, Axis("stride", "stride, in fp32 numbers"), bandwidth, colour="what").titled(
            "Bandwidth of every s-th number", f"{_law(follows_until(rows))}. A number is alone in {burst}."
        ),
        bar(matrix, Axis("way"), Axis("used_bytes_per_s", "bandwidth"), rules=at_stride_1).titled(
            "Bandwidth of a row-major matrix", "The same numbers in another order."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    time = columns(gpu_ns="GPU") if place.on_gpu else columns(wall_ns="time")
    strided = columns("stride", used_bytes="used") | time | columns(used_bytes_per_s="bandwidth")
    strided |= columns(left_share="of stride 1's", expected_share="1/s", each_bytes="cost of a number")
    note = "cost of a number: the bytes that the bandwidth at stride 1 would have moved in that time"
    tables = [table_of(f"every s-th fp32 number of {units.size(rows[0].span_bytes)}", strided, shares(rows), (note,))]
    if square := select(rows, Matrix):
        matrix = columns(way="order", used_bytes="used") | time | columns(used_bytes_per_s="bandwidth")
        title = f"a row-major fp32 matrix of {square[0].side} × {square[0].side}"
        tables.append(table_of(title, matrix, [fields(row) for row in square]))
    return tables


EXPERIMENT = Experiment(10, "coalescing", LINE, CLAIM, (Strided, Matrix), measure, judge, draw, tabulate)
