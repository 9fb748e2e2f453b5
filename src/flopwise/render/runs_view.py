"""The stored runs as a table."""

from collections.abc import Sequence
from pathlib import Path

from flopwise.records.table import Table
from flopwise.render.json import document, picked
from flopwise.render.table import View, columns
from flopwise.store import RunSummary

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
    return View([Table("runs", title, shown, rows, notes)], document("runs", root=str(root), runs=rows))
