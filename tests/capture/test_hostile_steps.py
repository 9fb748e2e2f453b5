"""What a step does to its process and to ours: every row is right, nothing is left running, no log fills the disk."""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from flopwise import capped_log
from flopwise.capture.isolate import Worker
from flopwise.capture.pipes import EventReader, EventWriter, GarbledError
from flopwise.keeper import descendants
from flopwise.records.events import Sampled, WarmupStep
from flopwise.records.run import CRASH, OK


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    """Those that still run when the time is over."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_a_step_meets_one_descriptor_of_ours(worker, own_step, tmp_path):
    """The pipe for its events, which nobody meets by counting up from 3."""
    worker.run(own_step("counts_descriptors", samples=1), tmp_path / "log")
    found = re.findall(r"descriptor (\d+) (\S+)", (tmp_path / "log").read_text())
    pipes = {int(number) for number, place in found if place.startswith("pipe:") and int(number) > 2}
    assert len(pipes) == 1
    assert min(pipes) > 100
    others = {place for number, place in found if int(number) not in (1, 2, *pipes)}
    assert {place for place in others if not place.startswith(("/sys/", "/proc/"))} == {
        "/dev/null"
    }  # those are torch's


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("writes_low", OK, ""),
        ("writes_anywhere", CRASH, "wrote into flopwise's own pipe"),
        ("closes_all", CRASH, "closed flopwise's own pipe"),
    ],
)
def test_descriptors_that_a_step_has_not_opened(worker, own_step, name, status, reason):
    point = worker.run(own_step(name))
    assert point.status == status
    assert reason in point.reason
    assert worker.run(own_step("matmul")).status == OK


def test_a_fork_that_returns_from_the_step_counts_for_nothing(worker, own_step):
    point = worker.run(own_step("forks_and_returns", samples=5, warmup=2))
    assert (point.status, len(point.times().wall_ns), len(point.warmup_ns)) == (OK, 5, 2)
    assert descendants(worker.process.pid)[1:] == []  # below the keeper there is the worker alone


def test_what_a_step_left_running_ends_with_it(worker, own_step, tmp_path):
    worker.run(own_step("leaves_processes", samples=2), tmp_path / "log")
    left = [int(pid) for pid in re.findall(r"left (\d+)", (tmp_path / "log").read_text())]
    assert len(left) >= 2
    assert [pid for pid in left if _runs(pid)] == []


def test_a_log_keeps_the_beginning_and_the_end_and_says_what_it_left_out(worker, own_step, tmp_path):
    point = worker.run(own_step("prints_much", samples=2), tmp_path / "log")
    text = (tmp_path / "log").read_bytes()
    assert point.status == OK
    assert len(text) < capped_log.HEAD_BYTES + capped_log.TAIL_BYTES + 200
    assert text.startswith(b"the beginning\n")
    assert text.endswith(b"the end\n")
    (left_out,) = re.findall(rb"flopwise: (\d+) bytes of output left out", text)
    note = len(b"\n[flopwise:  bytes of output left out here]\n") + len(left_out)
    printed = len(b"the beginning\n") + 2 * (160 * (1 << 16) + len(b"\nthe end\n"))
    assert len(text) - note + int(left_out) in (
        printed,
        printed + 160 * (1 << 16) + 9,
    )  # a step that is watched is one more


@pytest.fixture
def line():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def test_events_that_are_changed_repeated_left_out_or_forged_are_noticed(line):
    read, write = line
    writer = EventWriter(write, "a key", "step")
    for ns in (1, 2, 3):
        writer(WarmupStep(wall_ns=ns))
    lines = os.read(read, 1 << 16).splitlines()
    reader = EventReader("a key")
    assert [reader.event(one) for one in lines] == [WarmupStep(wall_ns=ns) for ns in (1, 2, 3)]
    bit = bytearray(lines[0])
    bit[-2] ^= 1
    forged = lines[0].rpartition(b" ")[2]
    for wrong in (bytes(bit), lines[1], forged, b"step 0 x {}", b"", b"\xff" * 9, lines[0][:-1], b"noise " + lines[0]):
        with pytest.raises(GarbledError):
            EventReader("a key").event(wrong)
    again = EventReader("a key")
    again.event(lines[0])
    with pytest.raises(GarbledError):
        again.event(lines[0])
    with pytest.raises(GarbledError):
        EventReader("another key").event(lines[0])


_PARENT = textwrap.dedent("""
    import os, sys
    from flopwise.records.events import Started
    from flopwise.capture.isolate import Worker
    from flopwise.keeper import descendants
    from flopwise.spec.workload import Sampling, Trial, workload
    sampling = Sampling(warmup=0, samples=10_000, timeout_s=500.0)
    trial = Trial(workload=workload("py:steps:leaves_processes"), sampling=sampling, device="cpu")
    worker = Worker()
    seen = []
    def say(event):
        seen.append(event)
        if len(seen) == 6:
            print(*descendants(os.getpid()), flush=True)
    worker.run(trial, on_event=say)
""")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2, 3])
def test_whoever_is_killed_nothing_is_left(killed):
    """The program, its keeper, its worker or the step: forks in a session of their own end, too. Only the program goes on."""
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) > 3  # a keeper, a worker, a step, and what that has left
    os.kill((parent.pid, *pids)[killed], 9)
    more = descendants(pids[0])
    assert _gone([*pids, *more]) == []
    parent.wait(60)
    parent.stdout.close()


def test_a_closed_worker_leaves_nothing(own_step, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
    with Worker() as one:
        builder = one.begin(own_step("leaves_processes", samples=10_000))
        one.follow(builder, lambda event: None, until=Sampled)
        pids = [one.process.pid, *descendants(one.process.pid)]
    assert len(pids) > 3
    assert _gone(pids) == []
