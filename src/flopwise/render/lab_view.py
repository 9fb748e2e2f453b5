"""What a user is shown of the lab: the list of experiments; of a run, the verdicts and each experiment's tables."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from flopwise.experiments.experiment import Experiment
from flopwise.experiments.results import Answer, LabRun
from flopwise.experiments.verdict import VERDICTS
from flopwise.records.run import OK
from flopwise.records.table import SENTENCE, Column, Table
from flopwise.render.json import document
from flopwise.render.table import View


def list_view(experiments: Iterable[Experiment[Any]]) -> View:
    """The experiments there are."""
    rows = tuple({"name": one.name, "line": one.line, "claim": one.claim} for one in experiments)
    columns = (Column("name", "experiment"), Column("line", "what it does", SENTENCE))
    notes = ("flopwise lab NAME… runs them, flopwise lab all --quick runs all in about a minute or two",)
    return View([Table("lab-list", "The lab", columns, rows, notes)], document("lab-list", experiments=list(rows)))


def lab_view(found: LabRun) -> View:
    """A table of verdicts, then each experiment's own; and the same as a document."""
    answers = found.answers()
    tables = [verdicts_table(found, answers)]
    for one in answers:
        tables += [replace(table, title=f"{one.result.experiment}: {table.title}") for table in one.tables]
    return View(tables, _document(found, answers))


def summary(found: LabRun) -> str:
    """How it went, in one line.

    >>> from flopwise.experiments.results import Planned
    >>> summary(LabRun("r", Planned(experiments=("warmup",)), ()))
    '0 of 1 experiments ran'
    """
    answers, planned = found.answers(), len(found.planned.experiments)
    ran = f"{len(answers)} of {planned} experiments ran"
    if len(answers) == planned:
        ran = f"{planned} experiment{'s' if planned != 1 else ''}"
    counts = Counter(_NOT_JUDGED if one.as_stored else one.verdict.word for one in answers)
    words = ", ".join(f"{counts[word]} {word}" for word in (*VERDICTS, _NOT_JUDGED) if counts[word])
    where = f" on {place.name}" if (place := next((r.place for r in found.results if r.place), None)) else ""
    return f"{ran}{where}: {words}" if words else f"{ran}{where}"


def verdicts_table(found: LabRun, answers: Sequence[Answer]) -> Table:
    columns = (Column("experiment"), Column("verdict"), Column("why", unit=SENTENCE), Column("elapsed_s", "took"))
    rows = tuple(
        {
            "experiment": one.result.experiment,
            "verdict": f"{one.verdict.word}, as stored" if one.as_stored else one.verdict.word,
            "why": one.verdict.why,
            "elapsed_s": one.result.elapsed_s,
        }
        for one in answers
    )
    return Table("lab", summary(found), columns, rows, tuple(_notes(found, answers)))


def _notes(found: LabRun, answers: Sequence[Answer]) -> Iterator[str]:
    """What was not run, read or shown, and why; and where it ran."""
    done = {result.experiment for result in found.results}
    if left := [name for name in found.planned.experiments if name not in done]:
        yield f"not run: {', '.join(left)}"
    yield from (f"{r.experiment}: {r.hint}" for r in found.results if r.status != OK and r.hint)
    yield from _busy(found)
    yield from (f"{one.result.experiment}: {line}" for one in answers for line in one.problems)
    torch = next((r.place.torch for r in found.results if r.place and r.place.torch), "")
    yield f"run {found.run}" + (f", {torch}" if torch else "")


def _busy(found: LabRun) -> list[str]:
    """A machine that had other work: its times are not to be trusted far. A line, or none."""
    loads = {
        result.experiment: (place.load, place.environment.cpu_cores)
        for result in found.results
        if (place := result.place) and place.load and place.environment and place.environment.cpu_cores
    }
    busy = {name: load for name, (load, cores) in loads.items() if load > _BUSY * cores}
    if not busy:
        return []
    worst = max(busy, key=lambda name: busy[name])
    which = "every experiment" if len(busy) == len(found.results) > 1 else ", ".join(busy)
    cores = loads[worst][1]
    return [f"the machine was busy when {which} began: a load of up to {busy[worst]:.1f} on {cores} cores"]


_NOT_JUDGED = "as stored, not judged again"
_BUSY = 1.5  # runnable threads for each core: what the lab itself adds is less


def _document(found: LabRun, answers: Sequence[Answer]) -> dict[str, Any]:
    return document(
        "lab",
        run=found.run,
        quick=found.planned.quick,
        planned=list(found.planned.experiments),
        experiments=[
            msgspec.to_builtins(one.result)
            | {"claim": one.claim, "verdict": one.verdict.word, "why": one.verdict.why}
            | {"checks": msgspec.to_builtins(one.verdict.checks)}
            for one in answers
        ],
    )
