"""A tuning on the page: the recipe, every lever tried, the waterfalls before and after."""

from flopwise.records.tuning import Attempt, Tuning
from flopwise.render.report.evidence import BOTH, SPLIT, Picture, Section, TableBlock
from flopwise.render.run_charts import before_after_chart, predicted_measured_chart
from flopwise.render.tune_view import ATTEMPTS, RECIPE, tune_view


def tune_sections(tuning: Tuning) -> list[Section]:
    """The result first, then how it was found."""
    tables = {table.key: table for table in tune_view(tuning).tables}
    recipe, tried = tables.pop(RECIPE), tables.pop(ATTEMPTS)
    found = [Section("recipe", "The recipe", (TableBlock(recipe, how=""),))] if recipe.rows else []
    found.append(Section("attempts", "What was tried", (*_pictures(tuning), TableBlock(tried, how=BOTH))))
    falls = tuple(TableBlock(table, how=SPLIT) for table in tables.values())
    return [*found, *([Section("falls", "Before and after", falls)] if falls else [])]


def _pictures(tuning: Tuning) -> list[Picture]:
    timed = [a for a in tuning.attempts if a.before_ns is not None and a.after_ns is not None]
    rows = [
        {"name": name, "before_ms": (a.before_ns or 0) / 1e6, "after_ms": (a.after_ns or 0) / 1e6}
        for name, a in zip(_names(timed), timed, strict=True)
    ]
    savings = [
        {"name": name, "predicted_ms": a.predicted_ns / 1e6, "measured_ms": (a.saved_ns or 0) / 1e6}
        for name, a in zip(_names(timed), timed, strict=True)
        if a.predicted_ns is not None
    ]
    pictures = []
    if rows:
        caption = "The step before and after each change, in interleaved runs where the GPU has room for both."
        pictures.append(Picture("attempts", lambda: before_after_chart(rows), caption))
    if savings:
        caption = "What each change was predicted to save of a step, and what it saved. On the line, the prediction was right."
        pictures.append(Picture("predicted-measured", lambda: predicted_measured_chart(savings), caption, how=BOTH))
    return pictures


def _names(attempts: list[Attempt]) -> list[str]:
    """A short name for each, no two the same: bars of one name would be drawn on top of each other."""
    short = [f"{a.lever}={a.value}" + (f" and {len(a.also)} more" if a.also else "") for a in attempts]
    times = [short[: place + 1].count(name) for place, name in enumerate(short)]
    return [name if n == 1 else f"{name}, try {n}" for name, n in zip(short, times, strict=True)]
