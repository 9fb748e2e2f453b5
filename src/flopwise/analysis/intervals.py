"""Busy and idle time from intervals that may overlap: unions and gaps, vectorised."""

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]


def union(start: Times, end: Times) -> tuple[Times, Times]:
    """The intervals merged where they touch or overlap; sorted.

    >>> union(np.array([0, 5, 7]), np.array([4, 8, 9]))
    (array([0, 5]), array([4, 9]))
    """
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], reach[last]


def clipped(start: Times, end: Times, low: int, high: int) -> tuple[Times, Times]:
    """The intervals' parts inside a window.

    >>> clipped(np.array([0, 5]), np.array([4, 9]), 3, 6)
    (array([3, 5]), array([4, 6]))
    """
    inside = (end > low) & (start < high)
    return np.maximum(start[inside], low), np.minimum(end[inside], high)


def covered_ns(start: Times, end: Times) -> int:
    """How much time at least one interval covers.

    >>> covered_ns(np.array([0, 2]), np.array([3, 5]))
    5
    """
    merged_start, merged_end = union(start, end)
    return int((merged_end - merged_start).sum())


def gaps(start: Times, end: Times, low: int, high: int) -> tuple[Times, Times]:
    """What no interval covers between `low` and `high`.

    >>> gaps(np.array([2, 6]), np.array([4, 7]), 0, 10)
    (array([0, 4, 7]), array([ 2,  6, 10]))
    """
    merged_start, merged_end = union(*clipped(start, end, low, high))
    gap_start = np.concatenate(([low], merged_end)).astype(np.int64)
    gap_end = np.concatenate((merged_start, [high])).astype(np.int64)
    real = gap_end > gap_start
    return gap_start[real], gap_end[real]


def overlaps(some: tuple[Times, Times], others: tuple[Times, Times]) -> tuple[Times, Times]:
    """The times at which an interval of each is open.

    >>> overlaps((np.array([0, 8]), np.array([5, 9])), (np.array([1, 4]), np.array([2, 20])))
    (array([1, 4, 8]), array([2, 5, 9]))
    """
    start, end = union(*some)
    other_start, other_end = union(*others)
    first, last = np.searchsorted(other_end, start, side="right"), np.searchsorted(other_start, end, side="left")
    number = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(start)), number)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(number) - number, number)
    other = np.repeat(first, number) + nth
    return np.maximum(start[rows], other_start[other]), np.minimum(end[rows], other_end[other])


def counted_once(start: Times, end: Times) -> Times:
    """How much of each interval no other that began earlier covers: instants count once, and the sum is `covered_ns`.

    >>> counted_once(np.array([0, 2, 3]), np.array([4, 9, 5]))
    array([4, 5, 0])
    """
    own = np.zeros(len(start), dtype=np.int64)
    if not len(start):
        return own
    order = np.argsort(start, kind="stable")
    first, last = start[order], end[order]
    reach = np.concatenate((first[:1], np.maximum.accumulate(last)[:-1]))
    own[order] = np.clip(last - np.maximum(first, reach), 0, None)
    return own


def covered_within(low: Times, high: Times, start: Times, end: Times) -> Times:
    """How much of each span from `low` to `high` the intervals cover together.

    >>> covered_within(np.array([0, 4]), np.array([4, 8]), np.array([1, 2, 7]), np.array([3, 5, 9]))
    array([3, 2])
    """
    merged_start, merged_end = union(start, end)
    if not len(merged_start):
        return np.zeros(len(low), dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(merged_end - merged_start)))

    def until(time: Times) -> Times:
        at = np.searchsorted(merged_start, time, side="right")
        inside = np.clip(merged_end[np.maximum(at - 1, 0)] - time, 0, None)
        covered: Times = before[at] - np.where(at > 0, inside, 0)
        return covered

    return until(high) - until(low)
