"""What a user is shown of the runs that are kept."""

from collections.abc import Sequence
from pathlib import Path

from flopwise import units
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.store import RunSummary


def runs_view(summaries: Sequence[RunSummary], root: Path) -> View:
    """The runs under a root, newest first."""
    rows = tuple(
        {"id": s.id, "kind": s.kind or "?", "created_at": s.created_at, "ok": s.ok, "failed": s.failed, "planned": s.planned,
         "complete": "yes" if s.complete else "no", "tags": " ".join(s.tags), "size_bytes": s.size_bytes}
        for s in summaries
    )  # fmt: skip
    columns = (
        Column("id", "run", right=False),
        Column("kind", "kind", right=False),
        Column("created_at", "created", right=False),
        Column("ok", "ok"),
        Column("failed", "failed"),
        Column("planned", "planned"),
        Column("complete", "complete", right=False),
        Column("tags", "tags", right=False),
        Column("size_bytes", "size", units.size),
    )
    notes = [f"{s.id}: {warning}" for s in summaries for warning in s.warnings]
    title = f"{len(rows)} runs in {root}" if rows else f"no runs in {root} yet; try flopwise bench tiny --device cpu"
    return [Table(title=title, columns=columns if rows else (), rows=rows, notes=tuple(notes))], document(
        "runs", root=str(root), runs=rows
    )
