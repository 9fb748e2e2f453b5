"""Which interval is open at a time: ops and ranges nested on the threads that ran them.

An interval holds its start and not its end; one of no length holds nothing. The innermost interval at a time is the one
that started last among those still open. On properly nested intervals that is the deepest; where intervals overlap
without nesting (ranges opened on one thread and closed on another, clocks that tick in microseconds) the later start
wins for as long as it lasts. Of two that start together the shorter is the inner one; of two equal ones, the later row.

Questions are answered for whole arrays: sort the starts once, keep a tree of maxima over the ends, and climb it from the
last start before the time to the nearest end after it. O((n + q) log n) for any intervals, with no loop over events.
(Counting starts minus ends gives the depth in two searches, but is wrong as soon as one pair of intervals overlaps.)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_KEY_LIMIT = 2**62  # lane × span must stay below: keys are int64


@dataclass(frozen=True)
class _Clock:
    """Folds (lane, time) into one integer, so that one sorted array serves every thread."""

    origin: int
    span: int
    ticks: Ints | None  # distinct times, where lane × span would overflow: ranks stand for times

    def key(self, lane: Ints, time: Ints) -> Ints:
        if self.ticks is None:
            inside = np.clip(time, self.origin - 1, self.origin + self.span - 3) - self.origin + 1
        else:
            inside = np.searchsorted(self.ticks, time, side="right").astype(np.int64)
        return lane * self.span + inside

    def time(self, key: Ints) -> Ints:
        """The time in a key that was made of an interval's start or end."""
        inside = key % self.span - 1
        return self.origin + inside if self.ticks is None else self.ticks[inside]


def _clock(lane: Ints, start: Ints, end: Ints) -> _Clock:
    if len(start) == 0:
        return _Clock(0, 3, None)
    origin, last = int(start.min()), int(end.max())
    span = last - origin + 3  # room for 'before everything' and 'after everything' in each lane
    if (int(lane.max()) + 1) * span < _KEY_LIMIT:
        return _Clock(origin, span, None)
    ticks = np.unique(np.concatenate([start, end]))
    return _Clock(0, len(ticks) + 1, ticks)


class Nesting:
    """Intervals on lanes (one lane per thread), in the order lane, start, longest first; a position is a place in it."""

    def __init__(self, lane: Ints, start: Ints, end: Ints) -> None:
        self._clock = _clock(lane, start, end)
        first = self._clock.key(lane, start)
        last = self._clock.key(lane, end)
        self.order: Ints = _order(first, last)  # position -> row
        self._starts: Ints = first[self.order]
        self._ends: Ints = last[self.order]
        self._positions: NDArray[np.int32 | np.int64] | None = None  # a subset's places in the whole
        self._tree: list[Ints] | None = None

    def starts(self, positions: Ints) -> Ints:
        """When the intervals at these positions begin."""
        return self._clock.time(self._starts[positions])

    def ends(self, positions: Ints) -> Ints:
        return self._clock.time(self._ends[positions])

    def after(self) -> Ints:
        """Of every position, the first one behind it that begins after it has ended: those between begin inside."""
        ended = np.searchsorted(self._starts, self._ends, side="left").astype(np.int64)
        return np.maximum(ended, np.arange(1, len(ended) + 1))  # one of no length holds nothing

    def subset(self, rows: Flags) -> "Nesting":
        """Only the flagged rows; answers are still positions in the whole."""
        return self._pick(np.flatnonzero(rows[self.order]))

    def outermost(self) -> "Nesting":
        """Only the intervals that start outside every other one."""
        reached = np.maximum.accumulate(self._ends) if len(self._ends) else self._ends
        inside = np.zeros(len(self._starts), dtype=bool)
        inside[1:] = reached[:-1] > self._starts[1:]
        chosen = np.flatnonzero(~inside)
        return self._pick(chosen if self._positions is None else self._positions[chosen], chosen)

    def _pick(self, positions: NDArray[np.integer], local: NDArray[np.integer] | None = None) -> "Nesting":
        part = object.__new__(Nesting)
        local = positions if local is None else local
        part._clock, part.order = self._clock, self.order
        part._starts, part._ends = self._starts[local], self._ends[local]
        narrow = np.int32 if len(self.order) < 2**31 else np.int64
        part._positions, part._tree = positions.astype(narrow), None
        return part

    def innermost(self, lane: Ints, time: Ints) -> Ints:
        """The position of the innermost interval open at each time, -1 where there is none (or the lane is negative)."""
        keys = self._clock.key(lane, time)
        before = np.searchsorted(self._starts, keys, side="right").astype(np.int64)
        before[lane < 0] = 0
        return self._whole(self._last_open(before, keys))

    def parents(self, positions: Ints) -> Ints:
        """The position of the interval around each given one of this nesting, -1 around the outermost (and around -1)."""
        local = positions if self._positions is None else np.searchsorted(self._positions, positions).astype(np.int64)
        known = positions >= 0
        place = np.where(known, local, 0)
        keys = self._starts[place] if len(self._starts) else place
        return self._whole(self._last_open(np.where(known, place, 0), keys))

    def _whole(self, local: Ints) -> Ints:
        if self._positions is None or len(self._positions) == 0:
            return local
        return np.where(local >= 0, self._positions[local], -1).astype(np.int64, copy=False)

    def _last_open(self, before: Ints, keys: Ints) -> Ints:
        """The largest place < `before` whose end lies after the key, else -1: climb the tree of maxima, then descend."""
        found = np.full(len(before), -1, dtype=np.int64)
        active = np.flatnonzero(before > 0)
        node, bound = before[active], keys[active]
        direct = self._ends[node - 1] > bound  # most often the last to start is still open
        found[active[direct]] = node[direct] - 1
        active, node, bound = active[~direct], node[~direct], bound[~direct]
        if self._tree is None and len(active):
            self._tree = _maxima(self._ends)
        for level, maxima in enumerate(self._tree or ()):
            if len(active) == 0:
                break
            odd = (node & 1) == 1  # the block just before `node` is not covered by its parent's left neighbours
            hit = odd & (maxima[np.where(odd, node - 1, 0)] > bound)
            found[active[hit]] = _descend(self._tree or [], level, node[hit] - 1, bound[hit])
            going = ~hit & (node > 1)
            active, node, bound = active[going], node[going] >> 1, bound[going]
        return found


def _order(first: Ints, last: Ints) -> Ints:
    """By start, of those that start together the longest first, then by row; few do, so one sort serves the rest."""
    order = np.argsort(first, kind="stable")
    again = first[order[1:]] == first[order[:-1]]
    if again.any():
        tied = np.append(again, False) | np.append(False, again)
        rows = order[tied]
        order[tied] = rows[np.lexsort((-last[rows], first[rows]))]
    return order.astype(np.int64, copy=False)


def _maxima(values: Ints) -> list[Ints]:
    """Level k holds the maximum of each block of 2^k values."""
    levels = [values]
    while len(levels[-1]) > 1:
        below = levels[-1]
        if len(below) % 2:
            below = np.append(below, np.iinfo(np.int64).min)
        levels.append(np.maximum(below[0::2], below[1::2]))
    return levels


def _descend(tree: list[Ints], level: int, node: Ints, bound: Ints) -> Ints:
    """The last leaf under each node whose value exceeds the bound; the node's own maximum does."""
    for maxima in reversed(tree[:level]):
        right = np.minimum(2 * node + 1, len(maxima) - 1)
        node = np.where(maxima[right] > bound, right, 2 * node)
    return node
