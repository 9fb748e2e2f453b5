"""What a user is shown of a memory snapshot."""

from pathlib import Path
from typing import Any

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.memory.answers import DeviceMemory, MemoryReport
from flopwise.render.charts import memory_chart
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.render.visible import LONGEST_CELL, LONGEST_LINE, visible

_BAR = 30


def memory_view(report: MemoryReport) -> View:
    """Peak, its composition, the largest allocations, growth, and requests that failed; of the first device in full."""
    first = report.devices[0]
    tables = [_summary(report), _composition(first), _largest(first)]
    if first.phases:
        tables.append(_phases(first))
    tables.append(_growth(first))
    if first.ooms:
        tables.append(_failures(first))
    return tables, document("memory", **_content(report))


def of_device(report: MemoryReport, device: str | None) -> MemoryReport:
    """The report with one device (`cuda:1` or `1`) first; None leaves the highest peak there."""
    if device is None:
        return report
    chosen = tuple(one for one in report.devices if str(one.device) == device.removeprefix("cuda:"))
    if not chosen:
        there = ", ".join(f"cuda:{one.device}" for one in sorted(report.devices, key=lambda one: one.device))
        raise FlopwiseError(f"the snapshot has nothing of device '{device}'", f"it has: {there}")
    return MemoryReport(path=report.path, devices=(*chosen, *(one for one in report.devices if one not in chosen)))


def timeline_chart(report: MemoryReport) -> Any:
    """The first device's allocated bytes over time, stacked by owner."""
    first = report.devices[0]
    line = first.timeline
    clock = line.time_us is not None
    rows = [
        {"at": at, "reserved": reserved, "phase": visible(phase or "", LONGEST_CELL)}
        for at, reserved, phase in zip(
            [t / 1000 for t in line.time_us] if line.time_us is not None else line.event,
            line.reserved_bytes,
            line.phase,
            strict=True,
        )
    ]
    for owner, values in line.owners.items():
        for row, value in zip(rows, values, strict=True):
            row[owner] = value
    peak = units.size(first.peak.allocated_bytes)
    title = f"{Path(report.path).name}, device {first.device}: peak {peak} allocated"
    return memory_chart(rows, list(line.owners), "ms" if clock else "event", title)


def _content(report: MemoryReport) -> dict[str, Any]:
    return {"path": report.path, "devices": report.devices}


def _when(device: DeviceMemory) -> str:
    moment = device.peak
    at = f"event {moment.event:,}" if moment.time_us is None else units.duration(1000 * moment.time_us)
    return f"{at}, {moment.phase}" if moment.phase else at


def _summary(report: MemoryReport) -> Table:
    rows = tuple(
        {
            "device": d.device,
            "peak_bytes": d.peak.allocated_bytes,
            "reserved_bytes": d.peak.reserved_bytes,
            "unused_bytes": d.peak.unused_bytes,
            "when": _when(d),
            "end_bytes": d.end.allocated_bytes,
            "end_unused_bytes": d.end.unused_bytes,
            "events": d.events,
        }
        for d in report.devices
    )
    columns = (
        Column("device", "device"),
        Column("peak_bytes", "peak allocated", units.size),
        Column("reserved_bytes", "reserved then", units.size),
        Column("unused_bytes", "unused of it", units.size),
        Column("when", "when", right=False),
        Column("end_bytes", "at the end", units.size),
        Column("end_unused_bytes", "unused then", units.size),
        Column("events", "events", units.count),
    )
    return Table(title=f"{Path(report.path).name}: memory", columns=columns, rows=rows, notes=_notes(report.devices[0]))


def _notes(d: DeviceMemory) -> tuple[str, ...]:
    rounding = d.peak.allocated_bytes - d.peak.requested_bytes
    notes = [
        "measured by PyTorch's allocator; owners told from stacks and lifetimes, "
        f"known for {units.percent(d.known_share)} of the peak",
        f"at the peak {units.size(rounding)} are rounding: allocated, not asked for",
    ]
    if d.before_bytes:
        notes.append(f"{units.size(d.before_bytes)} were allocated before the recording")
    if not d.events:
        notes.append("no events: only what was there when the snapshot was taken (_record_memory_history was not on)")
    return (*notes, *d.notes)


def _composition(d: DeviceMemory) -> Table:
    total = max(d.peak.allocated_bytes, 1)
    rows = tuple({"owner": o, "bytes": b, "share": b / total} for o, b in d.peak.owners.items())
    columns = (
        Column("owner", "owner", right=False),
        Column("bytes", "size", units.size),
        Column("share", "share of the peak", _bar, right=False),
    )
    return Table(title="whose bytes, at the peak", columns=columns, rows=rows)


def _bar(share: float) -> str:
    """A share as a number and a bar.

    >>> _bar(0.5)
    ' 50.0 % ███████████████'
    """
    return f"{units.percent(share):>7} {'█' * round(_BAR * share)}".rstrip()


def _largest(d: DeviceMemory) -> Table:
    rows = tuple(
        {"bytes": a.bytes, "count": a.count, "owner": a.owner, "phase": a.phase, "stack": a.stack} for a in d.largest
    )
    columns = (
        Column("bytes", "size", units.size),
        Column("count", "count", units.count),
        Column("owner", "owner", right=False),
        Column("phase", "made in", right=False),
        Column("stack", "stack", right=False, longest=LONGEST_LINE),
    )
    return Table(title="largest allocations at the peak", columns=columns, rows=rows)


def _phases(d: DeviceMemory) -> Table:
    rows = tuple({"phase": phase, "peak_bytes": most} for phase, most in d.phases.items())
    columns = (Column("phase", "phase", right=False), Column("peak_bytes", "most allocated", units.size))
    return Table(title="peak of each phase", columns=columns, rows=rows)


def _growth(d: DeviceMemory) -> Table:
    g = d.growth
    if not g.steps:
        notes: tuple[str, ...] = ("no steps found: nothing is said of growth",)
    elif g.bytes_per_step is None:
        notes = (f"{g.steps} steps found by {g.found_by}: too few to say whether memory grows",)
    else:
        nothing = "nothing is left by every step" if g.leaks_sought else "too few to tell a leak"
        verdict = "" if g.leaks else f"; {nothing}"
        notes = (f"{g.steps} steps found by {g.found_by}; {units.size(g.bytes_per_step)} more per step{verdict}",)
    rows = tuple(
        {
            "bytes_per_step": k.bytes_per_step,
            "steps": k.steps,
            "of_steps": k.of_steps,
            "owner": k.owner,
            "stack": k.stack,
        }
        for k in g.leaks
    )
    columns = (
        Column("bytes_per_step", "left per step", units.size),
        Column("steps", "in steps"),
        Column("of_steps", "of"),
        Column("owner", "owner", right=False),
        Column("stack", "stack", right=False, longest=LONGEST_LINE),
    )
    return Table(title="growth between steps", columns=columns, rows=rows, notes=notes)


def _failures(d: DeviceMemory) -> Table:
    rows = tuple(
        {
            "asked_bytes": f.asked_bytes,
            "device_free_bytes": f.device_free_bytes,
            "allocated_bytes": f.allocated_bytes,
            "unused_bytes": f.reserved_bytes - f.allocated_bytes,
            "stack": f.stack,
        }
        for f in d.ooms
    )
    columns = (
        Column("asked_bytes", "asked for", units.size),
        Column("device_free_bytes", "free on the device", units.size),
        Column("allocated_bytes", "allocated", units.size),
        Column("unused_bytes", "reserved, unused", units.size),
        Column("stack", "stack", right=False, longest=LONGEST_LINE),
    )
    return Table(title="out of memory", columns=columns, rows=rows)
