"""`simt`: threads come in warps of 32, and a multiprocessor hides the wait for memory by having many of them.

Three kernels. Arithmetic in blocks of any size: the last warp of a block of 33 has one thread at work. Reads of a long array with
more or fewer warps on each multiprocessor, set by the shared memory that a block takes. And a kernel that needs a hundred
registers for each thread, compiled to fit more and more blocks onto a multiprocessor.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, line, scatter, table_of
from flopwise.experiments.rows import Moved, Timed, by, fields, select, values
from flopwise.experiments.verdict import Check, holds, least_certain, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "Speed by the threads of a block, and by the warps that registers and shared memory leave room for (occupancy)."
CLAIM = (
    "Threads run in warps of 32, so a block of 33 costs as much as one of 64; memory is kept busy by many warps, and the shared "
    "memory and registers of a block limit how many there are."
)
WARP = 32
MULTIPLES = range(WARP, 257, WARP)
SIZES = tuple(sorted({*range(8, 129, 8), 31, *MULTIPLES, *(n + 1 for n in MULTIPLES), 512, 1024}))  # threads of a block
QUICK_SIZES = (16, 32, 33, 64, 65, 96, 256)
NEEDED = (33, 64, 65, 96)
COUNT, STEPS = 2**22, 512  # threads; multiplications and additions of each
SHARED_KIB, AT_ONCE = (1, 9, 13, 27, 48), {"one": 1, "eight": 8}  # as in simt.cu
READERS = 64  # threads of a block that reads
BLOCKS, KEPT, BLOCK, ROUNDS = (1, 2, 3, 4, 6, 8), 96, 256, 64  # as in simt.cu
ARRAY_BYTES = 2**30  # more than any L2 cache
LANES = (0.8, 1.25)  # measured over what the share of working threads says
DRAWN = 260  # threads of a block: beyond, the steps are too small to see
SEVERAL, HARDLY = 2.0, 1.2  # times the bandwidth with all warps, of that with the fewest
SOURCE = Path(__file__).with_suffix(".cu")


class Block(Timed, frozen=True, kw_only=True, tag_field="part", tag="block"):
    threads: int
    work_flops: int
    rate_flops_per_s: float

    @property
    def lanes_share(self) -> float:
        """Of the threads in its warps, those that exist."""
        return lanes_share(self.threads)


class Reads(Moved, frozen=True, kw_only=True, tag_field="part", tag="reads"):
    at_once: int  # reads of a thread before it waits
    shared_bytes: int
    blocks: int  # on a multiprocessor
    occupancy_share: float
    rate_bytes_per_s: float


class Registers(Timed, frozen=True, kw_only=True, tag_field="part", tag="registers"):
    registers: int
    spilled_bytes: int
    occupancy_share: float
    work_flops: int
    rate_flops_per_s: float


Rows = Sequence[Block | Reads | Registers]


def lanes_share(threads: int) -> float:
    """Of the threads in a block's warps, those that exist.

    >>> lanes_share(64), lanes_share(33)
    (1.0, 0.515625)
    """
    return threads / (WARP * -(-threads // WARP)) if threads > 0 else 0.0


def measure(bench: "Bench") -> Iterator[Block | Reads | Registers]:
    bench.needs_gpu("a warp")
    names = ["arithmetic", *(f"{name}_{kib}" for kib in SHARED_KIB for name in AT_ONCE), *(f"kept_{n}" for n in BLOCKS)]
    loaded = bench.cuda_kernels(SOURCE.read_text(), SOURCE.name, names, STEPS=STEPS)
    kernels = dict(zip(names, loaded, strict=True))
    yield from _blocks(bench, kernels["arithmetic"])
    yield from _reads(bench, kernels)
    yield from _registers(bench, kernels)


def _blocks(bench: "Bench", arithmetic: Any) -> Iterator[Block]:
    import torch

    from flopwise.kernels.nvrtc import pointer

    out = torch.empty(COUNT, device=bench.device)
    for threads in QUICK_SIZES if bench.quick else SIZES:
        bench.doing(f"blocks of {threads} threads")
        blocks, given = -(-COUNT // threads), (pointer(out), ctypes.c_int(COUNT))
        timing = bench.time(partial(arithmetic, blocks, threads, *given), seconds=0.05)
        work = 2 * STEPS * blocks * threads
        yield Block(threads=threads, work_flops=work, rate_flops_per_s=1e9 * work / timing.took_ns, **fields(timing))


def _reads(bench: "Bench", kernels: dict[str, Any]) -> Iterator[Reads]:
    import torch

    from flopwise.kernels.nvrtc import pointer

    x, out = torch.zeros(ARRAY_BYTES // 4, device=bench.device), torch.zeros(1, device=bench.device)
    given = (pointer(x), pointer(out), ctypes.c_longlong(x.numel()))
    for name, at_once in AT_ONCE.items():
        for kib in SHARED_KIB:
            kernel = kernels[f"{name}_{kib}"]
            fit = kernel.blocks_per_sm(READERS)
            grid = fit * bench.chip.multi_processor_count
            bench.doing(f"{at_once} reads at once, {fit} blocks on a multiprocessor")
            timing = bench.time(partial(kernel, grid, READERS, *given), seconds=0.05)
            asked = at_once * grid * READERS  # numbers in a round
            moved = 4 * (x.numel() // asked * asked)
            yield Reads(
                at_once=at_once,
                shared_bytes=kib * 1024,
                blocks=fit,
                occupancy_share=fit * READERS / bench.chip.max_threads_per_multi_processor,
                moved_bytes=moved,
                rate_bytes_per_s=1e9 * moved / timing.took_ns,
                **fields(timing),
            )


def _registers(bench: "Bench", kernels: dict[str, Any]) -> Iterator[Registers]:
    import torch

    from flopwise.kernels.nvrtc import pointer

    grid = bench.chip.multi_processor_count * 8 * 3  # whole waves with 1, 2, 3, 4, 6 and 8 blocks
    out = torch.empty(grid * BLOCK, device=bench.device)
    given = (pointer(out), ctypes.c_int(ROUNDS), ctypes.c_float(0.5))
    for blocks in BLOCKS:
        kernel = kernels[f"kept_{blocks}"]
        bench.doing(f"{kernel.registers} registers")
        timing = bench.time(partial(kernel, grid, BLOCK, *given), seconds=0.05)
        work = 2 * KEPT * ROUNDS * grid * BLOCK
        fit = kernel.blocks_per_sm(BLOCK)
        yield Registers(
            registers=kernel.registers,
            spilled_bytes=kernel.local_bytes,
            occupancy_share=fit * BLOCK / bench.chip.max_threads_per_multi_processor,
            work_flops=work,
            rate_flops_per_s=1e9 * work / timing.took_ns,
            **fields(timing),
        )


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    blocks, reads = by(select(rows, Block), "threads"), sorted(_single(rows), key=lambda row: row.occupancy_share)
    kept = sorted(select(rows, Registers), key=lambda row: row.registers)
    complete = set(NEEDED) <= set(blocks) and len(reads) > 1 and len(kept) > 1
    counts = f"only {len(blocks)} sizes, {len(reads)} occupancies and {len(kept)} register counts were measured."
    yield require("all kernels", complete, counts)
    few, many = reads[0], reads[-1]
    gain = (few.device / many.device).around(many.rate_bytes_per_s / few.rate_bytes_per_s)
    spilled, free = kept[0], kept[-1]
    yield said(
        f"a block of 33 threads reaches {units.rate(blocks[33].rate_flops_per_s, 'FLOP/s')} and one of 64 "
        f"{units.rate(blocks[64].rate_flops_per_s, 'FLOP/s')}. With {units.percent(few.occupancy_share, 0)} of the warps that "
        f"fit, single reads get {units.rate(few.rate_bytes_per_s, 'B/s')}, with {units.percent(many.occupancy_share, 0)} "
        f"{units.rate(many.rate_bytes_per_s, 'B/s')}: {gain.middle:.1f} times as much. {_eight(rows)}"
    )
    yield said(
        f"A kernel of {free.registers} registers leaves room for {units.percent(free.occupancy_share, 0)} of the warps; held to "
        f"{spilled.registers} it has room for {units.percent(spilled.occupancy_share, 0)}, keeps {spilled.spilled_bytes} bytes "
        f"of each thread in memory, and takes {spilled.took_ns / free.took_ns:.1f} times as long."
    )
    lanes = {}
    for odd, even in ((33, 64), (65, 96)):
        ratio = blocks[even].device / blocks[odd].device
        measured = blocks[odd].rate_flops_per_s / blocks[even].rate_flops_per_s
        lanes[str(odd)] = ratio.around(measured / lanes_share(odd))
    yield within("warps of 32", lanes, *LANES, refuted="Not as its warps say: a block of {} threads.")
    yield within("many warps", {"single reads": gain}, SEVERAL, hardly=HARDLY)
    yield holds("shared memory limits", few.shared_bytes > many.shared_bytes)
    yield holds("registers limit", spilled.occupancy_share > free.occupancy_share)
    times = {f"blocks of {n}": blocks[n].device for n in NEEDED}
    yield least_certain(times | {f"reads at {row.occupancy_share:.0%}": row.device for row in (few, many)})


def _single(rows: Rows) -> list[Reads]:
    return [row for row in select(rows, Reads) if row.at_once == 1]


def _eight(rows: Rows) -> str:
    """That more reads of each thread do what more warps do."""
    eight = sorted((row for row in select(rows, Reads) if row.at_once > 1), key=lambda row: row.occupancy_share)
    if len(eight) < 2:
        return ""
    few, many = (units.rate(row.rate_bytes_per_s, "B/s") for row in (eight[0], eight[-1]))
    return f"{eight[0].at_once} reads at once get {few} and {many}."


def draw(rows: Rows, place: Place) -> list[Picture]:
    blocks = [row for row in select(rows, Block) if row.threads <= DRAWN]
    best = max((row.rate_flops_per_s for row in blocks), default=0.0)
    rates = [
        {"threads": row.threads, "rate_flops_per_s": rate, "what": what}
        for what in ("measured", "share of threads that exist")
        for row in blocks
        for rate in (row.rate_flops_per_s if what == "measured" else best * row.lanes_share,)
    ]
    reads = [fields(row) | {"reads": f"{row.at_once} at once"} for row in select(rows, Reads)]
    kept = [fields(row) | {"name": f"{row.registers} registers"} for row in select(rows, Registers)]
    occupancy = Axis("occupancy_share", "occupancy: warps of those that fit")
    return [
        line(rates, Axis("threads", "threads of a block"), Axis("rate_flops_per_s", "rate"), colour="what").titled(
            "Rate of arithmetic by the threads of a block",
            "A block pays for whole warps: one thread more than a multiple of 32 costs 32.",
        ),
        line(reads, occupancy, Axis("rate_bytes_per_s", "bandwidth"), colour="reads").titled(
            "Bandwidth of reads by occupancy",
            "The memory answers after hundreds of cycles: many warps, or many reads of each, keep it busy.",
        ),
        scatter(kept, occupancy, Axis("rate_flops_per_s", "rate"), colour="name").titled(
            "A kernel of 96 numbers in registers, held to fewer",
            "More warps fit when each thread has fewer registers, but what no longer fits into them goes to memory.",
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    blocks = columns(
        threads="threads of a block", lanes_share="threads that exist", gpu_ns="GPU", rate_flops_per_s="rate"
    )
    reads = columns(at_once="reads at once", shared_bytes="shared by a block", blocks="blocks on an SM")
    reads |= columns(occupancy_share="occupancy", gpu_ns="GPU", rate_bytes_per_s="bandwidth")
    kept = columns("registers", spilled_bytes="of a thread in memory", occupancy_share="occupancy", gpu_ns="GPU")
    return [
        table_of("arithmetic by the threads of a block", blocks, values(select(rows, Block), "lanes_share")),
        table_of("reads by occupancy", reads, values(select(rows, Reads))),
        table_of("registers and occupancy", kept | columns(rate_flops_per_s="rate"), values(select(rows, Registers))),
    ]


EXPERIMENT = Experiment(18, "simt", LINE, CLAIM, (Block, Reads, Registers), measure, judge, draw, tabulate)
