"""Kineto events, chunk by chunk, into typed columns: one set per table, names as numbers, times as whole nanoseconds.

An event's fields are packed into one binary record as soon as it is decoded, and numpy takes the columns out of thousands
of records at a time: a list per field takes twice as long, and small arrays per chunk leave the memory in pieces.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise.trace.columns import Ints, NumberType, compact, near
from flopwise.trace.kineto_stream import INT_ARGS, NO_ARGS, NO_LIST, Args, Event
from flopwise.trace.op_inputs import NO_INPUTS, Inputs
from flopwise.trace.phases import is_compiler_function
from flopwise.trace.spilled import PIECE_ROWS, GrowingTable, Rows
from flopwise.trace.tables import LONGEST_NS, MAX_NAMES, MAX_NAMES_CHARACTERS, NO_ID, OTHER_NAMES
from flopwise.trace.window import MOST_ROWS, Cut, cut, weight
from flopwise.work.recorded import BETWEEN

# Event categories, as written since PyTorch 1.12; the capitalised ones before.
_CATEGORIES = {
    "kernels": "kernel Kernel",
    "copies": "gpu_memcpy gpu_memset Memcpy Memset",
    "calls": "cuda_runtime cuda_driver hip_runtime hip_driver xpu_runtime Runtime",
    "ops": "cpu_op Operator",
    "annotations": "user_annotation",
    "modules": "python_function",
}
_TABLE_OF = {category: table for table, categories in _CATEGORIES.items() for category in categories.split()}
_ARROWS = frozenset("stf")  # from one event to another
BEGIN, END = "B", "E"
MOST_OPEN = 100_000  # beginnings held at a time: real ones nest tens deep
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
# Python frames that are not the user's training code: torch's, the interpreter's, those that run a step to measure it.
_FOREIGN = re.compile(
    r"(?:^|/)(?:torch|importlib|multiprocessing|flopwise/capture|site-packages|dist-packages|python3\.\d+)/"
    r"|^<|^(?:abc|contextlib|copy|enum|functools|runpy|threading|typing|warnings|weakref)\.py\("
)
_MOST_OTHERS = 1000
_BATCH_BYTES = 2 << 20  # of records, before their columns are taken out
HELD_ROWS = MOST_ROWS  # in memory; beyond, they go to a file

LARGEST_START_NS = 1 << 61  # the year 2043 of the Unix epoch; and sums with durations within 64 bits
NO_START = np.iinfo(np.int64).min
_EXACT_BELOW_US = 2.0**43  # a float of microseconds holds three decimals below 101 days, and not beyond

Events = list[Event[Any]]
Pack = Callable[..., bytes]
_BETWEEN = BETWEEN.encode()


class Numbers(dict[str, int]):
    """The position of each string, in order of first sight; beyond the limits, all are one."""

    characters = folded = 0

    def __missing__(self, text: str) -> int:
        if len(self) >= MAX_NAMES or self.characters + len(text) > MAX_NAMES_CHARACTERS:
            self.folded += 1
            return self.setdefault(OTHER_NAMES, len(self))
        self.characters += len(text)
        self[text] = position = len(self)
        return position


class EventColumns:
    """Typed columns per table, grown chunk by chunk; no event outlives its chunk."""

    def __init__(self, exact: bool) -> None:
        self.names = Numbers()
        self.inputs = Inputs()
        self.pairs = EventPairs(exact)
        self.events = 0
        self.python_calls = 0
        self.earliest_ns, self._latest_ns = LARGEST_START_NS, -LARGEST_START_NS
        self.unusable = 0
        self.incomplete = 0
        self.others: set[str] = set()  # categories that are not read
        self.exact = exact
        self._texts = Numbers()
        self._records = {table: _record(table, exact) for table in _ARGS_OF}
        self._pack: dict[str, Pack] = {table: _format(record).pack for table, record in self._records.items()}
        self._packed: dict[str, list[bytes]] = {table: [] for table in _ARGS_OF}
        self._size = dict.fromkeys(_ARGS_OF, 0)
        self._tables = {table: GrowingTable(_types(table)) for table in _ARGS_OF}

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
        for event in self._joined_halves(others) if others else ():
            by_category[event.cat].append(event)
        for category, alike in by_category.items():
            table = _TABLE_OF.get(category)
            if table == "modules":
                self.python_calls += len(alike)
                self._add("frames", [e for e in alike if ".py(" in e.name and _is_kept(e.name)])
                alike = [event for event in alike if event.name.startswith(_MODULE)]
            if table is not None:
                self._add(table, alike)
            elif len(self.others) < _MOST_OTHERS:
                self.others.add(category)

    def _joined_halves(self, events: Events) -> Events:
        halves = [event for event in events if event.ph in (BEGIN, END)]
        self.incomplete += sum(event.cat in _TABLE_OF for event in events if event.ph not in (BEGIN, END))
        return self.pairs.close(halves)

    def _add(self, table: str, events: Events) -> None:
        if not events:
            return
        if self.exact:
            for event, start in zip(events, start_times(events, exact=True).tolist(), strict=True):
                event.ts = start
        try:
            packed = self._joined(table, events)
        except struct.error:  # text for a number, or a number that no column holds
            for event in events:
                self._make_fit(event)
            packed = self._joined(table, events)
        self._packed[table].append(packed)
        self._size[table] += len(packed)
        if self._size[table] >= _BATCH_BYTES:
            self._unpack(table)

    def _joined(self, table: str, events: Events) -> bytes:
        """One record per event, in the order of `_record`; written out per table, as this is where the time goes."""
        pack, ids = self._pack[table], self.names
        if table in ON_GPU:
            records = [
                pack(e.ts, e.dur, e.pid, e.tid, ids[e.name], a.device, a.stream, a.correlation, a.graph_node, a.bytes)
                for e in events
                for a in (e.args,)
            ]
        elif table == "ops":
            number = self._inputs_number
            records = [
                pack(e.ts, e.dur, e.pid, e.tid, ids[e.name], a.sequence, a.forward_thread, given)
                for e in events
                for a in (e.args,)
                for given in (NO_INPUTS if a.dims is NO_LIST else number(e.name, a),)
            ]
        elif table == "calls":
            records = [pack(e.ts, e.dur, e.pid, e.tid, ids[e.name], e.args.correlation) for e in events]
        else:
            prefix = len(_MODULE) if table == "modules" else 0
            records = [pack(e.ts, e.dur, e.pid, e.tid, ids[e.name[prefix:]]) for e in events]
        return b"".join(records)

    def _inputs_number(self, op: str, args: Args) -> int:
        if not self.inputs.kept[op]:
            return NO_INPUTS
        return self.inputs[_BETWEEN.join((args.dims, args.types, args.strides, args.values))]

    def _make_fit(self, event: Event[Any]) -> None:
        """Ids and numbers that fit their columns: text becomes a number of its own, a giant becomes 'not given'."""
        event.pid, event.tid = self._id(event.pid), self._id(event.tid)
        giants = [name for name, _, _ in INT_ARGS if abs(getattr(event.args, name)) >= 1 << 62]
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
        start = rows["ts"] if self.exact else checked_nanoseconds(rows["ts"])
        duration = nanoseconds(rows["dur"])
        usable = (start > -LARGEST_START_NS) & (start < LARGEST_START_NS)
        usable &= (duration >= 0) & (duration < LONGEST_NS)
        if not usable.all():
            self.unusable += int((~usable).sum())
            rows, start, duration = rows[usable], start[usable], duration[usable]
        self.earliest_ns = int(start.min(initial=self.earliest_ns))
        self._latest_ns = int(start.max(initial=self._latest_ns))
        part = {"start_ns": start, "end_ns": start + duration}
        part |= {name: rows[name] for name in self._records[table].names or () if name not in ("ts", "dur")}
        if table in ON_GPU:  # a device or stream that args do not give is the event's pid or tid
            for column, stand_in in (("device", "process"), ("stream", "thread")):
                part[column] = np.where(rows[column] < 0, rows[stand_in], rows[column])
        for name in ("correlation", "graph_node"):  # they count from 1; writers put 0 where there is none
            if name in part:
                part[name] = np.where(rows[name] > 0, rows[name], NO_ID)
        self._tables[table].append(part)
        if self._tables[table].held >= PIECE_ROWS and weight(self._tables) > HELD_ROWS:
            self._tables[table].spill()

    def count(self, table: str) -> int:
        """Rows of a table so far."""
        return self._size[table] // self._records[table].itemsize + len(self._tables[table])

    def rows(self) -> int:
        """Usable events of all tables so far."""
        for table, size in self._size.items():
            if size:
                self._unpack(table)
        return sum(map(len, self._tables.values()))

    def cut(self, path: Path) -> Cut | None:
        """Of a trace that is too long to be explained at once, keep whole steps from its middle."""
        kept = None
        if self.rows() and weight(self._tables) > MOST_ROWS:
            kept = cut(self._tables, list(self.names), str(path))
            self.python_calls = round(self.python_calls * kept.share)
            self.earliest_ns = kept.window.low_ns
        self._drop_strays()
        return kept

    def _drop_strays(self) -> None:
        """Events of another year than the others: a clock that was not set, or a time that is damaged."""
        if self._latest_ns - self.earliest_ns < LONGEST_NS:
            return
        starts = [rows["start_ns"] for table in self._tables.values() for rows in table.pieces("start_ns")]
        if (usual := near(starts)) is None:
            return
        before = self.rows()
        for table in self._tables.values():
            table.keep(lambda rows: _between(rows, *usual), len(table))
        self.unusable += before - self.rows()
        starts = [rows["start_ns"] for table in self._tables.values() for rows in table.pieces("start_ns")]
        self.earliest_ns = min(int(some.min()) for some in starts)

    def take(self, table: str) -> pl.DataFrame:
        """Hand over a table, from time zero, sorted by start and, where two start together, the enclosing one first."""
        if self._size[table]:
            self._unpack(table)
        growing, self._tables[table] = self._tables[table], GrowingTable(_types(table))
        start, end = (growing.pop(name) - self.earliest_ns for name in ("start_ns", "end_ns"))
        order = np.lexsort((-end, start))
        columns = {"start_ns": start[order], "end_ns": end[order]}
        del start, end
        for name in _columns(table)[2:]:
            columns[name] = growing.pop(name, order)
        return compact(columns)


def _between(rows: Rows, low_ns: int, high_ns: int) -> Rows:
    chosen = (rows["start_ns"] >= low_ns) & (rows["start_ns"] <= high_ns)
    return {name: values[chosen] for name, values in rows.items()}


def _is_kept(function: str) -> bool:
    """Whether a Python function is the user's own, or the compiler at work."""
    return not _FOREIGN.search(function) or is_compiler_function(function)


def _types(table: str) -> dict[str, NumberType]:
    return {name: np.uint32 if name in ("name", "inputs") else np.int64 for name in _columns(table)}


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


class EventPairs:
    """Joins events written as a beginning (`ph: "B"`) and an end (`ph: "E"`) into whole ones, while chunks pass by.

    As in Chrome, an end closes the last beginning that is still open on its (pid, tid), whatever the end is called. PyTorch
    writes whole events; other writers of the format, and tools that cut or merge traces, do not.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._open: defaultdict[tuple[int | str, int | str], Events] = defaultdict(list)
        self._n_open = 0
        self._unpaired = 0

    def close(self, halves: Events) -> Events:
        """The events that end among these halves, which come in the file's order, as whole ones."""
        pairs: list[tuple[Event[Any], Event[Any]]] = []
        for half in halves:
            waiting = self._open[half.pid, half.tid]
            if half.ph == BEGIN and self._n_open < MOST_OPEN:
                waiting.append(half)
                self._n_open += 1
            elif half.ph == END and waiting:
                pairs.append((waiting.pop(), half))
                self._n_open -= 1
            else:
                self._unpaired += 1
            if not waiting:
                del self._open[half.pid, half.tid]
        return self._joined(pairs) if pairs else []

    @property
    def unpaired(self) -> int:
        """Ends without a beginning, and beginnings without an end so far."""
        return self._unpaired + self._n_open

    def _joined(self, pairs: list[tuple[Event[Any], Event[Any]]]) -> Events:
        """Durations are taken between whole nanoseconds: those of two floats of microseconds can be one off."""
        starts = start_times([begin for begin, _ in pairs], self._exact)
        ends = start_times([end for _, end in pairs], self._exact)
        known = (starts != NO_START) & (ends != NO_START)
        durations = np.where(known, np.where(known, ends, 0) - np.where(known, starts, 0), -1) / 1000
        for (begin, end), duration in zip(pairs, durations.tolist(), strict=True):
            begin.ph, begin.dur = "X", duration
            if begin.args is NO_ARGS:  # which half carries them is the writer's choice
                begin.args = end.args
        return [begin for begin, _ in pairs]


class NeedsExactTimes(Exception):
    """A time is too large for a float of microseconds to hold its nanoseconds: absolute epochs of older writers."""


def start_times(events: Events, exact: bool) -> Ints:
    """When events begin; NO_START where they do not say. `exact`: from the numbers' own text."""
    if exact:
        return _exact_nanoseconds([_text(event.ts) for event in events])
    return checked_nanoseconds(np.fromiter([event.ts for event in events], np.float64, len(events)))


def checked_nanoseconds(us: NDArray[np.float64]) -> Ints:
    """Nanoseconds, unless a float is too coarse for them."""
    if (np.abs(us) >= _EXACT_BELOW_US).any():
        raise NeedsExactTimes
    return nanoseconds(us)


def nanoseconds(us: NDArray[np.float64]) -> Ints:
    """Exact below 2**43 µs: the whole part and the rounded fraction apart, as their product would not fit a float.

    >>> nanoseconds(np.array([3845976557080.535]))
    array([3845976557080535])
    """
    usable = np.abs(us) < LARGEST_START_NS / 1000
    us = np.where(usable, us, 0.0)
    whole = np.floor(us)
    exact = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    return np.where(usable, exact, NO_START)


def _exact_nanoseconds(texts: list[str]) -> Ints:
    """From the decimal text of microseconds; further decimals than three are cut."""
    text = pl.Series(texts, dtype=pl.String)
    whole = text.str.extract(r"^(-?\d{1,16})(?:\.\d+)?$", 1).cast(pl.Int64, strict=False)
    fraction = text.str.extract(r"\.(\d+)$", 1).fill_null("0").str.head(3).str.pad_end(3, "0").cast(pl.Int64)
    sign = pl.select(pl.when(text.str.starts_with("-")).then(-1).otherwise(1)).to_series()
    fits = (whole.abs() < LARGEST_START_NS // 1000).fill_null(False)
    exact = (whole * 1000 + sign * fraction).fill_null(NO_START).to_numpy()
    rounded = nanoseconds(text.cast(pl.Float64, strict=False).fill_null(float("nan")).to_numpy())
    return np.where(fits.to_numpy(), exact, rounded)


def _text(number: object) -> str:
    return bytes(number).decode("ascii", "replace") if isinstance(number, msgspec.Raw) else ""
