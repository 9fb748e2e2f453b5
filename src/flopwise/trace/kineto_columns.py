"""Kineto events, chunk by chunk, into typed columns: one set per table, names as numbers, times as whole nanoseconds.

An event's fields are packed into one binary record as soon as it is decoded, and numpy takes the columns out of thousands
of records at a time: a list per field takes twice as long, and small arrays per chunk leave the memory in pieces.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import polars as pl

from flopwise.trace.growing import Growing, compact
from flopwise.trace.kineto_pairs import BEGIN, END, Pairs
from flopwise.trace.kineto_stream import NO_LIST, Args, Event
from flopwise.trace.kineto_times import (
    LARGEST_DURATION_NS,
    LARGEST_START_NS,
    checked_nanoseconds,
    nanoseconds,
    start_times,
)
from flopwise.trace.op_inputs import NO_INPUTS, Inputs
from flopwise.trace.tables import NO_ID
from flopwise.work.recorded import BETWEEN

# Event categories, as written since PyTorch 1.12; the capitalised ones before.
_TABLE_OF = {
    "kernel": "kernels",
    "Kernel": "kernels",
    "gpu_memcpy": "copies",
    "gpu_memset": "copies",
    "Memcpy": "copies",
    "Memset": "copies",
    "cuda_runtime": "calls",
    "cuda_driver": "calls",
    "hip_runtime": "calls",
    "hip_driver": "calls",
    "xpu_runtime": "calls",
    "Runtime": "calls",
    "cpu_op": "ops",
    "Operator": "ops",
    "user_annotation": "annotations",
    "python_function": "modules",
}
_ARROWS = frozenset("stf")  # from one event to another
ON_GPU = ("kernels", "copies")
_GPU_ARGS = ("device", "stream", "correlation", "graph_node", "bytes")
_ARGS_OF: dict[str, tuple[str, ...]] = {
    "kernels": _GPU_ARGS,
    "copies": _GPU_ARGS,
    "calls": ("correlation",),
    "ops": ("sequence", "forward_thread"),
    "annotations": (),
    "modules": (),
    "frames": (),
}
_MODULE = "nn.Module: "
# Frames of Python that are nobody's training code: torch's, the interpreter's, those that run a step to measure it.
_FOREIGN = re.compile(
    r"(?:^|/)(?:torch|importlib|multiprocessing|flopwise/capture|site-packages|dist-packages|python3\.\d+)/"
    r"|^<|^(?:abc|contextlib|copy|enum|functools|runpy|threading|typing|warnings|weakref)\.py\("
)
_BATCH_BYTES = 2 << 20  # of records, before their columns are taken out
_WHOLE_ARGS = tuple(field.name for field in msgspec.structs.fields(Args) if field.type is int)

Events = list[Event[Any]]
Pack = Callable[..., bytes]


class _Ids(dict[str, int]):
    """The position of each string, in order of first sight."""

    def __missing__(self, text: str) -> int:
        self[text] = position = len(self)
        return position


class Columns:
    """Typed columns per table, grown chunk by chunk; no event outlives its chunk."""

    def __init__(self, exact: bool) -> None:
        self.names = _Ids()
        self.inputs = Inputs()
        self.pairs = Pairs(exact)
        self.events = 0
        self.earliest_ns = LARGEST_START_NS
        self.unusable = 0
        self.incomplete = 0
        self._exact = exact
        self._texts = _Ids()
        self._records = {table: _record(table, exact) for table in _ARGS_OF}
        self._pack: dict[str, Pack] = {table: _format(record).pack for table, record in self._records.items()}
        self._packed: dict[str, list[bytes]] = {table: [] for table in _ARGS_OF}
        self._size = dict.fromkeys(_ARGS_OF, 0)
        self._columns = {table: _growing(table) for table in _ARGS_OF}

    def add(self, events: Events) -> None:
        self.events += len(events)
        by_category: defaultdict[str, Events] = defaultdict(list)
        others: Events = []
        for event in events:
            ph = event.ph
            if ph == "X":
                by_category[event.cat].append(event)
            elif ph not in _ARROWS:
                others.append(event)
        for event in self._whole_ones(others):
            by_category[event.cat].append(event)
        for category, found in by_category.items():
            table = _TABLE_OF.get(category)
            if table == "modules":
                if frames := [event for event in found if ".py(" in event.name and not _FOREIGN.search(event.name)]:
                    self._add("frames", frames)
                found = [event for event in found if event.name.startswith(_MODULE)]
            if table is not None and found:
                self._add(table, found)

    def _whole_ones(self, others: Events) -> Events:
        halves: Events = []
        for event in others:
            if event.ph in (BEGIN, END):
                halves.append(event)
            elif event.cat in _TABLE_OF:
                self.incomplete += 1
        return self.pairs.close(halves) if halves else []

    def _add(self, table: str, events: Events) -> None:
        if self._exact:
            for event, start in zip(events, start_times(events, exact=True).tolist(), strict=True):
                event.ts = start
        try:
            packed = self._joined(table, events)
        except struct.error:  # text for a number, or a number that no column holds
            for event in events:
                self._mend(event)
            packed = self._joined(table, events)
        self._packed[table].append(packed)
        self._size[table] += len(packed)
        if self._size[table] >= _BATCH_BYTES:
            self._unpack(table)

    def _joined(self, table: str, events: Events) -> bytes:
        """One record per event, in the order of `_record`; written out per table, as this is where the time goes."""
        pack, ids = self._pack[table], self.names
        if table in ON_GPU:
            return b"".join(
                [
                    pack(
                        e.ts,
                        e.dur,
                        e.pid,
                        e.tid,
                        ids[e.name],
                        (a := e.args).device,
                        a.stream,
                        a.correlation,
                        a.graph_node,
                        a.bytes,
                    )
                    for e in events
                ]
            )
        if table == "ops":
            inputs, kept, join = self.inputs, self.inputs.kept, BETWEEN.encode().join
            return b"".join(
                [
                    pack(
                        e.ts,
                        e.dur,
                        e.pid,
                        e.tid,
                        ids[e.name],
                        (a := e.args).sequence,
                        a.forward_thread,
                        NO_INPUTS
                        if a.dims is NO_LIST or not kept[e.name]
                        else inputs[join((a.dims, a.types, a.strides, a.values))],
                    )
                    for e in events
                ]
            )
        if table == "calls":
            return b"".join([pack(e.ts, e.dur, e.pid, e.tid, ids[e.name], e.args.correlation) for e in events])
        prefix = len(_MODULE) if table == "modules" else 0
        return b"".join([pack(e.ts, e.dur, e.pid, e.tid, ids[e.name[prefix:]]) for e in events])

    def _mend(self, event: Event[Any]) -> None:
        """Ids and numbers that fit their columns: text becomes a number of its own, a giant becomes 'not given'."""
        event.pid, event.tid = self._id(event.pid), self._id(event.tid)
        giants = [name for name in _WHOLE_ARGS if abs(getattr(event.args, name)) >= 1 << 62]
        if giants:
            event.args = msgspec.structs.replace(event.args, **dict.fromkeys(giants, NO_ID))

    def _id(self, value: int | str) -> int:
        """A thread or process id; one that is not a number gets a number of its own below NO_ID."""
        text = str(value)
        number = int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else None
        return number if number is not None else NO_ID - 1 - self._texts[text]

    def _unpack(self, table: str) -> None:
        """The columns of the records so far; what has no usable time is dropped and counted."""
        packed, self._packed[table], self._size[table] = self._packed[table], [], 0
        rows = np.frombuffer(b"".join(packed), self._records[table])
        start = rows["ts"] if self._exact else checked_nanoseconds(rows["ts"])
        duration = nanoseconds(rows["dur"])
        usable = (start > -LARGEST_START_NS) & (start < LARGEST_START_NS)
        usable &= (duration >= 0) & (duration < LARGEST_DURATION_NS)
        if not usable.all():
            self.unusable += int((~usable).sum())
            rows, start, duration = rows[usable], start[usable], duration[usable]
        self.earliest_ns = min(self.earliest_ns, int(start.min(initial=self.earliest_ns)))
        part = {"start_ns": start, "end_ns": start + duration}
        part |= {name: rows[name] for name in self._records[table].names or () if name not in ("ts", "dur")}
        if table in ON_GPU:  # a device or stream that args do not give is the event's pid or tid
            for column, stand_in in (("device", "process"), ("stream", "thread")):
                part[column] = np.where(rows[column] < 0, rows[stand_in], rows[column])
        for name in ("correlation", "graph_node"):  # they count from 1; writers put 0 where there is none
            if name in part:
                part[name] = np.where(rows[name] > 0, rows[name], NO_ID)
        for name, growing in self._columns[table].items():
            growing.append(part[name])

    def empty(self) -> bool:
        for table, size in self._size.items():
            if size:
                self._unpack(table)
        return not any(len(columns["name"]) for columns in self._columns.values())

    def take(self, table: str) -> pl.DataFrame:
        """Hand over a table, from time zero, sorted by start and, where two start together, the enclosing one first."""
        if self._size[table]:
            self._unpack(table)
        found, self._columns[table] = self._columns[table], _growing(table)
        start, end = (found.pop(name).values() - self.earliest_ns for name in ("start_ns", "end_ns"))
        order = np.lexsort((-end, start))
        columns = {"start_ns": start[order], "end_ns": end[order]}
        del start, end
        for name in list(found):
            columns[name] = found.pop(name).ordered(order)
        return compact(columns)


def _growing(table: str) -> dict[str, Growing]:
    return {name: Growing(np.uint32 if name in ("name", "inputs") else np.int64) for name in _columns(table)}


def _record(table: str, exact: bool) -> np.dtype[np.void]:
    """The binary layout of one event of a table, without gaps."""
    time = "<i8" if exact else "<f8"
    fields = [("ts", time), ("dur", "<f8"), ("process", "<i8"), ("thread", "<i8"), ("name", "<u4")]
    fields += [(name, "<i8") for name in _ARGS_OF[table]]
    return np.dtype(fields + ([("inputs", "<u4")] if table == "ops" else []))


def _format(record: np.dtype[np.void]) -> struct.Struct:
    letters = {"<f8": "d", "<i8": "q", "<u4": "I"}
    return struct.Struct("<" + "".join(letters[field[1]] for field in record.descr))


def _columns(table: str) -> list[str]:
    """What is kept of a record, the times first."""
    host = [] if table in ON_GPU else ["process", "thread"]
    given = [name for name in _ARGS_OF[table] if name != "bytes" or table == "copies"]
    return ["start_ns", "end_ns", "name", *given, *host, *(["inputs"] if table == "ops" else [])]
