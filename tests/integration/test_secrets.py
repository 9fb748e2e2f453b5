"""Secrets are planted wherever flopwise looks, and searched for in all that it prints and writes.

What a run, a page, a picture or an answer may hold of its maker is in SECURITY.md; here is what it may not.
"""

import gzip
import json
import os
import pickle
import re
import socket
import sqlite3
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path

import pytest

from in_process import in_process

pytest.importorskip("mcp")
from flopwise.integrations.mcp.folder import Folder
from flopwise.integrations.mcp.server import answered
from flopwise.integrations.mcp.tools import TOOLS

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "snapshot"))
from gen_snapshot import made  # noqa: E402

MARK = "PLANTED"  # in every secret
ENVIRONMENT = {
    "HF_TOKEN": f"{MARK}-of-the-environment",
    "DB_PASSWORD": f"{MARK}-password",
    "SOMETHING": f"{MARK}-variable",
    "USER": f"{MARK}user",
    "LOGNAME": f"{MARK}user",
    "HOSTNAME": f"{MARK}host",
    "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),  # Vega, bundled once
}
SCRIPT = """
import argparse, os, torch
parser = argparse.ArgumentParser()
for name in ("--token", "--api-key", "--hub"):
    parser.add_argument(name)
parser.parse_args()
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(40):
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FACTORY = """
import os
def broken():
    raise RuntimeError("cannot log in with " + os.environ["HF_TOKEN"] + " from " + os.path.expanduser("~/data"))
"""
ARGUMENTS = ("--token", f"{MARK}argument", f"--api-key={MARK}key", "--hub", f"https://eve:{MARK}@example.com/x")
FORMS = ("table", "json", "csv", "markdown")


def event(cat, name, ts, dur, tid, pid, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def kineto(home):
    """A trace of one step that says whose it is wherever a profiler or a user can say so."""
    ids = {"correlation": 1, "External id": 1}
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16"] * 2}
    frames = {"Python id": 1, "Python module id": 0}
    return {
        "schemaVersion": 1,
        "traceName": f"{home}/{MARK}.json",
        "hostname": f"{MARK}host",
        "environment": {"HF_TOKEN": f"{MARK}env"},
        "distributedInfo": {"rank": 0, "world_size": 1, "host": f"{MARK}host"},
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "uuid": f"{MARK}uuid"}],
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "args": {"name": f"python --token {MARK}"}},
            {"ph": "M", "name": "thread_name", "pid": 100, "tid": 5, "args": {"name": f"{MARK}thread"}},
            event("user_annotation", "step", 0, 50, 5, 100, user=f"{MARK}user"),
            event("python_function", f"{home}/train.py(12): forward", 0, 45, 5, 100, **frames),
            event("cpu_op", "aten::mm", 1, 40, 5, 100, **{"External id": 1, "cwd": str(home)}, **shapes),
            event("cuda_runtime", "cudaLaunchKernel", 2, 2, 5, 100, **ids),
            event("kernel", "gemm", 5, 10, 7, 0, device=0, stream=7, path=f"{home}/kernel.cu", **ids),
        ],
    }


def nsys(path):
    with gzip.open(TESTS / "trace" / "fixtures" / "h200-small-fp32-naive-2steps.nsys.sqlite.gz") as packed:
        path.write_bytes(packed.read())
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE IF NOT EXISTS TARGET_INFO_SYSTEM_ENV (name TEXT, nameEnum INTEGER, value TEXT)")
    db.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 1, ?)", (f"{MARK}host",))
    db.execute("INSERT INTO StringIds VALUES (99999999, ?)", (f"HF_TOKEN={MARK}",))
    db.commit()
    db.close()


def snapshot(home):
    found = made(steps=2)[0]
    blocks = (block for segment in found["segments"] for block in segment["blocks"])
    for held in (*blocks, *(event for events in found["device_traces"] for event in events)):
        held["frames"] = [frame | {"filename": f"{home}/train.py"} for frame in held.get("frames", ())]
    return found | {"allocator_settings": {"host": f"{MARK}host"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder with a project in a repository whose remote holds a token."""
    place = tmp_path_factory.mktemp("machine") / f"{MARK}home"
    project = place / "project"
    project.mkdir(parents=True)
    for words in (("init", "-q"), ("remote", "add", "origin", f"https://eve:{MARK}git@example.com/x.git")):
        subprocess.run(("git", *words), cwd=project, check=True)
    (project / "train.py").write_text(SCRIPT)
    (project / "step.py").write_text(FACTORY)
    (project / "trace.json").write_text(json.dumps(kineto(place)))
    nsys(project / "export.sqlite")
    (project / "memory.pickle").write_bytes(pickle.dumps(snapshot(place)))
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    theirs = {"_name_or_path": f"{place}/{MARK}", "token": f"hf_{MARK}config", "auth": {"user": f"{MARK}user"}}
    (project / "config.json").write_text(json.dumps(config | theirs))
    return place


@pytest.fixture(scope="module")
def machine(home):
    """`flopwise WORDS` in the project of this home."""

    def command(*words, code=0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["flopwise", *map(str, words)])
            ended = in_process(*words, cwd=home / "project", HOME=str(home), **ENVIRONMENT)
        assert ended.returncode == code, ended.stderr
        return ended

    return command


def held(path):
    """A file's text, with what is packed in it."""
    text = path.read_bytes()
    text = gzip.decompress(text) if path.suffix == ".gz" else text
    packed = re.findall(rb"[A-Za-z0-9+/]{400,}={0,2}", text) if path.suffix == ".html" else ()
    return b"\n".join((text, *map(b64decode, packed))).decode("latin-1")


def names(text):
    """Secrets in a text, with what stands around them."""
    host = socket.gethostname()
    known = MARK if len(host) < 6 else f"{MARK}|{re.escape(host)}"
    return [text[max(0, found.start() - 60) : found.end() + 20] for found in re.finditer(known, text)]


def left(place):
    """Every file below a place that holds a secret, or is called by one."""
    files = [path for path in place.rglob("*") if path.is_file()]
    assert files
    shown = {str(path.relative_to(place)): names(str(path.relative_to(place))) + names(held(path)) for path in files}
    return {path: found for path, found in shown.items() if found}


def clean(ended):
    return names(ended.stdout + ended.stderr) == []


def test_what_is_looked_for_is_found(tmp_path):
    (tmp_path / f"{MARK}.txt").write_text("")
    (tmp_path / "b.gz").write_bytes(gzip.compress(f"a {MARK} b".encode()))
    (tmp_path / "page.html").write_text(b64encode(b"x" * 400 + MARK.encode()).decode())
    assert set(left(tmp_path)) == {f"{MARK}.txt", "b.gz", "page.html"}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_others(machine, form):
    for words in (("explain", "trace.json"), ("explain", "export.sqlite"), ("memory", "memory.pickle")):
        assert clean(machine(*words, "--format", form)), words
        assert form != "table" or clean(machine(*words, "--full")), words
    assert clean(machine("account", "hf:config.json", "--gpu", "h100", "--format", form))
    assert clean(machine("roofline", "trace.json", "--format", form))


@pytest.mark.slow
def test_pages_and_pictures_of_them(machine, home):
    given = ("trace.json", "export.sqlite", "memory.pickle")
    for words in (("-o", "made/page.html"), ("-o", "made/page.md", "--pictures")):
        (home / "project" / "made").mkdir(exist_ok=True)
        assert clean(machine("report", *given, *words))
    for name in ("roof.svg", "roof.png"):
        assert clean(machine("roofline", "trace.json", "-o", f"made/{name}"))
    assert left(home / "project" / "made") == {}


def test_a_scrubbed_trace(machine, home):
    (home / "project" / "safe").mkdir()
    for name in ("trace.json", "export.sqlite"):
        assert clean(machine("runs", "scrub", name, "-o", f"safe/{name}"))
    assert left(home / "project" / "safe") == {}


@pytest.mark.parametrize("name", TOOLS)
def test_answers_to_an_agent(machine, home, name):
    project = home / "project"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.setenv("HOME", str(home))
        folder = Folder.at(project)
        fields = {"target", "a", "b", "model", "workload"} & set(TOOLS[name].arguments.__struct_fields__)
        for target in ("trace.json", "export.sqlite", "last", "no.json", "config.json", "train.py", "hf:config.json"):
            answer = answered(folder, name, dict.fromkeys(fields, target)).model_dump_json()
            assert names(answer) == [], target


@pytest.mark.slow
def test_what_is_measured(machine, home):
    """Runs in every form, their folders' names, logs and raw traces; a page over all of them."""
    quick = ("--batch", "1", "--context", "16", "--device", "cpu")
    assert clean(machine("run", "train.py", *ARGUMENTS))
    broken = machine("bench", "step.py:broken", "--device", "cpu", code=2)
    assert "cannot log in with [removed] from ~/data" in broken.stderr
    assert clean(broken)
    for words in (("profile", "tiny", *quick), ("memory", "tiny", *quick), ("bench", "tiny", *quick, "--samples", "3")):
        assert clean(machine(*words)), words
    runs = ("last", "last~1", "last~2", "last~3")
    for form in FORMS:
        assert all(clean(machine("runs", "show", run, "--format", form)) for run in runs)
        assert clean(machine("runs", "--format", form))
    (home / "project" / "pages").mkdir()
    for page in ("page.html", "page.md"):
        assert clean(machine("report", *runs, "-o", f"pages/{page}"))
    assert clean(machine("doctor"))
    assert left(home / "project" / "pages") == {}
    assert left(home / "project" / ".flopwise") == {}


TINY = "n_layers=1,d_model=32,d_ff=64,n_heads=2,n_kv_heads=2,head_dim=16,vocab=270"
SMALL = ("--batch", "1", "--context", "16", "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["tune", "train", "lab"])
def test_what_is_tuned_trained_or_tried(machine, home, verb):
    """A run of each, and of a step that fails; shown and on a page; a recipe; a training that goes on, and its checkpoints."""
    project, runs, made = home / "project", f"{verb}-runs", f"{verb}-made"
    (project / made).mkdir()
    (project / "book.txt").write_text("some words, over and over\n" * 400)
    words = {
        "tune": ("hf:config.json", *SMALL, "--budget", "5s", "--seconds", "0.2", "--save", f"{made}/fast.toml"),
        "train": ("tiny", *SMALL, "--text", "book.txt", "--steps", "4", "--set", TINY),
        "lab": ("tile-quantization", "--quick", "--device", "cpu"),
    }[verb]
    failing = {
        "tune": ("step.py:broken", "--device", "cpu"),
        "train": ("tiny", "--data", "no-corpus", "--device", "cpu"),
        "lab": ("autocast-audit", "--workload", "step.py:broken", "--quick", "--device", "cpu"),
    }[verb]
    failed = machine(verb, *failing, "--runs", runs, code=2)
    assert names(failed.stderr.replace(str(project), "")) == []  # where no corpus is, is said as it is
    assert clean(machine(verb, *words, "--runs", runs))
    if verb == "train":
        kept = ("--data", "corpus", "--text", "book.txt", "--steps", "2")
        assert clean(machine("train", "tiny", *SMALL, *kept, "--set", TINY, "--runs", runs))
        assert clean(machine("train", "--resume", "last", "--steps", "6", "--runs", runs))
        assert clean(machine("generate", "last", "--runs", runs, "--tokens", "2"))
    for form in FORMS:
        assert clean(machine("runs", "show", "last", "--runs", runs, "--format", form))
    for page in ("page.html", "page.md"):
        assert clean(machine("report", "last", "--runs", runs, "-o", f"{made}/{page}"))
    assert left(project / made) == {}
    assert left(project / runs) == {}
