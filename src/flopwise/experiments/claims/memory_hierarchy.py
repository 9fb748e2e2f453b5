"""`memory-hierarchy`: how long a read takes and how many bytes arrive, from the registers to the memory.

Latency: a chain of addresses, each stored at the one before, in random order; one thread follows it, so that every read waits for
the last. The chain lies in a working set that grows: while it fits into a cache, the cache answers. Bandwidth: a working set read
again and again, on a GPU by all multiprocessors, on a CPU by one core. Registers have no addresses: their latency is that of an
instruction that needs the result of the one before, and their bandwidth is counted from the rate of multiply-adds.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import Unsupported
from flopwise.experiments.experiment import Axis, Experiment, Picture, Rule, columns, line, scatter, table_of
from flopwise.experiments.host_code import compile_host
from flopwise.experiments.rows import Interval, Row, Timed, by, exact, fields, select
from flopwise.experiments.verdict import NOT_MEASURABLE, Check, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.experiments.bench import Bench

LINE = "Latency by a chain of dependent reads and bandwidth by working set: registers, caches, memory."
CLAIM = "The farther a memory lies from the processor, the longer a read takes and the fewer bytes per second arrive."
SOURCE, HOST_SOURCE = Path(__file__).with_suffix(".cu"), Path(__file__).with_suffix(".c")
KERNELS = ("chase_far", "chase_shared", "chase_registers", "read_far", "read_l1", "read_shared", "read_registers")
REGISTERS, SHARED, L1, L2, MEMORY = "registers", "shared memory", "L1", "L2", "memory"
ORDER = (REGISTERS, SHARED, L1, L2, "L3", "L4", MEMORY)
ALIKE = 0.1  # two levels nearer to each other than this share are not distinguished
SMALLEST, LARGEST = 2**12, 2**30  # working sets on a GPU
FAR_SMALLEST = 2**20  # of the sets that all multiprocessors read: less than a line for each thread below
CPU_LARGEST, CPU_QUICK_LARGEST = 2**28, 2**27
LINE_BYTES, CPU_LINE_BYTES = 128, 64  # between two addresses of a chain: no two share a cache line
STEPS, WARM, RUNS = 2**14, 2**12, 3  # of a chain on a GPU: timed, before that, and how often
CPU_STEPS, CPU_MOST_WARM = 2**13, 2**20  # less than a millisecond: other processes seldom get in between
LONG_STEPS = 2**18  # where a step takes few cycles: the GPU's nanosecond clock ticks about once in a microsecond
L1_SET = 2**15
BLOCKS, THREADS = 4, 256  # of a multiprocessor that reads, and of a block
READS = 8  # of a thread, under way at the same time
NEAR_PASSES, FAR_PASSES, REGISTER_PASSES = 1024, 128, 2048
CHAINS, UNROLLED = 8, 16  # independent multiply-adds of a thread, and steps of each in a pass
OPERANDS_BYTES = 16  # of a multiply-add: three numbers read, one written
CPU_READ_BYTES = 2**22  # at least, in one call


class Cache(Row, frozen=True, tag_field="part", tag="cache"):
    level: str
    size_bytes: int


class Bandwidth(Timed, frozen=True, kw_only=True, tag_field="part", tag="bandwidth"):
    level: str | None
    set_bytes: int | None
    read_bytes_per_s: float
    moved_bytes: int


class Latency(Row, frozen=True, kw_only=True, tag_field="part", tag="latency", forbid_unknown_fields=True):
    """By the clocks that a GPU's thread reads itself."""

    level: str | None
    set_bytes: int | None
    latency_ns: float
    latency_cycles: float
    steps: int


class CpuLatency(Timed, frozen=True, kw_only=True, tag_field="part", tag="latency"):
    level: str | None
    set_bytes: int | None
    latency_ns: float
    steps: int = 0


Rows = Sequence[Cache | Bandwidth | Latency | CpuLatency]


def measure(bench: "Bench") -> Iterator[Cache | Bandwidth | Latency | CpuLatency]:
    yield from _on_gpu(bench) if bench.on_gpu else _on_cpu(bench)


def working_sets(smallest: int, largest: int, named: Mapping[int, str], quick: bool) -> list[int]:
    """Powers of two, in quick mode every third; and those at which the levels are read."""
    powers = range(smallest.bit_length() - 1, largest.bit_length(), 3 if quick else 1)
    return sorted({2**power for power in powers} | set(named))


def write_chain(buffer: "Tensor", set_bytes: int, line_bytes: int) -> int:
    """Write a chain through the first bytes of a buffer, in random order and without an end; the address of a place in it."""
    import torch

    order = torch.randperm(set_bytes // line_bytes, device=buffer.device)
    first = buffer.data_ptr()
    buffer[order * (line_bytes // 8)] = first + order.roll(-1) * line_bytes
    return first


def _on_gpu(bench: "Bench") -> Iterator[Cache | Bandwidth | Latency]:
    import torch

    l2_bytes, blocks = bench.chip.L2_cache_size, BLOCKS * bench.chip.multi_processor_count
    yield Cache(L2, l2_bytes)
    named = {L1_SET: L1, 1 << (l2_bytes // 4).bit_length() - 1: L2, LARGEST: MEMORY}
    constants = {"READS": READS, "THREADS": THREADS, "CHAINS": CHAINS, "STEPS": UNROLLED}
    loaded = bench.cuda_kernels(SOURCE.read_text(), SOURCE.name, KERNELS, **constants)
    kernels = dict(zip(KERNELS, loaded, strict=True))
    buffer = torch.zeros(LARGEST // 8, dtype=torch.int64, device=bench.device)
    result = torch.zeros(4, dtype=torch.int64, device=bench.device)  # cycles, nanoseconds, where the chain was left
    x, out = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (buffer, result))

    # Bandwidth first: it raises the clocks, which a single thread would not.
    each, done = blocks * THREADS * READS * 16, blocks * THREADS * CHAINS * UNROLLED * REGISTER_PASSES * OPERANDS_BYTES
    for level, kernel, passes, moved in (
        (REGISTERS, "read_registers", REGISTER_PASSES, done),
        (SHARED, "read_shared", NEAR_PASSES, each * NEAR_PASSES),
        (L1, "read_l1", NEAR_PASSES, each * NEAR_PASSES),
    ):
        run = partial(kernels[kernel], blocks, THREADS, x, out, ctypes.c_int(passes))
        yield _bandwidth(bench, level, None, moved, run)
    for size in working_sets(FAR_SMALLEST, LARGEST, {n: name for n, name in named.items() if name != L1}, bench.quick):
        mask = ctypes.c_uint(size // 16 - 1)
        run = partial(kernels["read_far"], blocks, THREADS, x, out, mask, ctypes.c_int(FAR_PASSES))
        yield _bandwidth(bench, named.get(size), size, each * FAR_PASSES, run)

    for level, kernel in ((REGISTERS, "chase_registers"), (SHARED, "chase_shared")):
        result.zero_()
        run = partial(kernels[kernel], 1, 1, out, ctypes.c_int(LONG_STEPS))
        yield _latency(bench, level, None, run, result, LONG_STEPS)
    for size in working_sets(SMALLEST, LARGEST, named, bench.quick):
        result[2] = write_chain(buffer, size, LINE_BYTES)
        buffer[: size // 8].sum()  # what fits into the L2 cache is there now
        run = partial(kernels["chase_far"], 1, 1, out, ctypes.c_int(WARM), ctypes.c_int(STEPS))
        yield _latency(bench, named.get(size), size, run, result, STEPS)


def _bandwidth(bench: "Bench", level: str | None, size: int | None, moved: int, run: Callable[[], object]) -> Bandwidth:
    bench.doing(f"bandwidth of {level or units.size(size or 0)}")
    timing = bench.time(run, seconds=0.02 if bench.quick else 0.05)
    rate = moved / timing.took_ns * 1e9
    return Bandwidth(level=level, set_bytes=size, read_bytes_per_s=rate, moved_bytes=moved, **fields(timing))


def _latency(
    bench: "Bench", level: str | None, size: int | None, run: Callable[[], object], result: "Tensor", steps: int
) -> Latency:
    """The thread reads both clocks itself. It goes on where the last run ended: no run finds the lines of another."""
    bench.doing(f"latency of {level or units.size(size or 0)}")
    clocks: list[list[int]] = []
    for _ in range(RUNS + 1):
        run()
        bench.synchronise()
        clocks.append(result.tolist())
    cycles, ns = (median(one[n] for one in clocks[1:]) / steps for n in (0, 1))
    return Latency(level=level, set_bytes=size, latency_ns=ns, latency_cycles=cycles, steps=steps)


def cpu_caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> list[Cache]:
    """The first core's caches for data, as Linux describes them; none elsewhere."""
    found = []
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction" and size.endswith("K"):
                found.append(Cache(f"L{level}", int(size[:-1]) * 2**10))
        except (OSError, ValueError):
            continue
    return found


def _in_large_pages(n_bytes: int) -> "Tensor":
    """Host memory, in large pages if the system has some to give: with small ones, random reads wait for the table of pages."""
    import torch

    memory = mmap.mmap(-1, n_bytes)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int64).fill_(1)  # written: pages never written are all read from one


def _on_cpu(bench: "Bench") -> Iterator[Cache | Bandwidth | CpuLatency]:
    import torch

    source, what = HOST_SOURCE.read_text(), "a chain of reads"
    try:
        host = compile_host(source, what, ("-O2", "-march=native"))
    except Unsupported:
        host = compile_host(source, what)  # a compiler that does not know this processor
    caches = cpu_caches()
    most = CPU_QUICK_LARGEST if bench.quick else CPU_LARGEST
    largest = min(LARGEST, max(most, *(4 * cache.size_bytes for cache in caches), 0))
    named = {cache.size_bytes // 2: cache.level for cache in caches} | {largest: MEMORY}
    yield from caches
    buffer, end = _in_large_pages(largest), torch.zeros(1, dtype=torch.int64)
    start, into = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (buffer, end))
    steps = ctypes.c_long(CPU_STEPS)
    budget = 0.03 if bench.quick else 0.1
    timing = bench.time(partial(host["add_chain"], steps, into), seconds=budget)
    yield CpuLatency(level=REGISTERS, set_bytes=None, latency_ns=timing.wall_ns / CPU_STEPS, **fields(timing))
    for size in working_sets(SMALLEST, largest, named, bench.quick):
        level, passes = named.get(size), max(1, CPU_READ_BYTES // size)
        read = partial(host["read_all"], start, ctypes.c_long(size), ctypes.c_long(passes), into)
        yield _bandwidth(bench, level, size, size * passes, read)
        bench.doing(f"latency of {units.size(size)}")
        end[0] = write_chain(buffer, size, CPU_LINE_BYTES)
        warm = min(size // CPU_LINE_BYTES, CPU_MOST_WARM)  # once around: caches hold what they can
        host["chase"](into, ctypes.c_long(warm))
        timing = bench.time(partial(host["chase"], into, steps), seconds=budget)
        ns = timing.wall_ns / CPU_STEPS
        yield CpuLatency(level=level, set_bytes=size, latency_ns=ns, steps=CPU_STEPS, **fields(timing))


def _latencies(rows: Rows) -> dict[str, Latency | CpuLatency]:
    """By level, near to far."""
    found = by((row for row in rows if isinstance(row, Latency | CpuLatency)), "level")
    return {level: found[level] for level in ORDER if level in found}


def _bandwidths(rows: Rows) -> dict[str, Bandwidth]:
    found = by(select(rows, Bandwidth), "level")
    return {level: found[level] for level in ORDER if level in found}


def levels(rows: Rows) -> list[dict[str, Any]]:
    """Each level once, from near to far, with its latency and its bandwidth; what was not measured is None."""
    latencies, rates = _latencies(rows), _bandwidths(rows)
    names = ("set_bytes", "latency_ns", "latency_cycles")
    return [
        {"level": level, "read_bytes_per_s": getattr(rates.get(level), "read_bytes_per_s", None)}
        | {name: getattr(latencies.get(level), name, None) for name in names}
        for level in ORDER
        if level in latencies or level in rates
    ]


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    found = [row for row in levels(rows) if row["latency_ns"] is not None]
    few = f"levels of memory that could be distinguished: {len(found)}."
    yield require("two levels", len(found) >= 2, few, NOT_MEASURABLE)
    yield said(f"a read takes and brings: {'; '.join(map(_described, found))}.")
    yield _all_levels(found, place)
    yield within(
        "each step outward is slower",
        dict(_outward(rows, place)),
        1 + ALIKE,
        hardly=1 - ALIKE,
        refuted="Not slower outward: {}.",
        unknown="Too near to each other, or too uncertain, to tell: {}.",
    )


def _described(row: Mapping[str, Any]) -> str:
    cycles = f" ({row['latency_cycles']:.0f} cycles)" if row["latency_cycles"] else ""
    rate = f", {units.rate(row['read_bytes_per_s'], 'B/s')}" if row["read_bytes_per_s"] else ""
    return f"{row['level']} {units.duration(row['latency_ns'])}{cycles}{rate}"


def _all_levels(found: Sequence[Mapping[str, Any]], place: Place) -> Check:
    """Registers, at least one cache, and memory; of a GPU all of its levels. A CPU's registers have a latency alone."""
    there = {row["level"] for row in found if row["read_bytes_per_s"]}
    wanted = {REGISTERS, SHARED, L1, L2, MEMORY} if place.on_gpu else {MEMORY}
    missing = wanted - there | {REGISTERS} - {row["level"] for row in found}
    names = ", ".join(level for level in ORDER if level in missing) or "any cache"
    return require("all levels", not missing and there - {REGISTERS, MEMORY}, f"Not measured: {names}.")


def _outward(rows: Rows, place: Place) -> Iterator[tuple[str, Interval]]:
    """Each step outward by its name, and how many times slower it is. On a GPU shared memory and L1 are the same memory: the
    way goes through either."""
    for other in (L1, SHARED) if place.on_gpu else ("",):
        way = [level for level in ORDER if level != other]
        latencies, rates = _latencies(rows), _bandwidths(rows)
        for near, far in pairwise(level for level in way if level in latencies):
            middle = latencies[far].latency_ns / latencies[near].latency_ns
            yield f"latency, {near} to {far}", _clock_ratio(latencies[far], latencies[near]).around(middle)
        for near, far in pairwise(level for level in way if level in rates):
            middle = rates[near].read_bytes_per_s / rates[far].read_bytes_per_s
            yield f"bandwidth, {near} to {far}", _clock_ratio(rates[far], rates[near]).around(middle)


def _clock_ratio(far: Row, near: Row) -> Interval:
    """How uncertain the ratio of two times is; a GPU's thread reads its own clock, which is exact."""
    return far.device / near.device if isinstance(far, Timed) and isinstance(near, Timed) else exact(1.0)


def draw(rows: Rows, place: Place) -> list[Picture]:
    # In KiB, and not in the unit of the largest set: the smallest is a quarter of a million times smaller.
    caches = [Rule("x", row.size_bytes / 2**10, row.level) for row in select(rows, Cache)]
    latency = [row for row in rows if isinstance(row, Latency | CpuLatency)]
    near = [Rule("y", row.latency_ns, row.level) for row in latency if row.level and not row.set_bytes]
    every = [row for row in levels(rows) if row["read_bytes_per_s"]]
    who = "all multiprocessors" if place.on_gpu else "one core"
    size, read = Axis("set_kib", "working set, KiB", log=True), Axis("read_bytes_per_s", f"read by {who}", log=True)
    return [
        line(_sized(latency), size, Axis("latency_ns", "time of a read", log=True), rules=(*caches, *near)).titled(
            "Latency by working set", "Each plateau is a memory; the lines stand where a cache is full."
        ),
        line(_sized(select(rows, Bandwidth)), size, Axis("read_bytes_per_s", "read"), rules=tuple(caches)).titled(
            f"Bandwidth of {who} by working set", "The same plateaus, by what arrives."
        ),
        scatter(every, read, Axis("level")).titled("Bandwidth of each memory", "Downward from near to far."),
    ]


def _sized(rows: Sequence[Latency | CpuLatency | Bandwidth]) -> list[dict[str, Any]]:
    return [fields(row) | {"set_kib": row.set_bytes / 2**10} for row in rows if row.set_bytes]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns(level="memory", set_bytes="working set", latency_ns="latency")
    headings |= columns(latency_cycles="in cycles") if place.on_gpu else {}
    shown = [
        row | {"latency_cycles": None if row["latency_cycles"] is None else round(row["latency_cycles"], 1)}
        for row in levels(rows)
    ]
    notes = ["registers: a step of a chain of instructions, each of which needs the last one's result"]
    notes += ["bandwidth of registers: counted, 16 bytes for each multiply-add"] if place.on_gpu else []
    return [table_of("from near to far", headings | columns(read_bytes_per_s="bandwidth"), shown, tuple(notes))]


KINDS = (Cache, Bandwidth, CpuLatency, Latency)
EXPERIMENT = Experiment(13, "memory-hierarchy", LINE, CLAIM, KINDS, measure, judge, draw, tabulate)
