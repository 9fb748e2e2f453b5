import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.statistics import block_length, estimate, shown_drift

from .noise import spread

runs = st.lists(st.integers(min_value=0, max_value=2**62), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(runs)
def test_the_interval_lies_within_the_samples_and_holds_the_median(samples: list[int]) -> None:
    e = estimate(samples)
    assert e.n == len(samples)
    assert e.median == np.median(np.array(samples, dtype=float))
    if e.n == 1:
        assert (e.low, e.high, e.method) == (None, None, "single")
    else:
        assert e.low is not None
        assert e.high is not None
        assert float(min(samples)) <= e.low <= e.median <= e.high <= float(max(samples))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60), st.sampled_from([0.5, 2.0, 1024.0]))
def test_scaling_the_samples_scales_the_estimate(samples: list[int], c: float) -> None:
    one, scaled = estimate(samples), estimate([c * x for x in samples])
    assert scaled.median == c * one.median
    assert scaled.low == (None if one.low is None else c * one.low)
    assert scaled.high == (None if one.high is None else c * one.high)
    assert scaled.drift == pytest.approx(one.drift)
    assert scaled.method == one.method


@given(st.integers(1, 2**62), st.integers(2, 300))
@settings(max_examples=30, deadline=None)
def test_equal_samples_leave_no_doubt(value: int, n: int) -> None:
    e = estimate([value] * n)
    assert e.low == e.high == e.median == float(value)
    assert e.drift == 0
    assert e.std <= 1e-15 * value  # a sum of large equal floats rounds


def test_few_samples_give_their_range_and_say_so() -> None:
    e = estimate([10, 30, 20])
    assert (e.low, e.median, e.high, e.method) == (10, 20, 30, "range")
    assert e.std == 10


@pytest.mark.parametrize("samples", [[], [1, -1, 3], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_duration_is_refused_with_a_hint(samples: list[float]) -> None:
    with pytest.raises(FlopwiseError) as refused:
        estimate(samples)
    assert refused.value.hint


def test_confidence_is_a_share() -> None:
    with pytest.raises(FlopwiseError):
        estimate([1, 2, 3], confidence=95)


def test_the_same_samples_give_the_same_answer() -> None:
    x = spread(np.random.default_rng(0), 50, 0.02, "gamma")
    assert estimate(x) == estimate(x) == estimate(list(x))


def test_blocks_follow_the_data() -> None:
    rng = np.random.default_rng(3)
    noise = rng.normal(size=400)
    assert block_length(noise) == 1
    walk = np.cumsum(noise)
    assert block_length(walk) >= 20
    assert block_length(walk + 0 * noise) == block_length(1e6 * walk)  # ranks: no unit


def test_blocks_widen_the_interval() -> None:
    walk = 1000 + np.cumsum(np.random.default_rng(4).normal(size=200))
    blocks, shuffled = estimate(walk), estimate(np.random.default_rng(4).permutation(walk))
    assert (blocks.method, shuffled.method) == ("block bootstrap", "bootstrap")
    assert (blocks.high or 0) - (blocks.low or 0) > 2 * ((shuffled.high or 0) - (shuffled.low or 0))


def test_drift_is_told_from_noise() -> None:
    rng = np.random.default_rng(6)
    noise = rng.lognormal(0, 0.01, 100)
    assert estimate(noise).drift == 0
    assert estimate(noise * np.linspace(1, 1.2, 100)).drift == pytest.approx(0.15 / 1.1, rel=0.1)  # quarter to quarter
    false = sum(shown_drift(rng.lognormal(0, 0.01, 40)) > 0 for _ in range(300))
    assert false <= 10  # 1 % expected


@pytest.mark.parametrize("correlated", [False, True])
def test_a_hundred_thousand_samples_are_no_burden(correlated: bool) -> None:
    x = np.random.default_rng(0).normal(size=100_000)
    x = 1e6 + (np.cumsum(x) if correlated else x)
    whole = estimate(x)  # a quadratic step in it would take minutes
    assert whole.low <= whole.median <= whole.high
