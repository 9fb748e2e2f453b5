"""What a user is shown of a tuning: the verdict, every lever tried with its prediction, the recipe, and how to write it."""

from typing import Any

import msgspec

from flopwise import units
from flopwise.advice.pytorch_lines import lines_by_lever, recipe_toml, toml_by_lever
from flopwise.records.tuning import Attempt, Tuning
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.render.visible import LONGEST_LINE
from flopwise.render.waterfall_view import waterfalls_table
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import LEVERS

DRIFTED = 0.05  # between the first and the last step as measured, and their levers in turns
OTHER_STEP = 0.01  # of a step's time: a waterfall that is so far from it says so


def tune_view(tuning: Tuning) -> View:
    """Tables for people, and the same as a document."""
    tables = [_attempts(tuning)]
    falls = {"before": tuning.begun.waterfall, "after": tuning.ended.waterfall if tuning.ended else None}
    if falls["before"] is not None or falls["after"] is not None:
        tables.append(waterfalls_table({name: fall for name, fall in falls.items() if fall is not None}))
    tables.append(_recipe(tuning))
    return tables, _document(tuning)


def verdict(tuning: Tuning) -> str:
    """How it went, in one line."""
    begun, after_bytes = tuning.begun, peak_after(tuning)
    kept = sum(attempt.kept for attempt in tuning.attempts)
    times = f"{units.duration(tuning.first_ns)} → {units.duration(tuning.last_ns)}, {tuning.times_faster:.2f}x"
    words = f"{begun.workload.label()}: {times}"
    if begun.peak_bytes and after_bytes:
        words += f"; peak memory {units.size(begun.peak_bytes)} → {units.size(after_bytes)}"
    cut = "" if tuning.ended is not None else "; cut off before its end"
    return f"{words}; {kept} of {len(tuning.attempts)} levers tried were kept{cut}"


def peak_after(tuning: Tuning) -> int | None:
    """The step's peak with all that was kept."""
    if tuning.ended is not None:
        return tuning.ended.peak_bytes
    kept = [attempt for attempt in tuning.attempts if attempt.kept]
    return kept[-1].after_bytes if kept else None


def _attempts(tuning: Tuning) -> Table:
    signed = _signed
    columns = (
        Column("lever", "lever", right=False),
        Column("before_ns", "step ms", units.milliseconds),
        Column("after_ns", "with it", units.milliseconds),
        Column("predicted_ns", "predicted saving", signed),
        Column("saved_ns", "measured", signed),
        Column("interval", "± 95 %", right=False),
        Column("after_bytes", "peak", units.size),
        Column("loss_error", "loss off by", _share),
        Column("gradient_error", "gradients", _share),
        Column("kept", "kept", lambda kept: "yes" if kept else "no", right=False),
        Column("why", "why", right=False, longest=LONGEST_LINE),
    )
    rows = tuple(_row(attempt) for attempt in tuning.attempts)
    return Table(title=verdict(tuning), columns=columns, rows=rows, notes=_notes(tuning))


def _row(attempt: Attempt) -> dict[str, Any]:
    agreement = attempt.agreement
    return {
        "lever": attempt.name,
        "status": attempt.status,
        "before_ns": attempt.before_ns,
        "after_ns": attempt.after_ns,
        "predicted_ns": attempt.predicted_ns,
        "saved_ns": attempt.saved_ns,
        "interval": _interval(attempt),
        "after_bytes": attempt.after_bytes,
        "loss_error": agreement.loss_error if agreement else None,
        "gradient_error": agreement.gradient_error if agreement else None,
        "kept": attempt.kept,
        "why": attempt.why if attempt.status == "ok" else f"{attempt.status}: {attempt.why}",
    }


def _interval(attempt: Attempt) -> str | None:
    """The saving's interval, from that of the ratio."""
    found, before = attempt.comparison, attempt.before_ns or 0.0
    if found is None or found.low is None or found.high is None:
        return None
    return f"{_signed(before * (1 - found.high))} … {_signed(before * (1 - found.low))}"


def _notes(tuning: Tuning) -> tuple[str, ...]:
    pairs = [attempt.close for attempt in tuning.attempts if attempt.close is not None]
    notes = list(tuning.begun.notes)
    if pairs:
        notes.append(f"predictions within 20 % or 1 ms of the measurement: {sum(pairs)} of {len(pairs)}")
    if any(attempt.agreement for attempt in tuning.attempts):
        model = isinstance(tuning.begun.workload.subject, ModelSpec)
        beside = "the same steps by hand in fp32" if model else "the step as it is written"
        notes.append(f"losses and gradients: beside {beside}, from the same weights and data")
    notes += _drift(tuning)
    if any(one.kept and one.agreement is not None and one.agreement.gradient_error is None for one in tuning.attempts):
        notes.append(
            "where no gradients are shown, a step leaves none behind (overlap = on): its losses alone were compared"
        )
    if any(attempt.kept and attempt.agreement is None for attempt in tuning.attempts):
        notes.append("not all that was kept could be checked: its results may be wrong")
    notes += _of_other_steps(tuning)
    if tuning.begun.waterfall is not None and tuning.ended is not None and tuning.ended.waterfall is None:
        notes.append(f"no waterfall of the last step: {tuning.ended.stopped}")
    if tuning.ended is not None:
        notes += tuning.ended.notes
        notes.append(f"ended after {units.duration(tuning.ended.seconds * 1e9)}: {tuning.ended.stopped}")
    else:
        best = (
            "the last lever kept is the best so far"
            if any(one.kept for one in tuning.attempts)
            else "nothing was kept yet"
        )
        notes.append(f"cut off before its end: {best}")
    return (*notes, f"run {tuning.run}")


def _of_other_steps(tuning: Tuning) -> list[str]:
    """Which waterfalls are not of the times told: a step is traced by itself, and may have been slower or faster then."""
    after = (tuning.ended.waterfall, tuning.last_ns) if tuning.ended is not None else (None, 0.0)
    falls = {"before": (tuning.begun.waterfall, tuning.first_ns), "after": after}
    return [
        f"the waterfall {name} is of a step of {units.duration(fall.step_ns)}, as it was when it was traced"
        for name, (fall, step_ns) in falls.items()
        if fall is not None and abs(fall.step_ns - step_ns) > OTHER_STEP * step_ns
    ]


def _drift(tuning: Tuning) -> list[str]:
    """How far the machine's pace moved while it was measured."""
    found, alone_ns = [], tuning.begun.step_ns
    if abs(alone_ns - tuning.first_ns) > DRIFTED * tuning.first_ns:
        found.append(f"alone, before all others, the first step took {units.duration(alone_ns)}")
    if (turns := tuning.in_turns) is not None and abs(turns / max(tuning.times_faster, 1e-12) - 1) > DRIFTED:
        found.append(
            f"the machine's pace moved meanwhile: by what each lever saved in turns with the best before it, all are {turns:.2f}x"
        )
    return found


def _recipe(tuning: Tuning) -> Table:
    recipe = tuning.best.recipe
    files, lines = toml_by_lever(recipe), lines_by_lever(recipe, tuning.begun.workload.recipe)
    rows = [
        {"file": files.get(lever, f"# {lever} as it is by default"), "code": lines.get(lever)}
        for lever in LEVERS
        if lever in files or lever in lines
    ] or [{"file": recipe_toml(recipe), "code": None}]
    columns = (
        Column("file", "recipe.toml", right=False, longest=LONGEST_LINE),
        Column("code", "the lines of PyTorch that do it", right=False, longest=LONGEST_LINE),
    )
    return Table(title="The recipe: flopwise bench … --recipe recipe.toml", columns=columns, rows=tuple(rows))


def _document(tuning: Tuning) -> dict[str, Any]:
    return document(
        "tune",
        run=tuning.run,
        verdict=verdict(tuning),
        before=tuning.begun,
        attempts=[
            msgspec.to_builtins(attempt) | {"saved_ns": attempt.saved_ns, "prediction_close": attempt.close}
            for attempt in tuning.attempts
        ],
        after=tuning.ended,
        first_ns=tuning.first_ns,
        step_ns=tuning.last_ns,
        times_faster=tuning.times_faster,
        times_faster_in_turns=tuning.in_turns,
        notes=_notes(tuning),
        peak_bytes=peak_after(tuning),
        recipe=tuning.best.recipe.changed(),
        recipe_toml=recipe_toml(tuning.best.recipe),
        pytorch=list(lines_by_lever(tuning.best.recipe, tuning.begun.workload.recipe).values()),
    )


def _signed(ns: float) -> str:
    """A saving: with its sign where it is a loss."""
    return f"−{units.duration(-ns)}" if ns < 0 else units.duration(ns)


def _share(error: float) -> str:
    return f"{100 * error:.2g} %"
