"""Innermost intervals: against the definition, on nested and on messy ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.trace.nesting import Nesting

Interval = tuple[int, int, int]  # lane, start, end


def nesting_of(intervals: list[Interval]) -> Nesting:
    table = np.array(intervals, dtype=np.int64).reshape(-1, 3)
    return Nesting(table[:, 0], table[:, 1], table[:, 2])


def innermost_rows(nesting: Nesting, queries: list[tuple[int, int]]) -> list[int]:
    lanes, times = np.array(queries, dtype=np.int64).reshape(-1, 2).T
    found = nesting.innermost(lanes, times)
    return [int(nesting.order[p]) if p >= 0 else -1 for p in found]


def reference(intervals: list[Interval], lane: int, time: int) -> int:
    """The definition: open, and the last to start; of those that start together the shortest, then the later row."""
    open_now = [(s, -e, row) for row, (at, s, e) in enumerate(intervals) if at == lane and s <= time < e]
    return max(open_now)[2] if open_now else -1


messy = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)).map(lambda x: (x[0], x[1], x[1] + x[2])),
    max_size=40,
)
asked = st.lists(st.tuples(st.integers(-1, 3), st.integers(-2, 45)), min_size=1, max_size=40)


@st.composite
def nested(draw: st.DrawFn) -> list[Interval]:
    """Intervals cut out of one another, with shared ends, touching neighbours and empty ones."""
    intervals: list[Interval] = []

    def fill(lane: int, start: int, end: int, depth: int) -> None:
        cuts = sorted(draw(st.lists(st.integers(start, end), max_size=4)))
        for left, right in zip(cuts[::2], cuts[1::2], strict=False):
            intervals.append((lane, left, right))
            if depth < 5:
                fill(lane, left, right, depth + 1)

    for lane in range(draw(st.integers(1, 2))):
        fill(lane, 0, 40, 0)
    return draw(st.permutations(intervals))


@settings(max_examples=300, deadline=None)
@given(st.one_of(messy, nested()), asked, st.sampled_from([1, 10**12, 2**57]))
def test_innermost_is_the_last_start_still_open(
    intervals: list[Interval], queries: list[tuple[int, int]], unit: int
) -> None:
    """Also where lane × time would not fit into 64 bits."""
    scaled = [(lane, s * unit, e * unit) for lane, s, e in intervals]
    times = [(lane, t * unit + shift) for lane, t in queries for shift in ((0,) if unit == 1 else (-1, 0, 1))]
    assert innermost_rows(nesting_of(scaled), times) == [reference(scaled, lane, t) for lane, t in times]


@settings(max_examples=200, deadline=None)
@given(st.one_of(messy, nested()), asked, st.data())
def test_a_subset_answers_as_if_alone(
    intervals: list[Interval], queries: list[tuple[int, int]], data: st.DataObject
) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=len(intervals), max_size=len(intervals)))
    part = nesting_of(intervals).subset(np.array(flags, dtype=bool))
    alone = [i if keep else (i[0], 0, 0) for i, keep in zip(intervals, flags, strict=True)]
    assert innermost_rows(part, queries) == [reference(alone, lane, t) for lane, t in queries]


@settings(max_examples=200, deadline=None)
@given(nested(), asked)
def test_outermost_and_parents_of_nested_intervals(intervals: list[Interval], queries: list[tuple[int, int]]) -> None:
    """Walking the parents of the innermost interval passes every interval that holds the time and ends at the outermost."""
    nesting = nesting_of(intervals)
    lanes, times = np.array(queries, dtype=np.int64).reshape(-1, 2).T
    top = nesting.outermost().innermost(lanes, times)
    here, seen = nesting.innermost(lanes, times), np.zeros(len(lanes), dtype=int)
    last = here
    while (here >= 0).any():
        seen += here >= 0
        last, here = np.where(here >= 0, here, last), nesting.parents(here)
    assert (last == top).all()
    assert seen.tolist() == [sum(at == lane and s <= t < e for at, s, e in intervals) for lane, t in queries]


def test_ends_are_exact_and_empty_intervals_hold_nothing() -> None:
    nesting = nesting_of([(0, 10, 20), (0, 12, 12), (0, 12, 15), (0, 15, 20)])
    times = [9, 10, 12, 14, 15, 19, 20]
    assert innermost_rows(nesting, [(0, time) for time in times]) == [-1, 0, 2, 2, 3, 3, -1]


def test_nothing_to_search() -> None:
    assert innermost_rows(nesting_of([]), [(0, 5)]) == [-1]
    assert nesting_of([]).outermost().innermost(np.array([0]), np.array([1])).tolist() == [-1]


@pytest.mark.parametrize("depth", [20_000])
def test_absurd_nesting_costs_no_more_than_a_sort(depth: int) -> None:
    nesting = nesting_of([(0, i, 2 * depth - i) for i in range(depth)])
    assert innermost_rows(nesting, [(0, depth - 1), (0, 2 * depth - 1)]) == [depth - 1, 0]
