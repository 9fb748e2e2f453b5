"""How often the statistics are right, by simulation; docs/decisions/0003-median-and-bootstrap.md has these cases at length.

Seeds are fixed. A count is held against what a rate on the limit would exceed once in twenty times.
"""

from math import comb

import numpy as np
import pytest

from flopwise.analysis.comparison import compare_samples
from flopwise.capture.stopping import DECIDED, PairsRule
from flopwise.spec.workload import Sampling
from flopwise.statistics import Series, difference_of_pairs, error_rate_at, estimate
from quick import tenth

from .noise import DRIFTS, SKEWED, level, mixed, spread, with_outliers

TRIALS = tenth(300)


def most(rate: float, trials: int = TRIALS, tail: float = 0.05) -> int:
    """The least count that a binomial of this rate exceeds with a probability below `tail`."""
    below = 0.0
    for k in range(trials + 1):
        below += comb(trials, k) * rate**k * (1 - rate) ** (trials - k)
        if 1 - below < tail:
            return k
    return trials


def test_the_bound_is_the_binomials() -> None:
    assert most(0.05, trials=300) == 21  # of 300: mean 15, standard deviation 3.8


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [20, 50, 200])
@pytest.mark.parametrize("kind", SKEWED)
def test_the_interval_holds_the_median_as_often_as_it_says(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    truth = np.median(spread(np.random.default_rng(0), 2_000_001, 0.1, kind))
    estimates = [estimate(spread(rng, n, 0.1, kind)) for _ in range(TRIALS)]
    assert sum(not (e.low or 0) <= truth <= (e.high or 0) for e in estimates) <= most(0.07)


def test_blocks_keep_the_interval_honest_under_autocorrelation() -> None:
    rng = np.random.default_rng(5)
    missed = 0
    for _ in range(TRIALS):
        noise = rng.normal(size=250)
        x = np.empty(250)
        x[0] = noise[0]
        for i in range(1, 250):
            x[i] = 0.6 * x[i - 1] + noise[i]
        e = estimate(1000 + x[50:])
        missed += not (e.low or 0) <= 1000 <= (e.high or 0)
    assert missed <= most(0.10)  # drawing singly misses about a third


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("n", "share"), [(40, 0.01), (100, 0.02)])
@pytest.mark.parametrize("drift", DRIFTS)
def test_same_against_same_in_sequence_is_rarely_a_difference(drift: str, n: int, share: float) -> None:
    """B's run goes on where A's drift has come to."""
    rng = np.random.default_rng(n)
    false = 0
    for trial in range(TRIALS):
        x = mixed(rng, 2 * n, share, trial) * level(rng, 2 * n, drift, 0.03)
        false += compare_samples([x[:n]], [x[n:]], paired=False).verdict in ("faster", "slower")
    assert false <= most(0.05)


def processes(rng: np.random.Generator, many: int, n: int, share: float, trial: int, differ: float) -> list[Series]:
    """Of the same step: their levels differ by that share."""
    return [mixed(rng, n, share, trial) * rng.lognormal(0, differ) for _ in range(many)]


@pytest.mark.parametrize(("n", "share"), [(15, 0.01), (80, 0.03)])
@pytest.mark.parametrize("drift", DRIFTS)
def test_paired_drift_cancels(drift: str, n: int, share: float) -> None:
    """Common drift makes no difference of nothing and hides none of 3 %."""
    rng = np.random.default_rng(n)
    false = missed = 0
    for trial in range(TRIALS):
        common = [level(rng, n, drift, 0.1) for _ in range(8)]
        sides = [processes(rng, 8, n, share, trial, 0.005) for _ in range(2)]
        a, b = ([x * moved for x, moved in zip(side, common, strict=True)] for side in sides)
        false += compare_samples(a, b, paired=True).verdict in ("faster", "slower")
        missed += compare_samples(a, [x * 1.03 for x in b], paired=True).verdict != "slower"
    assert false <= most(0.05)
    assert missed <= most(0.05)


@pytest.mark.parametrize(("n", "share"), [(40, 0.01), (150, 0.02)])
def test_five_percent_are_found_between_two_quiet_runs(n: int, share: float) -> None:
    rng = np.random.default_rng(n)
    missed = 0
    for trial in range(TRIALS):
        a, b = (processes(rng, 3, n, share, trial, 0.003) for _ in range(2))
        missed += compare_samples(a, [x / 1.05 for x in b], paired=False).verdict != "faster"
    assert missed <= most(0.05)


def test_a_verdict_of_no_difference_is_reached() -> None:
    """'inconclusive' must not be the way out of every question."""
    rng = np.random.default_rng(1)
    runs = [processes(rng, 6, 40, 0.01, trial, 0.003) for trial in range(100)]
    verdicts = [compare_samples(r[:3], r[3:], paired=False).verdict for r in runs]
    assert verdicts.count("no difference shown") >= 80


@pytest.mark.parametrize("differ", [0.003, 0.02, 0.1])
def test_looking_after_every_few_pairs_does_not_raise_the_error_rate(differ: float) -> None:
    """Same against same, as `bench --versus` runs it: it stops when it believes to know."""
    rng, false = np.random.default_rng(7), 0
    rule = PairsRule(Sampling())
    for _ in range(3 * TRIALS):
        differences, stopped = [float(rng.normal(0, differ))], ""
        while not stopped:
            differences.append(float(rng.normal(0, differ)))
            stopped = rule.after(differences, 0.0)
        rate = error_rate_at(len(differences), stopped == DECIDED)
        false += difference_of_pairs(differences, rate).differs()
    assert false <= most(0.05, 3 * TRIALS)


def test_outliers_alone_move_nothing() -> None:
    rng = np.random.default_rng(2)
    false = 0
    for _ in range(TRIALS):
        a, b = spread(rng, 40, 0.01, "gamma"), with_outliers(rng, spread(rng, 40, 0.01, "gamma"), 0.05)
        false += compare_samples([a], [b], paired=False).verdict in ("faster", "slower")
    assert false <= most(0.05)
