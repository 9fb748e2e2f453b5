"""Why the GPU was idle: every gap between two pieces of its work, by what the host did meanwhile.

The causes add up to the idle time exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.analysis.gpu_gaps import LONGEST_PAUSE_NS, Gaps, gpu_gaps
from flopwise.analysis.host_activity import (
    Spans,
    allocations,
    blocking_uploads,
    compiling,
    host_calls,
    loading_ranges,
    module_loads,
    slow_launches,
    span_times,
    waits,
)
from flopwise.analysis.host_spans import HostSpans
from flopwise.analysis.intervals import Times, covered_within, gaps, overlaps
from flopwise.trace.tables import STEP, Trace

LATE_LAUNCH = "late launch"  # the host had not yet launched what came next: it was busy launching
SYNCHRONISATION = "synchronisation"  # nor could it: it waited for the GPU, or had just done so for as long
INPUT = "input pipeline"  # it was waiting for data
TRANSFER = "transfer"  # it was copying to the GPU out of pageable memory
HOST = "host code"  # it ran other code, and launched nothing for a long time
COMPILATION = "compilation"  # it compiled, or loaded kernels' code
ALLOCATOR = "allocator"  # it asked the driver for memory, or gave some back
BETWEEN = "between kernels"  # the next piece was queued already; the GPU took its time to begin it
NOTHING = "nothing to do"  # all work of the window was done, and the host was in no op, launch or wait
UNKNOWN = "unknown"  # the trace does not say who launched the next piece, or what it waited for in the queue
CAUSES = (*(LATE_LAUNCH, SYNCHRONISATION, INPUT, TRANSFER, HOST), *(COMPILATION, ALLOCATOR, BETWEEN, NOTHING, UNKNOWN))
# An untraced clock is of the same steps if these hold; launch-bound steps vary by a fifth from one to the next.
_MOST_BUSY = 1.1  # of the untraced time, the GPU's work in the trace
_LONGEST = 1.25  # of the traced time, the untraced
FITS, TOO_SHORT, TOO_LONG = "fits", "too short", "too long"
# The host does other things than launch once it has launched nothing for so many times as long as it usually takes from one call
# to the next, and for this long: in code that launches nothing; in none that the trace shows. In code that launches something it
# takes this long, whatever is usual (an eager op takes 5 to 200 µs under a profiler, an optimizer in Python a millisecond).
# Judgement.
_OTHER_RATIO, _OTHER_NS, _UNSEEN_NS, _LAUNCHING_NS = 10.0, 500_000, 2_000_000, 5_000_000
_LEAST_OTHER = 0.02  # of the window

Activity = list[tuple[str, Spans]]  # causes with the times of their activity: the first that holds counts


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Idle time of one device in one window, in nanoseconds."""

    total_ns: int
    by_cause_ns: dict[str, int]
    n_gaps: int


@dataclass(frozen=True)
class HostGaps:
    """The parts of the gaps that are the host's, and what the thread that launched next did in them."""

    gaps: Gaps
    inside: npt.NDArray[np.bool_]  # the gap ends with work of the window, by a call that is known
    low: Times
    high: Times
    thread: Times
    activity: dict[int, Activity]  # by thread
    waiting: pl.DataFrame  # the waits of all threads
    spans: HostSpans


def idle(trace: Trace, found: HostGaps, low: int, high: int) -> Idle:
    """Split a device's idle time between `low` and `high` by cause.

    A gap ends when the next piece of work begins. The part of it until that work's launch call returned is the host's, by what
    it did at the time: see `host_gaps`; 'late launch' is the rest. After the call had returned, it is the device's own ('between
    kernels', 'unknown' if that takes longer than LONGEST_PAUSE_NS). After the last piece, ops and launches are 'late launch' (of
    work that the window does not hold); where the host did nothing known, there was 'nothing to do'.
    """
    between, inside = found.gaps, found.inside
    last = between.end >= high
    paused, queued = inside & (between.queued <= LONGEST_PAUSE_NS), between.queued
    causes = dict.fromkeys(CAUSES, 0)
    causes[UNKNOWN] = int((between.end - between.start)[~last & ~inside].sum() + queued[inside & ~paused].sum())
    causes[BETWEEN] = int(queued[paused].sum())
    causes[LATE_LAUNCH] = int((found.high - found.low).sum())
    for thread, activity in found.activity.items():
        mine = found.thread == thread
        for cause, spent in shared_out(found.low[mine], found.high[mine], activity):
            causes[cause] += int(spent.sum())
            causes[LATE_LAUNCH] -= int(spent.sum())
    for cause, ns in _afterwards(trace, found, between.start[last], low, high).items():
        causes[cause] += ns
    if causes[HOST] < _LEAST_OTHER * (high - low):  # a range of the framework's own here and there: part of launching
        causes[LATE_LAUNCH], causes[HOST] = causes[LATE_LAUNCH] + causes[HOST], 0
    total = int((between.end - between.start).sum())
    assert sum(causes.values()) == total
    return Idle(total_ns=total, by_cause_ns=causes, n_gaps=len(between.start))


def host_gaps(trace: Trace, low: int, high: int, device: int) -> HostGaps:
    """What the host did in the gaps that end with a known launch.

    In this order: it loaded data; it copied out of pageable memory; it compiled; it asked the driver for memory; it waited for
    the GPU, or would have been here earlier by as much as it had waited before; it launched nothing for a long time, and ran
    other code.
    """
    between = gpu_gaps(trace, low, high, device)
    inside = (between.end < high) & (between.thread >= 0)
    start, stop, thread = between.start[inside], (between.start + between.host)[inside], between.thread[inside]
    waiting, spans = waits(trace), HostSpans(trace)
    stretches = _without_calls(trace, waiting, low, high)
    everywhere = [
        (INPUT, span_times(loading_ranges(trace))),
        (TRANSFER, span_times(blocking_uploads(trace))),
        (COMPILATION, _joined([span_times(found(trace)) for found in (compiling, module_loads, slow_launches)])),
        (ALLOCATOR, span_times(allocations(trace))),
    ]
    activity = {
        number: [
            *everywhere,
            (SYNCHRONISATION, _waited(waiting, between, inside, number)),
            *_code(spans, stretches, number),
        ]
        for number in np.unique(thread).tolist()
    }
    return HostGaps(between, inside, start, stop, thread, activity, waiting, spans)


def _code(spans: HostSpans, stretches: tuple[Spans, float], thread: int) -> Activity:
    """Stretches without calls, by the code that the thread was in: what launches something is late, unless it takes too long."""
    (first, last), usual = stretches
    took, least = last - first, min(_OTHER_RATIO * usual, _LAUNCHING_NS)
    much = took > _LAUNCHING_NS
    some, unseen = took > max(_OTHER_NS, least), took > max(_UNSEEN_NS, least)
    other, short = (first[some], last[some]), (first[some & ~much], last[some & ~much])
    near = spans.near(thread, other)

    def of(wanted: npt.NDArray[np.bool_], times: Spans) -> Spans:
        return overlaps((spans.start[near & wanted], spans.end[near & wanted]), times)

    return [
        (LATE_LAUNCH, of(spans.launches & spans.is_op, short)),
        (HOST, of(~spans.launches, other)),
        (HOST, (first[much], last[much])),
        (LATE_LAUNCH, of(spans.launches, short)),
        (HOST, (first[unseen], last[unseen])),
    ]


def shared_out(low: Times, high: Times, activity: Activity) -> Iterator[tuple[str, Times]]:
    """How much of each span belongs to each activity; an instant counts for the first of them.

    >>> spans = [("a", (np.array([0]), np.array([4]))), ("b", (np.array([2]), np.array([7])))]
    >>> list(shared_out(np.array([1]), np.array([9]), spans))
    [('a', array([3])), ('b', array([3]))]
    """
    before, so_far = np.zeros(len(low), dtype=np.int64), list[Spans]()
    for name, spans in activity:
        so_far.append(spans)
        covered = covered_within(low, high, *_joined(so_far))
        yield name, covered - before
        before = covered


def _joined(spans: Sequence[Spans]) -> Spans:
    start, end = (np.concatenate([one[side] for one in spans]) for side in (0, 1))
    return start, end


def _waited(waiting: pl.DataFrame, between: Gaps, inside: npt.NDArray[np.bool_], thread: int) -> Spans:
    """For each gap in which the launching thread's last wait ended: the wait, and after it as long as it had waited before."""
    begin, end = span_times(waiting.filter(pl.col("thread") == thread).sort("end_ns"))
    mine = np.flatnonzero(inside & (between.thread == thread))
    last = np.searchsorted(end, between.launch_start[mine], side="right") - 1
    mine, last = mine[last >= 0], last[last >= 0]
    within = end[last] >= between.start[mine]
    gap, closed, last = between.start[mine[within]], between.end[mine[within]], last[within]
    before = np.maximum(gap - begin[last], 0)
    return np.maximum(begin[last], gap), np.minimum(end[last] + before, closed)


def _without_calls(trace: Trace, waiting: pl.DataFrame, low: int, high: int) -> tuple[Spans, float]:
    """When no thread launched anything, or waited; and how long that usually is."""
    tables = [table.select("start_ns", "end_ns") for table in (host_calls(trace), waiting, trace.calls)]
    start, end = span_times(pl.concat(tables))
    first, last = gaps(start, end, min(low, int(start.min(initial=low))), high)
    within = last > low
    usual = float(np.median((last - first)[within])) if within.any() else 0.0
    return (first[within], last[within]), usual


def clock_fit(traced: Idle, window_ns: float, wall_ns: float) -> str:
    """Whether steps that took `wall_ns` untraced can be those of a trace: FITS, TOO_SHORT or TOO_LONG."""
    if window_ns - traced.total_ns > _MOST_BUSY * wall_ns:
        return TOO_SHORT
    return TOO_LONG if wall_ns > _LONGEST * window_ns else FITS


def untraced_idle(traced: Idle, window_ns: int, wall_ns: float) -> Idle:
    """The idle time of the same steps without a profiler, which take `wall_ns`.

    A profiler records on the host and makes it slower. The GPU's work and its gaps between queued kernels are taken as they
    were traced; what the untraced steps are idle beyond these is the host's, and its causes share it as they do in the trace.
    """
    total = max(0, round(wall_ns) - (window_ns - traced.total_ns))
    between = min(total, traced.by_cause_ns[BETWEEN])
    host_ns = traced.total_ns - traced.by_cause_ns[BETWEEN]
    slower = (total - between) / host_ns if host_ns else 0.0
    causes = {cause: int(ns * slower) for cause, ns in traced.by_cause_ns.items()} | {BETWEEN: between}
    causes[UNKNOWN] += total - sum(causes.values())  # rounding; all of it where the trace knows no idle host
    return Idle(total_ns=total, by_cause_ns=causes, n_gaps=traced.n_gaps)


def _afterwards(trace: Trace, found: HostGaps, done: Times, low: int, high: int) -> dict[str, int]:
    """What the host did from the last piece of work to the end of the window; `done` is empty if that lasted to the end."""
    if not len(done):
        return {}
    start, near = done[:1], (pl.col("end_ns") > int(done[0]), pl.col("start_ns") < high)
    begun = pl.col("start_ns") >= low  # what began before the window says nothing of its end
    ops = (trace.ops, trace.launches, trace.graph_launches)
    code = (trace.frames.filter(begun), trace.ranges.filter(begun, pl.col("kind") != STEP))
    whole = next(iter(found.activity.values()), [])
    spans = [(cause, times) for cause, times in whole if cause in (INPUT, TRANSFER, COMPILATION, ALLOCATOR)]
    spans.append((SYNCHRONISATION, span_times(found.waiting)))
    spans.append((LATE_LAUNCH, _joined([span_times(table.filter(*near)) for table in ops])))
    spans.append((HOST, _joined([span_times(table.filter(*near)) for table in code])))
    spent = {cause: int(ns[0]) for cause, ns in shared_out(start, np.array([high]), spans)}
    return spent | {NOTHING: high - int(start[0]) - sum(spent.values())}
