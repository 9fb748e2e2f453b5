import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.analysis.matching import Compared, compare_points, match
from flopwise.errors import FlopwiseError
from flopwise.records.run import PhaseTimes, Point
from flopwise.render.comparison_view import comparison_view
from flopwise.spec.workload import Sampling, Trial, workload

from .points import make_point


def labels(pairs: list[tuple[Point, Point]]) -> list[tuple[str, str]]:
    return [(a.trial.workload.label(), b.trial.workload.label()) for a, b in pairs]


def test_the_same_trials_are_paired_in_the_order_of_a() -> None:
    tiny, small, medium = make_point("tiny"), make_point("small"), make_point("medium")
    assert match([medium, tiny], [tiny, small, medium]) == ([(medium, medium), (tiny, tiny)], [], [small])


def test_a_trial_measured_twice_is_paired_in_turn() -> None:
    first, second = make_point(started_at="1"), make_point(started_at="2")
    pairs, only_a, only_b = match([first, second], [second, first])
    assert pairs == [(first, second), (second, first)]
    assert not only_a
    assert not only_b


def test_two_runs_of_one_point_are_paired_whatever_they_are() -> None:
    a, b = make_point("op:gelu"), make_point("small", wall=(), status="oom")
    assert match([a], [b]) == ([(a, b)], [], [])


def test_a_changed_recipe_is_matched_where_it_is_the_only_one() -> None:
    before, after, other = make_point("tiny"), make_point("tiny", options={"precision": "bf16"}), make_point("small")
    assert match([before, other], [other, after]) == ([(before, after), (other, other)], [], [])
    third = make_point("tiny", options={"compile": "default"})
    assert match([before, other], [other, after, third]) == ([(other, other)], [before], [after, third])


def test_a_label_matches_across_sampling_and_device() -> None:
    recipes = ({}, {"precision": "bf16"})
    a = [make_point("tiny", options=r) for r in recipes]
    b = [make_point("tiny", options=r, samples=5, device="cpu") for r in recipes]
    assert match(a, b) == (list(zip(a, b, strict=True)), [], [])


def test_a_label_prefers_its_own_device() -> None:
    a = [make_point("tiny", device=d) for d in ("cpu", "cuda")]
    b = [make_point("tiny", device=d, samples=9) for d in ("cuda", "cpu")]
    assert match(a, b)[0] == [(a[0], b[1]), (a[1], b[0])]


def test_a_failure_is_matched_with_its_success() -> None:
    oom, ok, other = make_point("small", wall=(), status="oom"), make_point("small"), make_point("tiny")
    assert match([oom, other], [ok, other])[0] == [(oom, ok), (other, other)]


def test_the_only_usable_points_are_the_last_resort() -> None:
    failed, a, b = make_point("small", wall=(), status="oom"), make_point("tiny"), make_point("op:gelu")
    assert match([failed, a], [b]) == ([(a, b)], [failed], [])


_TRIALS = [
    Trial(workload=workload(target, precision=precision), sampling=Sampling(samples=samples), device=device)
    for target in ("tiny", "small")
    for precision in ("fp32", "bf16")
    for samples in (None, 7)
    for device in ("cpu", "cuda")
]
_points = st.lists(st.sampled_from(_TRIALS), max_size=6).map(
    lambda trials: [Point(key=t.key(), trial=t, status="ok", started_at=str(i)) for i, t in enumerate(trials)]
)


@settings(max_examples=60, deadline=None)
@given(_points, _points)
def test_every_point_is_in_one_place(a: list[Point], b: list[Point]) -> None:
    pairs, only_a, only_b = match(a, b)
    assert sorted(p.started_at for p in [*only_a, *(x for x, _ in pairs)]) == sorted(p.started_at for p in a)
    assert sorted(p.started_at for p in [*only_b, *(y for _, y in pairs)]) == sorted(p.started_at for p in b)
    back, _, _ = match(b, a)
    assert len(back) == len(pairs)


def test_a_point_is_no_different_from_itself() -> None:
    point = make_point(wall=(100, 300, 200))
    c = compare_points(point, point)
    assert (c.ratio, c.low, c.high, c.verdict) == (1, 1, 1, "no difference shown")


def test_points_that_took_turns_are_compared_by_pairs() -> None:
    drift = [1000 * (i + 10) for i in range(30)]
    a = make_point(wall=tuple(drift))
    b = make_point("small", wall=tuple(9 * x // 10 for x in drift), paired_with=a.key)
    assert compare_points(a, b).verdict == "faster"
    assert compare_points(a, b).paired
    assert compare_points(b, a).verdict == "slower"
    alone = make_point("small", wall=tuple(9 * x // 10 for x in drift))
    assert not compare_points(a, alone).paired
    assert compare_points(a, alone).verdict == "inconclusive"


def test_a_point_without_samples_says_why() -> None:
    oom, ok = make_point("small", wall=(), status="oom", reason="out of memory: 3 GiB more"), make_point()
    c = compare_points(oom, ok)
    assert (c.ratio, c.verdict, c.n_a, c.n_b) == (None, "inconclusive", 0, 10)
    assert "oom" in c.reason
    assert compare_points(oom, oom).verdict == "inconclusive"
    assert "forward" in compare_points(ok, make_point("small"), "forward").reason
    assert "gpu clock" in compare_points(ok, make_point("small"), clock="gpu").reason


def test_another_phase_and_clock_can_be_compared() -> None:
    def point(target: str, ns: int) -> Point:
        times = PhaseTimes(phase="forward", wall_ns=(100,) * 8, gpu_ns=(ns,) * 8, gpu_held=(True,) * 8)
        return make_point(target, phases=(times,))

    c = compare_points(point("tiny", 50), point("small", 40), "forward", "gpu")
    assert (c.ratio, c.verdict) == (pytest.approx(0.8), "faster")
    assert "zero" in compare_points(point("tiny", 0), point("small", 40), "forward", "gpu").reason


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(FlopwiseError) as refused:
        compare_points(make_point(), make_point("small"), clock="cpu")
    assert "wall" in refused.value.hint


@pytest.mark.parametrize("busy_a", [0.0, 1.5])
@pytest.mark.parametrize("busy_b", [0.0, 1.5])
@pytest.mark.parametrize("faster", ["A", "B"])
def test_load_is_no_speedup(busy_a: float, busy_b: float, faster: str) -> None:
    """The law: the slower of the two is called slower only where load alone cannot have made it so."""
    walls = [tuple(range(level, level + 20)) for level in ((1000, 2000) if faster == "A" else (2000, 1000))]
    a, b = make_point(wall=walls[0], busy_cores=busy_a), make_point(wall=walls[1], busy_cores=busy_b)
    found = compare_points(a, b)
    slower, other = (busy_b, busy_a) if faster == "A" else (busy_a, busy_b)
    doubtful = slower > 0 and other == 0
    assert found.verdict == ("inconclusive" if doubtful else "slower" if faster == "A" else "faster")
    assert ("busy machine" in found.reason) == doubtful
    assert [note[:2] for note in comparison_view(Compared(((a, b, found),))).tables[0].notes if "was busy" in note] == [
        side for side, busy in (("A:", busy_a), ("B:", busy_b)) if busy
    ]
