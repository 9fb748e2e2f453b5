"""The parts of a memory report that set one thing beside another: owners with predictions, blocks, levers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwise import units
from flopwise.errors import one_line
from flopwise.records.prediction import DRY_RUN, SHAPES
from flopwise.records.run import OK
from flopwise.render.table import Column, Table
from flopwise.snapshot.answers import MEASURED, DeviceMemory, MemoryReport, SavedBlock

_BAR = 30
_OPS = 5  # rows of the table of temporary bytes
_ALL = "all"
_CASTS = {("_to_copy", "bf16"), ("_to_copy", "fp16")}
_CAST_SHARE = 0.25  # of the parameters' bytes: copies of half the size, and some are not made yet at the peak


def heading(report: MemoryReport) -> str:
    """What the report is about, in one line."""
    if report.label:
        return one_line(f"{report.label} on {report.where}", 100)
    return one_line(Path(report.path).name, 80)


def shape(sizes: Sequence[int], dtype: str) -> str:
    """A tensor's shape as people write it.

    >>> shape((4, 512, 768), "fp32"), shape((), "")
    ('4×512×768 fp32', '')
    """
    return f"{'×'.join(map(str, sizes)) or 'scalar'} {dtype}" if dtype else ""


def composition(report: MemoryReport) -> Table:
    """Whose bytes at the peak; beside a measurement, what the predictions say and by how much they err."""
    d = report.devices[0]
    total = max(d.peak.allocated_bytes, 1)
    beside = [p for p in report.predictions if report.obtained == MEASURED or p.source != DRY_RUN]
    owners = [*d.peak.owners, *dict.fromkeys(o for p in beside for o in p.peak.owners if o not in d.peak.owners)]
    rows: list[dict[str, Any]] = []
    for owner in (*owners, *((_ALL,) if beside else ())):
        own = d.peak.allocated_bytes if owner == _ALL else d.peak.owners.get(owner, 0)
        row: dict[str, Any] = {"owner": owner, "bytes": own, "share": own / total if owner != _ALL else None}
        for p in beside:
            said = p.peak.total_bytes if owner == _ALL else p.peak.owners.get(owner, 0)
            row |= {f"{_key(p.source)}_bytes": said, f"{_key(p.source)}_error_bytes": said - own}
        rows.append(row)
    columns = [Column("owner", "owner", right=False), Column("bytes", "size", units.size)]
    for p in beside:
        columns.append(Column(f"{_key(p.source)}_bytes", p.source, units.size))
        columns.append(Column(f"{_key(p.source)}_error_bytes", "differs by", _difference))
    columns.append(Column("share", "share of the peak", _bar, right=False))
    whole = report.status == OK  # what ran out half-way is no measure of a prediction for the whole step
    notes = tuple(_verdict(p.source, p.peak.total_bytes, d.peak.allocated_bytes) for p in beside if whole)
    more = d.growth.bytes_per_step
    if whole and beside and report.obtained == MEASURED and more:
        notes += (f"it {_grows(more)} per step; a prediction is for one step that leaves nothing behind",)
    notes += (
        () if whole or not beside else ("the predictions are for the whole step, the rest for what was recorded of it",)
    )
    notes += tuple(note for p in beside for note in p.notes)
    return Table(title="whose bytes, at the peak", columns=tuple(columns), rows=tuple(rows), notes=notes)


def _grows(n_bytes: int) -> str:
    return f"grows by {units.size(n_bytes)}" if n_bytes > 0 else f"shrinks by {units.size(-n_bytes)}"


def _key(source: str) -> str:
    return source.replace(" ", "_")


def _difference(n_bytes: int) -> str:
    """Bytes with a sign.

    >>> _difference(-2048), _difference(0)
    ('-2.00 KiB', '0')
    """
    return f"{'+' if n_bytes > 0 else ''}{units.size(n_bytes)}" if n_bytes else "0"


def _verdict(source: str, said: int, measured: int) -> str:
    if said == measured:
        return f"{source}: the same peak to the byte"
    return f"{source}: {units.percent(said / max(measured, 1) - 1, 3)} off the peak"


def _bar(share: float) -> str:
    """A share as a number and a bar.

    >>> _bar(0.5)
    ' 50.0 % ███████████████'
    """
    return f"{units.percent(share):>7} {'█' * round(_BAR * share)}".rstrip()


def temporary_table(d: DeviceMemory) -> Table:
    """The peak's temporary bytes by op; autocast's copies, which are easily overlooked, in words."""
    rows = tuple(
        {"op": one.op or None, "dtype": one.dtype or None, "count": one.count, "bytes": one.bytes}
        for one in d.temporary[:_OPS]
    )
    columns = (
        Column("op", "made by", right=False),
        Column("dtype", "type", right=False),
        Column("count", "count", units.count),
        Column("bytes", "size", units.size),
    )
    rest = d.temporary[_OPS:]
    notes = [f"and {units.size(sum(one.bytes for one in rest))} of {len(rest)} other kinds"] if rest else []
    first = d.temporary[0]
    if (first.op, first.dtype) in _CASTS and first.bytes > _CAST_SHARE * d.peak.owners.get("parameters", 0):
        notes.append(
            f"{first.op} to {first.dtype}: most likely autocast's copies of the weights, which it keeps until it is left; "
            "weights that are of this type themselves (--precision bf16-pure) need none"
        )
    return Table(title="temporary, at the peak", columns=columns, rows=rows, notes=tuple(notes))


def saved_tables(d: DeviceMemory) -> list[Table]:
    """What forward keeps for backward, block by block, and the tensors that have names; none for others' snapshots."""
    tables = [_saved(d.saved)] if d.saved else []
    if d.named:
        rows = tuple(
            {"name": n.name, "shape": shape(n.shape, n.dtype), "bytes": n.bytes, "kept": n.kept, "note": n.note}
            for n in d.named
        )
        columns = (
            Column("name", "tensor", right=False),
            Column("shape", "shape", right=False),
            Column("bytes", "size", units.size),
            Column("kept", "kept for backward"),
            Column("note", "what it is", right=False),
        )
        tables.append(Table(title="by name", columns=columns, rows=rows))
    return tables


def _saved(blocks: Sequence[SavedBlock]) -> Table:
    rows: list[dict[str, Any]] = []
    for block in blocks:
        head: dict[str, Any] = {"block": block.block, "block_bytes": block.bytes, "tensors": block.tensors}
        for i, t in enumerate(block.largest):
            tensor = {
                "bytes": t.bytes, "shape": shape(t.shape, t.dtype), "owner": t.owner, "module": t.module, "op": t.op,
                "saved_by": t.saved_by or None,
            }  # fmt: skip
            rows.append((head if i == 0 else {}) | tensor)
    columns = (
        Column("block", "block", right=False),
        Column("block_bytes", "each keeps", units.size),
        Column("tensors", "tensors"),
        Column("bytes", "of it", units.size),
        Column("shape", "shape", right=False),
        Column("owner", "owner", right=False),
        Column("module", "module", right=False),
        Column("op", "made by", right=False),
        Column("saved_by", "saved by", right=False),
    )
    used = tuple(c for c in columns if any(row.get(c.key) is not None for row in rows))
    return Table(title="kept for backward: the five largest tensors of each block", columns=used, rows=tuple(rows))


def levers_table(report: MemoryReport) -> Table:
    """What each lever would change."""
    rows = tuple(
        {
            "lever": effect.lever, "peak_bytes": effect.peak_bytes, "saved_bytes": effect.saved_bytes,
            "how": f"{effect.how}; {effect.note}" if effect.note else effect.how,
        }
        for effect in report.levers
    )  # fmt: skip
    columns = (
        Column("lever", "lever", right=False),
        Column("peak_bytes", "predicted peak", units.size),
        Column("saved_bytes", "saves", units.size),
        Column("how", "told by", right=False),
    )
    notes = ["predicted, each alone, for the eager step on a GPU; savings do not add up"]
    base = next((p.peak.total_bytes for p in report.predictions if p.source == SHAPES), None)
    if base is not None:
        notes.append(f"against the shape simulator's own peak of {units.size(base)}, not against the one above")
    if report.predictions and report.predictions[-1].peak.phase == "optimizer":
        notes.append("the peak is the optimizer's: what forward and backward hold counts only once that is lower")
    return Table(title="what each lever would change", columns=columns, rows=rows, notes=tuple(notes))


def failed_table(report: MemoryReport) -> Table:
    """A workload of which nothing was recorded."""
    columns = (Column("status", "status", right=False), Column("reason", "reason", right=False))
    row = {"status": report.status, "reason": report.reason}
    return Table(title=f"{heading(report)}: memory", columns=columns, rows=(row,), notes=report.notes)


def expected_tables(report: MemoryReport) -> list[Table]:
    """The predictions alone, where there is nothing to set beside them."""
    columns = (Column("source", "predicted by", right=False), Column("peak_bytes", "peak", units.size))
    rows = tuple({"source": p.source, "peak_bytes": p.peak.total_bytes} for p in report.predictions)
    tables = [Table(title="what it would need", columns=columns, rows=rows)] if rows else []
    return [*tables, levers_table(report)] if report.levers else tables
