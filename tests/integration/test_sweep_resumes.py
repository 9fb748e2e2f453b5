"""A sweep that is killed or interrupted and then resumed yields the same table as an uninterrupted one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flopwise.records.run import OK, OOM
from flopwise.store import StoredRun, find

STEPS = Path(__file__).parent.parent / "capture"
SWEEP = """
[base]
device = "cpu"
samples = 3
warmup = 0

[group.steps]
workload = ["py:steps:matmul", "py:steps:out_of_memory", "py:gated:step", "py:steps:phases"]

[group.again]
workload = ["py:steps:matmul", "py:gated:step"]
samples = [4, 5]
"""
GATED = """
import os, time

def step(device):
    open("waits", "w").close()
    while not os.path.exists("gate"):
        time.sleep(0.01)
    return lambda: None
"""


@pytest.fixture
def sweep(tmp_path, cli):
    """A folder with the sweep and what it needs: the words of the command, the environment, and a way to run it here."""
    (tmp_path / "s.toml").write_text(SWEEP)
    (tmp_path / "gated.py").write_text(GATED)
    source = os.environ["PYTHONPATH"]
    env = {"PYTHONPATH": os.pathsep.join((str(STEPS), str(tmp_path), source))}

    def words(runs):
        return ["sweep", str(tmp_path / "s.toml"), "--runs", str(tmp_path / runs)]

    return words, env, lambda runs: cli(*words(runs), cwd=tmp_path, **env)


def table(runs: Path) -> list[tuple[str, str, int]]:
    """What does not depend on the clock: the points in order, how each ended, and how many samples it has."""
    run = StoredRun.load(find("last", runs))
    assert run.complete
    assert run.warnings == ()
    return [(p.trial.workload.label(), p.status, len(p.phases[0].wall_ns) if p.phases else 0) for p in run.points]


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopped_and_resumed_it_runs_what_is_missing_and_ends_with_the_same_table(sweep, tmp_path, sign):
    words, env, run_here = sweep
    command = [sys.executable, "-m", "flopwise", *words("stopped")]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | env, stdout=said, stderr=said)
    while process.poll() is None and not (tmp_path / "waits").exists():
        time.sleep(0.01)
    assert process.poll() is None, (tmp_path / "said").read_text()
    process.send_signal(sign)  # the third point waits for the gate
    process.wait()
    (rows,) = (tmp_path / "stopped").rglob("points.jsonl")
    before = rows.read_bytes()
    interrupted = int(sign == signal.SIGINT)  # it has a row of its own, and is run again
    assert before.count(b"\n") == 2 + interrupted

    (tmp_path / "gate").touch()
    resumed, whole = run_here("stopped"), run_here("whole")
    assert (resumed.returncode, whole.returncode) == (0, 0)
    assert "resuming: " in resumed.stderr
    assert "resuming: " not in whole.stderr
    assert rows.read_bytes().startswith(before)  # what was there is untouched
    assert rows.read_bytes().count(b"\n") == 8 + interrupted  # and every point was run once
    assert table(tmp_path / "stopped") == table(tmp_path / "whole")
    assert [status for _, status, _ in table(tmp_path / "whole")] == [OK, OOM, *[OK] * 6]
