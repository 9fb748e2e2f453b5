"""Several answers, a line each: in 80 columns whatever is in them, all of them there, the same text with and without colour."""

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from flopwise.api.account import account
from flopwise.api.explain import explain
from flopwise.render.account_listing import account_shown
from flopwise.render.listing import Heading, Listing
from flopwise.render.listings import explanations_listing, points_listing, runs_listing
from flopwise.render.one_screen import text
from flopwise.render.screen import LINES, WIDTH
from flopwise.render.views import screen_of
from flopwise.store import StoredRun, list_runs

ROOT = Path(__file__).parents[2]
TRACES = sorted((ROOT / "tests" / "trace" / "fixtures").glob("*.gz"))
RESULTS = ROOT / "benchmarks" / "results" / "h200-2026-11"
SWEEPS = [folder for folder in sorted(RESULTS.iterdir()) if (folder / "points.jsonl").is_file()]
ANSI = re.compile(r"\x1b\[[0-9;]*m")
EVIL = "\x1b[31m\x9b31m\u202e\u2028\x7f\r\nfake row|" + "A" * 300


def assert_fits(listing):
    plain = text(listing)
    lines = plain.splitlines()
    assert max(map(cell_len, lines)) <= WIDTH
    assert len(lines) <= max(LINES, len(listing.rows) + 8)
    assert all(line == line.rstrip() for line in lines)
    assert ANSI.sub("", text(listing, Console(file=io.StringIO(), force_terminal=True))) == plain
    return plain


def test_traces_have_a_line_each_with_the_numbers_of_their_own_screens():
    explained = [explain(path) for path in TRACES]
    listing = explanations_listing(explained)
    assert_fits(listing)
    for e, row in zip(explained, listing.rows, strict=True):
        shown = text(screen_of(e))
        assert all(cell in shown for cell in row[1:4])
        assert e.launch_bound == (row[-1] == "launch-bound")
    assert len({row[0] for row in listing.rows}) == len(TRACES)


@pytest.mark.parametrize("folder", SWEEPS, ids=lambda path: path.name)
def test_every_point_of_a_run_has_a_line(folder):
    run = StoredRun.load(folder)
    listing = points_listing(run)
    assert len(listing.rows) == len(run.points)
    plain = assert_fits(listing)
    assert plain.endswith("All tables: --full. A page: flopwise report RUN\n")
    if len(run.points) > 2:
        assert screen_of(run) == listing


@pytest.mark.slow
def test_gpus_have_a_line_each_and_one_has_a_screen():
    several = account_shown(account("small", gpu="h100,h200,rtx4090"))
    plain = assert_fits(several)
    assert [row[0] for row in several.rows] == ["H100 SXM 80 GB", "H200 SXM 141 GB", "GeForce RTX 4090 24 GB"]
    for name, row in zip(("h100", "h200", "rtx4090"), several.rows, strict=True):
        alone = text(account_shown(account("small", gpu=name)))
        assert all(cell in alone for cell in row[1:4])
    assert "predicted" in plain


def test_stored_runs_are_listed(tmp_path):
    found = list_runs(RESULTS)
    plain = assert_fits(runs_listing(found, tmp_path))
    assert all(one.id[:30] in plain for one in found)


@pytest.mark.parametrize("name", [EVIL, "漢字" * 100, "", "e" + "\u0301" * 500], ids=["evil", "wide", "none", "marks"])
def test_no_name_can_break_it(name):
    headings = (Heading(name, right=False), Heading("a"), Heading("b", worth=1), Heading(name, right=False))
    listing = Listing(name, headings, ((name, "1.00 ms", name, name),) * 3, name, name, (name,), name)
    lines = text(listing).splitlines()
    assert max(map(cell_len, lines)) <= WIDTH
    assert not any(line.strip().startswith("fake row") for line in lines)


def test_numbers_of_the_least_worth_are_left_out_first_and_empty_columns_always():
    headings = (Heading("name", right=False), *(Heading(f"column {i}" * 3, worth=i) for i in range(5)), Heading("none"))
    shown = text(Listing("t", headings, (("n", *"12345", ""),)))
    assert [f"column {i}" in shown for i in range(5)] == [True, False, False, False, True]
    assert "none" not in shown
