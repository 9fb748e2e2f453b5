"""Capture by nsys, without one: a program of its name stands in for it. Every failure is a row and leaves nothing behind."""

import gzip
import json
import os
import shutil
import sqlite3
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flopwise.api import profile as profile_verb
from flopwise.api.explain import explain
from flopwise.api.profile import profile
from flopwise.api.sweep import sweep
from flopwise.capture import nsys, traced_trial
from flopwise.capture.nsys_program import can_discard_environment, find_nsys
from flopwise.capture.runners import local
from flopwise.errors import FlopwiseError
from flopwise.records.events import TraceRequest
from flopwise.records.run import CRASH, ERROR, INTERRUPTED, OK, OOM, TIMEOUT
from flopwise.spec.sweep import sweep_from
from flopwise.spec.workload import Sampling, Trial, workload

HERE = Path(__file__).parent
FIXTURE = HERE.parent / "trace" / "fixtures" / "h200-small-fp32-naive-2steps.nsys.sqlite.gz"
SECRET = "API_TOKEN=hunter2-hunter2"
TRIAL = Trial(workload=workload("tiny", batch=1, context=8), sampling=Sampling(seconds=0.1), device="cpu")


@pytest.fixture(scope="module")
def export_file(tmp_path_factory):
    """A real export, with the environment that nsys puts into its own."""
    path = tmp_path_factory.mktemp("export") / "real.sqlite"
    with gzip.open(FIXTURE) as packed, path.open("wb") as out:
        shutil.copyfileobj(packed, out)
    db = sqlite3.connect(path)
    for table in ("META_DATA_CAPTURE", "TARGET_INFO_SYSTEM_ENV"):
        db.execute(f"CREATE TABLE {table} (name TEXT, value TEXT)")
        db.execute(f"INSERT INTO {table} VALUES ('DeviceEnvironment', ?)", (SECRET,))
    db.execute("INSERT INTO StringIds SELECT max(id) + 1, ? FROM StringIds", (SECRET,))
    db.commit()
    db.close()
    return path


@pytest.fixture
def fake(tmp_path, monkeypatch, export_file):
    """Puts the stand-in on PATH and tells it how to behave; `saw()` is the command line it was called with."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -SE\n" + (HERE / "fake_nsys.py").read_text())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NSYS_SAW", str(tmp_path / "saw.json"))
    monkeypatch.setenv("FAKE_NSYS_PID", str(tmp_path / "step-pid"))
    monkeypatch.setenv("FAKE_NSYS_EXPORT", str(export_file))
    return SimpleNamespace(
        program=str(program),
        behave=lambda mode: monkeypatch.setenv("FAKE_NSYS", mode),
        saw=lambda: json.loads((tmp_path / "saw.json").read_text()),
    )


@pytest.fixture
def trace(tmp_path, fake):
    """Trace into a folder of its own; nothing but the trace may be in it afterwards."""
    folder = tmp_path / "100%p traces"
    folder.mkdir()

    def run(mode, timeout_s=60.0):
        fake.behave(mode)
        request = TraceRequest(path=str(folder / "key.nsys.sqlite"))
        traced, done = nsys.trace_with_nsys(fake.program, TRIAL, request, tmp_path / "nsys.log", timeout_s)
        left = sorted(p.name for p in folder.iterdir())
        assert left == ([Path(traced.path).name] if traced else [])
        return traced, done

    return run


def test_the_command_line_captures_only_what_the_step_opens(trace, fake):
    traced, done = trace("pretend")
    assert (done.status, traced.step_ns) == (OK, 1_000_000)
    program, verb, *words = fake.saw()
    options, command = words[:-4], words[-4:]
    assert (program, verb) == (fake.program, "profile")
    assert command[:3] == [sys.executable, "-m", "flopwise.capture.nsys_target"]
    assert {
        "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node", "--wait=primary",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--discard-environment=true", "--force-overwrite=true",
    } == {word for word in options if not word.startswith("--output=")}  # fmt: skip
    assert "/100%%p traces/" in next(word for word in options if word.startswith("--output="))


def test_the_environment_stays_out_of_the_run_with_an_old_nsys_too(trace, fake, monkeypatch):
    monkeypatch.setenv(*SECRET.split("="))
    monkeypatch.setenv("NOT_TEXT", os.fsdecode(b"\xff\xfe"))
    fake.behave("old")
    assert not can_discard_environment(fake.program)
    traced, _ = trace("old")
    assert "--discard-environment=true" not in fake.saw()
    assert SECRET.encode() not in Path(traced.path).read_bytes()
    assert explain(traced.path).steps == 2


def test_a_large_export_is_compressed(trace, monkeypatch):
    monkeypatch.setattr(nsys, "GZIP_FROM_BYTES", 1000)
    traced, _ = trace("pretend")
    assert traced.path.endswith("key.nsys.sqlite.gz")
    assert explain(traced.path).steps == 2


@pytest.mark.parametrize(
    ("mode", "status", "reason"),
    [
        ("refuse", ERROR, "nsys did not run the step (exit code 1): FATAL ERROR: the injection library"),
        ("crashes", CRASH, "ended without a result (exit code 139): Segmentation fault"),
        ("oom", OOM, "CUDA out of memory"),
        ("no-report", ERROR, "nsys wrote no report (exit code 0): No reports were generated"),
        ("export-fails", ERROR, "could not export its report (exit code 1): ERROR: the database or disk is full"),
        ("export-nothing", ERROR, "could not export its report (exit code 0)"),
        ("export-garbage", ERROR, "the export of nsys cannot be read"),
    ],
)
def test_what_goes_wrong_is_a_row_with_a_reason(trace, mode, status, reason):
    traced, done = trace(mode)
    assert (traced, done.status) == (None, status)
    assert reason in done.reason
    assert done.hint


def test_a_full_disk_is_said(trace, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nsys, "_stored", full)
    _, done = trace("pretend")
    assert (done.status, done.hint) == (ERROR, "is the disk full?")
    assert "No space left on device" in done.reason


def test_an_nsys_that_cannot_be_started_is_said(tmp_path):
    request = TraceRequest(path=str(tmp_path / "key.nsys.sqlite"))
    _, done = nsys.trace_with_nsys(str(tmp_path / "none"), TRIAL, request, tmp_path / "log", 5.0)
    assert done.status == ERROR
    assert "cannot be started: No such file" in done.reason


def ended(pid):
    """Gone, or waiting to be buried by whoever adopted it."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def once(monkeypatch, tmp_path):
    """Once the file is there, time has run out, or the user presses Ctrl-C."""

    def arrange(pattern, late_s=0.0, interrupt=False):
        def sleep(seconds):
            if interrupt and any(tmp_path.glob(pattern)):
                raise KeyboardInterrupt
            time.sleep(seconds)

        def monotonic():
            return time.monotonic() + (late_s if any(tmp_path.glob(pattern)) else 0.0)

        monkeypatch.setattr(nsys, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))

    return arrange


def test_a_time_out_ends_nsys_and_the_step(trace, once, tmp_path):
    once("step-pid", late_s=1000.0)
    _, done = trace("hangs")
    assert (done.status, done.reason) == (TIMEOUT, "nsys profile took longer than --timeout")
    assert ended(int((tmp_path / "step-pid").read_text()))


def test_an_export_without_end_is_a_time_out(trace, once):
    once("*/partial-*/exporting", late_s=1000.0)
    _, done = trace("export-hangs")
    assert (done.status, done.reason) == (TIMEOUT, "nsys export took longer than --timeout")


def test_ctrl_c_ends_nsys_and_the_step(trace, once, tmp_path):
    once("step-pid", interrupt=True)
    _, done = trace("hangs")
    assert (done.status, done.reason) == (INTERRUPTED, "while nsys traced the step")
    assert ended(int((tmp_path / "step-pid").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["profile", "sweep"])
def test_a_trace_by_nsys_is_stored_and_explained(by, tmp_path, fake, monkeypatch):
    """The whole way, with the real process under the stand-in; its trace is another's, since there is no GPU."""
    fake.behave("run")
    for module in (traced_trial, profile_verb, local):
        monkeypatch.setattr(module, "check_device", lambda device: None)
    tiny = {"batch": 1, "context": 8, "seconds": 0.1}
    if by == "profile":
        run = profile("tiny", profiler="nsys", device="cpu", runs=tmp_path / "runs", **tiny)
    else:
        table = {"base": {"workload": "tiny", "device": "cpu", "trace": "nsys", **tiny}}
        run = sweep(sweep_from(table), runs=tmp_path / "runs")
    (point,) = run.points
    assert (point.status, point.trace_file) == (OK, f"{point.key}.nsys.sqlite")
    assert point.traced_step_ns > 0
    assert [p.name for p in (run.path / "traces").iterdir()] == [point.trace_file]
    explained = explain(run)
    assert (explained.source, explained.steps) == ("nsys", 2)
    left_out = any(
        "the untraced clock is left out" in note for note in explained.notes
    )  # the stand-in's trace is of other work
    assert (explained.host_ns.get("step", 0) > 0) != left_out


def test_nsys_is_refused_in_one_line_where_it_can_see_nothing(monkeypatch, fake):
    with pytest.raises(FlopwiseError, match="nothing for nsys to see on 'cpu'"):
        profile_verb.check_device("cpu")
    with pytest.raises(FlopwiseError, match="--stacks is recorded by PyTorch's profiler only"):
        profile("tiny", profiler="nsys", stacks=True)
    monkeypatch.setenv("PATH", "/nowhere")
    if find_nsys() == "":
        with pytest.raises(FlopwiseError, match="nsys: not installed"):
            profile("tiny", profiler="nsys")
    with pytest.raises(FlopwiseError, match="profiler = 'nsight' is not allowed"):
        profile("tiny", profiler="nsight")
