"""The step without its profiler: the traced host made faster by what the profiler cost it, and the GPU's queue replayed.

The GPU's work and its pauses between queued kernels are taken as they were traced. A kernel begins when it has been launched
and the one before it has ended. The host waits for the GPU where it waited in the trace, in synchronisations and where the
queue was full; all else that it does is its own work, and gets shorter by the profiler's cost.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.analysis.gpu_gaps import gpu_work
from flopwise.analysis.host_activity import held_up_calls, host_calls, waits
from flopwise.analysis.intervals import Times, counted_once, covered_within
from flopwise.analysis.profiler_cost import COSTS, NO_COST, CostRange, ProfilerCost, unit_ns
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.records.untraced import UntracedStep
from flopwise.trace.columns import first_rows
from flopwise.trace.tables import Trace

LAUNCH_QUEUE = 1000  # launches, about: a host this far ahead of the GPU has to wait
_BLOCK = 1 << 17
_LEAST_LEFT = 0.2  # of any stretch of the host's time: more than the rest was never the profiler's. Judgement

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HostTimeline:
    """What the host did in the steps, by its own clock, which stands still while the host waits for the GPU."""

    unit_ns: float
    recorded: Floats  # by that clock: when each op, range and call was recorded
    python_calls: float  # per nanosecond of it
    launch: Floats  # launches in their order: the call
    ready: Floats  # the first instant at which the GPU could begin the work
    work: Floats  # of the GPU, with its own pauses
    wait: Floats  # when each wait began …
    wait_before: Times  # … the launch that it came before
    wait_for: Times  # … and the launch whose work it waited for
    gpu_free: float  # when the GPU had done what came before the steps; no time where that is not known
    closed: float  # the end of the last step's mark, where there is one
    marked: bool
    end: float

    @cached_property
    def events_before(self) -> tuple[Times, Times, Times, Times]:
        """How many events were recorded by each launch, each ready and each wait; and by `closed` and `end`."""
        times = (self.launch, self.ready, self.wait, np.array([self.closed, self.end]))
        launch, ready, wait, ends = (np.searchsorted(self.recorded, time, side="right") for time in times)
        return launch, ready, wait, ends


def estimate(part: TracedSteps, costs: CostRange | None = None) -> UntracedStep | None:
    """The step without the profiler; None where the trace does not show the host's calls."""
    costs = costs or COSTS.get(part.trace.source)
    host = host_timeline(part)
    if host is None or costs is None:
        return None
    n, window, busy = len(part.steps), part.high_ns - part.low_ns, part.high_ns - part.low_ns - part.idle.total_ns
    as_traced, _ = replay(host, NO_COST)
    # What the replay leaves out of the traced step (work on several streams at once) it leaves out of both.
    found = [replay(host, cost) for cost in (costs.most, costs.likely, costs.least)]
    low, likely, high = (min(window, max(busy, window - (as_traced - ns))) / n for ns, _ in found)
    return UntracedStep(ns=likely, low_ns=low, high_ns=high, host_left=found[1][1])


def replay(host: HostTimeline, cost: ProfilerCost) -> tuple[float, float]:
    """Nanoseconds of all steps if the profiler had not cost the host that much; and what is left of the host's own time.

    Launches are taken as many at a time as the queue holds: when it took each, the work before these has decided.
    """
    launch, ready, wait, closed, end = host_without(host, cost)
    done = np.full(
        LAUNCH_QUEUE + len(launch), -inf
    )  # of each launch's work, so many places later: when the queue took it
    waited, gpu, at = 0.0, host.gpu_free, 0
    for before, target, began in _until_waits(host, wait):
        while at < before:
            to = min(before, at + LAUNCH_QUEUE)
            held = np.maximum.accumulate(np.maximum(done[at:to] - launch[at:to], waited))
            through = np.cumsum(host.work[at:to])
            begun = np.maximum.accumulate(np.maximum(ready[at:to] + held - (through - host.work[at:to]), gpu))
            done[LAUNCH_QUEUE + at : LAUNCH_QUEUE + to] = begun + through
            waited, gpu, at = float(held[-1]), float(done[LAUNCH_QUEUE + to - 1]), to
        waited = max(waited, float(done[target + LAUNCH_QUEUE]) - began)
    whole = max(gpu, closed + waited) - host.gpu_free if host.marked else gpu - float(ready[0])
    return whole, end / host.end if host.end else 1.0


def _until_waits(host: HostTimeline, wait: Floats) -> Iterator[tuple[int, int, float]]:
    """Of each wait the launch it came before, the one it waited for, and when it began; at last all launches, and no wait."""
    yield from zip(host.wait_before.tolist(), host.wait_for.tolist(), wait.tolist(), strict=True)
    yield len(host.launch), -LAUNCH_QUEUE, 0.0


def host_without(host: HostTimeline, cost: ProfilerCost) -> tuple[Floats, Floats, Floats, float, float]:
    """When the host launched, was ready, waited and ended, by its own clock without the profiler's cost.

    The cost of an event is taken from the time after it began; what that cannot give, the time after it gives.
    """
    stacks = min(1 - _LEAST_LEFT, host.python_calls * cost.python_call * host.unit_ns)
    takes = 1 - _LEAST_LEFT - stacks  # of the time that passes
    asked = cost.event * host.unit_ns
    before = asked * np.arange(len(host.recorded)) - takes * host.recorded
    least = np.minimum.accumulate(np.concatenate(([0.0], before)))

    def without(time: Floats, n: Times) -> Floats:
        taken = np.minimum(asked * n, takes * time + least[n])
        left: Floats = time * (1 - stacks) - np.where(n > 0, np.maximum(taken, 0.0), 0.0)
        return left

    by_launch, by_ready, by_wait, by_ends = host.events_before
    closed, end = without(np.array([host.closed, host.end]), by_ends).tolist()
    launch, ready = without(host.launch, by_launch), without(host.ready, by_ready)
    return launch, ready, without(host.wait, by_wait), closed, end


def host_timeline(part: TracedSteps) -> HostTimeline | None:
    """None where no launch in the steps is known."""
    trace, marked = part.trace, part.steps.marked_ns is not None
    work = gpu_work(trace, part.device)
    start = work["start_ns"].to_numpy()
    work = work.filter((start >= part.low_ns) & (start < part.high_ns))
    calls = host_calls(trace)
    row = _call_of(work, calls)
    if not (row >= 0).any():
        return None
    pieces = _pieces(work, calls, row, part.low_ns)
    zero = min(part.low_ns, int(pieces.launch.min()))
    threads = calls["thread"].gather(row[row >= 0]).unique()
    mine = pl.col("thread").is_in(threads.implode()), pl.col("start_ns") >= zero, pl.col("start_ns") < part.high_ns
    wait_start, wait_end, wait_for = _waiting(trace, calls, pieces, mine)
    ended = wait_start + np.clip(
        np.where(wait_for >= 0, pieces.done[wait_for], 0) - wait_start, 0, wait_end - wait_start
    )

    def own(time: Times) -> Floats:
        found = np.empty(len(time))
        for first in range(0, len(time), _BLOCK):  # a block at a time: there are millions
            some = np.maximum(time[first : first + _BLOCK], zero)
            waited = covered_within(np.full(len(some), zero), some, wait_start, ended)
            found[first : first + _BLOCK] = some - zero - waited
        return found

    tables = [table.filter(*mine)["start_ns"].to_numpy() for table in (trace.ops, trace.ranges, calls, trace.syncs)]
    closed = part.steps.marked_ns[1] if part.steps.marked_ns is not None else zero
    last = int(pieces.launch.max())
    return HostTimeline(
        unit_ns=unit_ns(trace),
        recorded=own(np.sort(np.concatenate(tables), kind="stable")),
        python_calls=_python_rate(trace),
        launch=own(pieces.launch),
        ready=own(pieces.ready),
        work=pieces.work.astype(np.float64),
        wait=own(wait_start),
        wait_before=np.searchsorted(pieces.launch, wait_start, side="right"),
        wait_for=wait_for,
        gpu_free=float(part.low_ns - zero),
        closed=float(own(np.array([closed]))[0]),
        marked=marked,
        end=float(own(np.array([max(closed, last)]))[0]),
    )


@dataclass(frozen=True)
class _Pieces:
    """The GPU's work by launch, in the order of the launches."""

    launch: Times
    ready: Times  # the call had returned, or the work had begun
    work: Times
    done: Times  # when all work up to this launch's had ended


def _call_of(work: pl.DataFrame, calls: pl.DataFrame) -> Times:
    known = np.flatnonzero(calls["correlation"].to_numpy() > 0)
    of_work, of_calls = ((t["process"].to_numpy(), t["correlation"].to_numpy()) for t in (work, calls[known]))
    row = first_rows(of_work, of_calls)
    return np.where(row >= 0, known[np.maximum(row, 0)] if len(known) else -1, -1)


def _pieces(work: pl.DataFrame, calls: pl.DataFrame, row: Times, low: int) -> _Pieces:
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    known, at = row >= 0, np.maximum(row, 0)
    launch = np.where(known, np.minimum(calls["start_ns"].to_numpy()[at], start), start)
    ready = np.where(known, np.minimum(calls["end_ns"].to_numpy()[at], start), start)
    reach = np.concatenate(([low], np.maximum(np.maximum.accumulate(end)[:-1], low)))
    pause = np.clip(start - np.maximum(reach, ready), 0, None)
    once = counted_once(start, end) + pause
    order = np.lexsort((start, launch))
    call = np.where(known, row, -1 - np.arange(len(row)))[order]
    first = np.flatnonzero(np.concatenate(([True], call[1:] != call[:-1])))
    done = np.maximum.accumulate(np.maximum.reduceat(end[order], first))
    return _Pieces(launch[order][first], ready[order][first], np.add.reduceat(once[order], first), done)


def _waiting(
    trace: Trace, calls: pl.DataFrame, pieces: _Pieces, mine: tuple[pl.Expr, ...]
) -> tuple[Times, Times, Times]:
    """Calls that waited, by start: from, to, and the launch whose work was the last to end before they returned."""
    columns = ["start_ns", "end_ns"]
    blocked, slow = waits(trace).filter(*mine).select(columns), held_up_calls(calls).filter(*mine).select(columns)
    found = pl.concat([blocked.with_columns(queue=False), slow.with_columns(queue=True)]).sort("start_ns")
    start, end, queue = (found[name].to_numpy() for name in (*columns, "queue"))
    launched, done = (
        np.searchsorted(pieces.launch, start, side="right"),
        np.searchsorted(pieces.done, end, side="right"),
    )
    waited = ~queue | (launched - done >= LAUNCH_QUEUE // 2)  # a slow launch with a short queue is only slow
    return start[waited], end[waited], (np.minimum(launched, done) - 1)[waited]


def _python_rate(trace: Trace) -> float:
    """Python calls that were recorded, per nanosecond of the trace."""
    if not trace.python_calls or not trace.ops.height:
        return 0.0
    span = int(trace.ops["end_ns"].to_numpy().max()) - int(trace.ops["start_ns"].to_numpy().min())
    return trace.python_calls / max(span, 1)
