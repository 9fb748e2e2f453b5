"""The report of a snapshot: peak, owners, the largest allocations, growth, and the requests that failed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from flopwise import units
from flopwise.records.memory import Knowledge
from flopwise.records.note import Note
from flopwise.snapshot.answers import DeviceMemory, Failure, Growth, LargeAllocation, MemoryReport, Moment, TimelineLine
from flopwise.snapshot.before import Sizes
from flopwise.snapshot.growth import enough, leaks, per_step
from flopwise.snapshot.known import KnownAllocations, exact_history
from flopwise.snapshot.owners import OWNERS, owners
from flopwise.snapshot.phases import BACKWARD, NAMES, RECOMPUTE, Phases, phase_name, phases, stack_phases
from flopwise.snapshot.saved import named, saved_blocks
from flopwise.snapshot.snapshot import BEFORE, DeviceHistory, Flags, Ints, Snapshot
from flopwise.snapshot.stacks import short
from flopwise.snapshot.steps import Steps, steps
from flopwise.snapshot.timeline import Timeline, alive, thinned, timeline
from flopwise.spec.workload import Workload
from flopwise.work import operation as work

LARGEST = 10
POINTS = 2000  # of a timeline that is shown or exported

StackText = Callable[[int], dict[str, Any]]  # of a stack's number: its text, and its frames on request


def report(
    snapshot: Snapshot,
    whole_stacks: bool = False,
    knowledge: Knowledge | None = None,
    workload: Workload | None = None,
    models: Sequence[Sizes] = (),
) -> MemoryReport:
    """Report on every device of a snapshot; `knowledge` is what flopwise recorded with that of a `workload` it ran.

    `models`: of the model that someone says ran, the sizes of its parameters, in each way it may hold them.

    >>> from flopwise.snapshot.read import snapshot_of
    >>> raw = {"device_traces": [[{"action": "alloc", "addr": 1, "size": 700, "stream": 0}]], "segments": []}
    >>> report(snapshot_of(raw)).devices[0].peak.owners
    {'unknown': 1024}
    """

    def stack_text(number: int) -> dict[str, Any]:
        frames = snapshot.stack(number)
        return {"stack": short(frames), "frames": frames if whole_stacks else ()}

    by_stack = stack_phases(snapshot)
    devices = [
        _device(snapshot, device, by_stack, stack_text, knowledge, workload, models) for device in snapshot.devices
    ]
    devices.sort(key=lambda one: (-one.peak.allocated_bytes, one.device))
    return MemoryReport(path=snapshot.path, devices=tuple(devices))


def _device(
    snapshot: Snapshot,
    device: DeviceHistory,
    by_stack: Ints,
    stack_text: StackText,
    knowledge: Knowledge | None,
    workload: Workload | None,
    models: Sequence[Sizes],
) -> DeviceMemory:
    known = None
    # The CPU's history has the number of the first GPU.
    if knowledge is not None and int(knowledge.device.partition(":")[2] or 0) == device.device:
        known = KnownAllocations(snapshot, device, knowledge)
        device = exact_history(device, known) if knowledge.exact else device
    when = phases(snapshot, device, by_stack, *([known.phase_of_label] if known else []))
    step = steps(device, when)
    owned = owners(snapshot, device, by_stack, when, step, models)
    owner = owned.owner if known is None else known.owners(owned.owner, device)
    table = device.allocations
    line = timeline(table, owner, OWNERS, device.reserved_bytes)
    notes = device.notes
    if (line.reserved_bytes < line.allocated_bytes).any():
        text = "reserved bytes are incomplete: segment events are missing from the trace"
        notes = (*notes, Note("segments_missing", text))
    notes = (*notes, *_before_notes(table, owner, bool(models)))
    peak, at_peak = _moment(device, line, when, line.peak), alive(table, line.peak)
    guessed = int(table["bytes"].to_numpy()[owned.guessed & at_peak].sum()) if known is None else 0
    whole = max(peak.allocated_bytes, 1)
    turn = _backward_start(when, step, table["start"].to_numpy())
    kept = known.kept(alive(table, turn), owner) if known and turn is not None else []
    return DeviceMemory(
        device=device.device,
        events=device.events,
        allocations=len(table),
        before_bytes=int(table.filter(table["start"] == BEFORE)["bytes"].sum()),
        known_share=1 - (peak.owners.get(work.UNKNOWN, 0) + guessed) / whole,
        guessed_share=guessed / whole,
        peak=peak,
        peak_reserved_bytes=int(line.reserved_bytes.max()),
        end=_moment(device, line, when, device.events),
        phases=_phase_peaks(line, when),
        largest=_largest(device, when, owner, at_peak, stack_text, known),
        growth=_growth(device, step, line, owner, stack_text),
        ooms=_failures(device, line, stack_text),
        timeline=_line(device, line, when),
        notes=tuple(note.text for note in notes),
        note_keys=tuple(note.key for note in notes),
        temporary=known.temporary(at_peak, owner, device) if known else (),
        saved=saved_blocks(kept),
        named=named(workload, kept) if workload is not None else (),
        exact=known is not None,
    )


def _before_notes(table: pl.DataFrame, owner: Ints, model_given: bool) -> tuple[Note, ...]:
    """Where most of what was there before the recording has no owner: why, and what would tell."""
    before, size = table["start"].to_numpy() == BEFORE, table["bytes"].to_numpy()
    unknown, whole = int(size[before & (owner == OWNERS.index(work.UNKNOWN))].sum()), int(size[before].sum())
    if 2 * unknown <= whole:
        return ()
    text = f"{units.size(unknown)} were allocated before the recording, with no stack"
    if model_given:
        text = f"{text}, in other sizes than the model's parameters"
        if (before & (owner == OWNERS.index(work.PARAMETERS))).any():
            return (Note("before_other_sizes", f"{text}, which are there: a server's cache, say"),)
        return (Note("model_differs", f"{text}: another model, or a sharded one"),)
    return (Note("before_unknown", f"{text}; --model NAME or hf:PATH compares their sizes with a model's parameters"),)


def _backward_start(when: Phases, step: Steps, starts: Ints) -> int | None:
    """The moment when the last backward pass begins; None if there is none.

    It begins with an allocation: a free before it is of what forward releases as it returns, and its stack is not known.
    """
    begins = np.intersect1d(np.flatnonzero((when.own == BACKWARD) | (when.own == RECOMPUTE)), starts)
    if not len(begins):
        return None
    numbers = step.of(begins) if len(step) else np.zeros(len(begins), dtype=np.int64)
    return int(begins[numbers == numbers[-1]][0])


def _time(device: DeviceHistory, moment: int) -> int | None:
    if device.time_us is None:
        return None
    return int(device.time_us[max(moment - 1, 0)] - device.time_us[0])


def _moment(device: DeviceHistory, line: Timeline, when: Phases, moment: int) -> Moment:
    table = device.allocations
    return Moment(
        event=moment - 1,
        time_us=_time(device, moment),
        phase=phase_name(int(when.within[moment - 1])) if moment else "",
        allocated_bytes=int(line.allocated_bytes[moment]),
        reserved_bytes=int(max(line.reserved_bytes[moment], line.allocated_bytes[moment])),
        requested_bytes=int(table["requested_bytes"].to_numpy()[alive(table, moment)].sum()),
        owners=line.at(moment),
    )


def _phase_peaks(line: Timeline, when: Phases) -> dict[str, int]:
    within = {name: when.within == code for code, name in enumerate(NAMES)}
    return {name: int(line.allocated_bytes[1:][there].max()) for name, there in within.items() if there.any()}


def _largest(
    device: DeviceHistory,
    when: Phases,
    owner: Ints,
    there: Flags,
    stack_text: StackText,
    known: KnownAllocations | None,
) -> tuple[LargeAllocation, ...]:
    """The largest at the peak; those of one size, owner and stack (and op and shape, where they are known) are one row."""
    rows = np.flatnonzero(there)
    table = device.allocations
    start, size, asked, stack = (table[name].to_numpy() for name in ("start", "bytes", "requested_bytes", "stack"))
    kinds: dict[tuple[Any, ...], list[int]] = {}
    smallest = 0
    for row in rows[np.argsort(-size[rows], kind="stable")].tolist():
        if len(kinds) >= LARGEST and size[row] < smallest:
            break
        smallest = size[row]
        kind = (int(size[row]), int(owner[row]), int(stack[row]))
        kinds.setdefault((*kind, *known.kind(row)) if known else kind, []).append(row)
    return tuple(
        LargeAllocation(
            bytes=kind[0],
            count=len(alike),
            requested_bytes=int(asked[alike[0]]),
            owner=OWNERS[kind[1]],
            phase=phase_name(int(when.own[start[alike[0]]])) if start[alike[0]] != BEFORE else "before the recording",
            **stack_text(kind[2]),
            **(known.details(alike[0]) if known else {}),
        )
        for kind, alike in list(kinds.items())[:LARGEST]
    )


def _growth(device: DeviceHistory, step: Steps, line: Timeline, owner: Ints, stack_text: StackText) -> Growth:
    at_starts = line.allocated_bytes[step.starts]
    more = per_step(at_starts)
    return Growth(
        steps=len(step),
        found_by=step.found_by,
        start_bytes=tuple(at_starts.tolist()),
        bytes_per_step=more,
        leaks_sought=enough(step),
        leaks=leaks(device, step, owner, more is not None and more > 0, stack_text),
    )


def _failures(device: DeviceHistory, line: Timeline, stack_text: StackText) -> tuple[Failure, ...]:
    return tuple(
        Failure(
            time_us=_time(device, oom.event + 1),
            asked_bytes=oom.asked_bytes,
            device_free_bytes=oom.device_free_bytes,
            allocated_bytes=int(line.allocated_bytes[oom.event + 1]),
            reserved_bytes=int(line.reserved_bytes[oom.event + 1]),
            owners=line.at(oom.event + 1),
            **stack_text(oom.stack),
        )
        for oom in device.ooms
    )


def _line(device: DeviceHistory, line: Timeline, when: Phases) -> TimelineLine:
    within = np.concatenate(([-1], when.within)).astype(np.int64)
    # Recomputation counts as backward.
    kept = thinned(line.allocated_bytes, POINTS, np.where(within == RECOMPUTE, BACKWARD, within))
    times = tuple(_time(device, moment) or 0 for moment in kept.tolist()) if device.time_us is not None else None
    used = [i for i in range(len(line.owners)) if line.by_owner_bytes[i].any()]
    return TimelineLine(
        event=tuple((kept - 1).tolist()),
        time_us=times,
        phase=tuple(phase_name(int(within[moment])) for moment in kept.tolist()),
        reserved_bytes=tuple(line.reserved_bytes[kept].tolist()),
        owners={line.owners[i]: tuple(line.by_owner_bytes[i, kept].tolist()) for i in used},
    )
