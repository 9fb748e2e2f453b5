"""`launch-overhead`: what it costs to start work on the device, compared with the work.

Below some size the time of an elementwise add no longer follows the size: what is left is the cost of the call (Python, the
dispatcher, the driver). On a GPU three clocks separate the two, and a CUDA graph of many adds has one launch for all of them.
The GPU's clock around a single add includes its events and the start and end of the kernel: an upper bound of its work.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, line, table_of
from flopwise.experiments.rows import Interval, Moved, fields
from flopwise.experiments.verdict import NOT_MEASURABLE, Check, holds, least_certain, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "What an empty launch costs, the CPU's share of an elementwise add, and how a CUDA graph changes it."
CLAIM = "A launch costs microseconds whatever the size: a small operation is mostly launch, and a CUDA graph saves most of it."
EMPTY, ALONE, QUEUED, GRAPH = "empty kernel", "add, waited for", "adds, queued", "adds in a CUDA graph"
SMALL = ONE, LECTURE = (1, 2048)  # numbers; the lecture's vector is the second
LARGE = 2048 * 2048  # the lecture's: two matrices of 2048 × 2048
MICROSECONDS = 50_000  # ns: a launch that costs more does not cost 'microseconds'
WHATEVER = 3.0  # times from the cheapest launch to the dearest: more is not 'whatever the size'
IN_GRAPH = 50  # adds in one graph
MOSTLY = 0.5  # of the time


class Add(Moved, frozen=True, kw_only=True):
    how: str
    n: int

    @property
    def host_share(self) -> float | None:
        """The share of the wall time in which the GPU had nothing to do; None on the CPU."""
        return None if self.gpu_ns is None else max(0.0, 1 - self.gpu_ns / self.wall_ns)

    @property
    def gpu_share(self) -> Interval:
        """The share of the wall time in which the GPU works."""
        gpu, wall = self.device, self.wall
        return Interval(gpu.middle / wall.middle, gpu.low / wall.high, gpu.high / wall.low if wall.low else math.inf)


Rows = Sequence[Add]
Found = Mapping[tuple[str, int], Add]


def measure(bench: "Bench") -> Iterator[Add]:
    import torch

    from flopwise import torch_private

    if bench.on_gpu:
        # A kernel that spins for one cycle: the nearest to none that torch can launch.
        yield Add(how=EMPTY, n=0, moved_bytes=0, **fields(bench.time(lambda: torch_private.spin(1))))
    powers = range(0, 23, 11) if bench.quick else range(0, 23, 2)
    for n in sorted({2**power for power in powers} | {LECTURE, LARGE}):
        bench.doing(f"adding {n} numbers")
        a, b = (torch.rand(n, device=bench.device) for _ in range(2))
        add, moved = partial(torch.add, a, b, out=torch.empty_like(a)), 3 * a.nbytes
        yield Add(how=QUEUED, n=n, moved_bytes=moved, **fields(bench.time(add)))
        if bench.on_gpu:
            yield Add(how=ALONE, n=n, moved_bytes=moved, **fields(bench.time(add, repeats=1)))
            graph = bench.graphed(lambda add=add: [add() for _ in range(IN_GRAPH)])  # type: ignore[misc]
            yield _per_add(Add(how=GRAPH, n=n, moved_bytes=moved, **fields(bench.time(graph))))


def _per_add(row: Add) -> Add:
    times = {key: value / IN_GRAPH for key, value in fields(row).items() if key.endswith("_ns") and value is not None}
    return msgspec.structs.replace(row, **times)


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    found = {(row.how, row.n): row for row in rows}
    ways = (QUEUED, ALONE, GRAPH) if place.on_gpu else (QUEUED,)
    needed = [(how, n) for how in ways for n in (*SMALL, LARGE)] + ([(EMPTY, 0)] if place.on_gpu else [])
    missing = ", ".join(f"{how} of {n}" for how, n in needed if (how, n) not in found)
    yield require("all adds", not missing, f"not measured: {missing}.")
    small, large = found[QUEUED, ONE].wall_ns, found[QUEUED, LARGE].wall_ns
    yield require(
        "launches",
        place.on_gpu,
        f"a CPU has no launches: a call costs {units.duration(small)} here (an add of one number), "
        f"{units.percent(small / large)} of the {units.duration(large)} of an add of 2048 × 2048.",
        NOT_MEASURABLE,
    )
    yield from _on_gpu(rows, found)


def _on_gpu(rows: Rows, found: Found) -> Iterator[Check]:
    empty = found[EMPTY, 0].launch_ns or 0.0
    launches = [row.launch_ns or 0.0 for row in rows if row.how == QUEUED]
    waited = [found[ALONE, n].launch_ns or 0.0 for n in (*SMALL, LARGE)]
    shares = {n: units.percent(found[ALONE, n].host_share or 0.0, 0) for n in (*SMALL, LARGE)}
    in_graph = {str(n): found[GRAPH, n].wall / found[QUEUED, n].wall for n in SMALL}
    yield said(
        f"an empty kernel costs the host {units.duration(empty)}, an add {units.duration(min(launches))} to "
        f"{units.duration(max(launches))} from one number to 2048 × 2048. Of an add of {LECTURE} numbers that is waited for, at "
        f"least {shares[LECTURE]} is not the GPU's work (of one number {shares[ONE]}, of 2048 × 2048 {shares[LARGE]}). It takes "
        f"{units.duration(found[QUEUED, LECTURE].wall_ns)} when queued and {units.duration(found[GRAPH, LECTURE].wall_ns)} in a "
        f"CUDA graph: {units.percent(1 - in_graph[str(LECTURE)].middle, 0)} saved."
    )
    yield holds("microseconds", all(0 < ns <= MICROSECONDS for ns in (empty, *launches, *waited)))
    yield holds("whatever the size", max(launches) <= WHATEVER * min(launches))
    yield within("mostly launch", {str(n): found[ALONE, n].gpu_share for n in SMALL}, most=1 - MOSTLY)
    yield within("a graph saves most", in_graph, most=1 - MOSTLY)
    yield least_certain({f"{how}, {n}": found[how, n].wall for how in (QUEUED, ALONE, GRAPH) for n in SMALL})


def draw(rows: Rows, place: Place) -> list[Picture]:
    adds = [fields(row) | {"host_share": row.host_share} for row in rows if row.n]
    numbers = Axis("n", "numbers added", log=True)
    time = Axis("wall_ns", "time per add", log=True, interval=("wall_low_ns", "wall_high_ns"))
    pictures = [
        line(adds, numbers, time, colour="how").titled(
            "Time of an elementwise add by its size",
            "Flat on the left: the cost of the call. Rising on the right: the cost of the bytes.",
        )
    ]
    if place.on_gpu:
        idle = line(adds, numbers, Axis("host_share", "not the GPU's work"), colour="how")
        note = "At least: the GPU's time includes the cost of its clock, which many adds in a row share."
        pictures.append(idle.titled("Share of an add's time in which the GPU does not work", note))
    return pictures


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns(how="what", n="numbers", moved_bytes="moved", wall_ns="wall")
    if place.on_gpu:
        headings |= columns(launch_ns="launch", gpu_ns="GPU", host_share="not the GPU's work")
    notes = (
        "GPU: includes the clock's own cost, which many adds in a row share; not the GPU's work: so much at least",
    )
    shown = [fields(row) | {"host_share": row.host_share} for row in rows]
    return [table_of("time per operation", headings, shown, notes if place.on_gpu else ())]


EXPERIMENT = Experiment(3, "launch-overhead", LINE, CLAIM, (Add,), measure, judge, draw, tabulate)
