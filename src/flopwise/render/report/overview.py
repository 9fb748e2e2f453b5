"""What a reader sees first: which model on which GPU; now, reachable and limit; one picture; the three largest changes."""

from collections import Counter
from collections.abc import Sequence

from flopwise import units
from flopwise.analysis.clocks import gpu_name
from flopwise.analysis.reach import Reach, point_reach, reach, tuned_reach
from flopwise.records.finding import Finding
from flopwise.records.tuning import Attempt, Tuning
from flopwise.records.waterfall import Waterfall
from flopwise.render import run_charts, step_charts
from flopwise.render.actions import what_to_do
from flopwise.render.findings_view import options
from flopwise.render.report import evidence
from flopwise.render.report.evidence import Change, ChartBlock, Number, Overview, ReportPart, slug
from flopwise.render.report.verdict import short_command
from flopwise.render.waterfall_view import step_name
from flopwise.spec.workload import Workload, takes

MOST_CHANGES = 3
_MOST_NAMED = 3  # models of a run
_MEASURED = evidence.MEASURED
_Named = tuple[str, str, str]  # a number's label, its note, and how it was obtained


def overview(part: ReportPart) -> Overview | None:
    """None of a target without a step: a memory snapshot, a lab, a sweep."""
    if part.tuning is not None:
        return _of_tuning(part.tuning)
    if part.waterfall is not None:
        return _of_waterfall(part.waterfall, part.findings, _gpu(part))
    if len(part.pairs) == 1:
        before, after, _ = part.pairs[0]
        return Overview(_numbers(point_reach(before, after), ("Before", "", _MEASURED), ("After", "", _MEASURED)))
    if len(part.points) == 1:
        return Overview(_numbers(point_reach(part.points[0]), ("Now", "", _MEASURED), None))
    return None


def about(part: ReportPart) -> str:
    """The model and the GPU; of a trace alone, its name.

    >>> about(ReportPart(name="step.json.gz"))
    'step.json.gz'
    """
    workloads = [part.tuning.begun.workload] if part.tuning else [point.trial.workload for point in part.points]
    named = list(dict.fromkeys(map(_described, workloads)))
    what = "; ".join(named) if 0 < len(named) <= _MOST_NAMED else part.name
    return " · ".join(filter(None, (what, _gpu(part))))


def _described(workload: Workload) -> str:
    sizes = {"batch": f"batch {workload.batch}", "context": f"context {workload.context}", "phase": workload.phase}
    return ", ".join(
        [short_command(workload.target), *(text for name, text in sizes.items() if name in takes(workload.subject))]
    )


def _gpu(part: ReportPart) -> str:
    if part.tuning is not None and part.tuning.begun.gpu:
        return part.tuning.begun.gpu
    if part.explanation is not None:
        return part.explanation.gpu
    names = dict.fromkeys(map(gpu_name, part.run.points if part.run else ()))
    return ", ".join(filter(None, names))


def _of_waterfall(found: Waterfall, findings: Sequence[Finding], gpu: str) -> Overview:
    changes = _changes(found, findings)
    count = sum(_counted(one) > 0 for one in findings)
    every = f"with the {count} changes found" if count > 1 else "with the change found"
    how = _MEASURED if found.untraced is None or found.untraced.measured else evidence.PREDICTED
    now, reachable = ("Now", f"by {found.measured_by}", how), ("Reachable", every, evidence.PREDICTED)
    numbers = _numbers(reach(found, findings, gpu), now, reachable)
    return Overview(numbers, waterfall_picture(found), changes, "What to change first")


def waterfall_picture(found: Waterfall) -> ChartBlock:
    """The step in parts that add up."""
    step = units.duration(found.step_ns)
    caption = f"From the useful work at the chip's peak rate to {step_name(found)} of {step}: the parts add up."
    return ChartBlock("waterfall", lambda: step_charts.waterfall_chart(found, ""), caption, how=evidence.SPLIT)


def _changes(found: Waterfall, findings: Sequence[Finding]) -> tuple[Change, ...]:
    """The first that still save time after those before them, each with the step that it leaves."""
    made: list[Change] = []
    at = found.step_ns
    for one, anchor in zip(findings, finding_keys(findings), strict=True):
        saved = _counted(one)
        if saved > 0 and len(made) < MOST_CHANGES:
            after, title = max(0.0, at - saved), what_to_do(one)
            why, link = one.title if one.levers else "", "Code and evidence" if one.code else "Evidence"
            made.append(Change(title, at, after, why, options(one.levers), anchor, link))
            at = after
    return tuple(made)


def finding_keys(findings: Sequence[Finding]) -> list[str]:
    """A key for each: a rule may find several things."""
    seen: Counter[str] = Counter()
    keys = []
    for finding in findings:
        rule = slug(finding.rule)
        seen[rule] += 1
        keys.append(f"finding-{rule}" + (f"--{seen[rule]}" if seen[rule] > 1 else ""))
    return keys


def _counted(one: Finding) -> float:
    return one.saving_ns if one.counted_ns is None else one.counted_ns


def _of_tuning(tuning: Tuning) -> Overview:
    largest = sorted((one for one in tuning.kept if (one.saved_ns or 0.0) > 0), key=lambda one: -(one.saved_ns or 0.0))
    changes = tuple(_kept(one) for one in largest[:MOST_CHANGES])
    tuned = ("Tuned", f"changes kept: {len(tuning.kept)}", _MEASURED) if tuning.kept else None
    numbers = _numbers(tuned_reach(tuning), ("Before", "as it was", _MEASURED), tuned)
    return Overview(numbers, staircase_picture(tuning), changes, "What saved most", _MEASURED)


def _kept(one: Attempt) -> Change:
    before = one.before_ns or 0.0
    return Change(
        one.name, before, before - (one.saved_ns or 0.0), line=options(one.levers), anchor="recipe", link="The recipe"
    )


def staircase_picture(tuning: Tuning) -> ChartBlock | None:
    """The step after each change that was kept."""
    kept = [one for one in tuning.kept if one.after_ns is not None]
    if not kept:
        return None
    steps = zip(attempt_names(kept), (one.after_ns or 0.0 for one in kept), strict=True)
    rows = [("as it was", tuning.first_ns), *steps]
    caption = "The step after each change that was kept, in the order they were tried; pale: what the change saved."
    return ChartBlock("staircase", lambda: run_charts.staircase_chart(rows), caption)


def attempt_names(attempts: Sequence[Attempt]) -> list[str]:
    """A short name for each, no two the same: bars of one name would be drawn on top of each other."""
    short = [f"{a.lever}={a.value}" + (f" and {len(a.also)} more" if a.also else "") for a in attempts]
    times = [short[: place + 1].count(name) for place, name in enumerate(short)]
    return [name if n == 1 else f"{name}, try {n}" for name, n in zip(short, times, strict=True)]


def _numbers(found: Reach, now: _Named, reached: _Named | None) -> tuple[Number, ...]:
    """Now, reachable, limit: those that are known."""

    def share(ns: float) -> str:
        part = found.mfu(ns)
        return f"{units.percent(part)} of the {found.dtype} peak" if part is not None else ""

    times = ((now, found.now_ns), (reached, found.reachable_ns))
    made = [Number(one[0], ns, share(ns), *one[1:]) for one, ns in times if one is not None and ns is not None]
    if found.limit_ns is not None and found.peak_flops is not None:
        rate = units.rate(found.peak_flops, "FLOP/s")
        made.append(Number("Limit", found.limit_ns, f"its FLOPs at {rate}", f"{found.dtype} peak", evidence.SPECIFIED))
    return tuple(made)
