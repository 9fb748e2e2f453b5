"""Same against same with real processes, as `bench --versus` compares: rarely called different, whatever the machine does."""

import pytest

from flopwise.analysis.matching import compare_points
from flopwise.capture.interleave import Contest
from flopwise.capture.stopping import PairsRule
from flopwise.records.comparison import FASTER, SLOWER
from flopwise.spec.workload import Sampling, Trial, workload

VERDICTS = 8
ALLOWED = 2  # a rate of 5 % exceeds it once in 170 times


@pytest.mark.slow
def test_same_against_same_is_not_called_faster():
    work, sampling = workload("tiny", batch=1, context=32, phase="forward"), Sampling(seconds=1.0)
    trials = tuple(Trial(workload=work, sampling=sampling, device="cpu", group=name) for name in "ab")
    contest = Contest(lambda key: None)
    try:
        found = [compare_points(*contest.run(trials, PairsRule(sampling)).points) for _ in range(VERDICTS)]
    finally:
        contest.close()
    assert sum(one.verdict in (FASTER, SLOWER) for one in found) <= ALLOWED
    assert all(one.paired and one.n_processes >= 3 for one in found)
