"""The stored runs as a table."""

from collections.abc import Sequence
from pathlib import Path

from flopwise.records.table import Table
from flopwise.render.json import document, picked
from flopwise.render.table import View, columns, saying
from flopwise.store import RunCheck, RunSummary

_KEYS = "id kind created_at tags ok failed complete planned size_bytes warnings"
_HEADING = "id: run | kind: kind | created_at: created | tags | ok | failed | complete | planned | size_bytes"


def runs_view(summaries: Sequence[RunSummary], root: Path) -> View:
    """The runs under a root, newest first."""
    rows = tuple(
        picked(s, _KEYS) | {"kind": s.kind or "?", "complete": "yes" if s.complete else "no", "tags": " ".join(s.tags)}
        for s in summaries
    )
    title = f"{len(rows)} runs in {root}" if rows else f"No runs in {root} yet; try flopwise bench tiny --device cpu"
    shown = columns(_HEADING) if rows else ()
    notes = tuple(f"{s.id}: {warning}" for s in summaries for warning in s.warnings)
    view = View([Table("runs", title, shown, rows)], document("runs", root=str(root), runs=rows))
    return saying(view, notes)


def checks_view(checks: Sequence[RunCheck], root: Path) -> View:
    """What is damaged, a row for each thing; a run that is sound has one."""
    rows = tuple(
        {"id": one.id, "state": state, "what": what}
        for one in sorted(checks, key=lambda one: not one.damage)  # a terminal may cut off the last
        for state, what in (
            *(("damaged", line) for line in one.damage),
            *(("repaired", line) for line in one.repaired),
            *([] if one.damage or one.repaired else [("sound", "")]),
        )
    )
    damaged = sum(bool(one.damage) for one in checks)
    old = sum(not one.checked_files for one in checks)
    title = f"{len(checks)} runs in {root}: {damaged or 'none'} damaged"
    notes = (
        f"{old} of them are of an earlier version, never ended, or ended on a full disk: they have few checksums, or none",
    )
    table = Table("checks", title, columns("id: run | state | what [sentence]"), rows, notes if old else ())
    return View([table], document("runs-check", root=str(root), runs=checks))
