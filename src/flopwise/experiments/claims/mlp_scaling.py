"""`mlp-scaling`: the lecture's small MLP with more steps, layers, batch or width; and why its time does not follow.

A step is a forward pass, the mean of the output, and a backward pass, in fp32. On the wall clock batch and width cost nothing
for a while. Two things could be the reason. Parallelism: the GPU does more work in the same time. Launch overhead: the GPU does
take longer, but it was idle before, waiting for the host, and the wall clock shows the host. The GPU's own clock, and the same
run as a CUDA graph, separate them: without launches, what is left is the GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, line, table_of
from flopwise.experiments.rows import Interval, Row, Timed, by, exact, fields
from flopwise.experiments.verdict import CONFIRMED, INCONCLUSIVE, REFUTED, Check, least_certain, require, said, within
from flopwise.predict.flops import matmul_flops
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "An MLP with more steps, layers, batch and width: what grows, and whether parallelism or launches hide the rest."
CLAIM = "An MLP takes twice as long for twice the steps or layers, but no longer for more batch or width: the GPU's parallelism."
STEPS, LAYERS, BATCH, WIDTH = AXES = ("steps", "layers", "batch", "width")
FACTORS, QUICK_FACTORS = (1, 2, 3, 4, 5), (1, 3)
FLAT = 1.25  # times the base: less is flat, whatever the factor
LINEAR = (0.5, 1.5)  # of the growth to expect: that is linear, as the lecture's 3.65 of 5 is
ROOM = 0.5  # of the work's growth: a GPU whose time grows by less had room for more, and used it
BUSY = 0.9  # of the wall time: a GPU that works less waits for the host
BY_PARALLELISM, BY_LAUNCHES, NOT_FLAT = "flat by parallelism", "flat by launch overhead", "not flat"
BY_BOTH = "flat by launch overhead, and without it by parallelism"
PARTLY = "flat by launch overhead; without it, parallelism would do a part"


class Mlp(msgspec.Struct, frozen=True):
    """The lecture's base."""

    steps: int = 2
    layers: int = 4
    batch: int = 256
    width: int = 256

    def scaled(self, axis: str, factor: int) -> "Mlp":
        return msgspec.structs.replace(self, **{axis: factor * getattr(self, axis)})

    def flops(self) -> int:
        """Of the matmuls: three for each layer, but the first needs no gradient of its input.

        >>> Mlp().flops() == 2 * (3 * 4 - 1) * 2 * 256 * 256 * 256
        True
        """
        return self.steps * (3 * self.layers - 1) * matmul_flops(self.batch, self.width, self.width)


class Scaled(Timed, frozen=True, kw_only=True):
    axis: str
    factor: int
    work_flops: int
    graph_ns: float | None  # the wall time as a CUDA graph

    @property
    def busy_share(self) -> float | None:
        """The share of the wall time in which the GPU works; None on the CPU."""
        return None if self.gpu_ns is None else min(1.0, self.gpu_ns / self.wall_ns)


class Growth(Row, frozen=True):
    """At the largest factor of an axis: how much each clock grew."""

    axis: str
    factor: int
    work_grew: float
    wall_grew: float
    launch_grew: float | None
    gpu_grew: float | None
    graph_grew: float | None
    base_busy_share: float | None
    busy_share: float | None

    @property
    def has_room(self) -> bool:
        return self.gpu_grew is not None and self.gpu_grew <= ROOM * self.work_grew

    @property
    def why(self) -> str:
        """Why the wall clock stayed where it was."""
        if self.wall_grew > FLAT:
            return NOT_FLAT
        if self.gpu_grew is None:
            return ""
        if self.gpu_grew > FLAT:  # had the launches cost nothing, it would not be flat
            return PARTLY if self.has_room else BY_LAUNCHES
        return BY_PARALLELISM if (self.busy_share or 0.0) > BUSY else BY_BOTH


Rows = Sequence[Scaled]


def measure(bench: "Bench") -> Iterator[Scaled]:
    bench.fp32_matmul()
    seconds = (0.05 if bench.on_gpu else 0.12) if bench.quick else 0.2
    for axis in AXES:
        # The base is timed again for each axis: a machine that grows slower meanwhile must not look like a larger MLP.
        for factor in QUICK_FACTORS if bench.quick else FACTORS:
            bench.doing(f"{factor} × {axis}")
            mlp = Mlp().scaled(axis, factor)
            run = training(bench, mlp)
            timing = fields(bench.time(run, seconds=seconds, repeats=1))
            graph = bench.time(bench.graphed(run), seconds=seconds, repeats=1).wall_ns if bench.on_gpu else None
            yield Scaled(axis=axis, factor=factor, work_flops=mlp.flops(), graph_ns=graph, **timing)


def training(bench: "Bench", mlp: Mlp) -> Callable[[], None]:
    """The steps of an MLP."""
    from torch import nn

    layers = (layer for _ in range(mlp.layers) for layer in (nn.Linear(mlp.width, mlp.width), nn.GELU()))
    model = nn.Sequential(*layers).to(bench.device)
    x = bench.randn(mlp.batch, mlp.width)

    def run() -> None:
        for _ in range(mlp.steps):
            model.zero_grad(set_to_none=True)
            model(x).mean().backward()

    return run


def growths(rows: Rows) -> dict[str, Growth]:
    """How much each axis that was scaled grew at its largest factor."""
    found = {}
    for axis in AXES:
        some = sorted((row for row in rows if row.axis == axis), key=lambda row: row.factor)
        if len(some) < 2:
            continue
        base, last = some[0], some[-1]
        work, wall = last.work_flops / base.work_flops, last.wall_ns / base.wall_ns
        clocks = ("launch_ns", "gpu_ns", "graph_ns")
        launch, gpu, graph = (_ratio(getattr(last, clock), getattr(base, clock)) for clock in clocks)
        found[axis] = Growth(axis, last.factor, work, wall, launch, gpu, graph, base.busy_share, last.busy_share)
    return found


def _ratio(last: float | None, base: float | None) -> float | None:
    return last / base if last and base else None


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    grown = growths(rows)
    factors = [{row.factor for row in rows if row.axis == axis} for axis in AXES]
    complete = 1 in factors[0] and len(factors[0]) > 1 and all(some == factors[0] for some in factors)
    there = ", ".join(grown) or "nothing"
    yield require("several sizes", complete, f"only {there} could be measured at several sizes.")
    yield said(" ".join(map(_described, grown.values())))
    bases = by((row for row in rows if row.factor == 1), "axis")
    deep, wide = (_named(rows, axes) for axes in ((STEPS, LAYERS), (BATCH, WIDTH)))
    per_factor = {name: one.around(one.middle / deep[name].factor) for name, one in _walls(deep, bases).items()}
    yield within("linear", per_factor, *LINEAR, refuted="Steps or layers do not cost what they should.")
    flat = within("flat", _walls(wide, bases), most=FLAT, refuted="Batch or width do cost time, at some factor.")
    yield flat
    alone = _alone(wide, bases)
    yield said(_reason(flat, alone, grown, place))
    yield alone
    yield least_certain(_uncertain_walls(rows, bases))


def _reason(flat: Check, alone: Check, grown: Mapping[str, Growth], place: Place) -> str:
    """Why the wall clock is flat; '' where it is not, or parallelism is the whole reason."""
    if alone.outcome == REFUTED != flat.outcome:
        return _hidden(grown)
    if alone.outcome == CONFIRMED or flat.outcome != CONFIRMED:
        return ""
    clocks = (
        "The GPU's clock and the CUDA graph do not agree on whether the GPU alone is flat, or are not exact enough."
    )
    return clocks if place.on_gpu else "Only a GPU's own clock could show why it is flat."


def _named(rows: Rows, axes: tuple[str, ...]) -> dict[str, Scaled]:
    return {f"{row.factor} × {row.axis}": row for row in rows if row.axis in axes and row.factor > 1}


def _walls(rows: Mapping[str, Scaled], bases: Mapping[str, Scaled]) -> dict[str, Interval]:
    """How many times the base's wall time each takes. The base was timed once for each axis: where the four differ, none of
    them is known better than that."""
    low, high = min(base.wall.low for base in bases.values()), max(base.wall.high for base in bases.values())
    return {name: row.wall / Interval(bases[row.axis].wall_ns, low, high) for name, row in rows.items()}


def _alone(rows: Mapping[str, Scaled], bases: Mapping[str, Scaled]) -> Check:
    """Whether the GPU's own time is flat, by its clock and by the CUDA graph; inconclusive where these disagree."""
    graphs = {name: _ratio(row.graph_ns, bases[row.axis].graph_ns) for name, row in rows.items()}
    clocks = {name: row.device / bases[row.axis].device for name, row in rows.items() if row.gpu_ns}
    if None in graphs.values() or len(clocks) < len(rows):
        return Check("flat on the GPU alone", INCONCLUSIVE)
    by_clock = within("flat on the GPU alone", clocks, most=FLAT)
    by_graph = within("flat on the GPU alone", {name: exact(by or 0.0) for name, by in graphs.items()}, most=FLAT)
    agreed = by_clock.outcome if by_clock.outcome == by_graph.outcome else INCONCLUSIVE
    return msgspec.structs.replace(by_clock, outcome=agreed, uncertain=False)


def _uncertain_walls(rows: Rows, bases: Mapping[str, Scaled]) -> dict[str, Interval]:
    """The wall times, or those of the bases alone where they differ by more than a flat line may."""
    walls = [base.wall_ns for base in bases.values()]
    if max(walls) > FLAT * min(walls):
        text = f"{units.duration(min(walls))} to {units.duration(max(walls))}"
        return {"the base alone": Interval(walls[0], min(walls), max(walls), text)}
    return {f"{row.factor} × {row.axis}": row.wall for row in rows}


def _hidden(grown: Mapping[str, Growth]) -> str:
    """What launches hide, and what parallelism would do without them."""
    wide = [grown[axis] for axis in (BATCH, WIDTH)]
    idle = 1 - min(growth.base_busy_share or 0.0 for growth in wide)
    alone = " and ".join(f"{growth.work_grew:.3g} × the work in {growth.gpu_grew:.2f} × the time" for growth in wide)
    room = "it has room, which is parallelism, but its time grows." if all(growth.has_room for growth in wide) else ""
    return (
        f"Launches set the wall clock's pace (the base leaves the GPU idle for {100 * idle:.0f} % of the time), so it is they "
        f"that keep it flat. The GPU alone does {alone}: {room or 'it has little room for more.'}"
    )


def _described(growth: Growth) -> str:
    head = f"{growth.factor} × {growth.axis} ({growth.work_grew:.3g} × the work): wall × {growth.wall_grew:.2f}"
    why = f": {growth.why}" if growth.axis in (BATCH, WIDTH) and growth.why else ""
    if growth.gpu_grew is None:
        return f"{head}{why}."
    alone = f"GPU alone × {growth.gpu_grew:.2f}, in a CUDA graph × {growth.graph_grew or growth.gpu_grew:.2f}"
    shares = f"{100 * (growth.base_busy_share or 0):.0f} → {100 * (growth.busy_share or 0):.0f} %"
    return f"{head}, {alone}, GPU at work {shares} of the time{why}."


_CLOCKS = {"wall_ns": "wall", "launch_ns": "launch", "gpu_ns": "GPU alone", "graph_ns": "wall, as a CUDA graph"}


def draw(rows: Rows, place: Place) -> list[Picture]:
    clocks = [
        {"axis": row.axis, "factor": f"× {row.factor}", "clock": name, "time_ns": getattr(row, clock)}
        for row in rows
        for clock, name in _CLOCKS.items()
        if getattr(row, clock) is not None
    ]
    bases = {row.axis: row for row in rows if row.factor == 1}
    grown = [
        {"axis": row.axis, "factor": f"× {row.factor}", "grew": row.wall_ns / bases[row.axis].wall_ns} for row in rows
    ]
    factor = Axis("factor", "times the base")
    return [
        line(clocks, factor, Axis("time_ns", "time"), colour="clock", column="axis").titled(
            "Time by what is scaled", "Where the wall clock lies on the launch clock, the GPU waits for the host."
        ),
        line(grown, factor, Axis("grew", "times the base's wall time"), colour="axis").titled(
            "Growth of the wall time", "Steps and layers should double when doubled; batch and width should stay."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    times = columns(axis="scaled", factor="times", work_flops="FLOPs", wall_ns="wall")
    grew = columns(axis="scaled", factor="times", work_grew="work ×", wall_grew="wall ×")
    if place.on_gpu:
        times |= columns(launch_ns="launch", gpu_ns="GPU alone", graph_ns="as a CUDA graph")
        grew |= columns(launch_grew="launch ×", gpu_grew="GPU alone ×", graph_grew="as a CUDA graph ×")
        grew |= columns(base_busy_share="GPU at work, base", busy_share="GPU at work, scaled", why="so it is")
    base = Mlp()
    title = (
        f"{base.steps} steps of an MLP of {base.layers} layers of {base.width}, batch {base.batch}, and more of each"
    )
    growth = [fields(one) | {"why": one.why} for one in growths(rows).values()]
    return [table_of(title, times, [fields(row) for row in rows]), table_of("how much it grew", grew, growth)]


EXPERIMENT = Experiment(2, "mlp-scaling", LINE, CLAIM, (Scaled,), measure, judge, draw, tabulate)
