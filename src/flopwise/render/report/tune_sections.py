"""A tuning on the page: the recipe it found, every lever it tried, the waterfalls before and after."""

from flopwise.records.tuning import Attempt, Tuning
from flopwise.render.report.evidence import SPLIT, Block, Picture, Section, Shown
from flopwise.render.sweep_charts import before_after_chart, predicted_measured_chart
from flopwise.render.tune_view import tune_view

BOTH = "measured and predicted"


def tune_sections(tuning: Tuning) -> list[Section]:
    """What was found first, then how."""
    tables = tune_view(tuning)[0]
    tried, recipe = tables[0], tables[-1]
    found = [Section(key="recipe", title="The recipe", blocks=(Shown(recipe, how=""),))] if recipe.rows else []
    found.append(Section(key="attempts", title="What was tried", blocks=(*_pictures(tuning), Shown(tried, how=BOTH))))
    if falls := tables[1:-1]:
        found.append(
            Section(key="falls", title="Before and after", blocks=tuple(Shown(fall, how=SPLIT) for fall in falls))
        )
    return found


def changed(tuning: Tuning) -> list[str]:
    """The levers that the best recipe has and the first had not, in the order they were kept.

    >>> from flopwise.records.tuning import Begun, Ended
    >>> from flopwise.spec.workload import workload
    >>> ended = Ended(workload=workload("tiny", loss="chunked"), step_ns=1e7, stopped="")
    >>> changed(Tuning(run="", begun=Begun(workload=workload("tiny"), step_ns=2e7), attempts=(), ended=ended))
    ['loss=chunked']
    """
    first, best = tuning.begun.workload.recipe, tuning.best.recipe
    order = list(dict.fromkeys(lever for one in tuning.attempts if one.kept for lever in one.levers))
    levers = [lever for lever in best.__struct_fields__ if getattr(best, lever) != getattr(first, lever)]
    levers.sort(key=lambda lever: order.index(lever) if lever in order else -1)
    return [f"{lever}={getattr(best, lever)}" for lever in levers]


def _pictures(tuning: Tuning) -> list[Block]:
    timed = [a for a in tuning.attempts if a.before_ns is not None and a.after_ns is not None]
    names = _names(timed)
    rows = [
        {"name": name, "before_ms": (a.before_ns or 0) / 1e6, "after_ms": (a.after_ns or 0) / 1e6}
        for name, a in zip(names, timed, strict=True)
    ]
    savings = [
        {"name": name, "predicted_ms": a.predicted_ns / 1e6, "measured_ms": (a.saved_ns or 0) / 1e6}
        for name, a in zip(names, timed, strict=True)
        if a.predicted_ns is not None
    ]
    pictures: list[Block] = []
    if rows:
        caption = "The step before and after each change, measured in turns where the GPU has room for both."
        pictures.append(Picture("attempts", lambda: before_after_chart(rows), caption))
    if savings:
        caption = "What each change was predicted to save of a step, and what it saved. On the line, the prediction was right."
        pictures.append(Picture("predicted-measured", lambda: predicted_measured_chart(savings), caption, how=BOTH))
    return pictures


def _names(attempts: list[Attempt]) -> list[str]:
    """A short name for each, and another for each: bars of one name would be put on top of each other."""
    short = [f"{a.lever}={a.value}" + (f" and {len(a.also)} more" if a.also else "") for a in attempts]
    times = [short[: place + 1].count(name) for place, name in enumerate(short)]
    return [name if n == 1 else f"{name}, try {n}" for name, n in zip(short, times, strict=True)]
