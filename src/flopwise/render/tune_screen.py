"""A tuning on one screen: before and after, and the levers that brought it there."""

from collections import Counter
from dataclasses import replace

from flopwise import units
from flopwise.analysis.reach import tuned_reach
from flopwise.records.run import OK
from flopwise.records.tuning import BUDGET_SPENT, Attempt, Tuning
from flopwise.render.actions import action, pytorch_line
from flopwise.render.explain_screen import waterfall_parts
from flopwise.render.findings_view import options
from flopwise.render.limit_view import limit_sentence
from flopwise.render.screen import (
    BEFORE,
    MEASURED,
    MOST_CHANGES,
    REACHABLE,
    TUNED,
    Change,
    Figure,
    Screen,
    reach_figures,
)
from flopwise.render.tune_view import peak_after, tuned_limit, worth_of_levers, written
from flopwise.spec.recipe import Recipe, levers_to_apply

_LONG = 120  # letters of a reason that is not told on the screen


def tune_screen(tuning: Tuning) -> Screen:
    """The step before, as tuned, and at its limit; where the tuned step's time goes; what saved most."""
    found, ended = tuned_reach(tuning), tuning.ended
    after = ended.waterfall if ended is not None else None
    shown, name = (after, "the tuned step's") if after is not None else (tuning.begun.waterfall, "the first step's")
    best, limit = _best(tuning), tuned_limit(tuning)
    first = Figure(BEFORE, found.now_ns, MEASURED, found.mfu(found.now_ns), "as it was")
    rest = (replace(one, name=TUNED) if one.name == REACHABLE else one for one in reach_figures(found, MEASURED))
    return Screen(
        title=tuning.begun.workload.label(),
        where=tuning.begun.gpu,
        verdict=_verdict(tuning),
        figures=(first, *rest),
        parts_title=f"Where {name} {units.duration(shown.step_ns)} went when it was traced"
        if shown is not None
        else "",
        parts=waterfall_parts(shown) if shown is not None else (),
        paragraphs=tuple(filter(None, (limit_sentence(limit) if limit is not None else "", _worth(best)))),
        changes_title="What saved most (measured)" if best else "",
        changes=tuple(map(_change, best)),
        notes=_notes(tuning),
    )


def _verdict(tuning: Tuning) -> str:
    kept, tried = len(tuning.kept), len(tuning.attempts)
    words = [_nothing_kept(tuning)]
    if kept:
        times = f"{units.duration(tuning.first_ns)} → {units.duration(tuning.last_ns)}"
        words = [f"{tuning.times_faster:.2f} times as fast: {times}; {kept} of {tried} attempts kept."]
    before, after = tuning.begun.peak_bytes, peak_after(tuning)
    if kept and before and after:
        words.append(f"Peak memory {units.size(before)} → {units.size(after)}.")
    if tuning.ended is None:
        words.append("It was stopped before its end, or still runs.")
    elif tuning.ended.stopped == BUDGET_SPENT:
        words.append("The budget was spent before all levers were tried.")
    return " ".join(words)


def _nothing_kept(tuning: Tuning) -> str:
    """Why: what became of each attempt, or why there was none."""
    if not tuning.attempts:
        spent = tuning.ended is None or tuning.ended.stopped == BUDGET_SPENT
        return (
            "Nothing was tried."
            if spent
            else "Nothing was tried: no lever that is left can make this step faster here."
        )
    first, *others = tuning.attempts
    if not others and len(first.why) < _LONG:
        return f"Nothing that was tried was kept. {first.name}: {first.why or first.status}."
    words = Counter(one.decision.key if one.decision and one.status == OK else one.status for one in tuning.attempts)
    counts = ", ".join(f"{n} {word}" for word, n in words.most_common())
    return f"Nothing that was tried was kept: {counts}. Why: --full."


def _best(tuning: Tuning) -> list[Attempt]:
    """Those that saved most, in the order in which they were kept."""
    saving = [one for one in tuning.kept if (one.saved_ns or 0.0) > 0]
    most = sorted(saving, key=lambda one: -(one.saved_ns or 0.0))[:MOST_CHANGES]
    return [one for one in saving if one in most]


def _change(one: Attempt) -> Change:
    what = action(one.lever, one.value) + (f", and {len(one.also)} more" if one.also else "")
    line = "" if one.also else pytorch_line(one.levers)
    return Change(what, one.saved_ns or 0.0, line or options(one.levers))


def _worth(best: list[Attempt]) -> str:
    """Of the first bundle, which levers it is predicted to owe its saving to."""
    words = next(filter(None, map(worth_of_levers, best)), "")
    return words and f"Of the levers that were tried together, {words}."


def _notes(tuning: Tuning) -> tuple[str, ...]:
    """The recipe as options, and how to keep it, where something was kept."""
    if not tuning.kept:
        return (f"Run {tuning.run}",)
    levers = {
        name: str(value) for name, value in levers_to_apply(tuning.best.recipe, written(tuning) or Recipe()).items()
    }
    recipe = f"The recipe: {options(levers)}" if levers else ""
    return tuple(filter(None, (recipe, "As a file: --save fast.toml" if levers else "", f"Run {tuning.run}")))
