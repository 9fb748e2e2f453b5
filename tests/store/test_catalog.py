"""Runs under one root: found, listed, tagged, removed, resumed."""

import contextlib
import itertools
import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.records.run import CRASH, ERROR, INTERRUPTED, OK, OOM, TIMEOUT, UNSUPPORTED
from flopwise.store import Run, StoredRun, files, find, list_runs, remove, resumable, tag, untag
from flopwise.store.rows import Appender


def write(root, trials, points=(), kind="bench", name="small"):
    with Run.create(root, kind, name, "", trials) as run:
        for point in points:
            run.append(point)
    return run.path


@pytest.fixture
def three(root, trials, make_point, monkeypatch):
    """Three runs begun in the same second: only the header tells their order."""
    clock = itertools.count(1_800_000_000_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    return [write(root, trials, [make_point(trials[0])], name=name) for name in ("one", "two", "three")]


def test_last_counts_back_by_the_time_a_run_was_begun(root, three):
    assert [find(ref, root) for ref in ("last", "last~0", "last~1", "last~2")] == [
        three[2],
        three[2],
        three[1],
        three[0],
    ]
    with pytest.raises(FlopwiseError, match="no run 3 before the last") as error:
        find("last~3", root)
    assert error.value.hint == "allowed: last to last~2"


def test_a_damaged_run_stays_the_last_so_that_its_damage_is_said(root, three):
    (three[2] / "run.json").write_text("{")
    assert find("last", root) == three[2]
    assert find(three[2].name, root) == three[2]


@pytest.mark.parametrize(
    ("statuses", "memory_file", "is_last"),
    [
        ((ERROR,), "", False),
        ((OOM, CRASH, UNSUPPORTED, TIMEOUT), "", False),
        ((ERROR, INTERRUPTED), "", False),  # of a pair, the other is cut short
        ((ERROR, OK), "", True),
        ((INTERRUPTED,), "", True),
        ((OOM,), "peak.pickle", True),  # what was recorded shows why
        ((), "", False),  # it has only begun, or was killed
    ],
    ids=str,
)
def test_a_run_in_which_everything_failed_is_not_the_last(
    root, trials, make_point, monkeypatch, statuses, memory_file, is_last
):
    clock = itertools.count(1_800_000_000_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    good = write(root, trials, [make_point(trials[0])])
    rows = [make_point(trial, status) for trial, status in zip(trials, statuses, strict=False)]
    newest = write(root, trials, [msgspec.structs.replace(row, memory_file=memory_file) for row in rows])
    assert find("last", root) == (newest if is_last else good)
    assert find(newest.name, root) == newest
    assert [run.id for run in list_runs(root)] == [newest.name, good.name]
    remove(root, [good.name])
    if not is_last:
        with pytest.raises(FlopwiseError, match="has measured anything") as error:
            find("last", root)
        assert error.value.hint.startswith(f"{newest.name} failed")


def test_what_was_interrupted_before_its_first_sample_is_not_the_last(root, trials, make_point):
    good = write(root, trials, [make_point(trials[0])])
    write(root, trials, [msgspec.structs.replace(make_point(trials[0], INTERRUPTED), phases=())])
    assert find("last", root) == good


@pytest.mark.parametrize(
    ("kind", "file", "rows", "is_last"),
    [
        ("tune", "tuning.jsonl", None, False),  # killed while its reference was written
        ("tune", "tuning.jsonl", "", False),
        ("tune", "tuning.jsonl", '{"row": "begun"', False),  # killed while it wrote
        ("tune", "tuning.jsonl", '{"row": "begun"}\n', True),
        (
            "tune",
            "tuning.jsonl",
            '{"row": "begun"}\n{"row": "attempt"}\n',
            True,
        ),  # without an end: what was tried is kept
        ("lab", "lab.jsonl", '{"experiments": ["a", "b"]}\n', False),
        ("lab", "lab.jsonl", '{"experiments": ["a", "b"]}\n{"status": "error"}\n', False),
        ("lab", "lab.jsonl", '{"experiments": ["a", "b"]}\n{"status": "ok"}\n', True),
    ],
)
def test_a_tuning_or_a_lab_is_the_last_once_it_holds_something(root, trials, make_point, kind, file, rows, is_last):
    good = write(root, trials, [make_point(trials[0])])
    newest = write(root, trials, kind=kind)
    if rows is not None:
        (newest / file).write_text(rows)
    assert find("last", root) == (newest if is_last else good)


def test_a_run_is_found_by_id_by_the_start_of_its_id_by_tag_and_by_path(root, three, tmp_path, monkeypatch):
    tag(root, three[0], "baseline")
    start = three[1].name[: three[1].name.index("-two") + 2]
    monkeypatch.chdir(root)
    for ref, path in (
        (three[0].name, three[0]),
        ("baseline", three[0]),
        (str(three[2]), three[2]),
        (three[2], three[2]),
    ):
        assert find(ref, root) == path
    assert find(f"./{three[1].name}", root).samefile(three[1])
    assert find(three[1].name, tmp_path / "another root").samefile(three[1])
    with pytest.raises(FlopwiseError, match="names 2 runs") as error:
        find(start, root)  # …-t: two and three
    assert three[1].name in error.value.hint
    assert find(f"{start}w", root) == three[1]


def test_an_unknown_run_lists_the_close_ones(root, three):
    tag(root, "last", "baseline")
    with pytest.raises(FlopwiseError, match="there is no run 'baselin'") as error:
        find("baselin", root)
    assert "close to it: baseline" in error.value.hint
    with pytest.raises(FlopwiseError, match="there is no run 'zzz'") as error:
        find("zzz", root)
    assert three[0].name in error.value.hint
    with pytest.raises(FlopwiseError, match="there are no runs"):
        find("last", root / "empty")
    with pytest.raises(FlopwiseError, match="but not a run"):
        find(str(root), root)


HOSTILE = [
    "",
    ".",
    "..",
    "../..",
    "/",
    "/etc",
    "../outside",
    "a\0b",
    "x" * 5000,
    "last~",
    "last~-1",
    "last~99999999",
    "~",
    "*",
    "\n",
]


@pytest.mark.parametrize("ref", HOSTILE)
def test_hostile_refs_are_one_line_and_change_nothing(root, three, ref):
    write(root.parent / "outside-root", StoredRun.load(three[0]).header.trials)
    (root.parent / "outside").mkdir()
    before = sorted(root.parent.rglob("*"))
    for act in (find, lambda ref, root: remove(root, [ref]), lambda ref, root: tag(root, ref, "good")):
        with pytest.raises(FlopwiseError) as error:
            act(ref, root)
        assert error.value.message.isprintable()
    assert [p for p in sorted(root.parent.rglob("*")) if p.name != ".lock"] == before


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ref=st.text(st.characters(codec=None), max_size=30))
def test_any_ref_is_found_or_refused_in_one_line(root, trials, ref):
    if not root.exists():
        write(root, trials)
    with contextlib.suppress(FlopwiseError):
        assert find(ref, root).is_dir()
    with contextlib.suppress(FlopwiseError):
        tag(root, "last", ref)
        assert find(ref, root) == find("last", root)
    with contextlib.suppress(FlopwiseError):
        untag(root, ref)


def test_runs_are_listed_newest_first_with_their_counts(root, trials, points, make_point, three):
    rows = [points[0], make_point(trials[1], OOM), make_point(trials[2], INTERRUPTED)]
    part = write(root, trials, rows, "sweep", "part")
    full = write(root, trials, [*rows, points[2], points[3]], "sweep", "full")
    tag(root, full, "b")
    tag(root, full, "a")
    found = list_runs(root)
    assert [run.name for run in found] == ["full", "part", "three", "two", "one"]
    assert [(r.kind, r.ok, r.failed, r.planned, r.complete, r.tags) for r in found[:2]] == [
        ("sweep", 3, 1, 4, True, ("b", "a")),
        ("sweep", 1, 1, 4, False, ()),
    ]
    assert found[0].path == full
    assert found[0].id == full.name
    assert found[0].created_at.endswith("Z")
    assert found[0].size_bytes == sum(f.stat().st_size for f in full.iterdir())
    assert found[1].complete == StoredRun.load(part).complete


def test_a_damaged_run_is_listed_with_its_reason_and_what_is_no_run_is_not(root, three):
    (three[0] / "run.json").write_text("{")
    (three[1] / "run.json").unlink()
    (root / "notes").mkdir()
    (root / "file.txt").write_text("")
    (root / ".removed-x").mkdir()
    (root / "link").symlink_to(three[2])
    found = {run.id: run for run in list_runs(root)}
    assert set(found) == {path.name for path in three}
    assert "is not a run's header" in found[three[0].name].warnings[0]
    assert "has no run.json" in found[three[1].name].warnings[0]
    assert found[three[2].name].warnings == ()


def test_the_count_survives_rows_whose_trial_cannot_be_read(root, trials, points):
    path = write(root, trials, points[:1])
    with Appender(path / "points.jsonl") as table:
        table.append(b'{"key":"x","trial":{"workload":5},"status":"ok"}')
    assert list_runs(root)[0].ok == 2
    assert len(StoredRun.load(path).points) == 1


def test_a_root_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(FlopwiseError, match="cannot read"):
        list_runs(tmp_path / "runs")


def test_a_tag_belongs_to_one_run(root, three):
    tag(root, three[0], "baseline")
    tag(root, three[0], "keep")
    assert tag(root, "last", "baseline") == three[2]
    assert find("baseline", root) == three[2]
    assert {r.name: r.tags for r in list_runs(root)} == {"one": ("keep",), "two": (), "three": ("baseline",)}
    tag(root, "last", "baseline")  # again: still once
    assert list_runs(root)[0].tags == ("baseline",)
    assert untag(root, "baseline") == three[2]
    with pytest.raises(FlopwiseError, match=r"no run in .* has the tag 'baseline'"):
        untag(root, "baseline")


@pytest.mark.parametrize(
    "name", ["", "x" * 65, "../x", "a/b", "a b", "é", "last", "last~1", "lastly", ".", "..", "a\n", "a\0"]
)
def test_a_name_that_cannot_be_a_tag_is_refused(root, three, name):
    with pytest.raises(FlopwiseError, match="cannot be a tag"):
        tag(root, "last", name)


def test_an_id_cannot_be_a_tag(root, three):
    with pytest.raises(FlopwiseError, match="a run has this id"):
        tag(root, "last", three[0].name)


def test_a_tag_left_on_two_runs_by_a_kill_is_told_not_guessed(root, three):
    for path in three[:2]:
        (path / "tags.json").write_text('{"schema":1,"tags":["twice"]}')
    with pytest.raises(FlopwiseError, match="'twice' names 2 runs"):
        find("twice", root)
    tag(root, three[1], "twice")
    assert find("twice", root) == three[1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tags": [5]}', '{"tags": ["../x", "a b"]}', "\x00" * 9])
def test_damaged_tags_count_as_none(root, three, text):
    (three[2] / "tags.json").write_text(text)
    assert list_runs(root)[0].tags == ()
    tag(root, "last", "new")
    assert list_runs(root)[0].tags == ("new",)


def test_removing_takes_several_at_once_by_their_names_before(root, three):
    assert remove(root, ["last", "last~1", three[2].name]) == [three[2], three[1]]
    assert [r.name for r in list_runs(root)] == ["one"]
    assert sorted(p.name for p in root.iterdir()) == sorted([".lock", three[0].name])


def test_a_damaged_run_can_be_removed(root, three):
    (three[1] / "run.json").unlink()
    remove(root, [three[1].name])
    assert not three[1].exists()


def test_a_run_being_written_is_not_removed_and_neither_are_the_others(root, three):
    with Run.reopen(three[1]), pytest.raises(FlopwiseError, match="is being written by another process"):
        remove(root, [three[0].name, three[1].name])
    assert all(path.exists() for path in three)
    remove(root, [three[0].name, three[1].name])


def test_what_is_not_a_run_under_the_root_is_not_removed(root, three, tmp_path, trials):
    outside = write(tmp_path / "other", trials)
    (root / "link").symlink_to(outside)
    (root / "folder").mkdir()
    for ref in (
        str(outside),
        str(root / "link"),
        "link",
        str(root / "folder"),
        "folder",
        str(root),
        f"{root}/../other/{outside.name}",
    ):
        with pytest.raises(FlopwiseError):
            remove(root, [ref])
    assert outside.exists()
    assert (root / "folder").exists()


def test_a_removal_that_was_killed_is_finished_by_the_next(root, three, monkeypatch):
    import shutil

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            remove(root, ["last"])
    assert [r.name for r in list_runs(root)] == ["two", "one"]  # gone from every list all the same
    assert len(list(root.glob(".removed-*"))) == 1
    abandoned, fresh = root / ".new-20200101-000000-bench-0000", root / ".new-20200101-000000-bench-1111"
    abandoned.mkdir()
    fresh.mkdir()
    os.utime(abandoned, (0, 0))
    remove(root, ["last"])
    assert sorted(p.name for p in root.glob(".*")) == [".lock", fresh.name]


def test_an_unfinished_run_with_the_same_plan_is_resumed_the_newest_first(root, trials, points):
    older, newer = write(root, trials, points[:1]), write(root, trials, points[:2])
    write(root, trials, points)  # complete
    write(root, trials[:3])  # another plan
    write(root, tuple(reversed(trials)))  # another order
    write(root, trials, kind="sweep")
    damaged = write(root, trials)
    (damaged / "run.json").write_text("{")
    assert resumable(root, trials, "bench") == newer
    with Run.reopen(newer):
        assert resumable(root, trials, "bench") == older
    assert resumable(root, list(trials), "bench") == newer
    assert resumable(root, (), "bench") is None


def test_asking_whether_a_run_is_locked_does_not_lock_writers_out(root, three):
    lock = files.take_lock(three[0] / "lock")
    assert files.is_locked(three[0] / "lock")
    files.release(lock)
    assert not files.is_locked(three[0] / "lock")
    assert not files.is_locked(Path("no such"))
    Run.reopen(three[0]).close()
