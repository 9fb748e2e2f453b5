import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.analysis.comparison import compare_samples
from flopwise.errors import FlopwiseError

from .noise import mixed, spread

runs = st.lists(st.integers(1, 2**62), min_size=1, max_size=40)
MIRROR = {"faster": "slower", "slower": "faster"}


@settings(max_examples=80, deadline=None)
@given(runs, runs, st.booleans())
def test_swapping_the_two_mirrors_the_verdict(a: list[int], b: list[int], paired: bool) -> None:
    ab, ba = compare_samples(a, b, paired=paired), compare_samples(b, a, paired=paired)
    assert ba.verdict == MIRROR.get(ab.verdict, ab.verdict)
    assert ba.ratio == pytest.approx(1 / (ab.ratio or 0))
    if ab.low is not None:
        assert ba.high == pytest.approx(1 / ab.low)
        assert ab.low <= (ab.ratio or 0) <= (ab.high or 0)


@settings(max_examples=40, deadline=None)
@given(runs, st.booleans())
def test_a_against_itself_is_exactly_one(a: list[int], paired: bool) -> None:
    c = compare_samples(a, a, paired=paired)
    assert c.ratio == 1
    assert c.verdict in ("no difference shown", "inconclusive")
    if paired and len(a) >= 6:
        assert (c.low, c.high, c.verdict) == (1, 1, "no difference shown")


@pytest.mark.parametrize("paired", [False, True])
def test_the_unit_does_not_matter(paired: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = mixed(rng, 40, 0.02, 1), mixed(rng, 40, 0.02, 1) * 1.02
    one, scaled = compare_samples(a, b, paired=paired), compare_samples(a * 1e3, b * 1e3, paired=paired)
    assert scaled.verdict == one.verdict
    assert (scaled.ratio, scaled.low) == (pytest.approx(one.ratio), pytest.approx(one.low))


def test_unpaired_the_ratio_is_that_of_the_medians() -> None:
    rng = np.random.default_rng(1)
    a, b = spread(rng, 40, 0.2, "gamma"), spread(rng, 55, 0.2, "gamma")
    c = compare_samples(a, b, paired=False)
    assert c.ratio == pytest.approx(np.median(b) / np.median(a))
    assert (c.n_a, c.n_b) == (40, 55)


def test_paired_runs_of_unequal_length_use_the_pairs_there_are() -> None:
    rng = np.random.default_rng(1)
    common = np.exp(np.cumsum(rng.normal(0, 0.05, 40)))
    a, b = common * rng.lognormal(0, 0.005, 40), common * rng.lognormal(0, 0.005, 40) * 0.9
    c = compare_samples(a, b[:30], paired=True)
    assert c.verdict == "faster"
    assert c.ratio == pytest.approx(0.9, rel=0.01)
    assert compare_samples(a, b[:30], paired=False).verdict == "inconclusive"


def test_a_difference_below_the_negligible_is_none() -> None:
    a = 1e6 * (1 + 1e-4 * np.sin(np.arange(60) * 2.4))
    assert compare_samples(a, a * 1.004, paired=True).verdict == "no difference shown"
    assert compare_samples(a, a * 1.004, paired=True, negligible=0.001).verdict == "slower"


def test_drift_as_large_as_the_difference_leaves_it_open() -> None:
    x = np.linspace(1.0, 1.1, 120) * 1e6
    c = compare_samples(x[:60], x[60:], paired=False)
    assert c.verdict == "inconclusive"
    assert "moved" in c.reason
    assert c.drift > 0.03


def test_a_wide_interval_is_inconclusive_even_around_one() -> None:
    a = np.tile([1.0, 2.0, 3.0], 5)
    c = compare_samples(a, a, paired=False)
    assert c.verdict == "inconclusive"
    assert "spread" in c.reason


def test_the_threshold_decides_between_no_difference_and_inconclusive() -> None:
    rng = np.random.default_rng(3)
    a, b = spread(rng, 60, 0.02, "lognormal"), spread(rng, 60, 0.02, "lognormal")
    assert compare_samples(a, b, paired=False, threshold=0.1).verdict == "no difference shown"
    assert compare_samples(a, b, paired=False, threshold=0.005).verdict == "inconclusive"


def test_too_few_samples_are_said_to_be_too_few() -> None:
    c = compare_samples([100, 101, 102], [50, 51, 49], paired=False)
    assert c.verdict == "inconclusive"
    assert "too few" in c.reason
    assert c.low == pytest.approx(49 / 102)
    assert 51 / 100 <= (c.high or 0) < 0.53
    single = compare_samples([100], [50], paired=True)
    assert (single.ratio, single.low, single.high) == (pytest.approx(0.5), None, None)


@pytest.mark.parametrize(("a", "b"), [([], [1] * 9), ([1] * 9, []), ([0] * 9, [1] * 9)])
def test_nothing_to_compare_is_refused_with_a_hint(a: list[int], b: list[int]) -> None:
    with pytest.raises(FlopwiseError) as refused:
        compare_samples(a, b, paired=False)
    assert refused.value.hint
