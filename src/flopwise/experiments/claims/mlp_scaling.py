"""`mlp-scaling`: the lecture's small MLP with more steps, layers, batch or width; and why its time does not follow.

A step is a forward pass, the mean of the output, and a backward pass, in fp32. On the wall clock batch and width cost nothing
for a while. Two things could be the reason. Parallelism: the GPU does more work in the same time. Launch overhead: the GPU does
take longer, but it was idle before, waiting for the host, and the wall clock shows the host. The GPU's own clock, and the same
run as a CUDA graph, tell them apart: without launches, what is left is the GPU.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from flopwise import units
from flopwise.experiments.experiment import INCONCLUSIVE, Experiment, Picture, Row, Rows, TableOf, Verdict
from flopwise.experiments.steadiness import GPU, WALL, left_open, span, times, together, word
from flopwise.predict.flops import matmul_flops
from flopwise.records.experiment import Place

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

CLAIM = "An MLP takes twice as long for twice the steps or layers, but no longer for more batch or width: the GPU's parallelism."
STEPS, LAYERS, BATCH, WIDTH = AXES = ("steps", "layers", "batch", "width")
FACTORS, QUICK_FACTORS = (1, 2, 3, 4, 5), (1, 3)
FLAT = 1.25  # times the base: less is flat, whatever the factor
LINEAR = (0.5, 1.5)  # of the growth to expect: that is linear, as the lecture's 3.65 of 5 is
ROOM = 0.5  # of the work's growth: a GPU whose time grows by less had room for more, and used it
GRAPH = "graph_ns"
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


def measure(bench: "Bench") -> Iterator[Row]:
    from flopwise.lm.precision import apply_fp32_matmul
    from flopwise.spec.recipe import Recipe

    apply_fp32_matmul(Recipe(precision="fp32"))
    base = Mlp()
    for axis in AXES:
        # The base is timed again for each axis: a machine that grows slower meanwhile must not look like a larger MLP.
        for factor in QUICK_FACTORS if bench.quick else FACTORS:
            bench.doing(f"{factor} × {axis}")
            yield {"axis": axis, "factor": factor, **_timed(bench, base.scaled(axis, factor))}


def _timed(bench: "Bench", mlp: Mlp) -> Row:
    seconds = (0.05 if bench.on_gpu else 0.12) if bench.quick else 0.2
    run = _runs(bench, mlp)
    row = {"work_flops": mlp.flops(), **bench.time(run, seconds=seconds, repeats=1).row(), "graph_ns": None}
    if bench.on_gpu:
        row["graph_ns"] = bench.time(bench.graphed(run), seconds=seconds, repeats=1).wall_ns
    return row


def _runs(bench: "Bench", mlp: Mlp) -> Callable[[], None]:
    import torch
    from torch import nn

    layers = (layer for _ in range(mlp.layers) for layer in (nn.Linear(mlp.width, mlp.width), nn.GELU()))
    model = nn.Sequential(*layers).to(bench.device)
    x = torch.randn(mlp.batch, mlp.width, device=bench.device)

    def run() -> None:
        for _ in range(mlp.steps):
            model.zero_grad(set_to_none=True)
            model(x).mean().backward()

    return run


def growths(rows: Rows) -> list[Row]:
    """For each axis, at its largest factor: by how much each clock grew, and what the wall clock's growth comes from."""
    told: list[Row] = []
    for axis in AXES:
        some = sorted((row for row in rows if row["axis"] == axis), key=lambda row: row["factor"])
        if len(some) < 2:
            continue
        base, last = some[0], some[-1]
        row: Row = {
            "axis": axis,
            "factor": last["factor"],
            "work_grew": last["work_flops"] / base["work_flops"],
            "wall_grew": last["wall_ns"] / base["wall_ns"],
            "launch_grew": _ratio(last, base, "launch_ns"),
            "gpu_grew": _ratio(last, base, "gpu_ns"),
            "graph_grew": _ratio(last, base, "graph_ns"),
            "base_busy_share": busy(base),
            "busy_share": busy(last),
        }
        told.append({**row, "why": _why(row)})
    return told


def busy(row: Mapping[str, Any]) -> float | None:
    """The share of the wall time in which the GPU works; None on the CPU.

    >>> busy({"wall_ns": 100.0, "gpu_ns": 20.0})
    0.2
    """
    return None if row["gpu_ns"] is None else min(1.0, row["gpu_ns"] / row["wall_ns"])


def _ratio(last: Mapping[str, Any], base: Mapping[str, Any], clock: str) -> float | None:
    return last[clock] / base[clock] if last.get(clock) and base.get(clock) else None


def _why(row: Mapping[str, Any]) -> str:
    """Why the wall clock stayed where it was."""
    if row["wall_grew"] > FLAT:
        return NOT_FLAT
    if row["gpu_grew"] is None:
        return ""
    if row["gpu_grew"] > FLAT:  # had the launches cost nothing, it would not be flat
        return PARTLY if row["gpu_grew"] <= ROOM * row["work_grew"] else BY_LAUNCHES
    return BY_PARALLELISM if row["busy_share"] > BUSY else BY_BOTH


def judge(rows: Rows, place: Place) -> Verdict:
    grown = {row["axis"]: row for row in growths(rows)}
    factors = {axis: {row["factor"] for row in rows if row["axis"] == axis} for axis in AXES}
    if any(1 not in factors[axis] or len(factors[axis]) < 2 or factors[axis] != factors[STEPS] for axis in AXES):
        return Verdict(INCONCLUSIVE, f"only {', '.join(grown) or 'nothing'} could be measured at several sizes.")
    said = " ".join(_told(grown[axis]) for axis in AXES)
    steps = together(*(_grows(rows, axis, LINEAR[0], LINEAR[1], WALL) for axis in (STEPS, LAYERS)))
    flat = together(*(_grows(rows, axis, 0.0, FLAT, WALL) for axis in (BATCH, WIDTH)))
    alone = _alone(rows) if place.on_gpu else None
    answer = together(steps, flat, alone)
    if steps is False:
        said += " Steps or layers do not cost what they should."
    if flat is False:
        said += " Batch or width do cost time, at some factor."
    if flat is not False and alone is False:
        said += " " + _hidden(grown)
    if answer is None:
        said += " " + (_unsteady(rows) if None in (steps, flat) else _not_told(place))
    return Verdict(word(answer), said)


def _grows(rows: Rows, axis: str, least: float, most: float, clock: str) -> bool | None:
    """Whether the clock grows by this at every factor; the bounds of steps and layers are shares of the factor."""
    # The base was timed once for each axis: where the four differ, none of them is known better than that.
    bases = {row["axis"]: row for row in rows if row["factor"] == 1}
    lows, highs = zip(*(span(row) for row in bases.values()), strict=True)
    base = {**bases[axis], "wall_low_ns": min(lows), "wall_high_ns": max(highs)}
    more = [row for row in rows if row["axis"] == axis and row["factor"] > 1]
    by = {row["factor"]: row["factor"] if axis in (STEPS, LAYERS) else 1 for row in more}
    return together(
        *(times(row, base, clock).within(least * by[row["factor"]], most * by[row["factor"]]) for row in more)
    )


def _alone(rows: Rows) -> bool | None:
    """Whether the GPU's own time is flat for batch and width, by its clock and by the CUDA graph; None where these disagree."""
    if any(row.get(GPU) is None or row.get(GRAPH) is None for row in rows):
        return None
    clock, graph = (together(*(_grows(rows, axis, 0.0, FLAT, by) for axis in (BATCH, WIDTH))) for by in (GPU, GRAPH))
    return clock if clock == graph else None


def _hidden(grown: Mapping[str, Mapping[str, Any]]) -> str:
    """What launches hide, and what parallelism would do without them."""
    idle = 1 - min(grown[axis]["base_busy_share"] for axis in (BATCH, WIDTH))
    alone = " and ".join(
        f"{grown[axis]['work_grew']:.3g} × the work in {grown[axis]['gpu_grew']:.2f} × the time"
        for axis in (BATCH, WIDTH)
    )
    room = all(grown[axis]["gpu_grew"] <= ROOM * grown[axis]["work_grew"] for axis in (BATCH, WIDTH))
    return (
        f"Launches set the wall clock's pace (the base leaves the GPU idle for {100 * idle:.0f} % of the time), so it is they "
        f"that keep it flat. The GPU alone does {alone}: "
        + ("it has room, which is parallelism, but its time grows." if room else "it has little room for more.")
    )


def _unsteady(rows: Rows) -> str:
    bases = [row["wall_ns"] for row in rows if row["factor"] == 1]
    if max(bases) > FLAT * min(bases):
        return (
            f"Too unsteady to tell: the base alone takes {units.duration(min(bases))} to {units.duration(max(bases))}."
        )
    return left_open(((f"{row['factor']} × {row['axis']}", row) for row in rows), WALL)


def _not_told(place: Place) -> str:
    if place.on_gpu:
        return (
            "The GPU's clock and the CUDA graph do not agree on whether the GPU alone is flat, or are not exact enough."
        )
    return "Only a GPU's own clock could tell why it is flat."


def _told(row: Mapping[str, Any]) -> str:
    head = f"{row['factor']} × {row['axis']} ({row['work_grew']:.3g} × the work): wall × {row['wall_grew']:.2f}"
    why = f": {row['why']}" if row["axis"] in (BATCH, WIDTH) and row["why"] else ""
    if row["gpu_grew"] is None:
        return f"{head}{why}."
    alone = f"GPU alone × {row['gpu_grew']:.2f}, in a CUDA graph × {row['graph_grew'] or row['gpu_grew']:.2f}"
    shares = f"{100 * row['base_busy_share']:.0f} → {100 * row['busy_share']:.0f} %"
    return f"{head}, {alone}, GPU at work {shares} of the time{why}."


_CLOCKS = {"wall_ns": "wall", "launch_ns": "launch", "gpu_ns": "GPU alone", "graph_ns": "wall, as a CUDA graph"}


def draw(rows: Rows, place: Place) -> list[Picture]:
    clocks = [
        {"axis": row["axis"], "factor": f"× {row['factor']}", "clock": name, "time_ns": row[clock]}
        for row in rows
        for clock, name in _CLOCKS.items()
        if row.get(clock) is not None
    ]
    pictures = [
        Picture(
            title="Time by what is scaled",
            caption="Where the wall clock lies on the launch clock, the GPU waits for the host.",
            kind="line", rows=clocks, x="factor", y="time_ns", colour="clock", column="axis", x_title="times the base",
            y_title="time",
        ),
    ]  # fmt: skip
    bases = {row["axis"]: row for row in rows if row["factor"] == 1}
    grown = [
        {"axis": row["axis"], "factor": f"× {row['factor']}", "grew": row["wall_ns"] / bases[row["axis"]]["wall_ns"]}
        for row in rows
    ]
    pictures.append(
        Picture(
            title="Growth of the wall time", kind="line",
            caption="Steps and layers should double when doubled; batch and width should stay.",
            rows=grown, x="factor", y="grew", colour="axis", x_title="times the base", y_title="times the base's wall time",
        )
    )  # fmt: skip
    return pictures


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    times = {"axis": "scaled", "factor": "times", "work_flops": "FLOPs", "wall_ns": "wall"}
    grew = {"axis": "scaled", "factor": "times", "work_grew": "work ×", "wall_grew": "wall ×"}
    if place.on_gpu:
        times |= {"launch_ns": "launch", "gpu_ns": "GPU alone", "graph_ns": "as a CUDA graph"}
        grew |= {
            "launch_grew": "launch ×", "gpu_grew": "GPU alone ×", "graph_grew": "as a CUDA graph ×",
            "base_busy_share": "GPU at work, base", "busy_share": "GPU at work, scaled", "why": "so it is",
        }  # fmt: skip
    base = Mlp()
    title = (
        f"{base.steps} steps of an MLP of {base.layers} layers of {base.width}, batch {base.batch}, and more of each"
    )
    return [TableOf(title, times, rows), TableOf("how much it grew", grew, growths(rows))]


EXPERIMENT = Experiment(
    name="mlp-scaling",
    number=2,
    line="An MLP with more steps, layers, batch and width: what grows, and whether parallelism or launches hide the rest.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
