"""A worker that is forked for a test is as one that was started: its folder, its environment, its end."""

import os
import signal
import subprocess

import pytest

from flopwise.capture.isolate import Worker
from flopwise.errors import FlopwiseError
from flopwise.records.run import OK
from flopwise.spec.workload import Sampling, Trial, workload
from forked_workers import ForkedWorker

STEP = """
import os, sys
print(os.getcwd(), os.environ["OWN"], os.getpgid(os.getppid()), flush=True)
import beside

def factory(device):
    return lambda: None
"""


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A trial of a step that prints where it is, with one module beside it and one on PYTHONPATH."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_step.py").write_text(STEP)
    (tmp_path / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"), prepend=os.pathsep)
    monkeypatch.setenv("OWN", "this")
    return Trial(workload=workload("py:own_step:factory"), sampling=Sampling(warmup=0, samples=1), device="cpu")


def test_it_has_the_folder_the_environment_and_a_session_of_its_own(trial, tmp_path):
    with Worker() as worker:
        assert isinstance(worker.process, ForkedWorker)
        assert worker.run(trial, log=tmp_path / "log").status == OK
        assert (tmp_path / "log").read_text().split() == [str(tmp_path), "this", str(worker.process.pid)]
    assert worker.process.returncode == -signal.SIGTERM


def test_one_that_was_killed_is_started_again_and_the_others_live_on(trial):
    with Worker() as one, Worker() as other:
        os.killpg(one.process.pid, signal.SIGKILL)
        assert one.process.wait() == -signal.SIGKILL
        assert other.process.poll() is None
        assert (one.run(trial).status, other.run(trial).status) == (OK, OK)


def test_what_has_another_torch_is_started_as_always(trial, tmp_path):
    (tmp_path / "own" / "torch.py").write_text("raise ImportError('not here')")
    with pytest.raises(FlopwiseError, match="cannot import torch: not here"), Worker():
        pass


def test_other_programs_are_started_as_always():
    assert subprocess.run(["true"], check=False).returncode == 0
    with subprocess.Popen(["true"]) as process:
        assert not isinstance(process, ForkedWorker)
