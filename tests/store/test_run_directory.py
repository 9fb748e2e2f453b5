"""What a run's directory holds, what is refused, and what reading a damaged one gives."""

import contextlib
import errno
import math
import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.errors import Damaged, FlopwiseError, Interrupted
from flopwise.records.run import INTERRUPTED, OOM, Ran
from flopwise.store import Run, StoredRun, list_runs, rows, runs_root, stored


def write(root, trials, points, kind="bench", name="small"):
    with Run.create(root, kind, name, "flopwise bench small", trials) as run:
        for point in points:
            run.append(point)
    return run.path


def test_the_root_is_the_one_given_else_the_variable_else_beside_the_work(monkeypatch):
    monkeypatch.setenv("FLOPWISE_RUNS", "/from/variable")
    assert runs_root("given") == Path("given")
    assert runs_root(None) == Path("/from/variable")
    monkeypatch.setenv("FLOPWISE_RUNS", "")
    assert runs_root() == Path(".flopwise/runs")


@pytest.mark.parametrize("hostile", ["a\0b", "~no-such-user-here/runs"])
def test_a_root_that_cannot_be_is_one_line(hostile):
    with pytest.raises(FlopwiseError, match="cannot be a folder of runs"):
        runs_root(hostile)


def test_a_folder_we_make_is_kept_out_of_git_and_one_that_was_there_is_left_alone(tmp_path, trials):
    made, found = tmp_path / "a" / ".flopwise", tmp_path / "b" / ".flopwise"
    found.mkdir(parents=True)
    for home in (made, found):
        write(home / "runs", trials, [])
    assert (made / ".gitignore").read_text() == "*\n"
    assert not (found / ".gitignore").exists()
    write(tmp_path / "elsewhere", trials, [])
    assert not (tmp_path / ".gitignore").exists()


def test_reading_creates_nothing(tmp_path, monkeypatch, trials):
    from flopwise.store import list_runs, resumable

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOPWISE_RUNS", raising=False)
    assert list_runs(runs_root()) == []
    assert resumable(runs_root(), trials, "bench") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "in_id"),
    [
        ("small", "bench-small-"),
        ("op:matmul", "bench-op-matmul-"),
        ("../../etc/passwd", "bench-etc-passwd-"),
        ("", "bench-"),
        ("größe\n\0 x", "bench-gr-e-x-"),
        ("x" * 500, "bench-" + "x" * 40 + "-"),
        ("...", "bench-"),
    ],
)
def test_an_id_tells_time_kind_and_name_and_never_leaves_the_root(root, trials, name, in_id):
    path = write(root, trials, [], name=name)
    assert re.fullmatch(r"\d{8}-\d{6}-" + re.escape(in_id) + "[0-9a-f]{4}", path.name)
    assert path.parent == root
    assert StoredRun.load(path).header.id == path.name


def test_bytes_in_a_command_line_that_are_no_text_are_kept_readable(root, trials):
    with Run.create(root, "bench", "small", "flopwise bench \udcff", trials) as run:
        pass
    assert StoredRun.load(run.path).header.command == "flopwise bench \\udcff"


def test_a_file_in_the_way_is_one_line_with_a_hint(tmp_path, trials):
    (tmp_path / "runs").write_text("not a folder")
    for root in (tmp_path / "runs", tmp_path / "runs" / "deeper"):
        with pytest.raises(FlopwiseError, match="cannot create a run in") as error:
            Run.create(root, "bench", "x", "", trials)
        assert "a file stands where a folder should be" in error.value.hint


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_one_may_not_write_to_is_one_line_with_a_hint(root, trials, monkeypatch, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(FlopwiseError, match="cannot create a run in") as error:
        Run.create(root, "bench", "x", "", trials)
    assert "FLOPWISE_RUNS" in error.value.hint


def test_logs_lie_in_the_run_and_nowhere_else(root, trials):
    with Run.create(root, "bench", "small", "", trials) as run:
        assert run.log_path("0123abcd") == run.path / "logs" / "0123abcd.log"
        assert (run.path / "logs").is_dir()
        for hostile in ("../x", "a/b", "", ".hidden", "a\0", "x" * 300):
            with pytest.raises(FlopwiseError, match="cannot name a file"):
                run.log_path(hostile)


def test_a_closed_run_takes_no_rows(root, trials, points):
    run = Run.create(root, "bench", "small", "", trials)
    run.close()
    run.close()
    with pytest.raises(FlopwiseError, match="is closed"):
        run.append(points[0])


def test_rows_follow_the_plan_whatever_order_they_came_in_and_others_come_after(
    root, trials, points, make_point, make_trials
):
    extra = make_point(make_trials(9)[8])
    stored_run = StoredRun.load(write(root, trials, [extra, points[3], points[0]]))
    assert stored_run.points == (points[0], points[3], extra)
    assert stored_run.missing() == (trials[1], trials[2])
    assert not stored_run.complete


def test_a_later_row_replaces_an_earlier_one_and_an_interrupted_one_is_missing(root, trials, points, make_point):
    interrupted = make_point(trials[0], INTERRUPTED)
    oom = make_point(trials[1], OOM, "out of memory")
    path = write(root, trials[:2], [interrupted, oom])
    assert StoredRun.load(path).missing() == trials[:1]  # an OOM is a result
    with Run.reopen(path) as run:
        run.append(points[0])
    assert StoredRun.load(path).points == (points[0], oom)
    assert StoredRun.load(path).complete


def test_a_trial_planned_twice_is_measured_once(root, trials, points):
    path = write(root, (trials[0], trials[1], trials[0]), [])
    assert StoredRun.load(path).missing() == trials[:2]
    with Run.reopen(path) as run:
        run.append(points[0])
        run.append(points[1])
    assert StoredRun.load(path).complete


def test_a_row_whose_key_an_older_version_computed_still_belongs_to_its_trial(root, trials, points):
    old = tuple(msgspec.structs.replace(point, key=f"old-{n}") for n, point in enumerate(points))
    stored_run = StoredRun.load(write(root, trials, reversed(old)))
    assert stored_run.points == old
    assert stored_run.complete


def test_a_damaged_line_costs_itself_and_is_named(root, trials, points):
    path = write(root, trials, points)
    lines = (path / "points.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"key"', b'"kez"')
    lines[2] = b"\xff" * 30 + b"\n"
    (path / "points.jsonl").write_bytes(b"".join(lines))
    stored_run = StoredRun.load(path)
    assert stored_run.points == (points[0], points[3])
    assert [re.search(r"line (\d+)", warning)[1] for warning in stored_run.warnings] == ["2", "3"]


def test_a_line_that_is_too_long_is_refused_without_reading_it(root, trials, points, monkeypatch):
    path = write(root, trials, points)
    longest = max(len(line) for line in (path / "points.jsonl").read_bytes().splitlines()) + 1
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", longest)
    lines = (path / "points.jsonl").read_bytes().splitlines(keepends=True)
    (path / "points.jsonl").write_bytes(
        lines[0] + b"x" * 10 * longest + b"\n" + b"".join(lines[1:]) + b"y" * 3 * longest
    )
    stored_run = StoredRun.load(path)
    assert stored_run.points == points
    assert "line 2 is longer" in stored_run.warnings[0]
    assert "torn (line 6)" in stored_run.warnings[1]


def test_a_row_that_could_not_be_read_again_is_not_written(root, trials, points, monkeypatch):
    replace = msgspec.structs.replace
    with Run.create(root, "bench", "small", "", trials) as run:
        for bad in (
            replace(points[0], elapsed_s=math.nan),
            replace(points[0], reason="\udcff"),
            replace(points[0], key=5),
        ):
            with pytest.raises(FlopwiseError, match="cannot be stored"):
                run.append(bad)
        monkeypatch.setattr("flopwise.store.run.MAX_ROW_BYTES", 100)
        with pytest.raises(FlopwiseError, match="MiB of samples"):
            run.append(points[0])
    assert (run.path / "points.jsonl").read_bytes() == b""


def test_a_loss_that_is_not_a_number_is_stored_as_none(root, trials, points):
    nan = msgspec.structs.replace(points[0], ran=Ran(device="cpu", loss=math.nan))
    assert StoredRun.load(write(root, trials, [nan])).points[0].ran == Ran(device="cpu", loss=None)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "is not a run's header"),
        (b"{", "is not a run's header"),
        (b"[]", "is not a run's header"),
        (b"{}", "is not a run's header"),
        (b"\xff\xfe", "is not a run's header"),
        (b"[" * 100_000, "is not a run's header"),
        (b'{"schema": "1"}', "is not a run's header"),
        (b'{"schema": 1, "id": 7}', "is not a run's header"),
        (b'{"schema": 0}', "has schema = 0"),
    ],
)
def test_a_header_that_is_none_costs_a_line_and_not_the_rows(root, trials, points, header, said):
    path = write(root, trials, points)
    (path / "run.json").write_bytes(header)
    run = StoredRun.load(path)
    assert sorted(point.key for point in run.points) == sorted(point.key for point in points)
    assert re.search(f"{said}.*made anew from its rows", run.warnings[0])
    assert run.damage()
    assert list_runs(root)[0].warnings[0] == run.warnings[0]
    with pytest.raises(FlopwiseError, match=said):
        Run.reopen(path)
    with pytest.raises(Damaged):
        run.sound()


def test_a_header_of_a_newer_version_is_not_guessed(root, trials):
    path = write(root, trials, [])
    (path / "run.json").write_bytes(b'{"schema": 2, "anything": "at all"}')
    for read in (StoredRun.load, Run.reopen):
        with pytest.raises(FlopwiseError, match="was written by a newer flopwise"):
            read(path)


def test_a_header_with_a_plan_that_spec_refuses_is_one_line(root, trials):
    path = write(root, trials, [])
    text = (path / "run.json").read_bytes()
    for old, new in (
        (b'"n_heads":4', b'"n_heads":0'),
        (b'"device":"auto"', b'"device":"../x"'),
        (b'"d_ff":192', b'"d_ff":"192"'),
    ):
        assert old in text
        (path / "run.json").write_bytes(text.replace(old, new, 1))
        assert str(path / "run.json") in StoredRun.load(path).warnings[0]


def test_what_is_not_a_run_is_one_line(tmp_path, root, trials, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, said in (
        (tmp_path, "is not a run"),
        (tmp_path / "file", "is not a folder"),
        (tmp_path / "no", "is not a folder"),
    ):
        with pytest.raises(FlopwiseError, match=said):
            StoredRun.load(path)
    path = write(root, trials, [])
    (path / "run.json").unlink()
    os.mkfifo(path / "run.json")  # opening it would wait for ever
    assert "is not a plain file" in StoredRun.load(path).warnings[0]
    path = write(root, trials, [])
    monkeypatch.setattr(stored, "MAX_HEADER_BYTES", 10)
    assert "larger than" in StoredRun.load(path).warnings[0]


def test_a_table_that_is_gone_or_no_file_is_told(root, trials, points):
    path = write(root, trials, points)
    (path / "points.jsonl").unlink()
    assert StoredRun.load(path).points == ()
    assert "is missing" in StoredRun.load(path).warnings[0]
    with Run.reopen(path) as run:
        run.append(points[0])
    assert StoredRun.load(path).points == points[:1]
    (path / "points.jsonl").unlink()
    os.mkfifo(path / "points.jsonl")
    assert StoredRun.load(path).warnings[0] == "points.jsonl is not a plain file: no rows"
    with pytest.raises(FlopwiseError):  # and waits for nobody
        Run.reopen(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_in_the_files_are_read_or_refused_in_one_line(root, trials, points, data):
    if not root.exists():
        write(root, trials, points)
    path = next(p for p in root.iterdir() if p.name[0] != ".")
    good = {name: (path / name).read_bytes() for name in ("run.json", "points.jsonl")}
    try:
        name = data.draw(st.sampled_from(sorted(good)))
        start = data.draw(st.integers(0, len(good[name])))
        end = data.draw(st.integers(start, min(len(good[name]), start + 40)))
        (path / name).write_bytes(good[name][:start] + data.draw(st.binary(max_size=20)) + good[name][end:])
        with contextlib.suppress(FlopwiseError):
            assert len(StoredRun.load(path).points) <= len(points) + 1
    finally:
        for name, text in good.items():
            (path / name).write_bytes(text)


def stopped(run, error, table=None):
    if table is not None:
        (run.path / table).write_bytes(b"{}\n")
    with pytest.raises(type(error)), run:
        raise error


@pytest.mark.parametrize(
    ("kind", "table"),
    [("bench", "points"), ("sweep", "points"), ("tune", "tuning"), ("train", "training"), ("lab", "lab")],
)
def test_of_a_run_that_is_stopped_before_its_first_row_nothing_stays(root, trials, kind, table):
    def begun():
        return Run.create(root, kind, "small", "flopwise", trials)

    for stop in (KeyboardInterrupt(), Interrupted(None)):
        stopped(begun(), stop)
        assert list(root.iterdir()) == []
    stopped(begun(), FlopwiseError("no"))  # its logs may say why
    (path,) = root.iterdir()
    stopped(Run.reopen(path), KeyboardInterrupt())  # somebody knows of it
    assert path.is_dir()
    kept = begun()
    stopped(kept, KeyboardInterrupt(), f"{table}.jsonl")
    assert kept.path.is_dir()
