"""Functions, ranges, ops and calls of the host that last, and whether anything is launched in them."""

from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.analysis.host_activity import Spans, host_calls, slow_launches, span_times
from flopwise.analysis.intervals import Times, covered_within
from flopwise.trace.nesting import Nesting
from flopwise.trace.tables import STEP, Trace

_LEAST_SPAN_NS = 20_000  # shorter functions and ops are part of what called them

Flags = npt.NDArray[np.bool_]


class HostSpans:
    """The spans of every thread; marks of steps are none."""

    def __init__(self, trace: Trace) -> None:
        columns = ["start_ns", "end_ns", "thread", "name"]
        lasting = pl.col("end_ns") - pl.col("start_ns") >= _LEAST_SPAN_NS
        ranges = trace.ranges.filter(pl.col("kind") != STEP)
        tables = (trace.ops, trace.frames, ranges, trace.calls, slow_launches(trace))
        kept = [table.filter(lasting).select(columns) for table in tables]
        table = pl.concat(kept)
        self.names = trace.names
        self.start, self.end = span_times(table)
        self.thread: Times = table["thread"].to_numpy()
        self.name: npt.NDArray[np.uint32] = table["name"].to_numpy()
        self.is_op: Flags = np.arange(table.height) < kept[0].height
        launches = np.sort(host_calls(trace)["start_ns"].to_numpy())
        # By any thread: while a backward pass runs, the thread that asked for it does nothing.
        self.launches: Flags = np.searchsorted(launches, self.end) > np.searchsorted(launches, self.start)

    @cached_property
    def threads(self) -> Times:
        """The threads in order: a thread's place is its lane in the nesting."""
        return np.unique(self.thread)

    @cached_property
    def nesting(self) -> Nesting:
        return Nesting(np.searchsorted(self.threads, self.thread), self.start, self.end)

    def lanes(self, threads: Times) -> Times:
        """-1 for a thread without spans."""
        lane = np.minimum(np.searchsorted(self.threads, threads), max(len(self.threads) - 1, 0))
        known = self.threads[lane] == threads if len(self.threads) else np.zeros(len(threads), dtype=bool)
        return np.where(known, lane, -1)

    def near(self, thread: int, times: Spans) -> Flags:
        """The spans of a thread that overlap any of the times."""
        near: Flags = (self.thread == thread) & (covered_within(self.start, self.end, *times) > 0)
        return near

    def named(self, table: pl.DataFrame) -> Flags:
        """The spans that have the name of a row of the table."""
        return np.isin(self.name, table["name"].unique().to_numpy())

    def text(self, place: int) -> str:
        """The name at a place of the nesting, '' at -1."""
        return "" if place < 0 else self.names[int(self.name[self.nesting.order[place]])]
