"""Rows that are lost are said in every format, and no gate is passed without them."""

import json

import msgspec
import pytest

from flopwise.records.run import Ran
from flopwise.store import Run


@pytest.fixture
def two(root, trials, points):
    """The folders of two runs of the same points."""
    made = []
    for name in "ab":
        with Run.create(root, "sweep", name, "flopwise sweep", trials) as run:
            for point in points:
                run.append(point)
        made.append(run.path)
    return made


def spoil(path, line):
    """Damage one row of a run."""
    rows = (path / "points.jsonl").read_bytes().split(b"\n")
    rows[line] = rows[line].replace(b'"status"', b'"st\0tus"')
    (path / "points.jsonl").write_bytes(b"\n".join(rows))


def cut(path, line):
    rows = (path / "points.jsonl").read_bytes().split(b"\n")
    (path / "points.jsonl").write_bytes(b"\n".join(rows[:line] + rows[line + 1 :]))


@pytest.mark.parametrize("damage", [spoil, cut])
@pytest.mark.parametrize("side", [0, 1])
def test_a_gate_is_not_passed_without_a_row(two, cli, damage, side):
    whole = cli("compare", *two, "--fail-above", "3%")
    assert "missing" not in whole.stdout
    assert cli("compare", two[0], two[0], "--fail-above", "3%").returncode == 0
    damage(two[side], 2)
    for form in ("table", "json", "github"):
        done = cli("compare", *two, "--fail-above", "3%", "--format", form)
        assert done.returncode == 3
        assert f"{'AB'[side]}: 1 of 4 points are missing" in " ".join(done.stdout.split())
    same = cli("compare", two[side], two[side], "--fail-above", "3%")
    assert same.returncode == 3


def test_a_gate_without_any_row_left_says_why(two, cli):
    for line in range(4):
        spoil(two[1], line)
    done = cli("compare", *two, "--fail-above", "3%")
    assert (done.returncode, "B: points.jsonl: line 1 is damaged" in done.stderr) == (3, True)


def test_every_format_of_a_run_says_what_cannot_be_read(two, cli, root):
    spoil(two[1], 2)
    said = "points.jsonl: line 3 is damaged"
    shown = json.loads(cli("runs", "show", two[1], "--format", "json").stdout)
    assert said in shown["run"]["warnings"][0]
    assert said in cli("runs", "show", two[1], "--format", "markdown").stdout
    listed = json.loads(cli("runs", "--runs", root, "--format", "json").stdout)
    assert [said in " ".join(run["warnings"]) for run in listed["runs"]] == [True, False]


def test_the_screen_of_one_point_says_it_too(root, trials, points, cli):
    with Run.create(root, "bench", "tiny", "flopwise bench", trials[:2]) as run:
        for point in points[:2]:
            run.append(point)
    spoil(run.path, 1)
    assert "points.jsonl: line 2 is damaged" in " ".join(cli("runs", "show", run.path).stdout.split())


@pytest.mark.parametrize("count", [1, 4])
def test_a_loss_that_is_no_number_is_said(root, trials, points, cli, count):
    bad = msgspec.structs.replace(points[0], reason="", ran=Ran(device="cpu", bad_loss="nan"))
    with Run.create(root, "bench", "tiny", "flopwise bench", trials[:count]) as run:
        for point in (bad, *points[1:count]):
            run.append(point)
    assert "loss of the last step is nan" in " ".join(cli("runs", "show", run.path).stdout.split())
    shown = json.loads(cli("runs", "show", run.path, "--format", "json").stdout)
    assert shown["points"][0]["ran"]["bad_loss"] == "nan"


def test_the_table_says_which_points_are_lost(two, cli):
    spoil(two[1], 2)
    shown = " ".join(cli("runs", "show", two[1]).stdout.split())
    assert "line 3 is damaged" in shown
    assert "1 of 4 points are missing" in shown
