"""Names from outside reach a terminal as text, whatever is in them: no escape, no new row, no turned order, no flood."""

import io
import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flopwise.cli.main import main
from flopwise.records.events import Tracing
from flopwise.records.run import Point
from flopwise.render.progress import TerminalProgress
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import Run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "snapshot"))
from gen_snapshot import made  # noqa: E402

EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b[31m\x9b31m\u202e\u2028\x7f\r\nfake row|<b>"
LONG = EVIL + "A" * 20_000
FILE = EVIL.replace("/", "")
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # all but the line feed
FORMS = ("table", "markdown", "csv", "json")


def event(cat, name, ts, dur, tid, pid, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def trace(name):
    """A step with one matmul, every name of it the given one."""
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16"] * 2}
    ids = {"correlation": 1, "External id": 1}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": [
            event("user_annotation", name, 0, 50, 5, 100),
            event("python_function", f"nn.Module: {name}_0", 0, 45, 5, 100, **{"Python id": 1, "Python module id": 0}),
            event("cpu_op", "aten::mm", 1, 40, 5, 100, **{"External id": 1}, **shapes),
            event("cuda_runtime", "cudaLaunchKernel", 2, 2, 5, 100, **ids),
            event("kernel", f"gemm {name}", 5, 10, 7, 0, device=0, stream=7, **ids),
        ],
    }


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOPWISE_CEILINGS", str(tmp_path / "ceilings"))
    monkeypatch.delenv("FLOPWISE_RUNS", raising=False)

    def command(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return command


def asked(form):
    """The options that ask for a form; `full`: all tables of a verb that answers on one screen."""
    return ("--full",) if form == "full" else ("--format", form)


def assert_harmless(out, form):
    assert not STEERING.search(out.replace("\r\n", "\n") if form == "csv" else out), form
    assert not any(line.startswith("fake row") for line in out.splitlines()), form
    assert form in ("csv", "json") or max(map(len, out.splitlines())) < 2500, form


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", [*FORMS, "full"])
def test_explain(run, tmp_path, form):
    path = tmp_path / f"{FILE}.json"
    path.write_text(json.dumps(trace(LONG)))
    for words in ((path,), (path, path), (path, "--against", path)):
        code, out, err = run("explain", *words, *asked(form))
        assert code == 0, err
        assert_harmless(out, form)
        assert "fake row" in out or (form, len(words)) == ("table", 2)  # a line of several is cut
    if form == "json":
        assert json.loads(out)["before"] == str(path)


def test_json_keeps_the_whole_name(run, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(trace(LONG)))
    kernels = json.loads(run("explain", "t.json", "--format", "json")[1])["traces"][0]["kernels"]
    assert [kernel["name"] for kernel in kernels] == [f"gemm {LONG}"]


@pytest.mark.parametrize("form", [*FORMS, "full"])
def test_a_file_whose_name_is_no_text(run, tmp_path, form):
    path = tmp_path / "step\udcff.json"
    path.write_text(json.dumps(trace("step")))
    code, out, err = run("explain", path, *asked(form))
    assert (code, "\\udcff" in out or form == "csv") == (0, True), err


@pytest.mark.parametrize("form", FORMS)
def test_roofline(run, tmp_path, form):
    path = tmp_path / f"{FILE}.json"
    path.write_text(json.dumps(trace("step")))
    code, out, err = run("roofline", path, "--format", form)
    assert code == 0, err
    assert_harmless(out, form)


def test_charts(run, tmp_path):
    path = tmp_path / f"{FILE}.json"
    path.write_text(json.dumps(trace("step")))
    code, out, err = run("roofline", path, "-o", "picture.svg")
    assert code == 0, err
    assert_harmless(out, "table")
    assert not STEERING.search((tmp_path / "picture.svg").read_text())


@pytest.mark.parametrize("form", [*FORMS, "full"])
def test_memory(run, tmp_path, form):
    snapshot = made(steps=3)[0]
    blocks = (block for segment in snapshot["segments"] for block in segment["blocks"])
    for held in (*blocks, *(event for events in snapshot["device_traces"] for event in events)):
        held["frames"] = [frame | {"name": LONG} for frame in held.get("frames", ())]
    path = tmp_path / f"{FILE}.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    code, out, err = run("memory", path, *asked(form))
    assert code == 0, err
    assert_harmless(out, form)


@pytest.mark.parametrize("form", [*FORMS, "full"])
def test_account(run, tmp_path, form):
    folder = tmp_path / FILE
    folder.mkdir()
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": EVIL, "architectures": [EVIL]}))
    code, out, err = run("account", f"hf:{folder}/config.json", "--gpu", "h100", *asked(form))
    assert code == 0, err
    assert_harmless(out, form)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, no_color=True, width=200)
    progress = TerminalProgress(console)
    trial = Trial(workload=workload("tiny"), sampling=Sampling(samples=3), device="cpu")
    progress.begin(2, 0)
    progress.trial(trial)
    progress.label = EVIL
    progress.event(Tracing(profiler="kineto"))
    progress.point(Point(key="k", trial=trial, status="crash", reason=LONG))
    progress.end()
    written = console.file.getvalue()
    assert "]52" not in written.replace("␛]52", "")
    assert not re.search(r"[\x07\x7f-\x9f\u202e\u2028]", written)
    assert "crash: ␛]52" in written


def test_runs(run, tmp_path):
    runs = tmp_path / ".flopwise" / "runs"
    trial = Trial(workload=workload("tiny"), sampling=Sampling(samples=3), device="cpu")
    with Run.create(runs, "bench", "tiny", "", (trial,)) as kept:
        kept.append(Point(key=trial.key(), trial=trial, status="crash", reason=LONG))
    shutil.copytree(kept.path, runs / FILE)
    for form in FORMS:
        for words in (("runs",), ("runs", "show", runs / FILE)):
            code, out, err = run(*words, "--format", form)
            assert code == 0, err
            assert_harmless(out, form)
            assert form in ("csv", "table") or "fake row" in out  # a line of a list is cut
    code, _, err = run("runs", "rm", runs / FILE)
    assert (code, STEERING.search(err)) == (0, None)
