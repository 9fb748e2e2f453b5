"""Findings as tables: what to change, and each finding in full; the same for programs."""

from collections.abc import Sequence
from typing import Any

import msgspec

from flopwise import units
from flopwise.records.finding import Finding
from flopwise.records.table import Table
from flopwise.render.json import document
from flopwise.render.table import View, columns

NOTHING = "No change is worth its effort: nothing found that saves time or memory."


def findings_view(found: Sequence[Finding], step_ns: float) -> View:
    """One table of all findings, then one of each with its arithmetic, evidence and code."""
    rows = [_row(one, number, step_ns) for number, one in enumerate(found, 1)]
    tables = [_overview(rows, step_ns), *(_detail(one, number) for number, one in enumerate(found, 1))]
    return View(tables, document("findings", step_ns=step_ns, findings=rows))


def _row(one: Finding, number: int, step_ns: float) -> dict[str, Any]:
    share = one.counted_ns / step_ns if one.counted_ns is not None and step_ns else None
    return {"number": number, **msgspec.structs.asdict(one), "counted_share": share}


def _overview(rows: Sequence[dict[str, Any]], step_ns: float) -> Table:
    shown = columns(
        "number: # | title: problem [sentence] | options: change | counted_ns: saves [ms] | counted_share: of the step | "
        "saving_ns: alone [ms] | saving_bytes: memory | confidence",
        keep="title options counted_ns counted_share",
    )
    total = units.duration(sum(row["counted_ns"] or 0.0 for row in rows))
    notes = (
        f"predicted: together {total} of {units.duration(step_ns)}",
        "saves: with the changes above it made, nothing counted twice; alone: this change and no other",
    )
    table_rows = tuple(
        row | {"options": options(row["levers"]) or "in your code", "saving_bytes": row["saving_bytes"] or None}
        for row in rows
    )
    return Table("findings", "What to change, in this order", shown, table_rows, notes if rows else (NOTHING,))


def _detail(one: Finding, number: int) -> Table:
    lines = [("saving", one.arithmetic), *(("evidence", line) for line in one.evidence)]
    lines += [("change", options(one.levers))] if one.levers else []
    lines += [("code", line) for line in one.code.splitlines()]
    rows = tuple({"about": about, "detail": detail} for about, detail in lines)
    return Table(f"finding-{one.rule}", f"{number}. {one.title}", columns("about | detail [sentence]"), rows)


def options(levers: dict[str, str]) -> str:
    """Levers as options of the command line.

    >>> options({"graph": "on", "optimizer": "fused"})
    '--graph on --optimizer fused'
    """
    return " ".join(f"--{lever} {value}" for lever, value in levers.items())
