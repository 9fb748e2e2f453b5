"""The steps in a trace: by marks, by ranges named after steps or phases, by the optimizer, or by the period of the kernels."""

from collections.abc import Iterator

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis import step_marks as marks
from flopwise.analysis.intervals import Times
from flopwise.analysis.periods import periodic_starts
from flopwise.analysis.step_marks import Marks
from flopwise.trace.tables import Trace

PROFILER_STEPS, RANGES, PERIOD, WHOLE_TRACE = "profiler steps", "ranges", "period of the kernels", "whole trace"
ITERATIONS, UPDATES, LOADER = "iterations of the server", "optimizer steps", "fetched batches"
FUNCTIONS, CALLS = "Python functions", "calls of the model"
HOLDING = 0.5  # of the GPU time must be launched inside ranges that only their name makes steps
BEFORE = -1  # launched before the trace began
_MOSTLY_KNOWN = 0.5  # of the GPU time must have a launch in the trace, for the rest to be called launched before it


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """When each step began (on the host's clock), and how that was decided."""

    starts_ns: tuple[int, ...]
    end_ns: int
    how: str  # PROFILER_STEPS, RANGES, … or WHOLE_TRACE
    marked_ns: tuple[int, int] | None = None  # from the first mark's start to the last one's end, where there are marks
    n_empty: int = 0  # marks without any GPU work: not counted
    names: tuple[str, ...] = ()  # of the marks, where they have any

    def __len__(self) -> int:
        return len(self.starts_ns)

    def of(self, times_ns: Times) -> Times:
        """The number of the step that each time falls in; -1 before the first and after the last."""
        number = np.searchsorted(np.array(self.starts_ns), times_ns, side="right") - 1
        return np.where(times_ns > self.end_ns, -1, number)

    def part(self, first: int, last: int) -> "Steps":
        """The steps from `first` to before `last`; what is launched between two marks belongs to the first of them."""
        if (first, last) == (0, len(self)):
            return self
        starts, ends_here = self.starts_ns[first:last], last == len(self)
        closed = self.end_ns if ends_here else self.starts_ns[last] - 1
        marked = None
        if self.marked_ns is not None:
            marked = (starts[0], self.marked_ns[1] if ends_here else closed)
        names = self.names[first:last]
        return msgspec.structs.replace(self, starts_ns=starts, end_ns=closed, marked_ns=marked, names=names)


def launch_times(work: pl.DataFrame) -> Times:
    """When each piece of work was launched; `work` is by start.

    Where the trace does not say: with the piece before it on its stream, whose work runs in the order of the launches. What
    has none before it was launched before the trace began (BEFORE). When it began, in a trace that knows few launches.

    >>> columns = {"stream": [7, 7, 7, 9], "start_ns": [1, 5, 9, 10], "duration_ns": 1}
    >>> launch_times(pl.DataFrame(columns | {"launch_ns": [None, 3, None, 4]}))
    array([-1,  3,  3,  4])
    >>> launch_times(pl.DataFrame(columns | {"launch_ns": [None, None, None, 4]}))
    array([ 1,  5,  9, 10])
    """
    launch, start = work["launch_ns"], work["start_ns"]
    if not launch.null_count():
        return launch.to_numpy()
    known, spent = launch.is_not_null(), work["duration_ns"]
    if int(spent.filter(known).sum()) < _MOSTLY_KNOWN * int(spent.sum()) or not known.any():
        return start.to_numpy()
    first = int(launch.min())  # type: ignore[arg-type]  # some are known
    streams = pl.col("launch_ns").is_not_null().any().over("stream")
    alone = pl.when(streams | (pl.col("start_ns") < first)).then(BEFORE).otherwise(pl.col("start_ns"))
    filled = work.select(pl.col("launch_ns").forward_fill().over("stream").fill_null(alone).alias("launch_ns"))
    return filled["launch_ns"].to_numpy()


def find_steps(trace: Trace, work: pl.DataFrame) -> Steps:
    """`trace` is of one process, `work` an Attribution's rows of one device, by start.

    Steps in a range 'warm-up' count only where there are no others.
    """
    measured = marks.after_warm_up(trace, work)
    steps = (_by_marks(*measured) if measured is not None else None) or _by_marks(trace, work)
    if steps is not None:
        return steps
    end = last_end(trace)
    starts = periodic_starts(work, launch_times(work), trace.syncs["end_ns"].to_numpy())
    if starts and not marks.in_one_call(trace, np.array(starts)):
        return Steps(starts_ns=starts, end_ns=end, how=PERIOD)
    return Steps(starts_ns=(0,), end_ns=end, how=WHOLE_TRACE)


def _by_marks(trace: Trace, work: pl.DataFrame) -> Steps | None:
    """The profiler's own marks come first; a single one around several iterations or optimizer steps says less than these."""
    launched = launch_times(work)
    held = (_held(marked, work, launched, how, holding) for marked, how, holding in _marked(trace, work))
    found = (one for one in held if one is not None)
    steps = next(found, None)
    if steps is not None and steps.how == PROFILER_STEPS and len(steps) == 1:
        finer = next((one for one in found if one.how in (ITERATIONS, UPDATES)), None)
        if finer is not None and len(finer) > 1 and marks.same_name(finer.names):
            return finer
    return steps


def _marked(trace: Trace, work: pl.DataFrame) -> Iterator[tuple[Marks | None, str, float]]:
    """Marks of every kind that the trace may have, the surest first, and how much of the GPU time they must hold."""
    yield marks.profiler_steps(trace, work), PROFILER_STEPS, 0.0
    yield marks.iterations(trace, work), ITERATIONS, HOLDING
    yield marks.named_steps(trace, work), RANGES, HOLDING
    yield marks.forward_passes(trace, work), RANGES, 0.0
    yield marks.updates(trace, work), UPDATES, HOLDING
    yield marks.fetched_batches(trace, work), LOADER, HOLDING
    yield marks.alike_ranges(trace, work), RANGES, marks.ALL
    yield marks.functions(trace, work), FUNCTIONS, HOLDING
    yield marks.model_calls(trace, work), CALLS, HOLDING


def _held(marked: Marks | None, work: pl.DataFrame, launched: Times, how: str, holding: float) -> Steps | None:
    """Each mark is a step, if work was launched in it: a loop that ends inside the profiler's window leaves an empty one.

    `holding`: the least share of the GPU time launched inside the marks; a range 'step' may be around the optimizer alone.
    """
    if marked is None or not len(marked.start):
        return None
    start, end = marked.start, marked.end
    order = np.argsort(launched, kind="stable")
    first = np.searchsorted(launched[order], start, side="left")
    last = np.searchsorted(launched[order], end, side="right")
    full = np.flatnonzero(last > first)
    if not len(full):
        return None
    spent = np.concatenate(([0], np.cumsum(work["duration_ns"].to_numpy()[order])))
    here = int(spent[-1]) - int(spent[np.searchsorted(launched[order], 0)])
    if int((spent[last] - spent[first]).sum()) < holding * here:
        return None
    starts, close = tuple(start[full].tolist()), int(end[full[-1]])
    names = tuple(marked.names[place] for place in full.tolist())
    n_empty = len(start) - len(full)
    closed = close if marked.closed is None else marked.closed
    return Steps(starts_ns=starts, end_ns=close, how=how, marked_ns=(starts[0], closed), n_empty=n_empty, names=names)


def last_end(trace: Trace) -> int:
    """The end of the last event."""
    tables = (trace.kernels, trace.copies, trace.graph_runs, trace.ranges, trace.ops)
    return max((int(table["end_ns"].to_numpy().max()) for table in tables if table.height), default=0)
