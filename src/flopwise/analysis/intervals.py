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
