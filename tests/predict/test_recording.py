"""A step recorded beside other work, in a process of its own."""

from pathlib import Path

import pytest

from flopwise.predict.recording import StepRecording
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload


@pytest.fixture(autouse=True)
def _steps(monkeypatch):
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent / 'capture'}")


def test_a_step_is_recorded_as_written_and_cast():
    recording = StepRecording(workload("py:recorded_steps:perceptron"), gpu("h200"))
    found = recording.result()
    recording.close()
    assert {op.dtype for op in found.as_written.ops if op.kind == "matmul"} == {"fp32"}
    assert {op.dtype for op in found.cast["bf16"].ops if op.kind == "matmul"} == {"bf16"}
    assert found.as_written.architecture == "hopper"


def test_what_cannot_be_dry_run_is_nothing_and_raises_nothing():
    recording = StepRecording(workload("py:steps:counts_by_values"), gpu("h200"))
    assert recording.result() is None
    recording.close()


@pytest.mark.slow
def test_one_that_is_closed_early_ends():
    recording = StepRecording(workload("py:steps:hangs"), gpu("h200"))
    recording.close()
    assert recording.result(30) is None
    assert not recording._thread.is_alive()
