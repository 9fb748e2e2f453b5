"""`memory-hierarchy`: how long a read takes and how many bytes arrive, from the registers to the memory.

Latency: a chain of addresses, each stored at the one before, in random order; one thread follows it, so that every read waits for
the last. The chain lies in a working set that grows: while it fits into a cache, the cache answers. Bandwidth: a working set read
again and again, on a GPU by all multiprocessors, on a CPU by one core. Registers have no addresses: their latency is that of an
instruction that needs the result of the one before, and their bandwidth is counted from the rate of multiply-adds.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import Unsupported
from flopwise.experiments.experiment import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_MEASURABLE,
    REFUTED,
    Experiment,
    Picture,
    Row,
    Rows,
    Rule,
    TableOf,
    Verdict,
    part,
)
from flopwise.experiments.steadiness import WALL, Ratio, times
from flopwise.records.experiment import Place

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.experiments.bench import Bench

CLAIM = "The farther a memory lies from the processor, the longer a read takes and the fewer bytes per second arrive."
SOURCE, HOST_SOURCE = Path(__file__).with_suffix(".cu"), Path(__file__).with_suffix(".c")
CACHE, LATENCY, BANDWIDTH = "cache", "latency", "bandwidth"
REGISTERS, SHARED, L1, MEMORY = "registers", "shared memory", "L1", "memory"
ORDER = (REGISTERS, SHARED, L1, "L2", "L3", "L4", MEMORY)
BESIDE = 0.1  # two levels nearer to each other than this share are not told apart
SMALLEST, LARGEST = 2**12, 2**30  # working sets on a GPU
FAR_SMALLEST = 2**20  # of the sets that all multiprocessors read: less than a line for each thread below
CPU_LARGEST, CPU_QUICK_LARGEST = 2**28, 2**27
LINE, CPU_LINE = 128, 64  # bytes between two addresses of a chain: no two share a line
STEPS, WARM, RUNS = 2**14, 2**12, 3  # of a chain on a GPU: timed, before that, and how often
CPU_STEPS, CPU_MOST_WARM = 2**13, 2**20  # less than a millisecond: other processes seldom get in between
LONG_STEPS = 2**18  # where a step takes few cycles: the GPU's nanosecond clock ticks about once in a microsecond
L1_SET = 2**15
BLOCKS, THREADS = 4, 256  # of a multiprocessor that reads, and of a block
READS = 8  # of a thread, under way at the same time
NEAR_PASSES, FAR_PASSES, REGISTER_PASSES = 1024, 128, 2048
CHAINS, UNROLLED = 8, 16  # multiply-adds of a thread that wait not for each other, and steps of each in a pass
OPERANDS_BYTES = 16  # of a multiply-add: three numbers read, one written
CPU_READ_BYTES = 2**22  # at least, in one call


def measure(bench: "Bench") -> Iterator[Row]:
    yield from _on_gpu(bench) if bench.on_gpu else _on_cpu(bench)


def _sets(smallest: int, largest: int, named: Mapping[int, str], quick: bool) -> list[int]:
    """Powers of two, in quick mode every third; and those at which the levels are read."""
    powers = range(smallest.bit_length() - 1, largest.bit_length(), 3 if quick else 1)
    return sorted({2**power for power in powers} | set(named))


def _chain(buffer: "Tensor", set_bytes: int, line: int) -> int:
    """Write a chain through the first bytes of a buffer, in random order and without an end; the address of a place in it."""
    import torch

    order = torch.randperm(set_bytes // line, device=buffer.device)
    first = buffer.data_ptr()
    buffer[order * (line // 8)] = first + order.roll(-1) * line
    return first


def _on_gpu(bench: "Bench") -> Iterator[Row]:
    import torch

    from flopwise.kernels import nvrtc

    chip = torch.cuda.get_device_properties(bench.device)
    l2_bytes, blocks = chip.L2_cache_size, BLOCKS * chip.multi_processor_count
    yield {"part": CACHE, "level": "L2", "size_bytes": l2_bytes}
    named = {L1_SET: L1, 1 << (l2_bytes // 4).bit_length() - 1: "L2", LARGEST: MEMORY}
    names = ("chase_far", "chase_shared", "chase_registers", "read_far", "read_l1", "read_shared", "read_registers")
    given = {"READS": READS, "THREADS": THREADS, "CHAINS": CHAINS, "STEPS": UNROLLED}
    options = [f"-D{name}={value}" for name, value in given.items()]
    loaded = nvrtc.load(SOURCE.read_text(), SOURCE.name, names, bench.device.index or 0, options)
    kernels = dict(zip(names, loaded, strict=True))
    buffer = torch.zeros(LARGEST // 8, dtype=torch.int64, device=bench.device)
    told = torch.zeros(4, dtype=torch.int64, device=bench.device)  # cycles, nanoseconds, where the chain was left
    x, out = nvrtc.pointer(buffer), nvrtc.pointer(told)

    # Bandwidth first: it raises the clocks, which a single thread would not.
    near = blocks * THREADS * READS * NEAR_PASSES * 16
    done = blocks * THREADS * CHAINS * UNROLLED * REGISTER_PASSES * OPERANDS_BYTES
    for level, kernel, passes, moved in (
        (REGISTERS, "read_registers", REGISTER_PASSES, done),
        (SHARED, "read_shared", NEAR_PASSES, near),
        (L1, "read_l1", NEAR_PASSES, near),
    ):
        run = partial(kernels[kernel], blocks, THREADS, x, out, ctypes.c_int(passes))
        yield _bandwidth(bench, level, None, moved, run)
    far = blocks * THREADS * READS * FAR_PASSES * 16
    for size in _sets(FAR_SMALLEST, LARGEST, {n: level for n, level in named.items() if level != L1}, bench.quick):
        mask = ctypes.c_uint(size // 16 - 1)
        run = partial(kernels["read_far"], blocks, THREADS, x, out, mask, ctypes.c_int(FAR_PASSES))
        yield _bandwidth(bench, named.get(size), size, far, run)

    for level, kernel in ((REGISTERS, "chase_registers"), (SHARED, "chase_shared")):
        told.zero_()
        yield _latency(
            bench, level, None, partial(kernels[kernel], 1, 1, out, ctypes.c_int(LONG_STEPS)), told, LONG_STEPS
        )
    for size in _sets(SMALLEST, LARGEST, named, bench.quick):
        told[2] = _chain(buffer, size, LINE)
        buffer[: size // 8].sum()  # what fits into the L2 cache is there now
        run = partial(kernels["chase_far"], 1, 1, out, ctypes.c_int(WARM), ctypes.c_int(STEPS))
        yield _latency(bench, named.get(size), size, run, told, STEPS)


def _bandwidth(bench: "Bench", level: str | None, size: int | None, moved: int, run: Callable[[], object]) -> Row:
    bench.doing(f"bandwidth of {level or units.size(size or 0)}")
    timing = bench.time(run, seconds=0.02 if bench.quick else 0.05)
    rate = moved / timing.device_ns * 1e9
    return {
        "part": BANDWIDTH,
        "level": level,
        "set_bytes": size,
        "read_bytes_per_s": rate,
        "moved_bytes": moved,
        **timing.row(),
    }


def _latency(
    bench: "Bench", level: str | None, size: int | None, run: Callable[[], object], told: "Tensor", steps: int
) -> Row:
    """The thread reads both clocks itself. It goes on where the last run ended: no run finds the lines of another."""
    bench.doing(f"latency of {level or units.size(size or 0)}")
    found: list[list[int]] = []
    for _ in range(RUNS + 1):
        run()
        bench.synchronise()
        found.append(told.tolist())
    cycles, ns = (median(run[n] for run in found[1:]) / steps for n in (0, 1))
    return {
        "part": LATENCY,
        "level": level,
        "set_bytes": size,
        "latency_ns": ns,
        "latency_cycles": cycles,
        "steps": steps,
    }


@dataclass(frozen=True)
class Cache:
    """A cache of the CPU."""

    level: str
    size_bytes: int


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
    return torch.frombuffer(memory, dtype=torch.int64).fill_(1)  # written: pages that never were are all read from one


def _on_cpu(bench: "Bench") -> Iterator[Row]:
    import torch

    from flopwise.experiments.native import compile_host

    what = "a chain of reads"
    try:
        host = compile_host(HOST_SOURCE.read_text(), what, ("-O2", "-march=native"))
    except Unsupported:
        host = compile_host(HOST_SOURCE.read_text(), what)  # a compiler that does not know this processor
    caches = cpu_caches()
    most = CPU_QUICK_LARGEST if bench.quick else CPU_LARGEST
    largest = min(LARGEST, max(most, *(4 * cache.size_bytes for cache in caches), 0))
    named = {cache.size_bytes // 2: cache.level for cache in caches} | {largest: MEMORY}
    yield from ({"part": CACHE, "level": cache.level, "size_bytes": cache.size_bytes} for cache in caches)
    buffer = _in_large_pages(largest)
    end = torch.zeros(1, dtype=torch.int64)
    into = ctypes.c_void_p(end.data_ptr())
    budget = 0.03 if bench.quick else 0.1
    timing = bench.time(partial(host["add_chain"], ctypes.c_long(CPU_STEPS), into), seconds=budget)
    yield {
        "part": LATENCY,
        "level": REGISTERS,
        "set_bytes": None,
        "latency_ns": timing.wall_ns / CPU_STEPS,
        **timing.row(),
    }
    for size in _sets(SMALLEST, largest, named, bench.quick):
        level, passes = named.get(size), max(1, CPU_READ_BYTES // size)
        read = partial(
            host["read_all"], ctypes.c_void_p(buffer.data_ptr()), ctypes.c_long(size), ctypes.c_long(passes), into
        )
        yield _bandwidth(bench, level, size, size * passes, read)
        bench.doing(f"latency of {units.size(size)}")
        end[0] = _chain(buffer, size, CPU_LINE)
        host["chase"](
            into, ctypes.c_long(min(size // CPU_LINE, CPU_MOST_WARM))
        )  # once around: caches hold what they can
        timing = bench.time(partial(host["chase"], into, ctypes.c_long(CPU_STEPS)), seconds=budget)
        ns = timing.wall_ns / CPU_STEPS
        yield {"part": LATENCY, "level": level, "set_bytes": size, "latency_ns": ns, "steps": CPU_STEPS, **timing.row()}


def levels(rows: Rows) -> list[Row]:
    """Each level once, from near to far, with its latency and its bandwidth; what was not measured is None."""
    latencies, rates = _by_level(rows, LATENCY), _by_level(rows, BANDWIDTH)
    order = [level for level in ORDER if level in {**latencies, **rates}]
    return [
        {
            "level": level,
            "set_bytes": latencies.get(level, {}).get("set_bytes"),
            "latency_ns": latencies.get(level, {}).get("latency_ns"),
            "latency_cycles": latencies.get(level, {}).get("latency_cycles"),
            "read_bytes_per_s": rates.get(level, {}).get("read_bytes_per_s"),
        }
        for level in order
    ]


def _told(row: Mapping[str, Any]) -> str:
    cycles = f" ({row['latency_cycles']:.0f} cycles)" if row["latency_cycles"] else ""
    rate = f", {units.rate(row['read_bytes_per_s'], 'B/s')}" if row["read_bytes_per_s"] else ""
    return f"{row['level']} {units.duration(row['latency_ns'])}{cycles}{rate}"


def _by_level(rows: Rows, kind: str) -> dict[str, Mapping[str, Any]]:
    return {row["level"]: row for row in part(rows, kind) if row["level"]}


def _times_slower(near: Mapping[str, Any], far: Mapping[str, Any], key: str) -> Ratio:
    """How many times later the farther one answers, or less it brings; and between what, where its clock tells."""
    middle = far[key] / near[key] if key == "latency_ns" else near[key] / far[key]
    if WALL not in near or WALL not in far:  # a GPU's thread reads its own clock
        return Ratio(middle, middle, middle)
    clock = times(far, near)
    return Ratio(middle, middle * clock.low / clock.middle, middle * clock.high / clock.middle)


def _steps(rows: Rows, place: Place) -> dict[str, Ratio]:
    """Each step outward by its name. On a GPU shared memory and L1 are one and the same: the way goes through either."""
    ways = [[level for level in ORDER if level != other] for other in ((L1, SHARED) if place.on_gpu else ("",))]
    found = {}
    for kind, key in ((LATENCY, "latency_ns"), (BANDWIDTH, "read_bytes_per_s")):
        there = _by_level(rows, kind)
        for way in ways:
            for near, far in pairwise(level for level in way if level in there):
                found[f"{kind}, {near} to {far}"] = _times_slower(there[near], there[far], key)
    return found


def judge(rows: Rows, place: Place) -> Verdict:
    found = [row for row in levels(rows) if row["latency_ns"] is not None]
    if len(found) < 2:
        return Verdict(NOT_MEASURABLE, f"levels of memory that could be told apart: {len(found)}.")
    said = f"a read takes and brings: {'; '.join(map(_told, found))}."
    there = {row["level"] for row in found if row["read_bytes_per_s"]}
    wanted = {REGISTERS, SHARED, L1, "L2", MEMORY} if place.on_gpu else {MEMORY}
    less_of = wanted - there | {REGISTERS} - {row["level"] for row in found}  # a CPU's registers have a latency alone
    if less_of or not there - {REGISTERS, MEMORY}:
        less = ", ".join(level for level in ORDER if level in less_of) or "any cache"
        return Verdict(INCONCLUSIVE, f"{said} Not measured: {less}.")
    steps = _steps(rows, place)
    faster = [name for name, step in steps.items() if step.within(most=1 - BESIDE)]
    if faster:
        return Verdict(REFUTED, f"{said} Not slower outward: {'; '.join(faster)}.")
    alike = [name for name, step in steps.items() if not step.within(least=1 + BESIDE)]
    if alike:
        return Verdict(INCONCLUSIVE, f"{said} Too near to each other, or too unsteady, to tell: {'; '.join(alike)}.")
    return Verdict(CONFIRMED, said)


def draw(rows: Rows, place: Place) -> list[Picture]:
    # In KiB, and not in the unit of the largest set: the smallest is a quarter of a million times smaller.
    caches = tuple(Rule("x", row["size_bytes"] / 2**10, row["level"]) for row in part(rows, CACHE))
    sets = [{**row, "set_kib": row["set_bytes"] / 2**10} for row in rows if row.get("set_bytes")]
    near = [row for row in levels(rows) if row["set_bytes"] is None]
    beside = [Rule("y", row["latency_ns"], row["level"]) for row in near if row["latency_ns"]]
    whose = "all multiprocessors" if place.on_gpu else "one core"
    pictures = [
        Picture(
            title="Latency by working set", caption="Each plateau is a memory; the lines stand where a cache is full.",
            kind="line", rows=part(sets, LATENCY), x="set_kib", y="latency_ns",
            x_title="working set, KiB", y_title="time of a read", x_log=True, y_log=True, rules=(*caches, *beside),
        ),
        Picture(
            title=f"Bandwidth of {whose} by working set", caption="The same plateaus, by what arrives.",
            kind="line", rows=part(sets, BANDWIDTH), x="set_kib",
            y="read_bytes_per_s", x_title="working set, KiB", y_title="read", x_log=True, rules=caches,
        ),
        Picture(
            title="Bandwidth of each memory", caption="Downward from near to far.", kind="scatter",
            rows=[row for row in levels(rows) if row["read_bytes_per_s"]], x="read_bytes_per_s", y="level",
            x_title=f"read by {whose}", y_title="", x_log=True,
        ),
    ]  # fmt: skip
    return [picture for picture in pictures if picture.rows]


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    cycles = {"latency_cycles": "in cycles"} if place.on_gpu else {}
    columns = {
        "level": "memory",
        "set_bytes": "working set",
        "latency_ns": "latency",
        **cycles,
        "read_bytes_per_s": "bandwidth",
    }
    shown = [
        {**row, "latency_cycles": None if row["latency_cycles"] is None else round(row["latency_cycles"], 1)}
        for row in levels(rows)
    ]
    notes = ["registers: a step of a chain of instructions, each of which needs the last one's result"]
    if place.on_gpu:
        notes.append("bandwidth of registers: counted, 16 bytes for each multiply-add")
    return [TableOf("from near to far", columns, shown, tuple(notes))]


EXPERIMENT = Experiment(
    name="memory-hierarchy",
    number=13,
    line="Latency by a chain of dependent reads and bandwidth by working set: registers, caches, memory.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
