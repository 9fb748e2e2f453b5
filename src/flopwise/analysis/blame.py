"""Who kept the GPU waiting: idle time by the function, range, op or call that the host was in, with the stack around it.

Code of the host's own is named by the outermost function, range or op that launches nothing: that is what can be moved out of
the way as a whole. What launches something is looked into instead.
"""

from collections import defaultdict
from dataclasses import dataclass

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.host_activity import allocations, compiling, loading_ranges, module_loads, slow_launches
from flopwise.analysis.idle import ALLOCATOR, COMPILATION, HOST, INPUT, TRANSFER, HostGaps, Idle, shared_out
from flopwise.analysis.intervals import Times, covered_within
from flopwise.trace.tables import Trace

BLAMED = (HOST, INPUT, TRANSFER, COMPILATION, ALLOCATOR)
OUTSIDE = "Python outside every op"  # the trace shows no function, range or op at the time
_DEEPEST = 64
_MOST = 20  # names that are kept
_MOST_INNER, _MOST_STACK = 3, 12


class HostBlame(msgspec.Struct, frozen=True, kw_only=True):
    """What the host did while the GPU was idle; per step."""

    cause: str  # of the idle time: one of BLAMED
    what: str  # a function, range, op or call; OUTSIDE where the trace has none
    idle_ns: float  # of the GPU
    count: float  # gaps
    stack: tuple[str, ...] = ()  # functions, ranges and ops around it, outer to inner, the innermost ones
    inner: dict[str, float] = {}  # what it called most: GPU idle time
    before: str = ""  # the op, or the range, that launched what ended the idle time


@dataclass(frozen=True)
class _Pieces:
    """Stretches of idle time of one cause, each on the thread that launched next."""

    low: Times
    high: Times
    gap: Times
    thread: Times


def host_blame(trace: Trace, found: HostGaps, lost: Idle, steps: int) -> tuple[HostBlame, ...]:
    """Most idle time first. For each cause it adds up to no more than the idle time of that cause."""
    namer = _Namer(trace, found, steps)
    pieces = {cause: some for cause, some in _by_cause(found).items() if lost.by_cause_ns[cause]}
    blamed = [one for cause, some in pieces.items() for one in namer.blame(cause, some)]
    return tuple(sorted(blamed, key=lambda one: (-one.idle_ns, one.cause, one.what))[:_MOST])


def _by_cause(found: HostGaps) -> dict[str, _Pieces]:
    """The host's part of each gap, cut where its activity changes."""
    pieces: defaultdict[str, list[_Pieces]] = defaultdict(list)
    for thread, activity in found.activity.items():
        mine = np.flatnonzero(found.thread == thread)
        to_blame = [spans for cause, spans in activity if cause in BLAMED]
        start, end = (np.concatenate([spans[side] for spans in to_blame]) for side in (0, 1))
        mine = mine[covered_within(found.low[mine], found.high[mine], start, end) > 0]  # most gaps are launches
        cuts = np.concatenate([side for _, spans in activity for side in spans])
        low, high, gap = _cut(found.low[mine], found.high[mine], mine, cuts)
        for cause, spent in shared_out(low, high, activity):
            rows = np.flatnonzero((spent == high - low) & (spent > 0))
            if cause in BLAMED and len(rows):
                pieces[cause].append(_Pieces(low[rows], high[rows], gap[rows], np.full(len(rows), thread)))
    return {cause: _joined(some) for cause, some in pieces.items()}


def _joined(pieces: list[_Pieces]) -> _Pieces:
    low, high, gap, thread = (
        np.concatenate([getattr(one, column) for one in pieces]) for column in ("low", "high", "gap", "thread")
    )
    order = np.argsort(low, kind="stable")
    return _Pieces(low[order], high[order], gap[order], thread[order])


def _cut(low: Times, high: Times, label: Times, cuts: Times) -> tuple[Times, Times, Times]:
    """Spans that do not overlap, by start, cut at the times; each piece with its span's label.

    >>> _cut(np.array([0, 10]), np.array([5, 12]), np.array([7, 8]), np.array([0, 3, 5, 11]))
    (array([ 0,  3, 10, 11]), array([ 3,  5, 11, 12]), array([7, 7, 8, 8]))
    """
    if not len(low):
        return low, high, label
    near = cuts[(cuts > low[0]) & (cuts < high[-1])]
    edges = np.sort(np.concatenate([near, low, high]))
    edges = edges[np.concatenate(([True], edges[1:] > edges[:-1]))]
    if len(edges) < 2:
        return low[:0], high[:0], label[:0]
    begin, end = edges[:-1], edges[1:]
    place = np.searchsorted(low, begin, side="right") - 1
    inside = begin < high[place]
    return begin[inside], end[inside], label[place[inside]]


class _Namer:
    """Names what the host was in."""

    def __init__(self, trace: Trace, found: HostGaps, steps: int) -> None:
        self._found, self._steps, self._spans = found, steps, found.spans
        self._nesting = found.spans.nesting
        named = found.spans.named
        self._of = {
            HOST: ~found.spans.launches,
            INPUT: named(loading_ranges(trace)),
            COMPILATION: named(pl.concat([some(trace) for some in (compiling, module_loads, slow_launches)])),
            ALLOCATOR: named(allocations(trace)),
            TRANSFER: found.spans.is_op,
        }

    def blame(self, cause: str, pieces: _Pieces) -> list[HostBlame]:
        """The pieces of one cause by what the host was in."""
        spans = self._spans
        near = covered_within(spans.start, spans.end, pieces.low, pieces.high) > 0
        cuts = np.concatenate([spans.start[near], spans.end[near]])
        low, high, row = _cut(pieces.low, pieces.high, np.arange(len(pieces.low)), cuts)
        lane = spans.lanes(pieces.thread[row])
        inmost = self._nesting.innermost(lane, low)
        mine = self._nesting.subset(self._of[cause])
        chosen = (mine if cause == ALLOCATOR else mine.outermost()).innermost(lane, low)  # of memory, the call itself
        chosen = np.where(chosen < 0, inmost, chosen)
        return self._summed(cause, chosen, self._child(chosen, inmost), high - low, pieces.gap[row])

    def _child(self, chosen: Times, inmost: Times) -> Times:
        """The span directly inside the chosen one at the time; -1 where there is none."""
        child = np.where(inmost == chosen, -1, inmost)
        for _ in range(_DEEPEST):
            parent = self._nesting.parents(child)
            climb = (child >= 0) & (parent != chosen) & (parent >= 0)
            if not climb.any():
                break
            child = np.where(climb, parent, child)
        return child

    def _summed(self, cause: str, chosen: Times, inner: Times, spent: Times, gap: Times) -> list[HostBlame]:
        steps = self._steps
        total: defaultdict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
        within: defaultdict[tuple[str, tuple[str, ...]], defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        of_gaps: defaultdict[tuple[str, tuple[str, ...]], dict[int, int]] = defaultdict(dict)
        stacks = {place: self._stack(place) for place in np.unique(chosen).tolist()}
        for place, child, ns, one in zip(*(x.tolist() for x in (chosen, inner, spent, gap)), strict=True):
            key = (self._spans.text(place) or OUTSIDE, stacks[place])
            total[key] += ns
            of_gaps[key][one] = of_gaps[key].get(one, 0) + ns
            if child >= 0:
                within[key][self._spans.text(child)] += ns
        return [
            HostBlame(
                cause=cause,
                what=key[0],
                idle_ns=ns / steps,
                count=len(of_gaps[key]) / steps,
                stack=key[1],
                inner={
                    name: part / steps
                    for name, part in sorted(within[key].items(), key=lambda item: -item[1])[:_MOST_INNER]
                },
                before=self._next(max(of_gaps[key], key=lambda one: of_gaps[key][one])),
            )
            for key, ns in total.items()
        ]

    def _stack(self, place: int) -> tuple[str, ...]:
        """The names around a span, outer to inner, without itself."""
        found: list[str] = []
        at = np.array([place])
        for _ in range(_DEEPEST):
            at = self._nesting.parents(at)
            if at[0] < 0:
                break
            found.append(self._spans.text(int(at[0])))
        return tuple(reversed(found[:_MOST_STACK]))

    def _next(self, gap: int) -> str:
        """The innermost span around the launch that ended a gap."""
        found = self._found
        time = found.gaps.launch_start[found.inside][[gap]]
        return self._spans.text(int(self._nesting.innermost(self._spans.lanes(found.thread[[gap]]), time)[0]))
