"""Unions and gaps against counting every nanosecond."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flopwise.analysis.intervals import clipped, covered_ns, gaps, union

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=25)


def arrays(spans):
    start = np.array([s for s, _ in spans], dtype=np.int64)
    return start, start + np.array([d for _, d in spans], dtype=np.int64)


def covered(start, end):
    return {t for s, e in zip(start.tolist(), end.tolist(), strict=True) for t in range(s, e)}


@given(SPANS)
def test_the_union_covers_the_same_and_never_overlaps(spans):
    start, end = arrays(spans)
    merged_start, merged_end = union(start, end)
    assert covered(merged_start, merged_end) == covered(start, end)
    assert (merged_start[1:] > merged_end[:-1]).all()
    assert covered_ns(start, end) == len(covered(start, end))


@given(SPANS, st.integers(0, 40), st.integers(1, 40))
def test_gaps_and_work_fill_the_window(spans, low, length):
    start, end = arrays(spans)
    window = set(range(low, low + length))
    inside = covered(*clipped(start, end, low, low + length))
    idle = covered(*gaps(start, end, low, low + length))
    assert inside == covered(start, end) & window
    assert idle == window - inside
