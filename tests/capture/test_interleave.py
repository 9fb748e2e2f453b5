"""When two interleaved trials have been sampled well enough."""

import pytest

from flopwise.capture.interleave import MUCH_FASTER, MUCH_SLOWER, RoundsRule
from flopwise.spec.workload import Sampling

MS = 1_000_000


def rounds(second, *, fewest=6, seconds=10.0, most=100):
    """After how many rounds it stops, and why; each of the first takes 10 ms, and a round one second."""
    rule = RoundsRule((Sampling(seconds=seconds), Sampling(seconds=seconds)), fewest)
    for n in range(1, most):
        if stopped := rule.after((10 * MS, second(n) * MS), float(n)):
            return n, stopped
    return most, ""


def test_one_that_is_much_slower_is_given_up_after_two_rounds():
    assert rounds(lambda n: 21) == (2, MUCH_SLOWER)
    assert rounds(lambda n: 21, fewest=0)[1] != MUCH_SLOWER  # two workloads that a user compares


def test_one_that_is_much_faster_needs_no_more_rounds_once_the_budget_is_spent():
    assert rounds(lambda n: 6, seconds=2.0) == (6, MUCH_FASTER)  # the budget is overrun for six samples
    assert rounds(lambda n: 6 + n % 2, seconds=2.0, fewest=8) == (8, "budget")  # some rounds are not that fast


@pytest.mark.parametrize("fewest", [6, 12])
def test_as_many_rounds_as_asked_for_are_taken_whatever_the_budget(fewest):
    assert rounds(lambda n: 9 + n % 3, seconds=1.0, fewest=fewest)[0] == fewest


def test_precise_samples_end_it():
    n, stopped = rounds(lambda n: 9)
    assert (stopped, n) == ("precise", 10)
