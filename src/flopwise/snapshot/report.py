"""A snapshot's answers: peak, whose bytes, the largest allocations, growth, and what was asked for when memory ran out."""

from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise.records.memory import Knowledge
from flopwise.snapshot.answers import DeviceMemory, Failure, Growth, GrowthSource, Large, Line, MemoryReport, Moment
from flopwise.snapshot.growth import enough, leaks, per_step
from flopwise.snapshot.known import Told, exact_history
from flopwise.snapshot.owners import OWNERS, owners
from flopwise.snapshot.phases import NAMES, B, Phases, R, phases, stack_phases
from flopwise.snapshot.saved import named, saved_blocks
from flopwise.snapshot.snapshot import BEFORE, DeviceHistory, Snapshot
from flopwise.snapshot.stacks import short
from flopwise.snapshot.steps import Steps, phase_name, steps
from flopwise.snapshot.timeline import Timeline, alive, thinned, timeline
from flopwise.spec.workload import Workload
from flopwise.work import operation as work

LARGEST = 10
POINTS = 2000  # of a timeline that is shown or exported


def report(
    snapshot: Snapshot, whole_stacks: bool = False, knowledge: Knowledge | None = None, workload: Workload | None = None
) -> MemoryReport:
    """Answer for every device of a snapshot; `knowledge` is what flopwise wrote beside that of a `workload` it ran.

    >>> from flopwise.snapshot.read import snapshot_of
    >>> raw = {"device_traces": [[{"action": "alloc", "addr": 1, "size": 700, "stream": 0}]], "segments": []}
    >>> report(snapshot_of(raw)).devices[0].peak.owners
    {'unknown': 1024}
    """
    by_stack = stack_phases(snapshot)
    found = [_device(snapshot, device, by_stack, whole_stacks, knowledge, workload) for device in snapshot.devices]
    found.sort(key=lambda one: (-one.peak.allocated_bytes, one.device))
    return MemoryReport(path=snapshot.path, devices=tuple(found))


def _device(
    snapshot: Snapshot,
    device: DeviceHistory,
    by_stack: npt.NDArray[np.int64],
    whole: bool,
    knowledge: Knowledge | None,
    workload: Workload | None,
) -> DeviceMemory:
    told = Told(snapshot, device, knowledge) if knowledge is not None and _is_of(knowledge, device) else None
    if told is not None and told.knowledge.exact:
        device = exact_history(device, told)
    when = phases(snapshot, device, by_stack, told.said) if told else phases(snapshot, device, by_stack)
    step = steps(device, when)
    owned = owners(snapshot, device, by_stack, when, step)
    owner = owned.owner if told is None else told.owners(owned.owner, device)
    table = device.allocations
    line = timeline(table, owner, OWNERS, device.reserved_bytes)
    notes = device.notes
    if (line.reserved_bytes < line.allocated_bytes).any():
        notes = (*notes, "reserved bytes are not whole: segment events are missing from the trace")
    said = _Words(snapshot, whole)
    before = table.filter(table["start"] == BEFORE)
    peak = _moment(device, line, when, line.peak)
    guessed = owned.guessed & alive(table, line.peak) if told is None else np.zeros(len(table), dtype=np.bool_)
    by_size = int(table["bytes"].to_numpy()[guessed].sum()) / max(peak.allocated_bytes, 1)
    turn = _backward(when, step, table["start"].to_numpy())
    kept = told.kept(alive(table, turn), owner) if told and turn is not None else []
    return DeviceMemory(
        device=device.device,
        events=device.events,
        allocations=len(table),
        before_bytes=int(before["bytes"].sum()),
        known_share=1 - peak.owners.get(work.UNKNOWN, 0) / max(peak.allocated_bytes, 1) - by_size,
        guessed_share=by_size,
        peak=peak,
        peak_reserved_bytes=int(line.reserved_bytes.max()),
        end=_moment(device, line, when, device.events),
        phases=_phase_peaks(line, when),
        largest=_largest(device, when, owner, alive(table, line.peak), said, told),
        growth=_growth(device, step, line, owner, said),
        ooms=_failures(device, line, said),
        timeline=_line(device, line, when),
        notes=notes,
        temporary=told.temporary(alive(table, line.peak), owner, device) if told else (),
        saved=saved_blocks(kept),
        named=named(workload, kept) if workload is not None else (),
        exact=told is not None,
    )


def _is_of(knowledge: Knowledge, device: DeviceHistory) -> bool:
    """Whether this is the device that the knowledge is about; the CPU's history stands in the place of the first GPU's."""
    return int(knowledge.device.partition(":")[2] or 0) == device.device


def _backward(when: Phases, step: Steps, starts: npt.NDArray[np.int64]) -> int | None:
    """The moment when the last backward pass begins; None if there is none.

    It begins with an allocation: a free before it is of what forward lets go as it returns, and no stack tells whose it is.
    """
    begins = np.intersect1d(np.flatnonzero((when.own == B) | (when.own == R)), starts)
    if not len(begins):
        return None
    numbers = step.of(begins) if len(step) else np.zeros(len(begins), dtype=np.int64)
    return int(begins[numbers == numbers[-1]][0])


class _Words:
    """Stacks as they are shown: short, and whole when asked for."""

    def __init__(self, snapshot: Snapshot, whole: bool) -> None:
        self._snapshot, self._whole = snapshot, whole

    def __call__(self, number: int) -> dict[str, Any]:
        frames = self._snapshot.stack(number)
        return {"stack": short(frames), "frames": frames if self._whole else ()}


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
    after = line.allocated_bytes[1:]
    return {
        name: int(after[when.within == code].max()) for code, name in enumerate(NAMES) if (when.within == code).any()
    }


def _largest(
    device: DeviceHistory,
    when: Phases,
    owner: npt.NDArray[np.int64],
    there: npt.NDArray[np.bool_],
    said: _Words,
    told: Told | None,
) -> tuple[Large, ...]:
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
        kinds.setdefault((*kind, *told.kind(row)) if told else kind, []).append(row)
    return tuple(
        Large(
            bytes=kind[0],
            count=len(alike),
            requested_bytes=int(asked[alike[0]]),
            owner=OWNERS[kind[1]],
            phase=phase_name(int(when.own[start[alike[0]]])) if start[alike[0]] != BEFORE else "before the recording",
            **said(kind[2]),
            **(told.details(alike[0]) if told else {}),
        )
        for kind, alike in list(kinds.items())[:LARGEST]
    )


def _growth(device: DeviceHistory, step: Steps, line: Timeline, owner: npt.NDArray[np.int64], said: _Words) -> Growth:
    at_starts = line.allocated_bytes[step.starts]
    more = per_step(at_starts)
    sources = (
        GrowthSource(
            bytes_per_step=leak.bytes_per_step,
            allocations_per_step=round(leak.allocations_per_step, 2),
            steps=leak.steps,
            of_steps=leak.of_steps,
            owner=leak.owner,
            **said(leak.stack),
        )
        for leak in leaks(device, step, owner, grows=more is not None and more > 0)
    )
    return Growth(
        steps=len(step),
        found_by=step.found_by,
        start_bytes=tuple(at_starts.tolist()),
        bytes_per_step=more,
        leaks_sought=enough(step),
        leaks=tuple(sources),
    )


def _failures(device: DeviceHistory, line: Timeline, said: _Words) -> tuple[Failure, ...]:
    return tuple(
        Failure(
            time_us=_time(device, oom.event + 1),
            asked_bytes=oom.asked_bytes,
            device_free_bytes=oom.device_free_bytes,
            allocated_bytes=int(line.allocated_bytes[oom.event + 1]),
            reserved_bytes=int(line.reserved_bytes[oom.event + 1]),
            owners=line.at(oom.event + 1),
            **said(oom.stack),
        )
        for oom in device.ooms
    )


def _line(device: DeviceHistory, line: Timeline, when: Phases) -> Line:
    within = np.concatenate(([-1], when.within)).astype(np.int64)
    kept = thinned(line.allocated_bytes, POINTS, np.where(within == R, B, within))  # what is recomputed is backward's
    times = tuple(_time(device, moment) or 0 for moment in kept.tolist()) if device.time_us is not None else None
    used = [i for i in range(len(line.owners)) if line.by_owner_bytes[i].any()]
    return Line(
        event=tuple((kept - 1).tolist()),
        time_us=times,
        phase=tuple(phase_name(int(when.within[m - 1])) if m else "" for m in kept.tolist()),
        reserved_bytes=tuple(line.reserved_bytes[kept].tolist()),
        owners={line.owners[i]: tuple(line.by_owner_bytes[i, kept].tolist()) for i in used},
    )
