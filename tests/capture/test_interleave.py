"""When enough pairs of processes were measured, and pairs of real processes on the CPU."""

import math

import numpy as np
import pytest

from flopwise.capture.interleave import Contest
from flopwise.capture.stopping import BUDGET, DECIDED, PROCESSES, PairsRule
from flopwise.records.events import Done
from flopwise.spec.workload import Sampling, Trial, workload

MS = 1_000_000


def pairs(differences, *, seconds=10.0, seconds_each=0.1, **options):
    """After how many pairs it stops, and why; `differences` are log ratios, one for each pair."""
    fields = {"processes": options.pop("processes", None)}
    rule = PairsRule(Sampling(seconds=seconds, **fields), **options)
    for n in range(1, len(differences) + 1):
        if stopped := rule.after(differences[:n], n * seconds_each):
            return n, stopped
    return len(differences), ""


def spread(center, size, n=20, seed=0):
    return list(center + np.random.default_rng(seed).normal(0, size, n))


def test_a_large_difference_is_quick_and_a_small_one_takes_longer():
    twice, three, one = (pairs(spread(-math.log(ratio), 0.004)) for ratio in (2.0, 1.03, 1.01))
    assert twice == (3, DECIDED)
    assert twice[0] <= three[0] <= one[0]
    assert (three[1], one[1]) == (DECIDED, DECIDED)


def test_the_same_twice_ends_once_it_is_known_to_be_the_same():
    n, stopped = pairs(spread(0.0, 0.004))
    assert (n <= 12, stopped) == (True, DECIDED)
    assert pairs(spread(0.0, 0.3)) == (12, BUDGET)  # too noisy to tell


def test_the_time_ends_it_but_not_before_three_pairs():
    assert pairs(spread(0.0, 0.3), seconds=1.0, seconds_each=100.0) == (3, BUDGET)
    assert pairs(spread(0.0, 0.3), seconds=1.0, seconds_each=0.7) == (5, BUDGET)


def test_as_many_pairs_as_asked_for_are_measured_whatever_they_say():
    assert pairs(spread(-1.0, 0.001), processes=7) == (7, PROCESSES)
    assert pairs(spread(-1.0, 0.001), processes=1) == (1, PROCESSES)


def test_a_lever_that_cannot_be_worth_it_is_given_up():
    slightly_slower = spread(0.02, 0.012)
    assert pairs(slightly_slower, error_rate=0.001, worth=0.02)[0] < pairs(slightly_slower, error_rate=0.001)[0]


def test_one_that_is_much_slower_is_given_up_after_two_rounds():
    rule = PairsRule(Sampling(), worth=0.02)
    assert not rule.much_slower([10], [21])
    assert rule.much_slower([10, 10], [21, 21])
    assert not rule.much_slower([10, 10], [21, 19])
    assert not PairsRule(Sampling()).much_slower([10, 10], [21, 21])  # two workloads that a user compares


@pytest.mark.parametrize(("round_ms", "rounds"), [(0.1, 100), (50, 20), (400, 5)])
def test_a_pair_takes_a_tenth_of_the_seconds(round_ms, rounds):
    assert PairsRule(Sampling(seconds=10.0)).rounds(int(round_ms * MS)) == rounds
    assert PairsRule(Sampling(samples=3)).rounds(int(round_ms * MS)) == 3


# --- real processes


def trial(target="tiny", group="", **sampling):
    work = workload(target, batch=1, context=8, phase="forward")
    return Trial(workload=work, sampling=Sampling(warmup=1, **sampling), device="cpu", group=group)


def contested(**options):
    contest = Contest(lambda key: None)
    try:
        sampling = Sampling(samples=3, processes=options.pop("processes", 2))
        return contest.run((trial(group="a"), trial(group="b")), PairsRule(sampling), **options)
    finally:
        contest.close()


@pytest.mark.parametrize("together", [True, False])
def test_every_process_leaves_its_samples(together):
    found = contested(together=together)
    assert (found.stopped, found.failed) == (PROCESSES, None)
    a, b = found.points
    assert (a.paired_with, b.paired_with) == (b.key, a.key)
    assert a.together is together
    for point in found.points:
        times = point.times()
        assert (times.processes, len(times.wall_ns)) == ((3, 3), 6)
        assert [len(one) for one in times.by_process("wall")] == [3, 3]


@pytest.mark.slow
def test_where_two_do_not_fit_they_are_measured_one_after_the_other(monkeypatch):
    from flopwise.capture import interleave

    wait = interleave.InterleavedTrial.prepare
    beside = []

    def full(self):
        beside.append(self)
        if len(beside) == 2:  # the second of the first pair
            wait(self)
            self.interrupt()
            self.ended = Done(status="oom", reason="out of memory")
            self.builder.done = self.ended
            return False
        return wait(self)

    monkeypatch.setattr(interleave.InterleavedTrial, "prepare", full)
    found = contested()
    assert (found.stopped, found.points[0].together, found.points[1].together) == (PROCESSES, False, False)
