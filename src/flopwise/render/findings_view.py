"""What a user is shown of the findings: a table of all, the full text of each, and the same for programs."""

from collections.abc import Sequence
from typing import Any

import msgspec

from flopwise import units
from flopwise.records.finding import Finding
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.render.visible import LONGEST_LINE

NOTHING = "nothing found that is worth a change"


def findings_view(found: Sequence[Finding], step_ns: float) -> View:
    """One table of all findings, then one of each with its arithmetic, evidence and code."""
    rows = [finding_row(one, number, step_ns) for number, one in enumerate(found, 1)]
    return [_overview(rows, step_ns), *(_full(one, n) for n, one in enumerate(found, 1))], document(
        "findings", step_ns=step_ns, findings=rows
    )


def finding_row(one: Finding, number: int, step_ns: float) -> dict[str, Any]:
    """A finding with its shares of the step, as JSON has it."""
    share = one.counted_ns / step_ns if one.counted_ns is not None and step_ns else None
    return {"number": number, **msgspec.structs.asdict(one), "counted_share": share}


def _overview(rows: Sequence[dict[str, Any]], step_ns: float) -> Table:
    columns = (
        Column("number", "#"),
        Column("title", "finding", right=False, longest=LONGEST_LINE),
        Column("counted_ns", "saves ms", units.milliseconds),
        Column("counted_share", "of the step", units.percent),
        Column("saving_ns", "by itself ms", units.milliseconds),
        Column("saving_bytes", "memory", lambda n: units.size(n) if n else ""),
        Column("levers", "lever", _levers, right=False),
        Column("confidence", "confidence", right=False),
    )
    if not rows:
        return Table(title="findings", columns=columns, rows=(), notes=(NOTHING,))
    total = sum(row["counted_ns"] or 0.0 for row in rows)
    notes = [
        f"predicted: all together {units.duration(total)} of {units.duration(step_ns)}; 'saves' counts nothing twice and takes "
        "the findings above as mended, 'by itself' changes nothing else"
    ]
    return Table(
        title="findings, by what each can save, alone or once what stands in its way is mended",
        columns=columns,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _full(one: Finding, number: int) -> Table:
    lines = [("predicted", one.arithmetic), *(("seen", line) for line in one.evidence)]
    lines += [("lever", _levers(one.levers))] if one.levers else []
    lines += [("code", line) for line in one.code.splitlines()]
    columns = (Column("what", "", right=False), Column("text", "", right=False, longest=LONGEST_LINE))
    rows = tuple({"what": what, "text": text} for what, text in lines)
    return Table(title=f"{number}. {one.title}", columns=columns, rows=rows)


def _levers(levers: dict[str, str]) -> str:
    return " ".join(f"--{lever} {value}" for lever, value in levers.items())
