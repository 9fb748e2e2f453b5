import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.resampling import _ar1_length, _politis_white_length, block_lengths, shown_drifts
from flopwise.statistics import estimate, estimates

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
    walk = np.cumsum(noise)
    of_noise, of_walk, scaled = block_lengths(np.stack([noise, walk, 1e6 * walk]))
    assert of_noise == 1
    assert of_walk >= 20
    assert scaled == of_walk  # ranks: no unit


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
    assert (shown_drifts(rng.lognormal(0, 0.01, (300, 40))) > 0).sum() <= 10  # 1 % expected


@pytest.mark.parametrize("correlated", [False, True])
def test_a_hundred_thousand_samples_are_no_burden(correlated: bool) -> None:
    x = np.random.default_rng(0).normal(size=100_000)
    x = 1e6 + (np.cumsum(x) if correlated else x)
    whole = estimate(x)  # a quadratic step in it would take minutes
    assert whole.low <= whole.median <= whole.high


def plain_estimate(x):
    """What `estimate` is defined as, of one run by itself: the median, its interval, drift and the length of blocks."""
    n, block = x.size, 1
    medians = [float(np.median(part)) for part in np.array_split(x, 4)] if n >= 6 else [0.0]
    quarters = [np.sign(part - np.median(x)) for part in np.array_split(x, 4)]
    drifted = sum(part.sum() ** 2 / part.size for part in quarters if part.size) > 11.345
    drift = np.ptp(medians) / np.median(x) if drifted and np.median(x) > 0 else 0.0
    if n < 6:
        return np.median(x), x.min() if n > 1 else None, x.max() if n > 1 else None, drift, block
    if np.ptp(x):
        _, tied, counts = np.unique(x, return_inverse=True, return_counts=True)
        rank = (np.cumsum(counts) - counts / 2)[tied]
        rank -= rank.mean()
        longest = math.ceil(min(3 * math.sqrt(n), n / 3))
        correlation = np.array([rank[: n - lag] @ rank[lag:] for lag in range(longest + 1)]) / (rank @ rank)
        best = max(_ar1_length(correlation[1], n), _politis_white_length(correlation, n))
        block = max(1, min(longest, round(best)))
    rng, k = np.random.default_rng(0), (n + 1) // 2
    if block == 1:
        lower = rng.beta(k, n - k + 1, 1000)
        upper = lower if n % 2 else lower + (1 - lower) * rng.beta(1, n - k, 1000)
        resampled = (np.sort(x)[(n * lower).astype(int)] + np.sort(x)[np.minimum((n * upper).astype(int), n - 1)]) / 2
    else:
        starts = rng.integers(n, size=(1000, -(-n // block), 1))
        resampled = np.median(x[(starts + np.arange(block)).reshape(1000, -1)[:, :n] % n], axis=1)
    z, freedom = NormalDist().inv_cdf(0.975), max(1.0, n / block - 1)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    tail = 100 * NormalDist().cdf(-t * math.sqrt((freedom + 1) / freedom))
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return np.median(x), min(low, np.median(x)), max(high, np.median(x)), drift, block


kinds = {
    "noise": lambda rng, n: rng.lognormal(10, 0.05, n),
    "walk": lambda rng, n: np.exp(10 + np.cumsum(rng.normal(0, 0.01, n))),
    "ties": lambda rng, n: rng.integers(1, 5, n).astype(float),
    "equal": lambda rng, n: np.full(n, 7.0),
    "drift": lambda rng, n: np.round(rng.lognormal(10, 0.02, n) * np.linspace(1, 1.2, n)),
}


def test_thousands_of_runs_at_once_are_each_as_defined() -> None:
    rng = np.random.default_rng(5)
    runs = [kinds[kind](rng, int(rng.integers(1, 50))) for kind in kinds for _ in range(60)]
    rng.shuffle(places := np.arange(len(runs)))
    together = estimates([runs[i] for i in places])
    methods = set()
    for place, found in zip(places, together, strict=True):
        median, low, high, drift, block = plain_estimate(runs[place])
        assert (found.median, found.low, found.high) == (median, low, high)
        assert found.drift == pytest.approx(drift)
        assert (found.method == "block bootstrap") == (block > 1)
        assert found == estimate(runs[place])
        methods.add(found.method)
    assert methods == {"single", "range", "bootstrap", "block bootstrap"}
