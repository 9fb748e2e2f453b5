"""The steps in a trace: by the profiler's marks, by ranges named after steps or phases, or by the period of the kernels."""

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times
from flopwise.trace.phases import FORWARD, is_optimizer_step, is_step, phase_of_range
from flopwise.trace.tables import MODULE, STEP, Trace
from flopwise.work.operation import OPTIMIZER

PROFILER_STEPS, RANGES, PERIOD, WHOLE_TRACE = "profiler steps", "ranges", "period of the kernels", "whole trace"
HOLDING = 0.5  # of the GPU time must be launched inside ranges that only their name makes steps
FEWEST_PERIODS = 2
MATCHING = 0.97  # of the kernels must recur one period later
REPEATING = 0.9  # of the GPU time, whatever occurs rarely included
MOST_CANDIDATES = 200


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """When each step began (on the host's clock), and how that was decided."""

    starts_ns: tuple[int, ...]
    end_ns: int
    how: str  # PROFILER_STEPS, RANGES, PERIOD or WHOLE_TRACE
    marked_ns: tuple[int, int] | None = None  # from the first mark's start to the last one's end, where there are marks
    n_empty: int = 0  # marks without any GPU work: not counted

    def __len__(self) -> int:
        return len(self.starts_ns)

    def of(self, times_ns: Times) -> Times:
        """The number of the step that each time falls in; -1 before the first and after the last."""
        number = np.searchsorted(np.array(self.starts_ns), times_ns, side="right") - 1
        return np.where(times_ns > self.end_ns, -1, number)


def launch_times(work: pl.DataFrame) -> Times:
    """When each piece of work was launched; when it began, where the trace does not say.

    >>> launch_times(pl.DataFrame({"launch_ns": [3, None], "start_ns": [5, 9]}))
    array([3, 9])
    """
    launched: Times = work["launch_ns"].fill_null(work["start_ns"]).to_numpy()
    return launched


def find_steps(trace: Trace, work: pl.DataFrame) -> Steps:
    """`trace` is of one process, `work` an Attribution's rows of one device, by start.

    The profiler's own marks come first, then ranges named as steps ('step 3', 'train_step'), then forward passes.
    """
    annotations = trace.ranges.filter(pl.col("kind") != MODULE)
    named = [number for number, name in enumerate(trace.names) if is_step(name)]
    steps = (
        _marked(trace.ranges.filter(pl.col("kind") == STEP), work, PROFILER_STEPS)
        or _marked(annotations.filter(pl.col("name").is_in(named)), work, RANGES, HOLDING)
        or _by_forward(trace, annotations, work)
    )
    if steps is not None:
        return steps
    end = _last_end(trace)
    if starts := periodic_starts(work, launch_times(work)):
        return Steps(starts_ns=starts, end_ns=end, how=PERIOD)
    return Steps(starts_ns=(0,), end_ns=end, how=WHOLE_TRACE)


def _last_end(trace: Trace) -> int:
    tables = (trace.kernels, trace.copies, trace.graph_runs, trace.ranges, trace.ops)
    return max((int(table["end_ns"].to_numpy().max()) for table in tables if table.height), default=0)


def _marked(ranges: pl.DataFrame, work: pl.DataFrame, how: str, holding: float = 0.0) -> Steps | None:
    """Each range is a step, if work was launched in it: a loop that ends inside the profiler's window leaves an empty one.

    `holding`: the least share of the GPU time launched inside the ranges; a range 'step' may be around the optimizer alone.
    """
    start, end = _outermost(_of_one_thread(ranges, work))
    launched = launch_times(work)
    order = np.argsort(launched, kind="stable")
    first = np.searchsorted(launched[order], start, side="left")
    last = np.searchsorted(launched[order], end, side="right")
    full = np.flatnonzero(last > first)
    if not len(full):
        return None
    spent = np.concatenate(([0], np.cumsum(work["duration_ns"].to_numpy()[order])))
    if int((spent[last] - spent[first]).sum()) < holding * int(spent[-1]):
        return None
    starts, close = tuple(start[full].tolist()), int(end[full[-1]])
    n_empty = len(start) - len(full)
    return Steps(starts_ns=starts, end_ns=close, how=how, marked_ns=(starts[0], close), n_empty=n_empty)


def _by_forward(trace: Trace, annotations: pl.DataFrame, work: pl.DataFrame) -> Steps | None:
    """A step runs from a forward pass to the next; to the next after an optimizer, where one lies after several."""
    phases = [phase_of_range(name) for name in trace.names]
    forward = [number for number, phase in enumerate(phases) if phase == FORWARD]
    start, _ = _outermost(_of_one_thread(annotations.filter(pl.col("name").is_in(forward)), work))
    if not len(start):
        return None
    updates = np.sort(_updates(trace, annotations, work))
    if len(updates):
        before = np.searchsorted(updates, start)
        start = start[np.concatenate(([True], before[1:] > before[:-1]))]
    marks = annotations.filter(pl.col("name").is_in([number for number, phase in enumerate(phases) if phase]))
    marked = int(start[0]), int(marks["end_ns"].to_numpy().max())
    return Steps(starts_ns=tuple(start.tolist()), end_ns=_last_end(trace), how=RANGES, marked_ns=marked)


def _updates(trace: Trace, annotations: pl.DataFrame, work: pl.DataFrame) -> Times:
    """When the optimizer changed the parameters: by its ranges, else by its kernels."""
    named = [number for number, name in enumerate(trace.names) if is_optimizer_step(name)]
    ranges: Times = annotations.filter(pl.col("name").is_in(named))["start_ns"].to_numpy()
    return ranges if len(ranges) else launch_times(work.filter(pl.col("class") == OPTIMIZER))


def _of_one_thread(ranges: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Of the threads that have such ranges, the one that launched most of the work; else the one with most of them."""
    threads = ranges.group_by("thread").len()
    if threads.height < 2:
        return ranges
    calls = work.group_by(pl.col("launch_thread").alias("thread")).agg(calls=pl.len())
    ranked = threads.join(calls, on="thread", how="left").sort("calls", "len", "thread", nulls_last=False)
    return ranges.filter(pl.col("thread") == ranked["thread"][-1])


def _outermost(ranges: pl.DataFrame) -> tuple[Times, Times]:
    """Start and end of the ranges of one thread, by start; one that starts inside another is part of it."""
    ranges = ranges.sort("start_ns", "end_ns", descending=[False, True])
    start, end = (ranges[name].to_numpy() for name in ("start_ns", "end_ns"))
    alone = np.ones(len(start), dtype=bool)
    alone[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    return start[alone], end[alone]


def periodic_starts(work: pl.DataFrame, launched: Times) -> tuple[int, ...]:
    """When each period began on the host; empty if there is none. `work` is sorted by start, `launched` are its launches.

    A model's layers repeat within a step, so a period must explain everything: the rarest kernel bounds the number of steps,
    and one that occurs once (an embedding, a head, an optimizer) means one step. Of the periods that pass, the smallest:
    twice a period is one, too. Copies do not count: a log that is read now and then is not periodic.

    >>> def starts(names):
    ...     times = np.arange(len(names))
    ...     kernels = {"source": "kernel", "name": pl.Series(list(names), dtype=pl.Categorical), "duration_ns": times}
    ...     return periodic_starts(pl.DataFrame(kernels), times)
    >>> starts("embbbhembbbh"), starts("embmbmbmbh")
    ((0, 6), ())
    """
    kernels = np.flatnonzero((work["source"] != "copy").to_numpy())
    names = work["name"].to_physical().to_numpy()[kernels].astype(np.int64)
    duration = work["duration_ns"].to_numpy()[kernels]
    n = len(names)
    if n < 2 * FEWEST_PERIODS:
        return ()
    distinct, counts = np.unique(names, return_counts=True)
    fewest = int(counts.min())
    positions = np.flatnonzero(names == distinct[counts.argmin()])
    near = sorted({int(d) for d in positions[1:] - positions[0] if d <= n // FEWEST_PERIODS})
    for period in near[:MOST_CANDIDATES]:
        if n // period <= fewest and _repeats(names, duration, period):
            begins = np.maximum.accumulate(launched[kernels])[n % period :: period].tolist()
            if n % period == 0:  # all of it is steps, the copy ahead of the first kernel included
                begins[0] = int(launched.min())
            return tuple(begins)
    return ()


def _repeats(names: Times, duration: Times, period: int) -> bool:
    """Whether nearly all kernels, by number and by time, have one of their name a period before or after."""
    same = names[period:] == names[:-period]
    if float(np.mean(same)) < MATCHING:
        return False
    again = np.zeros(len(names), dtype=bool)
    again[period:] |= same
    again[:-period] |= same
    return int(duration[again].sum()) >= REPEATING * int(duration.sum())
