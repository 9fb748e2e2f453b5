"""A tuning as tables: the verdict, every lever tried with its prediction, the recipe, and how to write it in PyTorch."""

from collections.abc import Iterator
from typing import Any

import msgspec

from flopwise import units
from flopwise.advice.pytorch_lines import lines_by_lever, lines_for_own_code, recipe_toml, toml_by_lever
from flopwise.analysis.clocks import StepWork, step_work
from flopwise.analysis.reach import tuned_reach
from flopwise.records.limit import StepLimit
from flopwise.records.table import Table
from flopwise.records.tuning import BUDGET_SPENT, Attempt, Tuning
from flopwise.records.waterfall import Waterfall
from flopwise.render.json import document, picked
from flopwise.render.limit_view import limit_table
from flopwise.render.table import View, columns
from flopwise.render.waterfall_view import waterfalls_table
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import LEVERS, Recipe
from flopwise.spec.workload import UserStep

_APPLY = 'flopwise.apply(model, optimizer, recipe="FILE.toml"), with what --save FILE.toml wrote'
ATTEMPTS, RECIPE = "attempts", "recipe"
DRIFTED = 0.05  # of the step's time: how far the machine's speed may move before it is mentioned
OTHER_STEP = 0.01  # of the step's time: a waterfall that is so far from it says so

_SAVED = "saved: by the ratio of steps run next to each other, which drift changes less than the times before and after"


def tune_view(tuning: Tuning) -> View:
    """Tables for people, and the same as a document."""
    waterfalls = {name: found for name, (found, _) in _waterfalls(tuning).items() if found is not None}
    tables = [_attempts(tuning), *([waterfalls_table(waterfalls)] if waterfalls else [])]
    limit = tuned_limit(tuning)
    tables += [*([limit_table(limit)] if limit is not None else []), _recipe(tuning)]
    return View(tables, _document(tuning) | {"reach": tuned_reach(tuning)})


def _waterfalls(tuning: Tuning) -> dict[str, tuple[Waterfall | None, float]]:
    """Before and after, each with the time of its step."""
    after = tuning.ended.waterfall if tuning.ended is not None else None
    return {"before": (tuning.begun.waterfall, tuning.first_ns), "after": (after, tuning.last_ns)}


def tuned_limit(tuning: Tuning) -> StepLimit | None:
    """Of the tuned step, where its trace tells it."""
    after, _ = _waterfalls(tuning)["after"]
    return after.limit if after is not None else None


def verdict(tuning: Tuning) -> str:
    """The result in one line."""
    begun, after_bytes = tuning.begun, peak_after(tuning)
    times = f"{units.duration(tuning.first_ns)} → {units.duration(tuning.last_ns)}, {tuning.times_faster:.2f}x"
    words = f"{begun.workload.label()}: {times}"
    if begun.peak_bytes and after_bytes:
        words += f"; peak memory {units.size(begun.peak_bytes)} → {units.size(after_bytes)}"
    cut = "" if tuning.ended is not None else "; stopped before its end"
    return f"{words}; {len(tuning.kept)} of {len(tuning.attempts)} attempts kept{cut}"


def peak_after(tuning: Tuning) -> int | None:
    """The step's peak with all that was kept."""
    if tuning.ended is not None:
        return tuning.ended.peak_bytes
    kept = [attempt for attempt in tuning.attempts if attempt.kept]
    return kept[-1].after_bytes if kept else None


def _attempts(tuning: Tuning) -> Table:
    shown = columns(
        "lever | kept | before_ns [ms] | after_ns [ms] | saved_ns [saving] | predicted_ns [saving] | why | interval: ± 95 % | "
        "after_bytes: peak | loss_error: loss off by [error_share] | gradient_error: gradients off by [error_share] | "
        "mfu | tokens_per_s: tokens/s",
        keep="kept saved_ns why",
    )
    rows = [_row(one) | _rates(work, one.after_ns, tuning) for one, work in _works(tuning)]
    return Table(ATTEMPTS, verdict(tuning), shown, tuple(rows), _notes(tuning))


def _works(tuning: Tuning) -> Iterator[tuple[Attempt, StepWork]]:
    """Every attempt with the work of its step: that of the first step, in the precision it was tried in."""
    precision = tuning.begun.workload.recipe.precision
    for attempt in tuning.attempts:
        tried = attempt.levers.get("precision", precision)
        yield attempt, _work_in(tuning, tried)
        precision = tried if attempt.kept else precision


def _work_in(tuning: Tuning, precision: str) -> StepWork:
    begun = tuning.begun.workload
    work = step_work(begun, tuning.begun.ran)
    if precision == begun.recipe.precision:
        return work
    return msgspec.structs.replace(work, dtype=precision.partition("-")[0])


def _rates(work: StepWork, step_ns: float | None, tuning: Tuning) -> dict[str, float | None]:
    ns = step_ns or 0.0
    return {"mfu": work.mfu(ns, tuning.begun.gpu), "tokens_per_s": work.tokens_per_second(ns)}


def _before_and_after(tuning: Tuning) -> tuple[StepWork, StepWork]:
    precisions = tuning.begun.workload.recipe.precision, tuning.best.recipe.precision
    return _work_in(tuning, precisions[0]), _work_in(tuning, precisions[1])


def _rates_note(tuning: Tuning) -> list[str]:
    """MFU and tokens per second, before and after."""
    works, gpu = _before_and_after(tuning), tuning.begun.gpu
    times_ns = tuning.first_ns, tuning.last_ns
    words = []
    shares = [work.mfu(ns, gpu) for work, ns in zip(works, times_ns, strict=True)]
    if None not in shares:
        peaks = [f" of {units.rate(work.peak(gpu) or 0.0, 'FLOP/s')} {work.dtype}" for work in works]
        shown = [f"{units.percent(share or 0.0)}{peak}" for share, peak in zip(shares, peaks, strict=True)]
        words.append(f"MFU {units.percent(shares[0] or 0.0) if peaks[0] == peaks[1] else shown[0]} → {shown[1]}")
    rates = [work.tokens_per_second(ns) for work, ns in zip(works, times_ns, strict=True)]
    if None not in rates:
        words.append(" → ".join(units.count(rate or 0.0) for rate in rates) + " tokens/s")
    return ["; ".join(words)] if words else []


def _row(attempt: Attempt) -> dict[str, Any]:
    agreement = attempt.agreement
    return picked(attempt, "status before_ns after_ns predicted_ns saved_ns after_bytes kept") | {
        "lever": attempt.name,
        "interval": _interval(attempt),
        "loss_error": agreement.loss_error if agreement else None,
        "gradient_error": agreement.gradient_error if agreement else None,
        "why": attempt.why if attempt.status == "ok" else f"{attempt.status}: {attempt.why}",
    }


def _interval(attempt: Attempt) -> str | None:
    """The saving's interval, from that of the ratio."""
    found, before = attempt.comparison, attempt.before_ns or 0.0
    if found is None or found.low is None or found.high is None:
        return None
    return f"{units.saving(before * (1 - found.high))} … {units.saving(before * (1 - found.low))}"


def _notes(tuning: Tuning) -> tuple[str, ...]:
    notes = [
        *_rates_note(tuning),
        *tuning.begun.notes,
        *(f"{one.name}: {worth}" for one in tuning.kept if (worth := worth_of_levers(one))),
        *_accuracy(tuning),
        *_drift(tuning),
        *_checks(tuning),
        *_other_steps(tuning),
    ]
    return (*notes, *_ending(tuning), f"run {tuning.run}")


def _accuracy(tuning: Tuning) -> list[str]:
    """How good the predictions were, and what results were compared with."""
    pairs = [attempt.close for attempt in tuning.attempts if attempt.close is not None]
    right = f"predictions within 20 % or 1 ms of the measurement: {sum(pairs)} of {len(pairs)}"
    model = isinstance(tuning.begun.workload.subject, ModelSpec)
    reference = "the same steps written out in fp32" if model else "the step as it is written"
    compared = f"losses and gradients: compared with {reference}, from the same weights and data"
    checked = any(attempt.agreement for attempt in tuning.attempts)
    saved = any(attempt.comparison is not None for attempt in tuning.attempts)
    return [*([right] if pairs else []), *([_SAVED] if saved else []), *([compared] if checked else [])]


def worth_of_levers(attempt: Attempt) -> str:
    """What each lever of a bundle is predicted to be worth, the largest first; '' where that is not known.

    >>> worth_of_levers(Attempt(lever="graph", value="on", before="off", status="ok", worth_ns={"loss": 1e6, "graph": 4e6}))
    'predicted to be lost without one of them: graph 4.00 ms, loss 1.00 ms'
    """
    worth = sorted(((ns, lever) for lever, ns in attempt.worth_ns.items() if ns > 0), reverse=True)
    each = ", ".join(f"{lever} {units.duration(ns)}" for ns, lever in worth)
    return f"predicted to be lost without one of them: {each}" if each else ""


def _drift(tuning: Tuning) -> list[str]:
    """The first step against the last, and how far the machine's speed moved while it was measured."""
    notes, alone_ns = _proof(tuning), tuning.begun.step_ns
    if abs(alone_ns - tuning.first_ns) > DRIFTED * tuning.first_ns:
        notes.append(f"alone, before all others, the first step took {units.duration(alone_ns)}")
    interleaved = tuning.in_turns
    if interleaved is not None and abs(interleaved / max(tuning.times_faster, 1e-12) - 1) > DRIFTED:
        notes.append(
            "the machine's speed changed meanwhile: by what each lever saved against the best before it, "
            f"all are {interleaved:.2f}x"
        )
    return notes


def _proof(tuning: Tuning) -> list[str]:
    found = tuning.ended.comparison if tuning.ended is not None else None
    if found is None or not found.ratio or not found.low or not found.high:
        return []
    times = f"{1 / found.ratio:.2f}x, {1 / found.high:.2f} to {1 / found.low:.2f}"
    pairs = f"{found.n_processes} pairs" if found.n_processes != 1 else "a pair"
    return [f"the first step against the last, in {pairs} of processes: {times}"]


def _checks(tuning: Tuning) -> list[str]:
    """What of the levers kept was not checked."""
    kept = [attempt.agreement for attempt in tuning.attempts if attempt.kept]
    notes = []
    if any(agreement is not None and agreement.gradient_error is None for agreement in kept):
        notes.append("no gradients shown: the step leaves none behind (overlap = on), so only its losses were compared")
    if None in kept:
        notes.append("not all that was kept could be checked: its results may be wrong")
    return notes


def _other_steps(tuning: Tuning) -> list[str]:
    """Which waterfalls are not of the times shown: a step is traced by itself, and may have been slower or faster then."""
    return [
        f"the waterfall {name} is of a step of {units.duration(found.step_ns)}, the time when it was traced"
        for name, (found, step_ns) in _waterfalls(tuning).items()
        if found is not None and abs(found.step_ns - step_ns) > OTHER_STEP * step_ns
    ]


def _ending(tuning: Tuning) -> list[str]:
    ended = tuning.ended
    if ended is None:
        kept = any(attempt.kept for attempt in tuning.attempts)
        best = "the last lever kept is the best so far" if kept else "nothing was kept yet"
        return [f"stopped before its end: {best}"]
    missing = tuning.begun.waterfall is not None and ended.waterfall is None
    notes = [f"no waterfall of the last step: {ended.stopped}"] if missing else []
    why = "the rest of the budget is too short for another lever" if ended.stopped == BUDGET_SPENT else ended.stopped
    return [*notes, *ended.notes, f"ended after {units.duration(ended.seconds * 1e9)}: {why}"]


def _recipe(tuning: Tuning) -> Table:
    recipe, own = tuning.best.recipe, written(tuning)
    files, lines = toml_by_lever(recipe, own), _lines(tuning)
    rows = [
        {"file": files.get(lever, f"# {lever}: the default"), "code": lines.get(lever)}
        for lever in LEVERS
        if lever in files or lever in lines
    ] or [{"file": recipe_toml(recipe, own), "code": None}]
    shown = columns("file: recipe.toml [sentence] | code: the lines of PyTorch that do it [sentence]")
    use = "flopwise bench … --recipe recipe.toml" if own is None else _APPLY
    return Table(RECIPE, f"The recipe, to use: {use}", shown, tuple(rows))


def tuned_recipe(tuning: Tuning) -> str:
    """The best recipe as a file."""
    return recipe_toml(tuning.best.recipe, written(tuning))


def written(tuning: Tuning) -> Recipe | None:
    """What a user's step does by its own code; None of flopwise's model."""
    subject = tuning.begun.workload.subject
    return subject.written if isinstance(subject, UserStep) else None


def _lines(tuning: Tuning) -> dict[str, str]:
    recipe, own = tuning.best.recipe, written(tuning)
    return lines_by_lever(recipe, tuning.begun.workload.recipe) if own is None else lines_for_own_code(recipe, own)


def _document(tuning: Tuning) -> dict[str, Any]:
    recipe, works = tuning.best.recipe, _before_and_after(tuning)
    attempts = [
        msgspec.to_builtins(attempt)
        | {"saved_ns": attempt.saved_ns, "prediction_close": attempt.close}
        | _rates(work, attempt.after_ns, tuning)
        for attempt, work in _works(tuning)
    ]
    return document(
        "tune",
        run=tuning.run,
        verdict=verdict(tuning),
        before=tuning.begun,
        attempts=attempts,
        after=tuning.ended,
        first_ns=tuning.first_ns,
        step_ns=tuning.last_ns,
        rates_before=_rates(works[0], tuning.first_ns, tuning),
        rates_after=_rates(works[1], tuning.last_ns, tuning),
        times_faster=tuning.times_faster,
        times_faster_in_turns=tuning.in_turns,
        notes=_notes(tuning),
        peak_bytes=peak_after(tuning),
        recipe=recipe.changed(),
        recipe_toml=tuned_recipe(tuning),
        pytorch=list(_lines(tuning).values()),
    )
