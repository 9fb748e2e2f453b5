"""A snapshot file of torch 2.1 or later -> one Snapshot.

What differs between versions: 2.1 has no `time_us`; its blocks may have `history` instead of `frames` and no `address`. Later
ones add `user_metadata`, `compile_context`, `external_annotations`, `pool_id`. Fields not named here are not read.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise.snapshot.history import FREES, Block, Events, allocations, frees_repeat_stacks, reserved
from flopwise.snapshot.rows import checked_sizes, column, cut, integers, numbers, once, rows_of, sizes, wrong
from flopwise.snapshot.snapshot import NO_STACK, Annotation, DeviceHistory, OutOfMemory, Snapshot
from flopwise.snapshot.stacks import StackTable
from flopwise.snapshot.unpickle import read_pickle, without_collector

MOST_DEVICES = 1024
_KNOWN = frozenset(
    ("alloc", "free_requested", "free_completed", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
     "snapshot", "oom")
)  # fmt: skip
_CATEGORY = "category:"


class _Hints:
    """Words said about allocations, numbered; 0 is none."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {"": 0}

    def number(self, word: str) -> int:
        return self.words.setdefault(word, len(self.words))


def read_snapshot(path: str | Path) -> Snapshot:
    """Read what `torch.cuda.memory._dump_snapshot` wrote, plain or gzipped."""
    with without_collector():
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
        raise wrong("the file", "has neither 'segments' nor 'device_traces'")
    stacks, hints = StackTable(), _Hints()
    by_device: dict[int, list[dict[Any, Any]]] = defaultdict(list)
    segments = rows_of(raw.get("segments", []), "'segments'")
    for device, segment in zip(column(segments, "device", int, "'segments'", 0), segments, strict=True):
        by_device[device].append(segment)
    traces = raw.get("device_traces", [])
    if type(traces) not in (list, tuple):
        raise wrong("'device_traces'", f"is {type(traces).__name__}, not a list")
    present = sorted({*by_device, *(i for i, trace in enumerate(traces) if trace)})
    if present and (present[0] < 0 or present[-1] >= MOST_DEVICES):
        raise wrong("a device", f"has the number {present[0] if present[0] < 0 else present[-1]}")
    once([trace for trace in traces if trace], "'device_traces'")
    marks = _annotations(raw.get("external_annotations", []))
    devices = tuple(
        _device(i, by_device.get(i, []), traces[i] if i < len(traces) else [], marks.get(i, ()), stacks, hints)
        for i in present
    )
    if not devices:
        raise wrong("it", "is empty: no segment and no event")
    return Snapshot(
        path=path, frames=tuple(stacks.frames), stacks=tuple(stacks.stacks), hints=tuple(hints.words), devices=devices
    )


def _device(
    device: int,
    segments: list[dict[Any, Any]],
    trace: Any,
    annotations: tuple[Annotation, ...],
    stacks: StackTable,
    hints: _Hints,
) -> DeviceHistory:
    where = f"device {device}'s trace"
    rows = rows_of(trace, where)
    actions = column(rows, "action", str, where)
    event_sizes = sizes(rows, "size", where)
    event_stacks = [stacks.number(row.get("frames")) for row in rows]
    event_hints = [hints.number(word) for word in _words(rows, where)]
    times = _times(rows, where)
    addresses = column(rows, "addr", int, where, 0)
    streams = column(rows, "stream", int, where, 0)
    numbers(streams, f"'stream' of {where}")
    events = Events(actions, addresses, event_sizes.tolist(), streams, event_stacks, event_hints)
    blocks, in_segments = _blocks(segments, stacks)
    repeated = frees_repeat_stacks(events)
    table, notes = allocations(events, blocks, bool(segments), repeated)
    if repeated:  # where a free happened is not known: its stack is its allocation's
        event_stacks = [
            NO_STACK if action in FREES else stack for action, stack in zip(actions, event_stacks, strict=True)
        ]
    strange = sorted(set(actions) - _KNOWN)
    if strange:
        notes = (*notes, f"events of an unknown kind are not counted: {', '.join(map(cut, strange[:5]))}")
    return DeviceHistory(
        device=device,
        events=len(rows),
        time_us=times,
        allocations=table,
        reserved_bytes=reserved(actions, event_sizes, in_segments),
        event_stacks=np.array(event_stacks, dtype=np.int64),
        event_hints=np.array(event_hints, dtype=np.int64),
        ooms=_ooms(rows, events, times),
        annotations=annotations,
        segments=len(segments),
        notes=notes,
    )


def _words(rows: list[dict[Any, Any]], where: str) -> list[str]:
    """What the program said of each event (`user_metadata`), else a profiler's category."""
    said = column(rows, "user_metadata", str, where, "")
    categories = column(rows, "category", str, where, "")
    return [
        cut(word) or (category and _CATEGORY + cut(category)) for word, category in zip(said, categories, strict=True)
    ]


def _times(rows: list[dict[Any, Any]], where: str) -> npt.NDArray[np.int64] | None:
    """Every event's clock, never falling; None where torch wrote none."""
    if not rows or any("time_us" not in row for row in rows):
        return None
    return np.asarray(np.maximum.accumulate(integers(rows, "time_us", where)), dtype=np.int64)


def _ooms(rows: list[dict[Any, Any]], events: Events, times: npt.NDArray[np.int64] | None) -> tuple[OutOfMemory, ...]:
    failed = [i for i, action in enumerate(events.actions) if action == "oom"]
    free = column([rows[i] for i in failed], "device_free", int, "an 'oom' event", None)
    return tuple(
        OutOfMemory(
            event=i,
            time_us=int(times[i]) if times is not None else None,
            asked_bytes=events.sizes[i],
            device_free_bytes=left,
            stack=events.stacks[i],
        )
        for i, left in zip(failed, free, strict=True)
    )


def _blocks(segments: list[dict[Any, Any]], stacks: StackTable) -> tuple[dict[int, Block], int]:
    """Blocks in use by address, and the bytes of all segments."""
    where = "'segments'"
    totals, streams = sizes(segments, "total_size", where), column(segments, "stream", int, where, 0)
    numbers(streams, f"'stream' of {where}")
    starts = column(segments, "address", int, where)
    if len(set(starts)) < len(starts):
        raise wrong(where, "holds two at one address")
    once([segment.get("blocks") or [] for segment in segments], "'blocks'")
    found: dict[int, Block] = {}
    for segment, address, stream in zip(segments, starts, streams, strict=True):
        rows = rows_of(segment.get("blocks", []), "'blocks'")
        takes = sizes(rows, "size", "'blocks'").tolist()
        for row, taken, state in zip(rows, takes, column(rows, "state", str, "'blocks'"), strict=True):
            if state == "active_allocated":
                requested, frames = _asked(row, taken)
                at = row.get("address", address)
                if type(at) is not int:
                    raise wrong("'address' of a block", f"is {type(at).__name__}, not int")
                found[at] = Block(taken, requested, stream, stacks.number(frames))
            address += taken
    checked_sizes([block.requested_bytes for block in found.values()], "'requested_size' of 'blocks'")
    return found, int(totals.sum())


def _asked(block: dict[Any, Any], taken: int) -> tuple[int, Any]:
    """What was asked for, and where; before torch 2.1 in the block's `history`."""
    history = block.get("history")
    first = history[0] if type(history) is list and history and type(history[0]) is dict else {}
    asked = block.get("requested_size", first.get("real_size", taken))
    if type(asked) is not int:
        raise wrong("'requested_size' of a block", f"is {type(asked).__name__}, not int")
    return asked, block.get("frames", first.get("frames"))


def _annotations(raw: Any) -> dict[int, tuple[Annotation, ...]]:
    """Ranges by device: a START and the END of the same name after it, innermost first."""
    where = "'external_annotations'"
    rows = rows_of(raw, where)
    named = zip(
        column(rows, "device", int, where, 0),
        map(cut, column(rows, "name", str, where, "")),
        column(rows, "stage", str, where, ""),
        integers(rows, "time_us", where, 0).tolist(),
        strict=True,
    )
    begun: dict[tuple[int, str], list[int]] = defaultdict(list)
    found: dict[int, list[Annotation]] = defaultdict(list)
    for device, name, stage, time_us in named:
        if stage == "START":
            begun[device, name].append(time_us)
        elif stage == "END":
            starts = begun[device, name]
            found[device].append(Annotation(name, starts.pop() if starts else None, time_us))
    for (device, name), starts in begun.items():
        found[device] += [Annotation(name, start, None) for start in starts]
    return {device: tuple(marks) for device, marks in found.items()}
