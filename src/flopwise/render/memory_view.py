"""What a user is shown of a memory snapshot."""

from pathlib import Path
from typing import Any

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.render.charts import memory_chart
from flopwise.render.json import document
from flopwise.render.memory_parts import (
    composition,
    expected_tables,
    failed_table,
    heading,
    levers_table,
    saved_tables,
    shape,
    temporary_table,
)
from flopwise.render.table import Column, Table, View
from flopwise.render.visible import LONGEST_CELL, LONGEST_LINE, visible
from flopwise.snapshot.answers import MEASURED, PREDICTED, DeviceMemory, MemoryReport
from flopwise.snapshot.growth import regular

_MOMENTS = 24  # rows of the timeline's table


def memory_view(report: MemoryReport) -> View:
    """Peak, its composition, the largest allocations, growth, and requests that failed; of the first device in full.

    Of a workload also: prediction beside measurement, tensors saved for backward, what each lever would change.
    """
    content = document("memory", **msgspec.structs.asdict(report))
    if not report.devices:
        return [failed_table(report), *expected_tables(report)], content
    first = report.devices[0]
    tables = [_summary(report), composition(report), _timeline(first), _largest(first)]
    if first.temporary:
        tables.append(temporary_table(first))
    if first.phases:
        tables.append(_phases(first))
    tables += saved_tables(first)
    if report.obtained == MEASURED:
        tables.append(_growth(first))
    if first.ooms:
        tables.append(_failures(first))
    if report.levers:
        tables.append(levers_table(report))
    return tables, content


def of_device(report: MemoryReport, device: str | None) -> MemoryReport:
    """The report with one device (`cuda:1` or `1`) first; None leaves the highest peak there."""
    if device is None:
        return report
    chosen = tuple(one for one in report.devices if str(one.device) == device.removeprefix("cuda:"))
    if not chosen:
        there = ", ".join(f"cuda:{one.device}" for one in sorted(report.devices, key=lambda one: one.device))
        raise FlopwiseError(f"the snapshot has nothing of device '{device}'", f"it has: {there}")
    others = (one for one in report.devices if one not in chosen)
    return msgspec.structs.replace(report, devices=(*chosen, *others))


def timeline_chart(report: MemoryReport) -> Any:
    """The first device's allocated bytes over time, stacked by owner."""
    first = report.devices[0]
    line = first.timeline
    clock = line.time_us is not None
    reserves = _reserves(first)
    rows = [
        {"at": at, "phase": visible(phase or "", LONGEST_CELL)} | ({"reserved": reserved} if reserves else {})
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
    below = f"peak {peak} allocated, {report.obtained}"
    return memory_chart(rows, list(line.owners), "ms" if clock else _counted(report), heading(report), below)


def _reserves(d: DeviceMemory) -> bool:
    """Whether more is ever reserved than allocated: a caching allocator's; the CPU's is none."""
    totals = [sum(values) for values in zip(*d.timeline.owners.values(), strict=True)]
    return not d.exact or d.peak_reserved_bytes > d.peak.allocated_bytes or list(d.timeline.reserved_bytes) != totals


def _counted(report: MemoryReport) -> str:
    return "op" if report.obtained == PREDICTED else "event"


def _when(device: DeviceMemory, counted: str) -> str:
    moment = device.peak
    at = f"{counted} {moment.event:,}" if moment.time_us is None else units.duration(1000 * moment.time_us)
    return f"{at}, {moment.phase}" if moment.phase else at


def _summary(report: MemoryReport) -> Table:
    rows = tuple(
        {
            "device": d.device,
            "peak_bytes": d.peak.allocated_bytes,
            "reserved_bytes": d.peak.reserved_bytes,
            "unused_bytes": d.peak.unused_bytes,
            "when": _when(d, _counted(report)),
            "end_bytes": d.end.allocated_bytes,
            "end_unused_bytes": d.end.unused_bytes,
            "events": d.events,
        }
        for d in report.devices
    )
    columns: tuple[Column, ...] = (
        Column("device", "device"),
        Column("peak_bytes", "peak allocated", units.size),
        Column("reserved_bytes", "reserved then", units.size),
        Column("unused_bytes", "unused of it", units.size),
        Column("when", "when", right=False),
        Column("end_bytes", "at the end", units.size),
        Column("end_unused_bytes", "unused then", units.size),
        Column("events", "events", units.count),
    )
    if not any(map(_reserves, report.devices)):
        columns = tuple(c for c in columns if c.key not in ("reserved_bytes", "unused_bytes", "end_unused_bytes"))
    notes = _notes(report.devices[0]) if report.obtained == MEASURED else _foretold(report)
    kept = (f"kept in {Path(report.path).parent.parent}",) if report.label and report.path else ()
    return Table(
        title=f"{heading(report)}: memory, {report.obtained}",
        columns=columns,
        rows=rows,
        notes=(*notes, *report.notes, *kept),
    )


def _foretold(report: MemoryReport) -> tuple[str, ...]:
    return (
        "predicted by a dry run on fake tensors, with the allocator's rounding and workspaces; nothing was run",
        *report.devices[0].notes,
    )


def _notes(d: DeviceMemory) -> tuple[str, ...]:
    how, told = (
        ("whose bytes they are was known as they were allocated", "known")
        if d.exact
        else ("owners by stacks and lifetimes, not known for certain", "told")
    )
    by_size = f"; for {units.percent(d.guessed_share)} guessed from the size alone" if d.guessed_share else ""
    rounding = d.peak.allocated_bytes - d.peak.requested_bytes
    notes = [
        f"measured; {how}, {told} for {units.percent(d.known_share)} of the peak{by_size}",
        f"at the peak {units.size(rounding)} are rounding: allocated, not asked for",
    ]
    if d.before_bytes:
        notes.append(f"{units.size(d.before_bytes)} were allocated before the recording")
    if not d.events and not d.exact:
        notes.append("no events: only what was there when the snapshot was taken (_record_memory_history was not on)")
    return (*notes, *d.notes)


def _timeline(d: DeviceMemory) -> Table:
    """One row per phase of every step, at its own peak; what is recomputed belongs to backward."""
    line = d.timeline
    totals = [sum(values) for values in zip(*line.owners.values(), strict=True)] or [0] * len(line.event)
    runs: list[tuple[str, list[int]]] = []
    for i, phase in enumerate("backward" if phase == "recompute" else phase for phase in line.phase):
        if not runs or runs[-1][0] != phase:
            runs.append((phase, []))
        runs[-1][1].append(i)
    tops = [(phase, max(places, key=lambda i: totals[i])) for phase, places in runs if phase]
    rows = tuple(
        {
            "at": line.time_us[i] / 1000 if line.time_us is not None else line.event[i],
            "phase": phase,
            "allocated_bytes": totals[i],
            **{owner: values[i] for owner, values in line.owners.items() if values[i]},
        }
        for phase, i in tops[-_MOMENTS:]
    )
    columns = (
        Column("at", "ms" if line.time_us is not None else "at", lambda at: f"{at:.1f}" if at % 1 else f"{at:.0f}"),
        Column("phase", "phase", right=False),
        Column("allocated_bytes", "allocated", units.size),
        *(Column(owner, owner, units.size) for owner in line.owners if any(owner in row for row in rows)),
    )
    shown = (f"the last {_MOMENTS} of {len(tops)} phases",) if len(tops) > _MOMENTS else ()
    return Table(title="timeline: each phase at its peak", columns=columns, rows=rows, notes=shown)


def _largest(d: DeviceMemory) -> Table:
    rows = tuple(
        {
            "bytes": a.bytes, "count": a.count, "owner": a.owner, "phase": a.phase, "module": a.module or None,
            "op": a.op or None, "shape": shape(a.shape, a.dtype) or None, "stack": a.stack or None,
        }
        for a in d.largest
    )  # fmt: skip
    columns = (
        Column("bytes", "size", units.size),
        Column("count", "count", units.count),
        Column("owner", "owner", right=False),
        Column("phase", "made in", right=False),
        Column("module", "module", right=False),
        Column("op", "op", right=False),
        Column("shape", "shape", right=False),
        Column("stack", "stack", right=False, longest=LONGEST_LINE),
    )
    used = tuple(c for c in columns if any(row[c.key] is not None for row in rows))
    return Table(title="largest allocations at the peak", columns=used, rows=rows)


def _phases(d: DeviceMemory) -> Table:
    rows = tuple({"phase": phase, "peak_bytes": most} for phase, most in d.phases.items())
    columns = (Column("phase", "phase", right=False), Column("peak_bytes", "most allocated", units.size))
    return Table(title="peak of each phase", columns=columns, rows=rows)


def _growth(d: DeviceMemory) -> Table:
    g = d.growth
    if not g.steps:
        notes: tuple[str, ...] = ("no steps found: nothing is said of growth",)
    elif g.bytes_per_step is None:
        notes = (
            f"{g.steps} {'step' if g.steps == 1 else 'steps'} found by {g.found_by}: too few to say whether memory grows",
        )
    else:
        nothing = "nothing is left by every step" if g.leaks_sought else "too few to tell a leak"
        verdict = "" if g.leaks else f"; {nothing}"
        if g.leaks and not any(regular(k.steps, k.of_steps) for k in g.leaks):
            verdict = f"; {nothing}; these outlive theirs in some"
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
