"""Ctrl-C from Python: what was measured is stored, then KeyboardInterrupt is raised."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from flopwise.api import memory as memory_module
from flopwise.api import profile as profile_module
from flopwise.api.profile import profile
from flopwise.api.sweep import sweep
from flopwise.capture.runners import local as local_runner
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.records.events import DeviceInfo
from flopwise.records.run import INTERRUPTED, Environment, PhaseTimes, Point
from flopwise.spec.sweep import sweep_from
from flopwise.store import StoredRun, find, list_runs
from flopwise.store.tuning import read_tuning

STEPS = Path(__file__).parents[1] / "capture"
OPENING = """
import signal
import flopwise
from flopwise.capture.progress import Progress
from flopwise.records.events import Sampled

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without one

class Watched(Progress):
    def event(self, event):
        if isinstance(event, Sampled):
            print("sampled", flush=True)

    def trial(self, trial):
        print(trial.group or "trial", flush=True)

"""


def interrupted_at(word: str, tmp_path: Path, program: str, sign: signal.Signals = signal.SIGINT) -> list[str]:
    """What a program prints after the signal that it gets when it has printed `word`."""
    code = OPENING + textwrap.dedent(program)
    paths = os.pathsep.join(filter(None, (str(STEPS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "FLOPWISE_RUNS": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            if line.strip() == word:
                break
        child.send_signal(sign)
        lines = [line.strip() for line in child.stdout]
    assert child.wait() == (0 if sign is signal.SIGINT else -sign)
    return lines


@pytest.mark.slow
def test_a_loop_of_benches_stops_and_keeps_what_was_measured(tmp_path):
    program = """
        try:
            for number in range(100):
                flopwise.bench("py:steps:slow", device="cpu", warmup=0, samples=100_000, progress=Watched())
        except KeyboardInterrupt as stop:
            print("stopped in", number, type(stop).__name__, stop.result.points[0].status)
    """
    assert interrupted_at("sampled", tmp_path, program)[-1] == "stopped in 0 Interrupted interrupted"
    (run,) = list_runs(tmp_path)
    (point,) = StoredRun.load(run.path).points
    assert point.status == INTERRUPTED
    assert point.times().wall_ns


@pytest.mark.slow
def test_a_tuning_stops_and_keeps_the_best_so_far(tmp_path):
    program = """
        try:
            flopwise.tune("py:steps:slow", device="cpu", seconds=0.1, progress=Watched())
        except KeyboardInterrupt as stop:
            print(stop.result.ended.stopped)
    """
    assert interrupted_at("attempt 1", tmp_path, program)[-1] == INTERRUPTED
    found = read_tuning("last", tmp_path)
    assert (found.ended.stopped, found.attempts) == (INTERRUPTED, ())
    assert found.best == found.begun.workload


TUNE = 'flopwise.tune("py:steps:slow", device="cpu", seconds=0.1, progress=Watched())'


@pytest.mark.slow
def test_a_tuning_that_was_killed_before_it_measured_is_not_the_last(tmp_path):
    interrupted_at("start", tmp_path, TUNE, signal.SIGKILL)
    (run,) = list_runs(tmp_path)
    assert (run.kind, run.complete) == ("tune", False)
    with pytest.raises(FlopwiseError, match="has measured anything") as error:
        find("last", tmp_path)
    assert run.id in error.value.hint


@pytest.mark.slow
def test_a_tuning_that_was_killed_later_is_the_last_and_says_that_it_has_no_end(tmp_path):
    interrupted_at("attempt 1", tmp_path, TUNE, signal.SIGKILL)
    found = read_tuning("last", tmp_path)
    assert found.ended is None
    assert "It was stopped before its end" in str(found)


class Stopped:
    """A worker whose trial the user stops after two samples."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def look(self, device):
        return DeviceInfo(environment=Environment(flopwise="", python="", torch=""), device="cpu")

    def run(self, trial, *_: object, **__: object):
        times = PhaseTimes(phase="step", wall_ns=(1, 2))
        return Point(key=trial.key(), trial=trial, status=INTERRUPTED, phases=(times,))


TWO = {"name": "two", "base": {"workload": "tiny", "device": "cpu"}, "group": {"sizes": {"context": [16, 32]}}}


@pytest.mark.parametrize(
    ("module", "verb"),
    [
        (local_runner, lambda runs: sweep(sweep_from(TWO), runs=runs)),
        (profile_module, lambda runs: profile("tiny", device="cpu", runs=runs)),
    ],
    ids=["sweep", "profile"],
)
def test_other_verbs_do_the_same(tmp_path, monkeypatch, module, verb):
    monkeypatch.setattr(module, "Worker", Stopped)
    with pytest.raises(Interrupted) as stopped:
        verb(tmp_path)
    (point,) = stopped.value.result.points  # of a sweep, the next is not begun
    assert point.times().wall_ns == (1, 2)
    assert len(list_runs(tmp_path)) == 1


def test_memory_shows_what_was_recorded_until_then(monkeypatch):
    report = SimpleNamespace(status=INTERRUPTED)
    monkeypatch.setattr(memory_module, "capture", lambda *_, **__: None)
    monkeypatch.setattr(memory_module, "stored_report", lambda *_: report)
    with pytest.raises(Interrupted) as stopped:
        memory_module.memory("tiny", device="cpu")
    assert stopped.value.result is report
