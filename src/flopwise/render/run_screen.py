"""A measured step on one screen; of two that were measured against each other, how they compare."""

from flopwise import units
from flopwise.advice.measured_levers import measured_reach
from flopwise.analysis.clocks import GPU, LAUNCH, PhaseSummary, gpu_name, summarise, tokens_per_second
from flopwise.analysis.exchanges import exchange
from flopwise.analysis.loop_notes import doubt, loop_notes
from flopwise.analysis.matching import compare_points
from flopwise.analysis.reach import Reach, point_reach
from flopwise.predict.op_bytes import op_bytes
from flopwise.records.comparison import Comparison
from flopwise.records.rank_rows import ranks_line
from flopwise.records.run import OK, Point
from flopwise.render.actions import action
from flopwise.render.exchanges_view import describe, rounded
from flopwise.render.findings_view import options
from flopwise.render.names import stored_in
from flopwise.render.run_view import disturbed, half_width
from flopwise.render.screen import (
    IDLE,
    LIMIT,
    MEASURED,
    MOST_CHANGES,
    NOW,
    SPECIFIED,
    Change,
    Figure,
    Part,
    Screen,
    changes_title,
    reach_figures,
    sentence,
)
from flopwise.spec.gpu import find_gpu
from flopwise.spec.recipe import levers_to_apply
from flopwise.store import StoredRun

VERSUS = "versus"
_WORTH_SAYING = 0.05  # of the step: shorter idle time is not mentioned


def run_screen(run: StoredRun) -> Screen | None:
    """Of one point, or of a pair; None of a run of several, which is a table."""
    stored = stored_in(run.path)
    if len(run.points) == 1:
        return point_screen(run.points[0], stored)
    if len(run.points) == 2 and run.points[1].paired_with == run.points[0].key and all(p.phases for p in run.points):
        return _pair_screen(*run.points, stored)
    return None


def point_screen(point: Point, stored: str = "") -> Screen:
    """The step by its clocks: what sets its time, by phase, and what plain PyTorch could still save."""
    label, where = (
        point.trial.workload.label(),
        gpu_name(point) or (point.ran.device if point.ran else point.trial.device),
    )
    summaries = summarise(point)
    if not summaries:
        return Screen(title=label, where=where, verdict=f"{point.status}: {point.reason}", notes=(stored,))
    step, (found, best) = summaries[0], measured_reach(point)
    return Screen(
        title=label,
        where=where,
        verdict=_verdict(point, step),
        figures=(_now(step, found), *(reach_figures(found) or _bytes_limit(point))),
        parts_title=f"Where the {units.duration(step.wall.median)} go",
        parts=() if exchange(point) else _parts(summaries),
        changes_title=changes_title(len(best)),
        changes=tuple(
            Change(action(c.lever, c.value), c.saving_ns, options({c.lever: c.value})) for c in best[:MOST_CHANGES]
        ),
        notes=tuple(filter(None, (*loop_notes(point), *_said(point, step), stored))),
    )


def _said(point: Point, step: PhaseSummary) -> tuple[str, ...]:
    layers = sentence(point.ran.linear) if point.ran is not None else ""
    return disturbed(point, step), _rates(point), layers, rounded(point), ranks_line(point), _why(point)


def _now(step: PhaseSummary, found: Reach, name: str = NOW) -> Figure:
    spread = half_width(step.wall)
    note = f"± {units.percent(spread)}, {step.wall.n} samples" if spread is not None else f"{step.wall.n} samples"
    return Figure(name, step.wall.median, MEASURED, found.mfu(step.wall.median), note)


def _bytes_limit(point: Point) -> tuple[Figure, ...]:
    """Of an operation without FLOPs to count: its bytes at the GPU's bandwidth."""
    gpu = find_gpu(gpu_name(point)) if gpu_name(point) else None
    moved = op_bytes(point.trial.workload)
    if gpu is None or not gpu.bandwidth_bytes_s or not moved:
        return ()
    note = f"its bytes at {units.rate(gpu.bandwidth_bytes_s, 'B/s')}"
    return (Figure(LIMIT, 1e9 * moved / gpu.bandwidth_bytes_s, SPECIFIED, note=note),)


def _verdict(point: Point, step: PhaseSummary) -> str:
    """What sets the step's time, by its clocks."""
    failed = f"{point.status}: {point.reason}. " if point.status != OK else ""
    if (exchanged := exchange(point)) is not None:
        return f"{failed}{describe(exchanged)}"
    if step.gpu is None or step.launch is None:
        return f"{failed}A step takes {units.duration(step.wall.median)}{_longest(point)}."
    host, gpu = units.duration(step.launch.median), units.duration(step.gpu.median)
    if step.bound == LAUNCH:
        return f"{failed}Launch-bound: the CPU needs {host} to launch what the GPU does in {gpu}."
    idle = step.gpu_idle_share if step.gpu_exact else None
    if step.bound == GPU:
        busy = f": the GPU works {units.percent(1 - idle, 0)} of the step" if idle is not None else ""
        return f"{failed}GPU-bound{busy}."
    if idle is not None and idle >= _WORTH_SAYING:
        return f"{failed}The GPU is idle {units.percent(idle, 0)} of the step."
    return f"{failed}A step takes {units.duration(step.wall.median)}."


def _longest(point: Point) -> str:
    """The phase that takes most of it."""
    step, *phases = summarise(point)
    most = max(_parts((step, *phases)), key=lambda one: one.amount, default=None) if phases else None
    share = most.amount / step.wall.median if most is not None and step.wall.median else 0.0
    return f", {units.percent(share, 0)} of it {most.name}" if most is not None and share else ""


def _parts(summaries: tuple[PhaseSummary, ...]) -> tuple[Part, ...]:
    """By phase; of a step without phases, the GPU's work and its idle time. The parts add up to the step.

    Medians of phases do not, their means do: what each has of the step is by these. On a GPU the phases are timed one by
    one, and take longer than the step, in which one is launched while another runs.
    """
    step, *phases = summaries
    if phases:
        together = sum(one.wall.mean for one in phases)
        scale = step.wall.median / (max(step.wall.mean, together) or 1.0)
        rest = Part("between phases", max(0.0, step.wall.median - together * scale))
        return (*(Part(one.phase, one.wall.mean * scale) for one in phases), rest)
    if step.gpu is None or not step.gpu_exact:
        return ()
    return (Part("GPU works", step.gpu.median), Part("GPU idle", max(0.0, step.wall.median - step.gpu.median), IDLE))


def _rates(point: Point) -> str:
    rate, peak = tokens_per_second(point), max((m.peak_bytes for m in point.memory), default=0)
    words = [
        f"{units.count(rate)} tokens/s" if rate is not None else "",
        f"peak memory {units.size(peak)}" if peak else "",
    ]
    return "; ".join(filter(None, words))


def _why(point: Point) -> str:
    """Where the reasons are: a trace has them, of a step on a GPU."""
    known = gpu_name(point) and point.loop is None and exchange(point) is None
    return "Why: flopwise profile WORKLOAD, then flopwise explain last" if known else ""


def _pair_screen(a: Point, b: Point, stored: str) -> Screen:
    found = compare_points(a, b)
    first, second = summarise(a)[0], summarise(b)[0]
    most = point_reach(a)
    figures = (_now(first, most), _now(second, most, VERSUS), *(reach_figures(most) or _bytes_limit(a)))
    return Screen(
        title=a.trial.workload.label(),
        where=gpu_name(a),
        verdict=_compared(a, b, found),
        figures=figures,
        parts_title=f"Where the second's {units.duration(second.wall.median)} go",
        parts=_parts(summarise(b)),
        notes=tuple(filter(None, (*_losses(a, b), found.settle, disturbed(b, second), stored))),
    )


def _losses(a: Point, b: Point) -> list[str]:
    return [f"{which}: {said}" for which, one in (("the first", a), ("the second", b)) if (said := doubt(one))]


def _compared(a: Point, b: Point, found: Comparison) -> str:
    changed = levers_to_apply(b.trial.workload.recipe, a.trial.workload.recipe)
    what = options({lever: str(value) for lever, value in changed.items()}) or b.trial.workload.label()
    if found.ratio is None:
        return f"With {what}: {found.verdict}."
    longer = f"{found.ratio:.2f} times as long" if found.ratio >= 1 else f"{units.percent(found.ratio, 0)} of the time"
    known = found.low is not None and found.high is not None
    interval = f" (95 %: {found.low:.2f} to {found.high:.2f})" if known else ""
    return f"With {what} a step takes {longer}{interval}: {found.verdict}. Judged by steps run in turns."
