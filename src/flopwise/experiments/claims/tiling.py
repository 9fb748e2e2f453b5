"""`tiling`: a matrix product in tiles reads its inputs from memory less often.

Every number of an n × n product needs n numbers of each input: computed on its own, each input is read n times. A tile of T × T
results loads its rows and columns into near memory piece by piece and uses each number T times: each input is read n/T times.
What is asked of memory is counted from these loops; the time is measured. Near memory is shared memory and, for the larger
tiles, registers; on a CPU a small array that its nearest cache holds.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, Rule, bar, columns, scatter, table_of
from flopwise.experiments.host_code import compile_host
from flopwise.experiments.rows import Timed, by, fields
from flopwise.experiments.verdict import Check, least_certain, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.experiments.bench import Bench

LINE = "A naive matmul and tiled ones: the bytes they ask memory for, counted, and their times."
CLAIM = (
    "A matmul in tiles, which uses what it loaded many times from near memory, is several times faster than a naive one at its "
    "best tile, and slower at none."
)
SCATTERED, NAIVE, LIBRARY = "naive, not coalesced", "naive", "the library's"
NUMBER = 4  # bytes: fp32
TILES = {
    16: (16, 1),
    32: (32, 1),
    64: (16, 4),
    128: (16, 8),
}  # T: depth of a step, results of a thread in each direction
ONE_RESULT = {tile for tile, (_, each) in TILES.items() if each == 1}
CPU_TILES = (8, 16, 32, 64)
SIDE, QUICK_SIDE = 4096, 2048
CPU_SIDE, CPU_QUICK_SIDE = 2048, 1024
CPU_ROWS, CPU_QUICK_ROWS = 64, 32  # on the CPU some rows of the product are enough
NAIVE_THREADS = 256
SEVERAL, HARDLY, SLOWER = 2.0, 1.2, 0.9  # times as fast
WRONG = 1e-4  # share of the largest number: fp32 sums of a few thousand numbers are off by a hundredth of that

HOST_FLAGS = ("-O2", "-fno-tree-vectorize")  # without vector instructions, which only some of the loops would get
SOURCE, HOST_SOURCE = Path(__file__).with_suffix(".cu"), Path(__file__).with_suffix(".c")


def gpu_source() -> str:
    """The kernels, with one for each tile."""
    parameters = "(const float* a, const float* b, float* c, int n)"
    return SOURCE.read_text() + "".join(
        f'extern "C" __global__ void __launch_bounds__({(tile // each) ** 2}) tiles_{tile}{parameters} '
        f"{{ product<{tile}, {depth}, {each}>(a, b, c, n); }}\n"
        for tile, (depth, each) in TILES.items()
    )


def host_source() -> str:
    return HOST_SOURCE.read_text() + "".join(f"TILED({tile})\n" for tile in CPU_TILES)


class Matmul(Timed, frozen=True):
    way: str
    tile: int | None  # 1: naive; None: not known
    rows: int
    side: int
    off: float  # largest error, as a share of the largest result
    asked_bytes: int | None
    done_flops_per_s: float
    device_ns: float

    @property
    def tiled(self) -> bool:
        return self.tile is not None and self.tile > 1


Rows = Sequence[Matmul]
Ways = dict[str, tuple[int | None, Callable[[], object]]]


def asked_bytes(rows: int, side: int, tile: int = 1) -> int:
    """What the loops ask memory for: T rows and T columns for each tile of T × T, and the product, written once.

    >>> asked_bytes(4096, 4096) / 1e9, asked_bytes(4096, 4096, 32) / 1e9    # naive, and in tiles of 32
    (549.822922752, 17.246978048)
    """
    return NUMBER * (2 * rows * side * side // tile + rows * side)


def measure(bench: "Bench") -> Iterator[Matmul]:
    import torch

    bench.fp32_matmul()
    side, rows = _size(bench)
    a, b = torch.rand(rows, side, device=bench.device), torch.rand(side, side, device=bench.device)
    c, right = torch.empty_like(a), a @ b
    ways = _on_gpu(bench, a, b, c) if bench.on_gpu else _on_cpu(a, b, c)
    ways[LIBRARY] = (None, partial(torch.mm, a, b, out=c))
    for way, (tile, run) in ways.items():
        bench.doing(f"{way}, {rows} × {side} × {side}")
        c.fill_(float("nan"))  # numbers that a kernel leaves out must not be those of the one before
        timing = bench.time(run, seconds=0.05 if bench.quick and bench.on_gpu else 0.1)
        off = float(torch.nan_to_num((c - right).abs().max() / right.max(), nan=1.0))
        asked = None if tile is None else asked_bytes(rows, side, tile)
        rate = 2 * rows * side * side / timing.took_ns * 1e9
        yield Matmul(way, tile, rows, side, off, asked, rate, timing.took_ns, **fields(timing))


def _size(bench: "Bench") -> tuple[int, int]:
    """The side of b, and the rows of a and c."""
    if bench.on_gpu:
        return (QUICK_SIDE, QUICK_SIDE) if bench.quick else (SIDE, SIDE)
    return (CPU_QUICK_SIDE, CPU_QUICK_ROWS) if bench.quick else (CPU_SIDE, CPU_ROWS)


def _on_gpu(bench: "Bench", a: "Tensor", b: "Tensor", c: "Tensor") -> Ways:
    n, names = len(a), ("scattered", "naive", *(f"tiles_{tile}" for tile in TILES))
    scattered, naive, *tiled = bench.cuda_kernels(gpu_source(), SOURCE.name, names)
    given: list[Any] = [*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, c)), ctypes.c_int(n)]
    ways: Ways = {
        way: (1, partial(kernel, n * n // NAIVE_THREADS, NAIVE_THREADS, *given))
        for way, kernel in ((SCATTERED, scattered), (NAIVE, naive))
    }
    for (tile, (_, each)), kernel in zip(TILES.items(), tiled, strict=True):
        ways[f"tiles of {tile}"] = (tile, partial(kernel, (n // tile) ** 2, (tile // each) ** 2, *given))
    return ways


def _on_cpu(a: "Tensor", b: "Tensor", c: "Tensor") -> Ways:
    library = compile_host(host_source(), "a matmul written by hand", HOST_FLAGS)
    rows, n = a.shape
    given = (*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, c)), ctypes.c_long(rows), ctypes.c_long(n))
    ways: Ways = {NAIVE: (1, partial(library["naive"], *given))}
    for tile in (tile for tile in CPU_TILES if rows % tile == 0):
        ways[f"tiles of {tile}"] = (tile, partial(library[f"tiles_{tile}"], *given))
    return ways


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    """By the times: the bytes asked for follow from the loops and cannot be otherwise, whatever was measured."""
    wrong = ", ".join(row.way for row in rows if row.off > WRONG)
    yield require("right products", not wrong, f"wrong products: {wrong}.")
    ways, tiled = by(rows, "way"), by((row for row in rows if row.tiled), "way")
    tiles = {row.tile for row in tiled.values()}
    complete = NAIVE in ways and LIBRARY in ways and tiled and (tiles == set(TILES) or not place.on_gpu)
    yield require("all products", complete, "not all of it was measured.")
    naive = ways[NAIVE]
    odd = next((row.way for row in (naive, *tiled.values()) if row.asked_bytes != _asked(row)), "")
    yield require("counted bytes", not odd, f"{odd}: the bytes in its row are not those that its loops ask for.")
    best = min(tiled.values(), key=attrgetter("device_ns"))
    yield said(
        f"a naive product of {naive.rows} × {naive.side} × {naive.side} takes {units.duration(naive.device_ns)}."
    )
    yield from map(said, _by_kind(naive, list(tiled.values()), place))
    yield said(
        f"By their loops (counted, not measured) the naive one asks memory for {units.size(naive.asked_bytes or 0)} and "
        f"tiles of {best.tile} for {units.size(best.asked_bytes or 0)}."
    )
    yield said(_caches(naive, place.bandwidth))
    faster = {name: (naive.device / row.device).around(naive.device_ns / row.device_ns) for name, row in tiled.items()}
    # 'Several' is twice and more; what is between that and 'hardly' is left open.
    yield within("several times faster", {best.way: faster[best.way]}, SEVERAL, hardly=HARDLY)
    yield within("no tile is slower", faster, SLOWER, refuted="Slower than the naive one: {}.")
    yield least_certain({NAIVE: naive, **tiled})


def _asked(row: Matmul) -> int:
    return asked_bytes(row.rows, row.side, row.tile or 1)


def _by_kind(naive: Matmul, tiled: Rows, place: Place) -> Iterator[str]:
    """The best of the tiles with one result for each thread, and of those with several, which lie in registers."""
    if not place.on_gpu:
        yield _best(naive, tiled, "")
        return
    shared = [row for row in tiled if row.tile in ONE_RESULT]
    yield _best(naive, shared, " in shared memory alone")
    yield _best(
        naive, [row for row in tiled if row not in shared], ", with several results in the registers of each thread,"
    )
    if all(naive.device_ns < SEVERAL * row.device_ns for row in shared):
        yield "Shared memory alone, judged by itself, does not make it several times faster here: the registers do."


def _best(naive: Matmul, some: Rows, what: str) -> str:
    best = min(some, key=attrgetter("device_ns"))
    gain = naive.device_ns / best.device_ns
    return f"Tiles of {best.tile}{what} take {units.duration(best.device_ns)}: {gain:.3g} times as fast."


def _caches(naive: Matmul, bandwidth: float | None) -> str:
    """Whether the naive product gets more than the memory can give."""
    rate = _asked(naive) / naive.device_ns * 1e9
    if not bandwidth or rate <= bandwidth:
        return ""
    return (
        f"The naive one gets what it asks for at {units.rate(rate, 'B/s')}, which the memory's "
        f"{units.rate(bandwidth, 'B/s')} cannot give: caches serve most of it."
    )


def _with_rates(rows: Rows) -> list[dict[str, Any]]:
    """With the rate at which what was asked arrived, and how much faster than the naive one it was."""
    naive = next((row.device_ns for row in rows if row.way == NAIVE), None)
    return [
        fields(row)
        | {"asked_bytes_per_s": row.asked_bytes / row.device_ns * 1e9 if row.asked_bytes else None}
        | {"faster": f"{naive / row.device_ns:.2f} ×" if naive else None, "off": f"{row.off:.0e}"}
        for row in rows
    ]


def draw(rows: Rows, place: Place) -> list[Picture]:
    every = _with_rates(rows)
    known = [row for row in every if row["asked_bytes"]]
    registers = " Tiles of 64 and 128 have their results in registers." if place.on_gpu else ""
    asked, time = Axis("asked_bytes", "asked of memory (counted)", log=True), Axis("device_ns", "time", log=True)
    memory = (Rule("y", place.bandwidth or 0.0, "memory"),)
    # On a CPU the library's has vector instructions and all cores: in the table, but no bar next to loops on one.
    pictures = [
        bar(every if place.on_gpu else known, Axis("way"), Axis("done_flops_per_s", "done")).titled(
            "Speed of a matmul, naive and in tiles", f"The larger the tile, the fewer the reads.{registers}"
        ),
        scatter(known, asked, time, colour="way").titled(
            "Time by what is asked of memory",
            "To the left the tiles grow. Time falls less than the bytes do: caches had served many of them.",
        ),
        bar(known, Axis("way"), Axis("asked_bytes_per_s", "asked for, by time"), rules=memory).titled(
            "Rate at which what is asked arrives",
            "Above the memory's own bandwidth (the vendor's figure), caches serve the repeats.",
        ),
    ]
    return pictures if place.bandwidth else pictures[:2]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns(way="how", asked_bytes="asked of memory (counted)", device_ns="time", faster="against naive")
    headings |= columns(done_flops_per_s="done", asked_bytes_per_s="asked for, by time", off="largest error")
    title = f"an fp32 product of {rows[0].rows} × {rows[0].side} × {rows[0].side}"
    return [table_of(title, headings, _with_rates(rows))]


EXPERIMENT = Experiment(11, "tiling", LINE, CLAIM, (Matmul,), measure, judge, draw, tabulate)
