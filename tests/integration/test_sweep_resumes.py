"""A sweep killed at any moment and resumed yields the same table as an uninterrupted one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from flopwise.records.run import OK, OOM
from flopwise.store import StoredRun, find

STEPS = Path(__file__).parent.parent / "capture"
SWEEP = """
[base]
device = "cpu"
samples = 3
warmup = 0

[group.steps]
workload = ["py:steps:matmul", "py:steps:slow", "py:steps:out_of_memory", "py:steps:phases"]

[group.again]
workload = ["py:steps:matmul", "py:steps:slow"]
samples = [4, 5]
"""


def command(root: Path, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "flopwise.cli.main",
        "sweep",
        str(root / "s.toml"),
        "--runs",
        str(root / "runs"),
        *words,
    ]


def table(root: Path) -> list[tuple[str, str, int]]:
    """What does not depend on the clock: the points in order, how each ended, and how many samples it has."""
    run = StoredRun.load(find("last", root / "runs"))
    assert run.complete
    assert run.warnings == ()
    return [(p.trial.workload.label(), p.status, len(p.phases[0].wall_ns) if p.phases else 0) for p in run.points]


def test_killed_at_random_moments_it_ends_with_the_same_table(tmp_path):
    env = os.environ | {"PYTHONPATH": str(STEPS)}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for root in (whole, killed):
        root.mkdir()
        (root / "s.toml").write_text(SWEEP)
    subprocess.run(command(whole), env=env, check=True, capture_output=True)
    expected = table(whole)
    assert [status for _, status, _ in expected] == [OK, OK, OOM, OK, OK, OK, OK, OK]

    rng = random.Random(7)
    for _ in range(3):
        process = subprocess.Popen(command(killed), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=rng.uniform(2.0, 7.0))
        except subprocess.TimeoutExpired:
            process.send_signal(rng.choice((signal.SIGKILL, signal.SIGINT)))
            process.wait()
    subprocess.run(command(killed), env=env, check=True, capture_output=True)
    assert table(killed) == expected
    assert len(list((killed / "runs").iterdir())) <= 5  # one run was continued, unless it was complete


def test_resuming_runs_only_what_is_missing(tmp_path):
    env = os.environ | {"PYTHONPATH": str(STEPS)}
    (tmp_path / "s.toml").write_text(SWEEP)
    process = subprocess.Popen(command(tmp_path), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    rows: list[Path] = []
    while time.monotonic() < deadline and not (rows and rows[0].read_bytes().count(b"\n") >= 3):
        # A run that is still being made has a hidden name, and is renamed at any moment.
        rows = [path for path in tmp_path.rglob("points.jsonl") if not path.parent.name.startswith(".")]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    before = rows[0].read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    resumed = subprocess.run(command(tmp_path), env=env, check=True, capture_output=True, text=True)
    assert "going on: " in resumed.stderr
    assert rows[0].read_bytes().startswith(kept)  # what was there is untouched
    assert rows[0].read_bytes().count(b"\n") == 8  # and every point was run once
