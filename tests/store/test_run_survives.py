"""The law of the store: killed at any byte and resumed, a run equals one that was never interrupted."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from flopwise.errors import FlopwiseError
from flopwise.store import Run, StoredRun, files, resumable
from quick import ALL, tenth

WRITER = """
import itertools, sys, time, msgspec
from flopwise.records.run import Point
from flopwise.store import Run, StoredRun
path, points_file, most = sys.argv[1:]
points = {p.key: p for p in msgspec.json.decode(open(points_file, "rb").read(), type=list[Point])}
with Run.reopen(path) as run:
    for trial in itertools.islice(StoredRun.load(path).missing(), int(most)):
        run.append(points[trial.key()])
    time.sleep(0 if StoredRun.load(path).complete else 1000)  # it is killed, however late that may be
"""


def write(root, trials, points):
    with Run.create(root, "bench", "small", "flopwise bench small", trials) as run:
        for point in points:
            run.append(point)
    return run.path


def test_a_table_cut_at_any_byte_reads_as_its_whole_rows_and_resumes_to_the_same_table(root, trials, points):
    path = write(root, trials, points)
    whole = StoredRun.load(path).points
    assert whole == points
    table = (path / "points.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(table) if byte == ord("\n")]
    for cut in range(len(table), -1, -1 if ALL else -7):
        os.truncate(path / "points.jsonl", cut)
        rows = sum(end <= cut for end in ends)
        stored = StoredRun.load(path)
        assert stored.points == points[:rows]
        assert stored.missing() == trials[rows:]
        assert bool(stored.warnings) == (cut < len(table))  # it was closed with all of them


def test_reopening_after_a_cut_at_any_byte_gives_the_uninterrupted_table(root, trials, points, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of reopenings; the disk is not what is tested here
    path = write(root, trials, points)
    table = (path / "points.jsonl").read_bytes()
    ends = [0] + [i + 1 for i, byte in enumerate(table) if byte == ord("\n")]
    for cut in range(0, len(table) + 1, 7 if ALL else 70):
        for old in path.glob("points.torn-*"):
            old.unlink()
        (path / "points.jsonl").unlink()
        (path / "points.jsonl").write_bytes(table[:cut])
        with Run.reopen(path) as run:
            for trial in StoredRun.load(path).missing():
                run.append(next(p for p in points if p.key == trial.key()))
        assert (path / "points.jsonl").read_bytes() == table
        torn = table[max(end for end in ends if end <= cut) : cut]
        kept = b"".join(file.read_bytes() for file in path.glob("points.torn-*"))
        assert kept == torn  # nothing is lost silently
        assert StoredRun.load(path).complete


def test_torn_bytes_of_several_kills_are_all_kept(root, trials, points):
    path = write(root, trials, points[:1])
    for torn in (b'{"key":', b'{"key": "second'):
        with (path / "points.jsonl").open("ab") as table:
            table.write(torn)
        Run.reopen(path).close()
    assert (path / "points.torn-1").read_bytes() == b'{"key":'
    assert (path / "points.torn-2").read_bytes() == b'{"key": "second'
    assert StoredRun.load(path).points == points[:1]


@pytest.mark.parametrize("rubbish", [b"\0" * 4096, b"not json\n", b"[1, 2]\n", b"\n\n\n", b"\xff\xfe\n", b"{}\n" * 3])
def test_rubbish_after_the_last_row_is_cut_and_kept(root, trials, points, rubbish):
    path = write(root, trials, points[:2])
    before = (path / "points.jsonl").read_bytes()
    (path / "points.jsonl").write_bytes(before + rubbish)
    assert StoredRun.load(path).points == points[:2]
    with Run.reopen(path) as run:
        run.append(points[2])
    assert (path / "points.torn-1").read_bytes() == rubbish
    assert StoredRun.load(path).points == points[:3]
    assert StoredRun.load(path).warnings == ()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_with_sigkill_again_and_again_it_ends_as_the_uninterrupted_run(tmp_path, root, make_trials, make_point):
    trials, each = make_trials(tenth(200)), 9  # rows of a writer, at most
    points = [make_point(trial) for trial in trials]
    (tmp_path / "points.json").write_bytes(msgspec.json.encode(points))
    (tmp_path / "writer.py").write_text(WRITER)
    path = write(root, trials, [])
    chance = random.Random(20)
    table, row_bytes = path / "points.jsonl", len(msgspec.json.encode(points[0])) + 1
    kills = before = 0
    while not StoredRun.load(path).complete:
        assert resumable(root, trials, "bench") == path
        grow_to = table.stat().st_size + chance.randrange(each * row_bytes)
        writer = subprocess.Popen([sys.executable, tmp_path / "writer.py", path, tmp_path / "points.json", str(each)])
        while writer.poll() is None and table.stat().st_size < grow_to:
            pass
        time.sleep(chance.uniform(0, 0.002))
        writer.send_signal(signal.SIGKILL)
        kills += writer.wait() == -signal.SIGKILL
        now = len(StoredRun.load(path).points)
        assert now >= before  # no row that was there is ever lost
        before = now
    assert kills >= len(trials) // each
    stored = StoredRun.load(path)
    assert stored.points == tuple(points)
    assert stored.header.trials == trials
    assert resumable(root, trials, "bench") is None


@pytest.mark.parametrize("cutting_fails", [False, True])
def test_a_full_disk_leaves_a_readable_run(root, trials, points, monkeypatch, cutting_fails):
    run = Run.create(root, "bench", "small", "", trials)
    run.append(points[0])
    write_for_real, space = os.write, [40]

    def nearly_full(fd, text):
        if space[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write_for_real(fd, text[: space[0]])
        space[0] -= done
        return done

    def cannot_cut(fd, length):
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as full:
        full.setattr(os, "write", nearly_full)
        if cutting_fails:
            full.setattr(os, "ftruncate", cannot_cut)
        with pytest.raises(FlopwiseError, match="no space left on device") as error:
            run.append(points[1])
        assert "free some space" in error.value.hint
    stored = StoredRun.load(run.path)
    assert stored.points == points[:1]
    assert stored.missing() == trials[1:]
    run.append(points[2])  # space again: the same handle goes on, and the torn row costs only itself
    run.close()
    assert StoredRun.load(run.path).points == (points[0], points[2])
    assert len(StoredRun.load(run.path).warnings) == cutting_fails


def test_a_full_disk_while_creating_leaves_no_half_run(root, trials, monkeypatch):
    def full(fd, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(FlopwiseError, match=r"cannot create a run in .* no space left"):
            Run.create(root, "bench", "x", "", trials)
    assert list(root.iterdir()) == []


def test_a_run_has_one_writer(root, trials, points):
    run = Run.create(root, "bench", "small", "", trials)
    attempt = [
        sys.executable,
        "-c",
        "import sys; from flopwise.store import Run; Run.reopen(sys.argv[1])",
        str(run.path),
    ]
    locked_out = subprocess.run(attempt, capture_output=True, text=True, check=False)
    assert "is being written by another process" in locked_out.stderr
    with pytest.raises(FlopwiseError, match="is being written by another process"):
        Run.reopen(run.path)
    run.append(points[0])
    run.close()
    assert subprocess.run(attempt, capture_output=True, check=False).returncode == 0
    assert StoredRun.load(run.path).points == points[:1]


def test_a_run_removed_while_waiting_for_its_lock_is_not_written(root, trials, monkeypatch):
    path = write(root, trials, [])
    monkeypatch.setattr(os.path, "samestat", lambda a, b: False)
    with pytest.raises(FlopwiseError, match="no such file"):
        Run.reopen(path)


def test_without_locks_runs_are_written_all_the_same(root, trials, points, monkeypatch):
    monkeypatch.setattr(files, "HAS_LOCKS", False)
    path = write(root, trials, points[:2])
    with Run.reopen(path) as run:
        run.append(points[2])
    assert StoredRun.load(path).points == points[:3]
    assert not files.is_locked(path / "lock")


def test_a_file_system_without_locks_is_written_all_the_same(root, trials, points, monkeypatch):
    def refuses(fd, how):
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(files.fcntl, "flock", refuses)
    assert StoredRun.load(write(root, trials, points)).complete


def test_the_folder_appears_whole_or_not_at_all(root, trials, monkeypatch):
    seen = []
    rename_for_real = os.rename

    def look_then_rename(old, new):
        seen.append(
            (sorted(p.name for p in Path(old).iterdir()), Path(new).exists(), files.is_locked(Path(old) / "lock"))
        )
        rename_for_real(old, new)

    monkeypatch.setattr(os, "rename", look_then_rename)
    write(root, trials, [])
    assert seen == [(["lock", "points.jsonl", "run.json"], False, True)]
