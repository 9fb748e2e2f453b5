"""Each point has a process of its own: whatever happens in it becomes a row, and the next point runs."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from flopwise.capture import isolate
from flopwise.capture.interleave import Contest, InterleavedTrial
from flopwise.capture.isolate import Worker
from flopwise.capture.stopping import PairsRule
from flopwise.errors import FlopwiseError
from flopwise.predict.dry.run import dry_run
from flopwise.records.events import Sampled
from flopwise.records.run import CRASH, ERROR, INTERRUPTED, OK, OOM, TIMEOUT
from flopwise.spec.workload import Sampling, Trial, workload


def test_a_good_step_gives_all_its_samples(worker, own_step):
    point = worker.run(own_step("matmul", samples=7, warmup=2))
    assert (point.status, point.stopped, point.warmup_rule) == (OK, "samples", "forced")
    assert len(point.times().wall_ns) == 7
    assert len(point.warmup_ns) == 2
    assert min(point.times().wall_ns) > 0
    assert point.times().gpu_ns == ()  # no GPU clock on the CPU
    assert point.environment.torch


def test_phases_are_timed_and_sum_to_the_step(worker, own_step):
    point = worker.run(own_step("phases", samples=5))
    step, forward, backward = point.phases
    assert (step.phase, forward.phase, backward.phase) == ("step", "forward", "backward")
    for whole, *parts in zip(step.wall_ns, forward.wall_ns, backward.wall_ns, strict=True):
        assert sum(parts) == whole


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("crashes", CRASH, "SIGSEGV"),
        ("killed", CRASH, "out of memory"),
        ("exits", CRASH, "code 7"),
        ("raises", ERROR, "ValueError: no luck"),
        ("stops_to_debug", ERROR, "breakpoint()"),
        ("asks", ERROR, "EOFError"),
        ("quits", ERROR, "SystemExit: 3"),
        ("out_of_memory", OOM, "memory"),
        ("wrong_return", ERROR, "returned"),
        ("wrong_phase", ERROR, "'step'"),
        ("not_callable", ERROR, "not callable"),
        ("missing", ERROR, "has no 'missing'"),
    ],
)
def test_what_goes_wrong_is_a_row_with_a_reason(worker, own_step, name, status, reason):
    point = worker.run(own_step(name))
    assert point.status == status
    assert reason in point.reason
    assert "\n" not in point.reason
    assert worker.run(own_step("matmul")).status == OK  # and the worker goes on


def test_what_a_step_prints_is_no_event(worker, own_step, tmp_path):
    point = worker.run(own_step("chatty", samples=4), tmp_path / "log")
    assert (point.status, len(point.times().wall_ns)) == (OK, 4)
    assert "noise" in (tmp_path / "log").read_text()


def test_the_log_keeps_the_traceback(worker, own_step, tmp_path):
    worker.run(own_step("raises"), tmp_path / "log")
    assert "Traceback" in (tmp_path / "log").read_text()


def test_samples_before_a_failure_are_kept(worker, own_step):
    point = worker.run(own_step("fails_after_five", samples=100))
    assert point.status == OOM
    assert len(point.times().wall_ns) == 5


@pytest.fixture
def _little_grace(monkeypatch):
    """What hangs is not waited for long after it was asked to stop."""
    monkeypatch.setattr(isolate, "GRACE_S", 0.2)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_little_grace")
@pytest.mark.parametrize("name", ["hangs", "hangs_deaf"])
def test_a_hang_ends_at_the_timeout(worker, own_step, name):
    begun = time.monotonic()
    point = worker.run(own_step(name, timeout_s=1.0))
    assert point.status == TIMEOUT
    assert "1 s" in point.reason
    assert time.monotonic() - begun < 120  # it would sleep for 1000 s
    assert worker.run(own_step("matmul")).status == OK


def test_a_timeout_keeps_what_was_measured(worker, own_step):
    point = worker.run(own_step("slow", samples=100_000, timeout_s=3.0))
    assert point.status == TIMEOUT
    assert len(point.times().wall_ns) > 0


def test_ctrl_c_keeps_what_was_measured(worker, own_step):
    seen: list[object] = []

    def after_five(event):
        seen.extend([event] if isinstance(event, Sampled) else [])
        if len(seen) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without one
    try:
        point = worker.run(own_step("slow", samples=100_000), on_event=after_five)
    finally:
        signal.signal(signal.SIGINT, before)
    assert point.status == INTERRUPTED
    assert len(point.times().wall_ns) >= 5
    assert point.ran is not None  # it ended in good order


def test_a_dead_worker_is_started_again(own_step, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
    with Worker() as one:
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        assert one.run(own_step("matmul")).status == OK


def contested(a, b):
    contest = Contest(lambda key: None)
    try:
        return contest.run((a, b), PairsRule(a.sampling)).points
    finally:
        contest.close()


def test_turns_give_as_many_samples_to_both(own_step, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
    a, b = contested(own_step("matmul", samples=3, processes=2), own_step("slow"))
    assert (a.status, b.status, a.stopped) == (OK, OK, "processes")
    assert len(a.times().wall_ns) == len(b.times().wall_ns) == 6
    assert (a.paired_with, b.paired_with) == (b.key, a.key)
    assert min(b.times().wall_ns) >= 20e6 > min(a.times().wall_ns)  # each has its own samples


def test_turns_survive_a_crash_of_one(own_step, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
    a, b = contested(own_step("matmul"), own_step("crashes"))
    assert b.status == CRASH
    assert (a.status, a.reason) == (INTERRUPTED, "the other of the two could not run")


@pytest.mark.usefixtures("_little_grace")
@pytest.mark.slow
def test_in_turns_the_timeout_is_of_each_wait(worker, own_step):
    """One that stays for long is not ended for it; one that hangs in a round is."""
    stays = InterleavedTrial(own_step("slow", timeout_s=20.0), worker=worker)
    assert stays.prepare()
    stays.builder.begun -= 100.0  # as if it had been here since then
    assert stays.round() > 0
    point = stays.stop()
    assert (point.status, len(point.times().wall_ns)) == (OK, 1)
    hangs = InterleavedTrial(own_step("hangs", timeout_s=3.0), worker=worker)
    assert hangs.prepare()
    assert hangs.round() == 0
    assert hangs.stop().status == TIMEOUT


def test_there_is_no_gpu_here(worker):
    if worker.look("auto").device != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(FlopwiseError, match="'cuda' is not available"):
        worker.look("cuda")


@pytest.mark.slow
def test_nothing_outlives_a_killed_parent(tmp_path):
    """kill -9 of the program ends the worker and the step it runs."""
    code = textwrap.dedent("""
        from flopwise.records.events import Started
        from flopwise.capture.isolate import Worker
        from flopwise.spec.workload import Sampling, Trial, workload
        trial = Trial(workload=workload("py:steps:hangs"), sampling=Sampling(warmup=0, samples=1), device="cpu")
        worker = Worker()
        print(worker.process.pid, flush=True)
        worker.run(trial, on_event=lambda e: print(e.pid, flush=True) if isinstance(e, Started) else None)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")))},
    )
    pids = [int(parent.stdout.readline()), int(parent.stdout.readline())]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if _alive(pid)] == []


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_can_never_fit_is_said_at_once(worker):
    trial = Trial(workload=workload("llama3-405b"), sampling=Sampling(samples=1), device="cpu")
    begun = time.monotonic()
    point = worker.run(trial)
    assert (point.status, "needs at least" in point.reason) == (OOM, True)
    assert time.monotonic() - begun < 20


def test_a_dry_run_in_a_worker_is_the_same(worker):
    work = workload("tiny", context=16, set={"n_layers": 1})
    assert worker.dry_run(work) == dry_run(work)


@pytest.mark.usefixtures("_little_grace")
def test_a_step_that_crashes_ends_its_process_alone(worker):
    for step, said in (("crashes", "SIGSEGV"), ("exits", "ended with 7"), ("counts_by_values", "nonzero")):
        with pytest.raises(FlopwiseError, match=said):
            worker.dry_run(workload(f"py:steps:{step}"))
    with pytest.raises(FlopwiseError, match="ended with code 0 and no result"):
        worker.dry_run(workload("py:steps:ends"))
    with pytest.raises(FlopwiseError, match="no end after 1 s"):
        worker.dry_run(workload("py:steps:hangs"), timeout_s=1.0)
    assert worker.dry_run(workload("py:steps:matmul")).ops[0].op == "mm"


def test_several_dry_runs_in_one_process_are_those_one_by_one(worker):
    """One that cannot be is None; where the first cannot be, none can."""
    asked = [workload("py:steps:matmul", precision=precision) for precision in ("fp32", "bf16", "fp16")]
    *good, refused = worker.dry_runs([*asked[:2], workload("py:steps:counts_by_values")])
    assert good == [dry_run(one) for one in asked[:2]]
    assert refused is None
    with pytest.raises(FlopwiseError, match="nonzero"):
        worker.dry_runs([workload("py:steps:counts_by_values"), *asked])
