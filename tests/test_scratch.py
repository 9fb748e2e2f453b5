"""Scratch folders: gone in the end; after a kill, gone at the next start; never taken from a process that lives."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flopwise.scratch import PREFIX, Scratch, scratch_folder, sweep
from flopwise.store import Run

CHILD = """
import sys
from flopwise.scratch import Scratch
scratch = Scratch()
(scratch.path / "file").write_bytes(bytes(1000))
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def other():
    """A process with a scratch folder, and that folder."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=pipe, stdout=pipe, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_is_not(other):
    process, folder = other
    assert sweep() == 0
    assert (folder / "file").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / "file").exists()
    with scratch_folder() as mine:  # the next start
        assert not folder.exists()
        assert list(mine.iterdir()) == []
    assert not mine.exists()


def test_what_is_not_ours_stays(place):
    (place / f"{PREFIX}notes").mkdir()  # a user's own: it has no owner's file
    (place / f"{PREFIX}file").touch()
    target = place / "elsewhere"
    target.mkdir()
    (target / ".owner").touch()
    (place / f"{PREFIX}link").symlink_to(target)
    assert sweep() == 0
    assert {one.name for one in place.iterdir()} == {f"{PREFIX}notes", f"{PREFIX}file", f"{PREFIX}link", "elsewhere"}


def test_a_fork_that_still_uses_it_counts_as_its_owner():
    scratch = Scratch()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(scratch._lock)
    scratch._lock = None
    assert sweep() == 0
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)
    assert sweep() == 1
    assert not scratch.path.exists()


def test_what_a_killed_capture_left_in_a_run_is_swept_when_the_next_run_begins(tmp_path):
    root = tmp_path / "runs"
    with Run.create(root, "bench", "live", "", []) as live, Run.create(root, "bench", "dead", "", []) as dead:
        for run in (live, dead):
            run.trace_path("key.json.gz").touch()
            run.trace_path("partial-key.json").write_bytes(bytes(1000))
        (dead.trace_path("partial-folder")).mkdir()
        dead.close()
        Run.create(root, "bench", "next", "", []).close()
        assert sorted(path.name for path in (dead.path / "traces").iterdir()) == ["key.json.gz"]
        assert sorted(path.name for path in (live.path / "traces").iterdir()) == ["key.json.gz", "partial-key.json"]
    Run.reopen(live.path).close()
    assert [path.name for path in (live.path / "traces").iterdir()] == ["key.json.gz"]
