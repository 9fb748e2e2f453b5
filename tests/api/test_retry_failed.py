"""`sweep --retry-failed`: rows that are not ok are measured again in their run, the others stay as they are."""

import pytest

from flopwise.api.sweep import sweep
from flopwise.errors import FlopwiseError
from flopwise.spec.sweep import sweep_from

STEP = """
import os

def step(device, batch):
    def run():
        if batch == 2 and not os.path.exists({good!r}):
            raise ValueError("not yet")

    return run
"""


@pytest.fixture
def plan(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(STEP.format(good=str(tmp_path / "good")))
    base = {"workload": f"{file}:step", "device": "cpu", "samples": 2, "warmup": 0, "batch": [1, 2, 3]}
    return sweep_from({"name": "retry", "base": base})


def test_only_what_failed_is_measured_again(plan, tmp_path):
    runs = tmp_path / "runs"
    before = sweep(plan, runs=runs)
    assert [point.status for point in before.points] == ["ok", "error", "ok"]
    (tmp_path / "good").touch()
    after = sweep(plan, runs=runs, retry_failed=True)
    assert after.path == before.path
    assert [point.status for point in after.points] == ["ok", "ok", "ok"]
    assert (after.points[0], after.points[2]) == (before.points[0], before.points[2])
    again = sweep(plan, runs=runs, retry_failed=True)
    assert (again.path, again.points) == (after.path, after.points)  # nothing is left to do
    assert len(list(runs.glob("*/run.json"))) == 1


def test_a_new_run_has_nothing_to_retry(plan, tmp_path):
    with pytest.raises(FlopwiseError, match="--retry-failed"):
        sweep(plan, runs=tmp_path / "runs", fresh=True, retry_failed=True)
