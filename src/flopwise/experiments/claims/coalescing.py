"""`coalescing`: memory comes in whole bursts, and what is not used of a burst is bandwidth lost.

Two readings. Every s-th number of a long array: the bursts that hold them are moved whole. And every number of a row-major
matrix, once so that reads that belong together lie in a row, once in a column. On a GPU those are the reads of the 32 threads of
a warp, made at the same moment; on a CPU those of one core, one after the other. The bandwidth is that of the numbers used, not
of the bursts moved.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import INCONCLUSIVE, Experiment, Picture, Row, Rows, Rule, TableOf, Verdict, part
from flopwise.experiments.steadiness import Ratio, left_open, times, together, word
from flopwise.records.experiment import Place

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

CLAIM = (
    "Memory comes in bursts: of every s-th number only about 1/s of the bandwidth is left for s up to 8, and no more than "
    "at 8 beyond; and a row-major matrix is read several times slower by columns than by rows."
)
STRIDES = (1, 2, 4, 8, 16, 32, 64)
STRIDED, MATRIX = "strided", "matrix"
BY_ROWS, BY_COLUMNS = "by rows", "by columns"
NUMBER = 4  # bytes: fp32
SECTOR = 32  # bytes: the least that a GPU of NVIDIA's reads of its memory (CUDA C++ Best Practices Guide, 'coalesced access')
JUDGED = SECTOR // NUMBER  # the stride from which every number has a sector of its own
LEFT = 2.0  # times 1/s of the bandwidth, or that part of it: beyond is not 'about'
EXACTLY = 1.1  # times 1/s: as near as this it follows the law; times what is left at 8: more than this is more
SEVERAL, HARDLY = 2.0, 1.2  # times as slow
CACHES = 32  # times the L2 cache that the array takes: the sectors of its every 64th number alone are four of them
CPU_BYTES, CPU_QUICK_BYTES = 2**29, 2**28  # of the array: the cache lines of its every 64th number are a quarter of it
CPU_SIDE, CPU_QUICK_SIDE = 8192, 4096  # of the matrix
THREADS, READS, WALK = 256, 8, 64  # of a block; of a thread in the array; of a thread in the matrix

SOURCE = """
// Block after block of the array: the threads of a warp are `stride` numbers apart. The sum keeps the reads alive.
extern "C" __global__ void strided(const float* x, float* out, long long stride) {
    const float* from = x + ((long long)blockIdx.x * THREADS * READS + threadIdx.x) * stride;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < READS; ++i) sum += from[i * THREADS * stride];
    if (sum == 12345.678f) out[blockIdx.x] = sum;
}

// A thread adds up WALK numbers of its column; the threads beside it have the columns beside it: a warp reads along a row.
extern "C" __global__ void by_rows(const float* x, float* out, unsigned side) {
    unsigned thread = blockIdx.x * THREADS + threadIdx.x;
    const float* from = x + (long long)(thread / side * WALK) * side + thread % side;
    float sum = 0.0f;
    #pragma unroll 8
    for (int i = 0; i < WALK; ++i) sum += from[(long long)i * side];
    if (sum == 12345.678f) out[thread] = sum;
}

// A thread adds up WALK numbers of its row; the threads beside it have the rows below it: a warp reads along a column.
extern "C" __global__ void by_columns(const float* x, float* out, unsigned side) {
    unsigned thread = blockIdx.x * THREADS + threadIdx.x;
    const float* from = x + (long long)(thread % side) * side + thread / side * WALK;
    float sum = 0.0f;
    #pragma unroll 8
    for (int i = 0; i < WALK; ++i) sum += from[i];
    if (sum == 12345.678f) out[thread] = sum;
}
"""


def measure(bench: "Bench") -> Iterator[Row]:
    reads = _on_gpu(bench) if bench.on_gpu else _on_cpu(bench)
    for about, run in reads:
        bench.doing(f"a matrix {about['way']}" if about["part"] == MATRIX else f"every {about['stride']}th number")
        timing = bench.time(run, seconds=0.05 if bench.quick and bench.on_gpu else 0.1)
        yield {**about, **timing.row(), "used_bytes_per_s": about["used_bytes"] / timing.device_ns * 1e9}


def _on_gpu(bench: "Bench") -> Iterator[tuple[Row, Callable[[], object]]]:
    import torch

    from flopwise.kernels import nvrtc

    index = bench.device.index or 0
    options = [f"-DTHREADS={THREADS}", f"-DREADS={READS}", f"-DWALK={WALK}"]
    strided, *walks = nvrtc.load(SOURCE, "coalescing.cu", ("strided", "by_rows", "by_columns"), index, options)
    l2_bytes = torch.cuda.get_device_properties(bench.device).L2_cache_size
    whole = 1 << (CACHES * l2_bytes - 1).bit_length()  # a power of two, so that blocks divide it
    x = torch.zeros(whole // NUMBER, device=bench.device)
    out = torch.empty(1, device=bench.device)  # never written: no sum of zeros is the one that the kernels look for
    given = nvrtc.pointer(x), nvrtc.pointer(out)
    for stride in STRIDES:
        blocks = x.numel() // stride // (THREADS * READS)
        run = partial(strided, blocks, THREADS, *given, ctypes.c_longlong(stride))
        used = blocks * THREADS * READS * NUMBER
        yield {"part": STRIDED, "stride": stride, "used_bytes": used, "span_bytes": x.nbytes}, run
    side = 1 << (x.numel().bit_length() - 1) // 2  # of the largest square in it
    for way, kernel in zip((BY_ROWS, BY_COLUMNS), walks, strict=True):
        run = partial(kernel, side * side // WALK // THREADS, THREADS, *given, ctypes.c_uint(side))
        used = side * side * NUMBER
        yield {"part": MATRIX, "way": way, "side": side, "used_bytes": used, "span_bytes": used}, run


def _on_cpu(bench: "Bench") -> Iterator[tuple[Row, Callable[[], object]]]:
    """One core, by numpy: its sum takes the same code whatever the stride is; torch's has another one for stride 1."""
    import numpy

    whole = CPU_QUICK_BYTES if bench.quick else CPU_BYTES
    x = numpy.ones(whole // NUMBER, dtype=numpy.float32)
    for stride in STRIDES:
        view = x[::stride]
        about = {"part": STRIDED, "stride": stride, "used_bytes": view.nbytes, "span_bytes": x.nbytes}
        yield about, partial(numpy.add.reduce, view)
    side = CPU_QUICK_SIDE if bench.quick else CPU_SIDE
    matrix = x[: side * side].reshape(side, side)
    for way, lines in ((BY_ROWS, list(matrix)), (BY_COLUMNS, list(matrix.T))):
        about = {"part": MATRIX, "way": way, "side": side, "used_bytes": matrix.nbytes, "span_bytes": matrix.nbytes}
        yield about, lambda lines=lines: [numpy.add.reduce(line) for line in lines]  # type: ignore[misc]


def shares(rows: Rows) -> list[Row]:
    """The strided rows with what is left of the bandwidth at stride 1, and what the stride leaves of a burst's numbers.

    >>> told = shares([{"part": "strided", "stride": s, "used_bytes_per_s": b} for s, b in ((1, 8.0), (4, 1.0))])
    >>> told[1]["left_share"], told[1]["expected_share"], told[1]["each_bytes"]
    (0.125, 0.25, 32.0)
    """
    strided = part(rows, STRIDED)
    full = next(row["used_bytes_per_s"] for row in strided if row["stride"] == 1)
    return [
        {
            **row,
            "left_share": row["used_bytes_per_s"] / full,
            "expected_share": 1 / row["stride"],
            "each_bytes": NUMBER * full / row["used_bytes_per_s"],
        }
        for row in strided
    ]


def _left(row: Mapping[str, Any], full: Mapping[str, Any]) -> Ratio:
    """The share of another stride's bandwidth, with what the times leave open."""
    return times(full, row).around(row["used_bytes_per_s"] / full["used_bytes_per_s"])


def follows_until(rows: Rows) -> int:
    """The last stride up to which the bandwidth is 1/s.

    >>> follows_until([{"part": "strided", "stride": s, "used_bytes_per_s": b} for s, b in ((1, 8.0), (2, 4.1), (4, 3.0))])
    2
    """
    told = shares(rows)
    parted = (row["stride"] for row in told if not 1 / EXACTLY <= row["left_share"] / row["expected_share"] <= EXACTLY)
    end = next(parted, 2 * told[-1]["stride"])
    return int(max(row["stride"] for row in told if row["stride"] < end))


def judge(rows: Rows, place: Place) -> Verdict:
    by_stride = {row["stride"]: row for row in part(rows, STRIDED)}
    ways = {row["way"]: row for row in part(rows, MATRIX)}
    if set(STRIDES) - set(by_stride) or {BY_ROWS, BY_COLUMNS} - set(ways):
        return Verdict(
            INCONCLUSIVE, f"only {len(by_stride)} strides and {len(ways)} orders of the matrix were measured."
        )
    left = {stride: _left(by_stride[stride], by_stride[1]) for stride in STRIDES}
    law = [left[s].within(1 / (LEFT * s), LEFT / s) for s in STRIDES if 1 < s <= JUDGED]
    beyond = [_left(by_stride[s], by_stride[JUDGED]).within(most=EXACTLY) for s in STRIDES if s > JUDGED]
    fast, slow = ways[BY_ROWS], ways[BY_COLUMNS]
    slower = times(slow, fast).around(fast["used_bytes_per_s"] / slow["used_bytes_per_s"])
    # 'Several' is twice and more; what is between that and 'hardly' is left open.
    ordered = slower.within(least=SEVERAL) or (False if slower.within(least=HARDLY) is False else None)
    last = max(STRIDES)
    said = (
        f"{units.rate(by_stride[1]['used_bytes_per_s'], 'B/s')} at stride 1. {_law(follows_until(rows))}; "
        f"at stride {JUDGED} {units.percent(left[JUDGED].middle)} "
        f"(1/s: {units.percent(1 / JUDGED)}), at stride {last} {units.percent(left[last].middle)} "
        f"(1/s: {units.percent(1 / last)}), as if each number cost {NUMBER / left[last].middle:.0f} bytes. A matrix of "
        f"{fast['side']} × {fast['side']} is read at {units.rate(fast['used_bytes_per_s'], 'B/s')} by rows and at "
        f"{units.rate(slow['used_bytes_per_s'], 'B/s')} by columns, {slower.middle:.1f} times slower."
    )
    if off := [str(s) for s, holds in zip(STRIDES[1:], (*law, *beyond), strict=True) if holds is False]:
        said += f" Not as claimed: stride {', '.join(off)}."
    answer = together(*law, *beyond, ordered)
    if None in (*law, *beyond, slower.within(least=SEVERAL)) and answer is None:
        said += " " + left_open((_name(row), row) for row in (*by_stride.values(), fast, slow))
    return Verdict(word(answer), said)


def _law(until: int) -> str:
    return f"1/s of the bandwidth is left up to stride {until}" if until > 1 else "What is left parts from 1/s at once"


def _name(row: Mapping[str, Any]) -> str:
    return f"stride {row['stride']}" if row["part"] == STRIDED else f"the matrix {row['way']}"


def draw(rows: Rows, place: Place) -> list[Picture]:
    told = shares(rows)
    full = told[0]["used_bytes_per_s"]
    lines = [{**row, "what": "measured"} for row in told] + [
        {"stride": row["stride"], "used_bytes_per_s": full * row["expected_share"], "what": "1/s of stride 1"}
        for row in told
    ]
    lines = [{**row, "stride": str(row["stride"])} for row in lines]  # words: each of the powers of two has its tick
    burst = f"a {SECTOR}-byte sector from stride {JUDGED} on" if place.on_gpu else "a cache line at some stride"
    until = follows_until(rows)
    return [
        Picture(
            title="Bandwidth of every s-th number",
            caption=f"{_law(until)}. A number is alone in {burst}.",
            kind="line", rows=lines, x="stride", y="used_bytes_per_s", colour="what", x_title="stride, in fp32 numbers",
            y_title="of the numbers used", y_log=True,
        ),
        Picture(
            title="Bandwidth of a row-major matrix", caption="The same numbers in another order.",
            kind="bar", rows=part(rows, MATRIX), x="way", y="used_bytes_per_s", x_title="", y_title="bandwidth",
            rules=(Rule("y", full, "stride 1"),),
        ),
    ]  # fmt: skip


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    time = {"gpu_ns": "GPU"} if place.on_gpu else {"wall_ns": "time"}
    strided = {
        "stride": "stride", "used_bytes": "used", **time, "used_bytes_per_s": "bandwidth", "left_share": "of stride 1's",
        "expected_share": "1/s", "each_bytes": "cost of a number",
    }  # fmt: skip
    matrix = {"way": "order", "used_bytes": "used", **time, "used_bytes_per_s": "bandwidth"}
    span = units.size(rows[0]["span_bytes"])
    tables = [
        TableOf(
            f"every s-th fp32 number of {span}",
            strided,
            shares(rows),
            ("cost of a number: the bytes that the bandwidth at stride 1 would have moved in that time",),
        )
    ]
    if square := part(rows, MATRIX):
        side = square[0]["side"]
        tables.append(TableOf(f"a row-major fp32 matrix of {side} × {side}", matrix, square))
    return tables


EXPERIMENT = Experiment(
    name="coalescing",
    number=10,
    line="The bandwidth of reads at strides 1 to 64, and of a row-major matrix read by rows and by columns.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
