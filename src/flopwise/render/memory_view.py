"""A memory report as tables: who holds the peak, over time, the largest allocations, growth, predictions and levers."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError, one_line
from flopwise.records.run import OK
from flopwise.records.table import Column, Table
from flopwise.render.json import document
from flopwise.render.table import View, columns, grouped
from flopwise.snapshot.answers import MEASURED, PREDICTED, DeviceMemory, MemoryReport, SavedBlock
from flopwise.snapshot.growth import regular

SUMMARY, OWNERS, LEVERS, NEEDED = "memory", "owners", "levers", "needed"  # keys of tables that a page shows first
_GROUPS = {
    "The peak": f"{OWNERS} largest temporary out-of-memory",
    "Over time": "timeline phases growth",
    "Kept for backward": "saved named",
    "What to change": LEVERS,
}
_DRY_RUN = "dry run"
_MOST_PHASES = 24  # rows of the timeline's table
_MOST_OPS = 5  # rows of the table of temporary bytes
_BAR_WIDTH = 30
_CASTS = {("_to_copy", "bf16"), ("_to_copy", "fp16")}
_CAST_SHARE = 0.25  # of the parameters' bytes: copies are half their size, and some are not made yet at the peak


def memory_view(report: MemoryReport, place: bool = True) -> View:
    """Of the first device in full; of a workload also predictions, tensors saved for backward and levers.

    `place`: with the folder that holds the run, which a shared page omits.
    """
    content = document("memory", **msgspec.structs.asdict(report))
    if not report.devices:
        needed = [_needed(report)] if report.predictions else []
        return View([_failed(report), *needed, *_levers(report)], content)
    first = report.devices[0]
    tables = [_summary(report, place), composition(report), _timeline(first), _largest(first)]
    tables += [temporary_table(first)] if first.temporary else []
    tables += [_phases(first)] if first.phases else []
    tables += [_saved(first.saved)] if first.saved else []
    tables += [_named(first)] if first.named else []
    tables += [_growth(first)] if report.obtained == MEASURED else []
    tables += [_out_of_memory(first)] if first.ooms else []
    return View(grouped([*tables, *_levers(report)], _GROUPS), content)


def subject(report: MemoryReport) -> str:
    """What the report is about, in one line."""
    if report.label:
        return one_line(f"{report.label} on {report.where}", 100)
    return one_line(Path(report.path).name, 80)


def of_device(report: MemoryReport, device: str | None) -> MemoryReport:
    """The report with one device (`cuda:1` or `1`) first; None leaves the highest peak there."""
    if device is None:
        return report
    chosen = tuple(one for one in report.devices if str(one.device) == device.removeprefix("cuda:"))
    if not chosen:
        there = ", ".join(f"cuda:{one.device}" for one in sorted(report.devices, key=lambda one: one.device))
        raise FlopwiseError(f"the snapshot has nothing of device '{device}'", f"it has: {there}")
    return msgspec.structs.replace(report, devices=(*chosen, *(one for one in report.devices if one not in chosen)))


def reserves(d: DeviceMemory) -> bool:
    """Whether more is ever reserved than allocated: a caching allocator's; the CPU's is none."""
    return (
        not d.exact or d.peak_reserved_bytes > d.peak.allocated_bytes or list(d.timeline.reserved_bytes) != _totals(d)
    )


def event_name(report: MemoryReport) -> str:
    """What the events of the timeline are."""
    return "op" if report.obtained == PREDICTED else "event"


def _totals(d: DeviceMemory) -> list[int]:
    owners = d.timeline.owners.values()
    return [sum(values) for values in zip(*owners, strict=True)] if owners else [0] * len(d.timeline.event)


def _shape(sizes: Sequence[int], dtype: str) -> str:
    """A tensor's shape as people write it.

    >>> _shape((4, 512, 768), "fp32"), _shape((), "")
    ('4×512×768 fp32', '')
    """
    return f"{'×'.join(map(str, sizes)) or 'scalar'} {dtype}" if dtype else ""


def _summary(report: MemoryReport, place: bool) -> Table:
    rows = tuple(_summary_row(d, event_name(report)) for d in report.devices)
    caching = any(map(reserves, report.devices))
    then = "reserved_bytes: reserved then | unused_bytes: of that unused | " if caching else ""
    end = " | end_unused_bytes: unused at the end" if caching else ""
    heading = f"device | peak_bytes: peak allocated | {then}when | end_bytes: at the end | events [count]{end}"
    stored = (f"stored in {Path(report.path).parent.parent}",) if place and report.label and report.path else ()
    title = f"{subject(report)}: memory, {report.obtained}"
    return Table(SUMMARY, title, columns(heading), rows, (*_how(report), *report.notes, *stored))


def _summary_row(d: DeviceMemory, event: str) -> dict[str, Any]:
    peak = d.peak
    at = f"{event} {peak.event:,}" if peak.time_us is None else units.duration(1000 * peak.time_us)
    return {
        "device": d.device,
        "peak_bytes": peak.allocated_bytes,
        "reserved_bytes": peak.reserved_bytes,
        "unused_bytes": peak.unused_bytes,
        "when": f"{at}, {peak.phase}" if peak.phase else at,
        "end_bytes": d.end.allocated_bytes,
        "end_unused_bytes": d.end.unused_bytes,
        "events": d.events,
    }


def _how(report: MemoryReport) -> list[str]:
    """How the numbers were obtained."""
    d = report.devices[0]
    if report.obtained != MEASURED:
        dry = "predicted by a dry run on fake tensors, with the allocator's rounding and workspaces; nothing was run"
        return [dry, *d.notes]
    how = "recorded with each allocation" if d.exact else "by stacks and lifetimes, not certain"
    guessed = f"; {units.percent(d.guessed_share)} guessed from the size alone" if d.guessed_share else ""
    rounding = units.size(d.peak.allocated_bytes - d.peak.requested_bytes)
    notes = [
        f"measured; owner known for {units.percent(d.known_share)} of the peak ({how}){guessed}",
        f"{rounding} of the peak are rounding: allocated, not asked for",
    ]
    if d.before_bytes:
        notes.append(f"{units.size(d.before_bytes)} were allocated before the recording")
    if not d.events and not d.exact:
        notes.append("no events: only what was there when the snapshot was taken (_record_memory_history was not on)")
    return [*notes, *d.notes]


def composition(report: MemoryReport) -> Table:
    """Bytes by owner at the peak; with a measurement, the predictions and their errors."""
    peak = report.devices[0].peak
    compared = [p for p in report.predictions if report.obtained == MEASURED or p.source != _DRY_RUN]
    owners = list(dict.fromkeys([*peak.owners, *(owner for p in compared for owner in p.peak.owners)]))
    rows: list[dict[str, Any]] = [{"owner": owner, "bytes": peak.owners.get(owner, 0)} for owner in owners]
    for row in rows:
        row["share"] = row["bytes"] / max(peak.allocated_bytes, 1)
    rows += [{"owner": "all", "bytes": peak.allocated_bytes}] if compared else []
    sizes: list[Column] = []
    for p in compared:
        key = p.source.replace(" ", "_")
        for row, size in zip(rows, [*(p.peak.owners.get(o, 0) for o in owners), p.peak.total_bytes], strict=True):
            row |= {f"{key}_bytes": size, f"{key}_error_bytes": size - row["bytes"]}
        sizes += [Column(f"{key}_bytes", p.source), Column(f"{key}_error_bytes", "differs by", "signed_bytes")]
    bars = Column("share", "of the peak", labels={row["share"]: _bar(row["share"]) for row in rows if "share" in row})
    shown = (*columns("owner | bytes: size"), *sizes, bars)
    return Table(OWNERS, "Peak memory by owner", shown, tuple(rows), _errors(report), total=bool(compared))


def _errors(report: MemoryReport) -> tuple[str, ...]:
    """How far the predictions are off."""
    d = report.devices[0]
    compared = [p for p in report.predictions if report.obtained == MEASURED or p.source != _DRY_RUN]
    notes = [note for p in compared for note in p.notes]
    if not compared:
        return ()
    if report.status != OK:  # what ran out half-way is no measure of a prediction for the whole step
        return ("the predictions are for the whole step, the rest for what was recorded of it", *notes)
    errors = [_error(p.source, p.peak.total_bytes, d.peak.allocated_bytes) for p in compared]
    if report.obtained == MEASURED and (more := d.growth.bytes_per_step):
        grows = f"grows by {units.size(more)}" if more > 0 else f"shrinks by {units.size(-more)}"
        errors.append(f"it {grows} per step; a prediction is for one step that leaves nothing behind")
    return (*errors, *notes)


def _error(source: str, predicted: int, measured: int) -> str:
    if predicted == measured:
        return f"{source}: the same peak to the byte"
    return f"{source}: {units.percent(predicted / max(measured, 1) - 1, 3)} off the peak"


def _bar(share: float) -> str:
    """A share as a number and a bar.

    >>> _bar(0.5)
    ' 50.0 % ███████████████'
    """
    return f"{units.percent(share):>7} {'█' * round(_BAR_WIDTH * share)}".rstrip()


def _timeline(d: DeviceMemory) -> Table:
    """One row per phase of every step, at its own peak; what is recomputed belongs to backward."""
    line, totals = d.timeline, _totals(d)
    phases = ["backward" if phase == "recompute" else phase for phase in line.phase]
    runs = [list(places) for _, places in groupby(range(len(phases)), key=lambda i: phases[i])]
    peaks = [max(places, key=lambda i: totals[i]) for places in runs if phases[places[0]]]
    rows = tuple(
        {"phase": phases[i], "allocated_bytes": totals[i]}
        | {"at": line.event[i] if line.time_us is None else line.time_us[i] / 1000}
        | {owner: values[i] or None for owner, values in line.owners.items()}
        for i in peaks[-_MOST_PHASES:]
    )
    at = "event" if line.time_us is None else "at ms"
    owners = (Column(owner, owner, "bytes") for owner in line.owners)
    shown = (*columns(f"phase | allocated_bytes | at: {at}"), *owners)
    notes = (f"the last {_MOST_PHASES} of {len(peaks)} phases",) if len(peaks) > _MOST_PHASES else ()
    return Table("timeline", "Timeline: each phase at its peak", shown, rows, notes)


def _largest(d: DeviceMemory) -> Table:
    rows = tuple(msgspec.structs.asdict(one) | {"shape": _shape(one.shape, one.dtype)} for one in d.largest)
    shown = columns("bytes: size | count | owner | phase: made in | module | op | shape | stack")
    return Table("largest", "Largest allocations at the peak", shown, rows)


def temporary_table(d: DeviceMemory) -> Table:
    """The peak's temporary bytes by op; autocast's copies, which are easily overlooked, in words."""
    rows = tuple(msgspec.structs.asdict(one) | {"op": one.op or "(none)"} for one in d.temporary)
    rest = d.temporary[_MOST_OPS:]
    notes = [f"and {units.size(sum(one.bytes for one in rest))} of {len(rest)} other kinds"] if rest else []
    first = d.temporary[0]
    if (first.op, first.dtype) in _CASTS and first.bytes > _CAST_SHARE * d.peak.owners.get("parameters", 0):
        notes.append(
            f"{first.op} to {first.dtype}: most likely autocast's copies of the weights, which live until autocast ends; "
            "weights of this type (--precision bf16-pure) need none"
        )
    shown = columns("op: made by | dtype: type | count | bytes: size")
    return Table("temporary", "Temporary memory at the peak", shown, rows, tuple(notes), most=_MOST_OPS)


def _phases(d: DeviceMemory) -> Table:
    rows = tuple({"phase": phase, "peak_bytes": most} for phase, most in d.phases.items())
    return Table("phases", "Peak of each phase", columns("phase | peak_bytes: most allocated"), rows)


def _saved(blocks: Sequence[SavedBlock]) -> Table:
    rows: list[dict[str, Any]] = []
    for block in blocks:
        head = {"block": block.block, "block_bytes": block.bytes, "tensors": block.tensors}
        for i, tensor in enumerate(block.largest):
            own = msgspec.structs.asdict(tensor) | {"shape": _shape(tensor.shape, tensor.dtype)}
            rows.append((head if i == 0 else {}) | own)
    heading = (
        "block | block_bytes: each keeps | bytes: of that | shape | owner | module | op: made by | saved_by | tensors"
    )
    return Table("saved", "Kept for backward: the five largest tensors of each block", columns(heading), tuple(rows))


def _named(d: DeviceMemory) -> Table:
    rows = tuple(msgspec.structs.asdict(one) | {"shape": _shape(one.shape, one.dtype)} for one in d.named)
    shown = columns("name: tensor | shape | bytes: size | kept: kept for backward | note: what it is [sentence]")
    return Table("named", "Well-known tensors", shown, rows)


def _growth(d: DeviceMemory) -> Table:
    rows = tuple(msgspec.structs.asdict(leak) for leak in d.growth.leaks)
    shown = columns("bytes_per_step: left per step [bytes] | steps: in steps | of_steps: of | owner | stack")
    return Table("growth", "Growth between steps", shown, rows, (_growth_verdict(d),))


def _growth_verdict(d: DeviceMemory) -> str:
    g = d.growth
    if not g.steps:
        return "no steps found: growth is unknown"
    if g.bytes_per_step is None:
        steps = "1 step" if g.steps == 1 else f"{g.steps} steps"
        return f"{steps} found by {g.found_by}: too few to say whether memory grows"
    verdict = ""
    if not any(regular(leak.steps, leak.of_steps) for leak in g.leaks):
        nothing = "nothing is left by every step" if g.leaks_sought else "too few to detect a leak"
        verdict = f"; {nothing}" + ("; these outlive some steps" if g.leaks else "")
    return f"{g.steps} steps found by {g.found_by}; {units.size(g.bytes_per_step)} more per step{verdict}"


def _out_of_memory(d: DeviceMemory) -> Table:
    rows = tuple(
        msgspec.structs.asdict(one) | {"unused_bytes": one.reserved_bytes - one.allocated_bytes} for one in d.ooms
    )
    sizes = "asked_bytes: asked for | device_free_bytes: free on the device | allocated_bytes | unused_bytes: reserved, unused"
    return Table("out-of-memory", "Out of memory", columns(f"{sizes} | stack"), rows)


def _levers(report: MemoryReport) -> list[Table]:
    """What each lever would change; no table without levers."""
    if not report.levers:
        return []
    rows = tuple(
        msgspec.structs.asdict(effect) | {"how": f"{effect.how}; {effect.note}" if effect.note else effect.how}
        for effect in report.levers
    )
    shown = columns("lever | saved_bytes: saves | peak_bytes: predicted peak | how: predicted by [sentence]")
    notes = ["predicted, each alone, for the eager step on a GPU; savings do not add up"]
    base = next((p for p in report.predictions if p.source != _DRY_RUN), None)
    if base is not None:
        size = units.size(base.peak.total_bytes)
        notes.append(f"compared with the peak that the {base.source} predicts, {size}, not with the one above")
    if report.predictions and report.predictions[-1].peak.phase == "optimizer":
        notes.append("the peak is the optimizer's: what forward and backward hold counts only once that is lower")
    return [Table(LEVERS, "What each lever would change", shown, rows, tuple(notes))]


def _failed(report: MemoryReport) -> Table:
    """A workload of which nothing was recorded."""
    row = {"status": report.status, "reason": report.reason}
    return Table(SUMMARY, f"{subject(report)}: memory", columns("status | reason"), (row,), report.notes)


def _needed(report: MemoryReport) -> Table:
    """The predictions alone, where there is nothing to compare them with."""
    rows = tuple({"source": p.source, "peak_bytes": p.peak.total_bytes} for p in report.predictions)
    shown = columns("source: predicted by | peak_bytes: peak")
    return Table(NEEDED, "What it would need", shown, rows)
