"""A device's work, and the gaps in it with the calls that ended them."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times, gaps
from flopwise.trace.columns import first_rows
from flopwise.trace.tables import Trace

LONGEST_PAUSE_NS = 1_000_000  # between two pieces of work that are queued: a longer one has a reason that is not shown


@dataclass(frozen=True)
class Gaps:
    """When a device had no work, and the call that launched what came next; -1 where that is not known."""

    start: Times
    end: Times
    launch_start: Times
    launch_end: Times
    thread: Times

    @property
    def host(self) -> Times:
        """How much of each passed until the launch had returned."""
        host: Times = np.clip(np.minimum(self.launch_end, self.end) - self.start, 0, None)
        return host

    @property
    def queued(self) -> Times:
        """How much of each passed with the next piece in the queue."""
        return self.end - self.start - self.host


def gpu_work(trace: Trace, device: int | None = None) -> pl.DataFrame:
    """Kernels, copies and whole graphs of a device (of all, if None): when, and by which call."""
    columns = ["start_ns", "end_ns", "process", "device", "stream", "correlation"]
    tables = [table.select(columns) for table in (trace.kernels, trace.copies, trace.graph_runs)]
    if device is not None:
        tables = [table.filter(pl.col("device") == device) for table in tables]
    filled = [table for table in tables if table.height] or tables[:1]
    return filled[0] if len(filled) == 1 else pl.concat(filled).sort("start_ns", maintain_order=True)


def gpu_gaps(trace: Trace, low: int, high: int, device: int) -> Gaps:
    """The gaps of a device between `low` and `high`. Only the work that ends one is looked up: a busy trace has few."""
    work = gpu_work(trace, device)
    start, end = gaps(work["start_ns"].to_numpy(), work["end_ns"].to_numpy(), low, high)
    at = np.searchsorted(work["start_ns"].to_numpy(), end, side="left")
    begun = np.flatnonzero(at < work.height)

    def of_calls(name: str) -> Times:
        return np.concatenate([table[name].to_numpy() for table in (trace.launches, trace.graph_launches)])

    correlation = of_calls("correlation")
    known = np.flatnonzero(correlation > 0)
    wanted = (work["process"].to_numpy()[at[begun]], work["correlation"].to_numpy()[at[begun]])
    row = first_rows(wanted, (of_calls("process")[known], correlation[known]))
    launched, row = begun[row >= 0], known[row[row >= 0]]

    def column(name: str) -> Times:
        values = np.full(len(end), -1, dtype=np.int64)
        values[launched] = of_calls(name)[row]
        return values

    return Gaps(start, end, column("start_ns"), column("end_ns"), column("thread"))
