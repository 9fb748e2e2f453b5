"""Kineto events, chunk by chunk, into typed columns: one set per table, names as numbers, times as whole nanoseconds."""

import re
from collections import defaultdict
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise.trace.kineto_stream import Event
from flopwise.trace.tables import NO_ID

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
ON_GPU = ("kernels", "copies")
_GPU_ARGS = ("device", "stream", "correlation", "graph_node")
ARGS_OF: dict[str, tuple[str, ...]] = {
    "kernels": _GPU_ARGS,
    "copies": (*_GPU_ARGS, "bytes"),
    "calls": ("correlation",),
    "ops": ("sequence", "forward_thread"),
    "annotations": (),
    "modules": (),
}
_MODULE = "nn.Module: "

_EXACT_BELOW_US = 2.0**43  # a float of microseconds holds three decimals below 101 days, and not beyond
_LARGEST_START_NS = 1 << 61  # the year 2043 of the Unix epoch; starts and durations below these sum within 64 bits
_LARGEST_DURATION_NS = 1 << 60
_NO_TIME = np.iinfo(np.int64).min

Integers = NDArray[np.int64]


class NeedsExactTimes(Exception):
    """A time is too large for a float of microseconds to hold its nanoseconds: absolute epochs of older writers."""


class _Ids(dict[str, int]):
    """The position of each string, in order of first sight."""

    def __missing__(self, text: str) -> int:
        self[text] = position = len(self)
        return position


class Columns:
    """Typed columns per table, grown chunk by chunk; no event outlives its chunk."""

    def __init__(self, exact: bool) -> None:
        self.names = _Ids()
        self.events = 0
        self.earliest_ns = _LARGEST_START_NS
        self.unusable = 0
        self.incomplete = 0
        self._exact = exact
        self._texts = _Ids()
        self._parts: dict[str, list[dict[str, NDArray[Any]]]] = {table: [] for table in ARGS_OF}

    def add(self, events: list[Event[Any]]) -> None:
        self.events += len(events)
        by_category: defaultdict[str, list[Event[Any]]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        for category, found in by_category.items():
            table = _TABLE_OF.get(category)
            if table is not None:
                complete = [event for event in found if event.ph == "X"]
                self.incomplete += len(found) - len(complete)
                if table == "modules":
                    complete = [event for event in complete if event.name.startswith(_MODULE)]
                if complete:
                    self._add(table, complete)

    def _add(self, table: str, events: list[Event[Any]]) -> None:
        start = self._starts(events)
        duration = _nanoseconds(np.fromiter([event.dur for event in events], np.float64, len(events)))
        ids, prefix = self.names, len(_MODULE) if table == "modules" else 0
        names = [ids[event.name[prefix:]] for event in events] if prefix else [ids[event.name] for event in events]
        part = {"start_ns": start, "end_ns": start + duration, "name": np.fromiter(names, np.uint32, len(events))}
        args = [event.args for event in events]
        part |= {field: _integers(list(map(attrgetter(field), args))) for field in ARGS_OF[table]}
        if table in ON_GPU:
            self._fill(part, "device", events, "pid")
            self._fill(part, "stream", events, "tid")
        else:
            part["process"] = self._ids([event.pid for event in events])
            part["thread"] = self._ids([event.tid for event in events])
        usable = (start > -_LARGEST_START_NS) & (start < _LARGEST_START_NS)
        usable &= (duration >= 0) & (duration < _LARGEST_DURATION_NS)
        if not usable.all():
            self.unusable += int((~usable).sum())
            part = {name: column[usable] for name, column in part.items()}
        self.earliest_ns = min(self.earliest_ns, int(part["start_ns"].min(initial=self.earliest_ns)))
        self._parts[table].append({name: _narrow(column) for name, column in part.items()})

    def _starts(self, events: list[Event[Any]]) -> Integers:
        if self._exact:
            return _exact_nanoseconds([_text(event.ts) for event in events])
        starts = np.fromiter([event.ts for event in events], np.float64, len(events))
        if (np.abs(starts) >= _EXACT_BELOW_US).any():
            raise NeedsExactTimes
        return _nanoseconds(starts)

    def _ids(self, values: list[int | str]) -> Integers:
        """Thread and process ids; one that is not a number gets a number of its own below NO_ID."""
        try:
            return np.fromiter(values, np.int64, len(values))
        except (ValueError, OverflowError, TypeError):
            return np.array([self._id(value) for value in values], np.int64)

    def _id(self, value: int | str) -> int:
        text = str(value)
        number = int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else None
        return number if number is not None else NO_ID - 1 - self._texts[text]

    def _fill(self, part: dict[str, NDArray[Any]], column: str, events: list[Event[Any]], field: str) -> None:
        """A device or stream that args do not give is the event's pid or tid."""
        absent = part[column] < 0
        if absent.any():
            part[column] = np.where(absent, self._ids([getattr(event, field) for event in events]), part[column])

    def empty(self) -> bool:
        return not any(len(part["name"]) for parts in self._parts.values() for part in parts)

    def take(self, table: str) -> pl.DataFrame:
        """Hand over a table, from time zero, sorted by start and, where two start together, the enclosing one first."""
        parts, self._parts[table] = self._parts[table], []
        names = ["start_ns", "end_ns", "name", *ARGS_OF[table], *([] if table in ON_GPU else ["process", "thread"])]
        if not parts:
            return pl.DataFrame(schema=dict.fromkeys(names, pl.Int64) | {"name": pl.UInt32})
        columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in names}
        columns |= {name: _wide(columns[name]) - self.earliest_ns for name in ("start_ns", "end_ns")}
        start, end = columns["start_ns"], columns["end_ns"]
        order = np.lexsort((-end, start))
        return pl.DataFrame({name: _wide(columns.pop(name)[order]) for name in names})


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    """Half the memory while the file is read: ids rarely need 64 bits."""
    narrow = column.astype(np.int32)
    return narrow if column.dtype == np.int64 and (narrow == column).all() else column


def _wide(column: NDArray[Any]) -> NDArray[Any]:
    return column.astype(np.int64) if column.dtype == np.int32 else column


def _nanoseconds(us: NDArray[np.float64]) -> Integers:
    """Exact below 2**43 µs: the whole part and the rounded fraction apart, as their product would not fit a float."""
    usable = np.abs(us) < _LARGEST_START_NS / 1000
    us = np.where(usable, us, 0.0)
    whole = np.floor(us)
    nanoseconds = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    return np.where(usable, nanoseconds, _NO_TIME)


def _exact_nanoseconds(texts: list[str]) -> Integers:
    """From the decimal text of microseconds; further decimals than three are cut."""
    text = pl.Series(texts, dtype=pl.String)
    whole = text.str.extract(r"^(-?\d{1,16})(?:\.\d+)?$", 1).cast(pl.Int64, strict=False)
    fraction = text.str.extract(r"\.(\d+)$", 1).fill_null("0").str.head(3).str.pad_end(3, "0").cast(pl.Int64)
    sign = pl.select(pl.when(text.str.starts_with("-")).then(-1).otherwise(1)).to_series()
    fits = (whole.abs() < _LARGEST_START_NS // 1000).fill_null(False)
    exact = (whole * 1000 + sign * fraction).fill_null(_NO_TIME).to_numpy()
    rounded = _nanoseconds(text.cast(pl.Float64, strict=False).fill_null(float("nan")).to_numpy())
    return np.where(fits.to_numpy(), exact, rounded)


def _text(number: object) -> str:
    return bytes(number).decode("ascii", "replace") if isinstance(number, msgspec.Raw) else ""


def _integers(values: list[int]) -> Integers:
    try:
        return np.fromiter(values, np.int64, len(values))
    except OverflowError:
        return np.array([value if abs(value) < 1 << 62 else NO_ID for value in values], np.int64)
