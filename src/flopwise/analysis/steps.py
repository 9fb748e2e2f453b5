"""The steps in a trace: by the profiler's own marks, by the ranges of their phases, or by the period of the kernels."""

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times
from flopwise.trace.phases import FORWARD, phase_of_range
from flopwise.trace.tables import Trace

FEWEST_PERIODS = 2
MATCHING = 0.97  # of the kernels must come again one period later
MOST_CANDIDATES = 200


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """When each step began (on the host's clock), and how that was found."""

    starts_ns: tuple[int, ...]
    end_ns: int
    how: str  # 'profiler steps', 'ranges', 'period of the kernels', or 'whole trace'

    def __len__(self) -> int:
        return len(self.starts_ns)

    def of(self, times_ns: Times) -> Times:
        """The number of the step that each time falls in; -1 before the first and after the last."""
        number = np.searchsorted(np.array(self.starts_ns), times_ns, side="right") - 1
        return np.where(times_ns > self.end_ns, -1, number)


def find_steps(trace: Trace, work: pl.DataFrame) -> Steps:
    """`work` is an Attribution's table: what ran on the GPU, by start."""
    end = max((_last_end(table) for table in (trace.kernels, trace.ranges, trace.ops)), default=0)
    marked = trace.ranges.filter(pl.col("kind") == "step").sort("start_ns")
    if marked.height:
        return Steps(starts_ns=tuple(marked["start_ns"]), end_ns=_last_end(marked), how="profiler steps")
    if starts := _forward_starts(trace):
        return Steps(starts_ns=starts, end_ns=end, how="ranges")
    if starts := _periodic_starts(work):
        return Steps(starts_ns=starts, end_ns=end, how="period of the kernels")
    return Steps(starts_ns=(0,), end_ns=end, how="whole trace")


def _last_end(table: pl.DataFrame) -> int:
    return int(table["end_ns"].to_numpy().max()) if table.height else 0


def _forward_starts(trace: Trace) -> tuple[int, ...]:
    """Where ranges named like a forward pass begin, on the thread that has most of them; one inside another counts once."""
    forward = [i for i, name in enumerate(trace.names) if phase_of_range(name) == FORWARD]
    ranges = trace.ranges.filter(pl.col("name").is_in(forward))
    if not ranges.height:
        return ()
    thread = ranges.group_by("thread").len().sort("len", "thread", descending=True)["thread"][0]
    starts: list[int] = []
    reach = -1
    for start, end in (
        ranges.filter(pl.col("thread") == thread).sort("start_ns").select("start_ns", "end_ns").iter_rows()
    ):
        if start >= reach:
            starts.append(start)
        reach = max(reach, end)
    return tuple(starts)


def _periodic_starts(work: pl.DataFrame) -> tuple[int, ...]:
    """The smallest period after which (nearly) every kernel comes again; candidates are the distances between two of one name."""
    names = work["name"].to_physical().to_numpy().astype(np.int64)
    n = len(names)
    if n < 2 * FEWEST_PERIODS:
        return ()
    rarest = work.group_by("name").len().filter(pl.col("len") >= FEWEST_PERIODS).sort("len")
    if not rarest.height:
        return ()
    positions = np.flatnonzero((work["name"] == rarest["name"][0]).to_numpy())
    for period in sorted({int(d) for d in positions[1:] - positions[0] if d <= n // FEWEST_PERIODS})[:MOST_CANDIDATES]:
        if float(np.mean(names[period:] == names[:-period])) >= MATCHING:
            begins = work["launch_ns"].fill_null(strategy="backward").fill_null(0)
            return tuple(int(begins[i]) for i in range(n % period, n, period))
    return ()
