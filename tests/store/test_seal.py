"""A stored record is shown as it was written, or not at all, and its loss is said; runs of earlier versions still read."""

import json
import os
import random
import re

import msgspec
import pytest

from flopwise.errors import Damaged, FlopwiseError
from flopwise.store import Run, StoredRun, check_run, find, list_runs, tag
from flopwise.store.rows import append_row, read_rows
from flopwise.store.sums import checked_file
from unsealed import unseal


@pytest.fixture
def stored(root, trials, points):
    with Run.create(root, "sweep", "s", "flopwise sweep", trials) as run:
        run.trace_path("t.json").write_bytes(b'{"traceEvents":[]}' * 20)
        for point in points:
            run.append(point)
    tag(root, run.path.name, "baseline")
    return run.path


def seen(path):
    """What is read of a run, and whether damage is said."""
    try:
        run, listed = StoredRun.load(path), list_runs(path.parent)[0]
        checked_file(path, "traces", "t.json")
    except FlopwiseError as error:
        return error.message, True
    return (run.points, run.header, listed.tags, listed.ok), bool(run.warnings or listed.warnings)


@pytest.mark.parametrize("name", ["points.jsonl", "run.json", "tags.json", "sums.json", "traces/t.json"])
def test_no_changed_bit_is_silent(stored, name):
    (whole, said), content, chance = seen(stored), (stored / name).read_bytes(), random.Random(7)
    assert not said
    for bit in chance.sample(range(8 * len(content)), 60):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (stored / name).write_bytes(changed)
        found, said = seen(stored)
        assert said or found == whole, bit
    for cut in chance.sample(range(len(content)), 20):
        (stored / name).write_bytes(content[:cut])
        found, said = seen(stored)
        assert said or found == whole, cut


def test_without_seals_a_changed_bit_can_be_silent(stored):
    """Else the bits above were badly chosen."""
    unseal(stored)
    (whole, _), content = seen(stored), (stored / "points.jsonl").read_bytes()
    (stored / "points.jsonl").write_bytes(content.replace(b"2000007", b"2000003", 1))
    found, said = seen(stored)
    assert not said
    assert found != whole


def test_a_run_of_an_earlier_version_reads_and_goes_on(stored, points):
    whole = StoredRun.load(stored)
    unseal(stored)
    (stored / "points.jsonl").write_bytes(b"".join((stored / "points.jsonl").read_bytes().splitlines(True)[:2]))
    assert StoredRun.load(stored).points == points[:2]
    with Run.reopen(stored) as run:
        for point in points[2:]:
            run.append(point)
    again = StoredRun.load(stored)
    assert (again.points, again.warnings, again.header) == (points, (), whole.header)
    lines = (stored / "points.jsonl").read_bytes().splitlines(True)
    (stored / "points.jsonl").write_bytes(b"".join([*lines[:2], lines[3]]))
    assert "1 row is missing" in " ".join(StoredRun.load(stored).warnings)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: [rows[0], *rows[2:]], "1 row is missing"),
        (lambda rows: [*rows, rows[1]], "rows are there twice"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "not in the order"),
        (lambda rows: rows[:3], "1 row is missing"),
        (lambda rows: [re.sub(rb',"seal":"[^"]*"', b"", rows[0]), *rows[1:]], "line 1 has lost its checksum"),
        (lambda rows: [rows[0], rows[1].replace(b"2000007", b"1000007"), *rows[2:]], "line 2 is damaged"),
    ],
)
def test_the_order_is_checked_and_sound_rows_are_read(stored, points, change, said):
    table = stored / "points.jsonl"
    table.write_bytes(b"".join(change(table.read_bytes().splitlines(True))))
    found = StoredRun.load(stored)
    assert said in " ".join(found.warnings)
    assert all(point in points for point in found.points)
    assert len(found.points) >= 3
    with pytest.raises(Damaged, match="is damaged"):
        found.sound()


def test_a_row_of_another_run_is_noticed(root, stored, trials, points):
    with Run.create(root, "sweep", "other", "", trials) as other:
        for point in points:
            other.append(msgspec.structs.replace(point, elapsed_s=9.0))
    mine, theirs = ((path / "points.jsonl").read_bytes().splitlines(True) for path in (stored, other.path))
    (stored / "points.jsonl").write_bytes(b"".join([mine[0], theirs[1], *mine[2:]]))
    assert "is not of this table" in " ".join(StoredRun.load(stored).warnings)


def test_a_damaged_run_stays_the_last(root, stored, trials, points):
    """To show the run before it instead would hide the damage."""
    with Run.create(root, "bench", "newer", "", trials[:1]) as run:
        run.append(points[0])
    assert find("last", root) == run.path
    for name in ("points.jsonl", "run.json"):
        whole = (run.path / name).read_bytes()
        (run.path / name).write_bytes(whole[: len(whole) // 2])
        assert find("last", root) == run.path
        (run.path / name).write_bytes(whole)


def test_repair_leaves_what_is_sound_and_deletes_nothing(stored, points):
    table, header = stored / "points.jsonl", stored / "run.json"
    damaged = table.read_bytes().replace(b"2000007", b"1000007", 1)
    table.write_bytes(damaged)
    header.write_bytes(header.read_bytes()[:50])
    assert len(check_run(stored).damage) >= 2
    done = check_run(stored, repair=True)
    assert done.damage == ()
    assert any("line 2 is damaged" in line for line in done.repaired)
    assert (stored / "points.damaged-1").read_bytes() == damaged
    found = StoredRun.load(stored)
    assert found.points == (points[0], *points[2:])
    assert found.header.kind == "sweep"
    assert found.damage() == ()  # what the plan had is not known any more
    assert found.left_out == found.repaired != ()


def test_a_resumed_run_is_whole_again(stored, points):
    table = stored / "points.jsonl"
    table.write_bytes(table.read_bytes().replace(b"2000007", b"1000007", 1))
    with Run.reopen(stored) as run:
        for trial in StoredRun.load(stored).missing():
            run.append(next(point for point in points if point.key == trial.key()))
    assert StoredRun.load(stored).points == points
    assert StoredRun.load(stored).damage() == ()


def test_rows_besides_the_points_are_sealed_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    for number in range(3):
        append_row(path, {"number": number})
    assert [row["number"] for row in read_rows(path, dict, "rows").rows] == [0, 1, 2]
    path.write_text(path.read_text().replace('"number":1', '"number":7'))
    found = read_rows(path, dict, "rows")
    assert [row["number"] for row in found.rows] == [0, 2]
    assert found.warnings == ["rows.jsonl: line 2 is damaged: it is not as it was written: skipped"]


def test_every_format_says_it(stored, cli):
    table = stored / "points.jsonl"
    table.write_bytes(table.read_bytes().replace(b"2000007", b"1000007", 1))
    said = "line 2 is damaged"
    for form in ("table", "json", "markdown", "csv"):
        done = cli("runs", "show", stored, "--format", form)
        assert said in " ".join((done.stdout + done.stderr).split()), form
    for page in ("page.md", "page.html"):
        cli("report", stored, "-o", stored.parent / page)
        assert said in (stored.parent / page).read_text(), page
    checked = cli("runs", "check", stored, "--format", "json")
    assert (checked.returncode, said in checked.stdout) == (1, True)
    assert json.loads(checked.stdout)["runs"][0]["damage"]


def test_a_table_that_is_a_link_is_not_sound(stored, tmp_path):
    table = stored / "points.jsonl"
    table.rename(tmp_path / "elsewhere")
    table.symlink_to(tmp_path / "elsewhere")
    assert check_run(stored).damage == ("points.jsonl: it is a link to another file",)
    before, rows = (tmp_path / "elsewhere").read_bytes(), StoredRun.load(stored).points
    assert StoredRun.load(stored).damage() == check_run(stored).damage
    assert not check_run(stored, repair=True).damage
    assert StoredRun.load(stored).points == rows
    assert (tmp_path / "elsewhere").read_bytes() == before
    assert not table.is_symlink()


@pytest.mark.parametrize("name", ["run.json", "points.jsonl", "tags.json", "sums.json"])
@pytest.mark.parametrize(
    "made", [os.mkfifo, os.mkdir, lambda place: place.symlink_to("/dev/zero"), lambda place: place.symlink_to(place)]
)
def test_what_is_no_file_is_said_at_once_and_put_aside(stored, name, made):
    """A past bug: the check waited for a pipe, and one odd run kept it from all others."""
    (stored / name).unlink(missing_ok=True)
    made(stored / name)
    assert check_run(stored).damage
    repaired = check_run(stored, repair=True)
    assert not repaired.damage
    assert any(name in line for line in repaired.repaired)
    assert StoredRun.load(stored).left_out


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(b"other"), lambda file: file.unlink()])
def test_a_raw_file_that_was_lost_or_changed_is_said_after_a_repair_too(stored, change):
    change(stored / "traces" / "t.json")
    assert check_run(stored).damage
    repaired = check_run(stored, repair=True)
    assert not repaired.damage
    assert any("traces/t.json" in line for line in repaired.repaired)
    assert any("traces/t.json" in line for line in StoredRun.load(stored).left_out)
