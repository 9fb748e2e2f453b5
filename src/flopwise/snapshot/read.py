"""A snapshot file of torch 2.1 or later -> one Snapshot.

What differs between versions: 2.1 has no `time_us`; its blocks may have `history` instead of `frames` and no `address`. Later
ones add `user_metadata`, `compile_context`, `external_annotations`, `pool_id`. Fields not named here are not read.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from flopwise.collector import no_collector
from flopwise.records.note import Note
from flopwise.snapshot.history import FREES, Block, Events, allocations, frees_repeat_stacks, reserved
from flopwise.snapshot.owners import CATEGORY
from flopwise.snapshot.rows import checked_sizes, column, cut, integers, invalid, numbers, once, rows_of, sizes
from flopwise.snapshot.snapshot import NO_STACK, Annotation, DeviceHistory, Ints, OutOfMemory, Snapshot
from flopwise.snapshot.stacks import StackTable
from flopwise.snapshot.unpickle import read_pickle

MOST_DEVICES = 1024
_SEGMENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
_ACTIONS = frozenset(("alloc", *FREES, *_SEGMENTS, "snapshot", "oom"))

Rows = list[dict[Any, Any]]


class _Labels(dict[str, int]):
    """Labels of allocations, numbered; 0 is none."""

    def __init__(self) -> None:
        super().__init__({"": 0})

    def __missing__(self, label: str) -> int:
        self[label] = number = len(self)
        return number


def read_snapshot(path: str | Path) -> Snapshot:
    """Read what `torch.cuda.memory._dump_snapshot` wrote, plain or gzipped."""
    with no_collector():
        return snapshot_of(read_pickle(path), str(path))


def snapshot_of(raw: Any, path: str = "") -> Snapshot:
    """The record of a snapshot that is already in memory.

    >>> raw = {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 700, "stream": 0},
    ...                                           {"action": "free_completed", "addr": 1, "size": 700, "stream": 0}]]}
    >>> snapshot_of(raw).devices[0].allocations.row(0, named=True)["bytes"]
    1024
    """
    if type(raw) is list:  # what memory_snapshot() gives: segments only
        raw = {"segments": raw}
    if type(raw) is not dict or not raw.keys() & {"segments", "device_traces"}:
        raise invalid("the file", "has neither 'segments' nor 'device_traces'")
    stacks, labels = StackTable(), _Labels()
    by_device: dict[int, Rows] = defaultdict(list)
    segments = rows_of(raw.get("segments", []), "'segments'")
    for device, segment in zip(column(segments, "device", int, "'segments'", 0), segments, strict=True):
        by_device[device].append(segment)
    traces = _traces(raw.get("device_traces", []))
    marks = _annotations(raw.get("external_annotations", []))
    devices = tuple(
        _device(i, by_device.get(i, []), traces.get(i, []), marks.get(i, ()), stacks, labels)
        for i in _numbers({*by_device, *traces})
    )
    frames, all_stacks = tuple(stacks.frames), tuple(stacks.stacks)
    return Snapshot(path=path, frames=frames, stacks=all_stacks, hints=tuple(labels), devices=devices)


def _traces(traces: Any) -> dict[int, Any]:
    """The traces that are not empty, by device."""
    if type(traces) not in (list, tuple):
        raise invalid("'device_traces'", f"is {type(traces).__name__}, not a list")
    filled = {i: trace for i, trace in enumerate(traces) if trace}
    once(list(filled.values()), "'device_traces'")
    return filled


def _numbers(devices: set[int]) -> list[int]:
    """The devices' numbers, checked."""
    if not devices:
        raise invalid("it", "is empty: no segment and no event")
    absurd = [number for number in devices if not 0 <= number < MOST_DEVICES]
    if absurd:
        raise invalid("a device", f"has the number {absurd[0]}")
    return sorted(devices)


def _device(
    device: int, segments: Rows, trace: Any, annotations: tuple[Annotation, ...], stacks: StackTable, labels: _Labels
) -> DeviceHistory:
    where = f"device {device}'s trace"
    rows = rows_of(trace, where)
    actions = column(rows, "action", str, where)
    event_sizes = sizes(rows, "size", where)
    event_stacks = [stacks.number(row.get("frames")) for row in rows]
    event_labels = [labels[label] for label in _row_labels(rows, where)]
    times = _times(rows, where)
    addresses = column(rows, "addr", int, where, 0)
    streams = column(rows, "stream", int, where, 0)
    numbers(streams, f"'stream' of {where}")
    events = Events(actions, addresses, event_sizes.tolist(), streams, event_stacks, event_labels)
    blocks, in_segments = _blocks(segments, stacks)
    repeated = frees_repeat_stacks(events)
    table, notes = allocations(events, blocks, bool(segments), repeated)
    if repeated:  # where a free happened is not known: its stack is its allocation's
        event_stacks = [
            NO_STACK if action in FREES else stack for action, stack in zip(actions, event_stacks, strict=True)
        ]
    if strange := sorted(set(actions) - _ACTIONS):
        text = f"events of an unknown kind are not counted: {', '.join(map(cut, strange[:5]))}"
        notes = (*notes, Note("unknown_events", text))
    return DeviceHistory(
        device=device,
        events=len(rows),
        time_us=times,
        allocations=table,
        reserved_bytes=reserved(actions, event_sizes, in_segments),
        event_stacks=np.array(event_stacks, dtype=np.int64),
        event_hints=np.array(event_labels, dtype=np.int64),
        ooms=_ooms(rows, events, times),
        annotations=annotations,
        segments=len(segments),
        notes=notes,
    )


def _row_labels(rows: Rows, where: str) -> list[str]:
    """The program's label of each event (`user_metadata`), else a profiler's category."""
    own = column(rows, "user_metadata", str, where, "")
    categories = column(rows, "category", str, where, "")
    return [cut(label) or (kind and CATEGORY + cut(kind)) for label, kind in zip(own, categories, strict=True)]


def _times(rows: Rows, where: str) -> Ints | None:
    """Every event's clock, never falling; None where torch wrote none."""
    if not rows or any("time_us" not in row for row in rows):
        return None
    return np.asarray(np.maximum.accumulate(integers(rows, "time_us", where)), dtype=np.int64)


def _ooms(rows: Rows, events: Events, times: Ints | None) -> tuple[OutOfMemory, ...]:
    failed = [i for i, action in enumerate(events.actions) if action == "oom"]
    free = column([rows[i] for i in failed], "device_free", int, "an 'oom' event", None)
    clock = [int(times[i]) if times is not None else None for i in failed]
    return tuple(
        OutOfMemory(event=i, time_us=at, asked_bytes=events.sizes[i], device_free_bytes=left, stack=events.stacks[i])
        for i, at, left in zip(failed, clock, free, strict=True)
    )


def _blocks(segments: Rows, stacks: StackTable) -> tuple[dict[int, Block], int]:
    """Blocks in use by address, and the bytes of all segments."""
    where = "'segments'"
    totals, streams = sizes(segments, "total_size", where), column(segments, "stream", int, where, 0)
    numbers(streams, f"'stream' of {where}")
    starts = column(segments, "address", int, where)
    if len(set(starts)) < len(starts):
        raise invalid(where, "holds two at one address")
    once([segment.get("blocks") or [] for segment in segments], "'blocks'")
    blocks: dict[int, Block] = {}
    for segment, address, stream in zip(segments, starts, streams, strict=True):
        rows = rows_of(segment.get("blocks", []), "'blocks'")
        takes = sizes(rows, "size", "'blocks'").tolist()
        for row, taken, state in zip(rows, takes, column(rows, "state", str, "'blocks'"), strict=True):
            if state == "active_allocated":
                requested, frames = _requested(row, taken)
                at = row.get("address", address)
                if type(at) is not int:
                    raise invalid("'address' of a block", f"is {type(at).__name__}, not int")
                blocks[at] = Block(taken, requested, stream, stacks.number(frames))
            address += taken
    checked_sizes([block.requested_bytes for block in blocks.values()], "'requested_size' of 'blocks'")
    return blocks, int(totals.sum())


def _requested(block: dict[Any, Any], taken: int) -> tuple[int, Any]:
    """The bytes requested, and the stack; before torch 2.1 in the block's `history`."""
    history = block.get("history")
    first = history[0] if type(history) is list and history and type(history[0]) is dict else {}
    requested = block.get("requested_size", first.get("real_size", taken))
    if type(requested) is not int:
        raise invalid("'requested_size' of a block", f"is {type(requested).__name__}, not int")
    return requested, block.get("frames", first.get("frames"))


def _annotations(raw: Any) -> dict[int, tuple[Annotation, ...]]:
    """Ranges by device: a START and the END of the same name after it, innermost first."""
    where = "'external_annotations'"
    rows = rows_of(raw, where)
    devices, times = column(rows, "device", int, where, 0), integers(rows, "time_us", where, 0).tolist()
    names, stages = map(cut, column(rows, "name", str, where, "")), column(rows, "stage", str, where, "")
    begun: dict[tuple[int, str], list[int]] = defaultdict(list)
    marks: dict[int, list[Annotation]] = defaultdict(list)
    for device, name, stage, time_us in zip(devices, names, stages, times, strict=True):
        if stage == "START":
            begun[device, name].append(time_us)
        elif stage == "END":
            starts = begun[device, name]
            marks[device].append(Annotation(name, starts.pop() if starts else None, time_us))
    for (device, name), starts in begun.items():
        marks[device] += [Annotation(name, start, None) for start in starts]
    return {device: tuple(own) for device, own in marks.items()}
