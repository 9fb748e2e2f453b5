"""The rules for warm-up and for enough samples."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.capture.stopping import PairsRule, StoppingRule, half_width, steady
from flopwise.spec.workload import Sampling
from flopwise.statistics import estimate


def rounds_until_stop(sampling, walls, seconds_each):
    rule = StoppingRule(sampling)
    for n, wall in enumerate(walls, 1):
        if why := rule.after(wall, n * seconds_each):
            return n, why
    return None


def test_warm_up_is_not_over_while_times_fall():
    falling = [int(1000 * 0.9**i) for i in range(30)]
    assert not any(steady(falling[:n], 0) for n in range(1, 31))


def test_warm_up_ends_once_times_are_level():
    assert steady([5000, 300, 200, 100, 101, 100, 99, 100, 100, 100], 0)


def test_a_gpu_is_given_time_to_raise_its_clocks():
    assert not steady([100] * 50, least_ns=10_000)
    assert steady([100] * 200, least_ns=10_000)


def test_half_width_is_that_of_the_interval_shown():
    rng = random.Random(0)
    walls = [int(1e6 * rng.lognormvariate(0, 0.2)) for _ in range(50)]
    shown = estimate(walls)
    assert half_width(walls) == (shown.high - shown.low) / 2 / shown.median


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60))
def test_half_width_is_a_share_and_never_negative(walls):
    assert half_width(walls) >= 0


def test_exactly_as_many_samples_as_asked():
    assert rounds_until_stop(Sampling(samples=4), [1, 100, 1, 100, 1], 10.0) == (4, "samples")


def test_quiet_samples_stop_early_and_noisy_ones_at_the_budget():
    rng = random.Random(1)
    quiet = [10**6 + rng.randrange(1000) for _ in range(1000)]
    noisy = [int(10**6 * rng.lognormvariate(0, 0.8)) for _ in range(1000)]
    assert rounds_until_stop(Sampling(seconds=5.0), quiet, 0.05) == (10, "precise")
    assert rounds_until_stop(Sampling(seconds=5.0), noisy, 0.05) == (100, "budget")


def test_a_budget_waits_for_six_samples_but_not_for_ever():
    assert rounds_until_stop(Sampling(seconds=2.0), [10**9] * 100, 1.0) == (6, "budget")
    assert rounds_until_stop(Sampling(seconds=2.0), [10**9] * 100, 5.0) == (2, "budget")


def test_one_burst_is_not_enough():
    n, why = rounds_until_stop(Sampling(seconds=5.0), [1000] * 500, 1e-6)
    assert (why, n >= 100) == ("precise", True)


@pytest.mark.parametrize(
    ("first", "second", "decided"),
    [
        ((120, 121), (100, 101), True),
        ((120, 121), (100, 110), False),  # one round was not so much faster
        ((120,), (100,), False),
        ((100, 101), (120, 121), False),
    ],
)
def test_one_pair_decides_only_where_every_round_is_much_faster(first, second, decided):
    assert PairsRule(Sampling(), worth=0.02).much_faster(first, second) is decided
    assert not PairsRule(Sampling()).much_faster(first, second)  # a comparison by itself always takes its pairs
