"""The figures of a stored run: of the one workload that was measured, or one line that says why there are none."""

from pathlib import Path

import pytest

from flopwise.analysis.measured import MeasuredRun
from flopwise.errors import FlopwiseError
from flopwise.records.run import OK, PhaseTimes, Point, RunHeader
from flopwise.spec.workload import Sampling, Trial, workload

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11"


def point(batch, status=OK, reason=""):
    trial = Trial(workload=workload("tiny", batch=batch, context=16), sampling=Sampling(), device="cpu")
    phases = (PhaseTimes(phase="step", wall_ns=(10**6,) * 3),) if status == OK else ()
    return Point(key=trial.key(), trial=trial, status=status, reason=reason, phases=phases)


def run(*points):
    header = RunHeader(id="1", kind="bench", created_at="", created_ns=0)
    return MeasuredRun(path=Path(), header=header, points=points)


GOOD, BAD = point(1), point(2, "error", "train.py:3 in step: ValueError: no")


@pytest.mark.parametrize("points", [(GOOD,), (GOOD, BAD)])
def test_of_one_measured_workload(points):
    found = run(*points)
    assert found.median_ms == 1.0
    assert found.tokens_per_second == pytest.approx(16_000)
    assert found.mfu is None  # no GPU is known


@pytest.mark.parametrize(
    ("points", "said"),
    [((), "no points"), ((BAD,), "train.py:3 in step: ValueError: no"), ((GOOD, point(4)), "1 has 2 workloads")],
)
@pytest.mark.parametrize("figure", ["median_ms", "mfu", "tokens_per_second"])
def test_of_none_and_of_several_one_line_says_so(points, said, figure):
    with pytest.raises(FlopwiseError, match=said):
        getattr(run(*points), figure)


def test_each_workload_is_a_run_of_its_own():
    found = run(GOOD, point(4))
    assert [one.tokens_per_second for one in found.each] == pytest.approx([16_000, 64_000])


def test_on_a_gpu_the_mfu_is_known():
    found = MeasuredRun.load(RESULTS / "launch-bound")
    assert all(0 < one.mfu < 1 for one in found.each)
