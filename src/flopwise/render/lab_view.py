"""What a user is shown of the lab: the list of experiments; of a run, the verdicts and each experiment's tables."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from flopwise import units
from flopwise.lab.experiment import VERDICTS, Experiment, Rows, TableOf
from flopwise.lab.results import Answer, LabRun
from flopwise.records import OK
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.render.visible import LONGEST_LINE


def list_view(experiments: Iterable[Experiment]) -> View:
    """The experiments there are."""
    rows = tuple({"name": one.name, "line": one.line, "claim": one.claim} for one in experiments)
    columns = (
        Column("name", "experiment", right=False),
        Column("line", "what it does", right=False, longest=LONGEST_LINE),
    )
    notes = ("flopwise lab NAME… runs them, flopwise lab all runs all; --quick takes about a minute or two",)
    return [Table(title="The lab", columns=columns, rows=rows, notes=notes)], document(
        "lab-list", experiments=list(rows)
    )


def lab_view(found: LabRun) -> View:
    """A table of verdicts, then each experiment's own; and the same as a document."""
    answers = found.answers()
    tables = [verdicts_table(found, answers)]
    for one in answers:
        tables += [shown_table(table, f"{one.result.experiment}: {table.title}") for table in one.tables]
    return tables, _document(found, answers)


def told(found: LabRun) -> str:
    """How it went, in one line.

    >>> from flopwise.lab.results import Planned
    >>> told(LabRun("r", Planned(experiments=("warmup",)), ()))
    '0 of 1 experiments ran'
    """
    answers = found.answers()
    planned = len(found.planned.experiments)
    ran = f"{len(answers)} experiment{'s' if planned != 1 else ''}" if len(answers) == planned else ""
    counts = Counter(one.verdict.word for one in answers)
    words = ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    ran = ran or f"{len(answers)} of {planned} experiments ran"
    where = f" on {place.name}" if (place := next((r.place for r in found.results if r.place), None)) else ""
    return f"{ran}{where}: {words}" if words else f"{ran}{where}"


def verdicts_table(found: LabRun, answers: list[Answer]) -> Table:
    columns = (
        Column("experiment", "experiment", right=False),
        Column("verdict", "verdict", right=False),
        Column("why", "why", right=False, longest=LONGEST_LINE),
        Column("elapsed_s", "s", lambda seconds: f"{seconds:.1f}"),
    )
    rows = tuple(
        {
            "experiment": one.result.experiment,
            "verdict": one.verdict.word,
            "why": one.verdict.why,
            "elapsed_s": one.result.elapsed_s,
        }
        for one in answers
    )
    left = [name for name in found.planned.experiments if name not in {result.experiment for result in found.results}]
    notes = [f"not run: {', '.join(left)}"] if left else []
    notes += [f"{r.experiment}: {r.hint}" for r in found.results if r.status != OK and r.hint]
    notes += [f"{one.result.experiment}: {line}" for one in answers for line in one.unshown]
    return Table(title=told(found), columns=columns, rows=rows, notes=(*notes, f"run {found.run}"))


def shown_table(table: TableOf, title: str = "") -> Table:
    """An experiment's table; a column's unit follows from its name."""
    columns = tuple(_column(key, heading, table.rows) for key, heading in table.columns.items())
    return Table(title=title or table.title, columns=columns, rows=tuple(table.rows), notes=table.notes)


def _column(key: str, heading: str, rows: Rows) -> Column:
    words = any(isinstance(row.get(key), str | bool) for row in rows)
    return Column(key, heading, partial(shown_value, key), right=not words, longest=LONGEST_LINE if words else 200)


def shown_value(key: str, value: Any) -> str:
    """A value as a person reads it, by the ending of its name.

    >>> [shown_value(k, v) for k, v in (("a_ns", 1500.0), ("b_bytes", 2048), ("c_share", 0.5), ("n", 7), ("x", 1.19e-7))]
    ['1.50 µs', '2.00 KiB', '50.0 %', '7', '1.19e-07']
    >>> shown_value("m_flops_per_s", 2e12), shown_value("ok", True), shown_value("name", "relu")
    ('2.00 TFLOP/s', 'yes', 'relu')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if abs(value) > _LARGEST:
        return "a number too large to show"
    for ending, show in _SHOWN.items():
        if key.endswith(ending):
            return show(float(value))
    return str(value) if isinstance(value, int) else f"{value:.4g}"


_LARGEST = 1e300  # a stored run may hold anything
_SHOWN: dict[str, Callable[[float], str]] = {
    "_bytes_per_s": partial(units.rate, unit="B/s"),
    "_flops_per_s": partial(units.rate, unit="FLOP/s"),
    "_bytes": units.size,
    "_ns": units.duration,
    "_share": units.percent,
    "_flops": units.count,
}


def _document(found: LabRun, answers: list[Answer]) -> dict[str, Any]:
    return document(
        "lab",
        run=found.run,
        quick=found.planned.quick,
        planned=list(found.planned.experiments),
        experiments=[
            msgspec.to_builtins(one.result) | {"claim": one.claim, "verdict": one.verdict.word, "why": one.verdict.why}
            for one in answers
        ],
    )
