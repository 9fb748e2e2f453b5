import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.analysis.comparison import Sides, compare_each, compare_samples
from flopwise.errors import FlopwiseError

from .noise import mixed, spread

runs = st.lists(st.lists(st.integers(1, 2**62), min_size=1, max_size=12), min_size=1, max_size=6)
MIRROR = {"faster": "slower", "slower": "faster"}


@settings(max_examples=80, deadline=None)
@given(runs, runs, st.booleans())
def test_swapping_the_two_mirrors_the_verdict(a: list[list[int]], b: list[list[int]], paired: bool) -> None:
    ab, ba = compare_samples(a, b, paired=paired), compare_samples(b, a, paired=paired)
    assert ba.verdict == MIRROR.get(ab.verdict, ab.verdict)
    assert ba.ratio == pytest.approx(1 / (ab.ratio or 0))
    if ab.low is not None:
        assert ba.high == pytest.approx(1 / ab.low)
        assert ab.high is None or ab.low <= (ab.ratio or 0) <= ab.high


@settings(max_examples=40, deadline=None)
@given(runs, st.booleans())
def test_a_against_itself_is_exactly_one(a: list[list[int]], paired: bool) -> None:
    c = compare_samples(a, a, paired=paired)
    assert c.ratio == 1
    assert c.verdict in ("no difference shown", "inconclusive")


def processes(rng: np.random.Generator, n: int, differ: float, level: float = 1.0) -> list[list[float]]:
    """So many processes, whose levels differ by that share, each with twenty samples."""
    return [list(level * 1e6 * np.exp(rng.normal(0, differ)) * rng.lognormal(0, 0.01, 20)) for _ in range(n)]


@pytest.mark.parametrize("pairs", [2, 3, 5, 12])
def test_processes_that_differ_are_no_difference_of_the_code(pairs: int) -> None:
    """Same against same, where the samples of a process agree to 0.2 % and processes differ by 5 %: at most 5 % are called."""
    rng, wrong = np.random.default_rng(pairs), 0
    for _ in range(400):
        a, b = processes(rng, pairs, 0.05), processes(rng, pairs, 0.05)
        wrong += compare_samples(a, b, paired=True).verdict in MIRROR
    assert wrong <= 0.05 * 400 + 2 * (400 * 0.05 * 0.95) ** 0.5


@pytest.mark.parametrize("paired", [False, True])
def test_what_differs_more_than_processes_do_is_found(paired: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = processes(rng, 8, 0.01), processes(rng, 8, 0.01, 0.9)
    c = compare_samples(a, b, paired=paired)
    assert (c.verdict, c.n_processes) == ("faster", 8)
    assert 0.008 < c.spread < 0.03


def test_processes_that_fall_into_two_groups_do_not_agree_by_chance() -> None:
    """A GPU's memory makes two groups of processes, 1.6 % apart: three pairs of one kind are no evidence."""
    a = [[1000, 1001, 999] * 3] * 3
    assert compare_samples(a, [[1016, 1017, 1015] * 3] * 3, paired=True, error_rate=0.005).verdict != "slower"


def test_one_process_of_each_says_little() -> None:
    rng = np.random.default_rng(2)
    a, b = processes(rng, 1, 0.0), processes(rng, 1, 0.0, 0.98)
    assert compare_samples(a, b, paired=True).verdict == "inconclusive"
    assert compare_samples(a, processes(rng, 1, 0.0, 0.8), paired=True).verdict == "faster"
    assert "--processes" in compare_samples(a, b, paired=True).settle


@pytest.mark.parametrize("paired", [False, True])
def test_the_unit_does_not_matter(paired: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = mixed(rng, 40, 0.02, 1), mixed(rng, 40, 0.02, 1) * 1.02
    one, scaled = compare_samples([a], [b], paired=paired), compare_samples([a * 1e3], [b * 1e3], paired=paired)
    assert scaled.verdict == one.verdict
    assert (scaled.ratio, scaled.low) == (pytest.approx(one.ratio), pytest.approx(one.low))


def test_unpaired_the_ratio_is_that_of_the_medians() -> None:
    rng = np.random.default_rng(1)
    a, b = spread(rng, 40, 0.2, "gamma"), spread(rng, 55, 0.2, "gamma")
    c = compare_samples([a], [b], paired=False)
    assert c.ratio == pytest.approx(np.median(b) / np.median(a))
    assert (c.n_a, c.n_b) == (40, 55)


def test_samples_next_to_each_other_are_not_moved_by_what_both_share() -> None:
    rng = np.random.default_rng(1)
    common = np.exp(np.cumsum(rng.normal(0, 0.05, 40)))
    a, b = common * rng.lognormal(0, 0.005, 40), common * rng.lognormal(0, 0.005, 40) * 0.9
    c = compare_samples([a], [b], paired=True)
    assert c.verdict == "faster"
    assert c.ratio == pytest.approx(0.9, rel=0.01)
    assert compare_samples([a], [b], paired=False).verdict == "inconclusive"


def test_a_difference_below_the_negligible_is_none() -> None:
    a = [1e6 * (1 + 1e-4 * np.sin(np.arange(60) * 2.4))] * 60
    assert compare_samples(a, [x * 1.004 for x in a], paired=True).verdict == "no difference shown"
    assert compare_samples(a, [x * 1.006 for x in a], paired=True).verdict == "slower"


def test_drift_as_large_as_the_difference_leaves_it_open() -> None:
    x = np.linspace(1.0, 1.1, 120) * 1e6
    c = compare_samples([x[:60]], [x[60:]], paired=False)
    assert c.verdict == "inconclusive"
    assert "moved" in c.reason
    assert c.drift > 0.03


def test_a_wide_interval_is_inconclusive_even_around_one() -> None:
    a = np.tile([1.0, 2.0, 3.0], 5)
    c = compare_samples([a], [a], paired=False)
    assert c.verdict == "inconclusive"
    assert "moved" in c.reason


def test_the_threshold_decides_between_no_difference_and_inconclusive() -> None:
    rng = np.random.default_rng(3)
    a, b = processes(rng, 8, 0.01), processes(rng, 8, 0.01)
    assert compare_samples(a, b, paired=False, threshold=0.1).verdict == "no difference shown"
    assert compare_samples(a, b, paired=False, threshold=0.005).verdict == "inconclusive"


def test_too_few_samples_are_said_to_be_too_few() -> None:
    c = compare_samples([[100, 101, 102]], [[50, 51, 49]], paired=False)
    assert c.verdict == "inconclusive"
    assert "too few" in c.reason
    single = compare_samples([[100]], [[50]], paired=True)
    assert (single.ratio, single.low, single.high) == (pytest.approx(0.5), None, None)


@pytest.mark.parametrize(("a", "b"), [([], [[1] * 9]), ([[1] * 9], [[]]), ([[0] * 9], [[1] * 9])])
def test_nothing_to_compare_is_refused_with_a_hint(a: list[list[int]], b: list[list[int]]) -> None:
    with pytest.raises(FlopwiseError) as refused:
        compare_samples(a, b, paired=False)
    assert refused.value.hint


def test_pairs_compared_at_once_are_each_as_alone():
    rng = np.random.default_rng(7)
    asked = []
    for place in range(120):
        shift, n, m = 1 + 0.02 * rng.normal(), *rng.integers(1, 30, 2)
        a = [rng.lognormal(10, 0.03, n) for _ in range(1 + place % 3)]
        b = [shift * rng.lognormal(10, 0.03, n if place % 2 else m) for _ in range(1 + place % 4)]
        asked.append(Sides(a, b, bool(place % 5), bool(place % 7), (0.05, 0.01)[place % 4 == 0]))
    alone = [compare_samples(a, b, paired=p, together=t, error_rate=e, threshold=0.02) for a, b, p, t, e in asked]
    assert compare_each(asked, 0.02) == alone
    assert len({found.verdict for found in alone}) > 2
