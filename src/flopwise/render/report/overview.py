"""What a reader sees first: which model on which GPU, and what the verb's own screen says: numbers, a picture, changes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flopwise import units
from flopwise.advice.findings import worth_most
from flopwise.analysis.clocks import gpu_name
from flopwise.records.finding import Finding
from flopwise.records.run import OK
from flopwise.records.tuning import Attempt, Tuning
from flopwise.records.waterfall import Waterfall
from flopwise.render import run_charts, screen, step_charts
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.host_screen import host_screen
from flopwise.render.lab_view import summary
from flopwise.render.loop_screen import loop_screen
from flopwise.render.memory_screen import memory_screen
from flopwise.render.ranks_screen import ranks_screen
from flopwise.render.report import evidence
from flopwise.render.report.evidence import Change, ChartBlock, Number, Overview, ReportPart, slug
from flopwise.render.report.verdict import of_several, short_command
from flopwise.render.run_screen import run_screen
from flopwise.render.screen import Figure, Screen
from flopwise.render.train_view import train_screen
from flopwise.render.tune_screen import tune_screen
from flopwise.render.waterfall_view import step_name
from flopwise.spec.workload import Workload, takes

_MOST_NAMED = 3  # models of a run
_EVIDENCE, _RECIPE = "Evidence", "The recipe"


def overview(part: ReportPart) -> Overview:
    """The screen of its verb; of a target without one (a lab, a sweep) its verdict alone. Damage comes first."""
    shown = _screen(part)
    if shown is None:
        return Overview(f"{_damaged(part)}{_without_screen(part)}")
    return Overview(
        verdict=f"{_damaged(part)}{shown.verdict}",
        numbers=tuple(_number(one, shown.unit) for one in shown.figures),
        picture=_picture(part, shown),
        changes=_changes(part, shown),
        heading=shown.changes_title.partition(" (")[0],
        how=evidence.MEASURED if part.tuning is not None else evidence.PREDICTED,
    )


def _damaged(part: ReportPart) -> str:
    more = f", and {len(part.damage) - _MOST_NAMED} more" if len(part.damage) > _MOST_NAMED else ""
    return f"Damaged: {'; '.join(part.damage[:_MOST_NAMED])}{more}. " if part.damage else ""


def _screen(part: ReportPart) -> Screen | None:
    traced = part.explanation or part.host
    if part.ranks is not None:
        return ranks_screen(part.ranks)
    if part.training is not None:
        return train_screen(part.training)
    if part.tuning is not None:
        return tune_screen(part.tuning)
    if part.run is not None and part.run.header.kind == "run" and part.run.points:
        return loop_screen(part.run, traced)
    if part.explanation is not None:
        return explanation_screen(part.explanation)
    if part.host is not None:
        return host_screen(part.host)
    if part.memory is not None:
        return memory_screen(part.memory)
    return run_screen(part.run) if part.run is not None and part.lab is None else None


def _without_screen(part: ReportPart) -> str:
    if part.lab is not None:
        return f"{summary(part.lab)}."
    if part.run is None:
        return part.name
    return of_several(part.points, sum(point.status != OK for point in part.run.points))


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
    if part.ranks is not None:
        return part.ranks.gpu
    if part.host is not None:
        return "the CPU"
    names = dict.fromkeys(map(gpu_name, part.run.points if part.run else ()))
    return ", ".join(filter(None, names))


def _number(one: Figure, unit: str) -> Number:
    share = f"MFU {units.percent(one.mfu)}" if one.mfu is not None and one.mfu < 1 else ""
    return Number(one.name.capitalize(), units.shown(one.amount, unit), share, one.note, one.how)


def _picture(part: ReportPart, shown: Screen) -> ChartBlock | None:
    if part.tuning is not None:
        return staircase_picture(part.tuning)
    if part.explanation is not None and part.explanation.waterfall is not None:
        return waterfall_picture(part.explanation.waterfall)
    return _parts_picture(shown)


def waterfall_picture(found: Waterfall) -> ChartBlock:
    """The step in parts that add up."""
    step = units.duration(found.step_ns)
    caption = f"From the useful work at the chip's peak rate to {step_name(found)} of {step}: the parts add up."
    return ChartBlock("waterfall", lambda: step_charts.waterfall_chart(found, ""), caption, how=evidence.SPLIT)


def _parts_picture(shown: Screen) -> ChartBlock | None:
    """What the screen's bar shows, in a row each."""
    if not shown.parts:
        return None
    parts = screen.largest(shown.parts)
    rows = [(one.name, one.amount, one.kind == screen.IDLE) for one in parts]
    caption = f"{shown.parts_title}: the parts add up."
    how = next((one.how for one in shown.figures if one.name == screen.NOW), evidence.MEASURED)
    return ChartBlock("parts", lambda: step_charts.parts_chart(rows, shown.unit), caption, how=how)


def _changes(part: ReportPart, shown: Screen) -> tuple[Change, ...]:
    """As the screen has them; of findings with the reason and a link to the rest."""
    made = [Change(one.what, screen.saves(one, shown), line=one.line) for one in shown.changes]
    if part.tuning is not None:
        return tuple(replace(one, anchor="recipe", link=_RECIPE) for one in made)
    best = worth_most(part.findings)
    if not best:
        return tuple(made)
    keys = dict(zip(map(id, part.findings), finding_keys(part.findings), strict=True))
    return tuple(
        replace(one, why=f.title, anchor=keys[id(f)], link=_EVIDENCE) for one, f in zip(made, best, strict=True)
    )


def finding_keys(findings: Sequence[Finding]) -> list[str]:
    """A key for each: a rule may find several things."""
    seen: Counter[str] = Counter()
    keys = []
    for finding in findings:
        rule = slug(finding.rule)
        seen[rule] += 1
        keys.append(f"finding-{rule}" + (f"--{seen[rule]}" if seen[rule] > 1 else ""))
    return keys


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
