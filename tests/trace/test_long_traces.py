"""Traces too long to hold: rows that go to a file come back as they were, and whole steps stand for all of them."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from gen_kineto import generate
from hypothesis import given
from hypothesis import strategies as st

from flopwise.analysis.explanation import explain_trace
from flopwise.errors import FlopwiseError
from flopwise.trace import kineto_columns, nsys_file, nsys_window, spilled, window
from flopwise.trace.read import read_trace
from flopwise.trace.spilled import GrowingTable
from flopwise.trace.tables import TABLES

STEPS = 24
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The same training in PyTorch's and in Nsight Systems' words."""
    folder = tmp_path_factory.mktemp("long")
    generate(folder / "k.json", "--steps", STEPS, "--layers", 2, "--shapes", "--stack")
    command = [sys.executable, str(HERE / "gen_nsys.py"), str(folder / "n.sqlite"), "--steps", str(STEPS)]
    subprocess.run([*command, "--layers", "2", "--emit-nvtx"], check=True, stdout=subprocess.DEVNULL)
    return {"kineto": folder / "k.json", "nsys": folder / "n.sqlite"}


@pytest.fixture
def at_most(monkeypatch):
    """Lowers the number of rows that are explained."""

    def lower(rows):
        for module in (window, kineto_columns, nsys_window):
            monkeypatch.setattr(module, "MOST_ROWS", rows)

    return lower


def test_rows_that_went_to_a_file_are_those_that_were_held(traces, monkeypatch):
    held = read_trace(traces["kineto"])
    for module in (kineto_columns, spilled):
        monkeypatch.setattr(module, "PIECE_ROWS", 100)
    monkeypatch.setattr(kineto_columns, "HELD_ROWS", 500)
    monkeypatch.setattr(kineto_columns, "_BATCH_BYTES", 1 << 12)
    spills, spill = [], GrowingTable.spill
    monkeypatch.setattr(GrowingTable, "spill", lambda table: (spills.append(table.held), spill(table)))
    back = read_trace(traces["kineto"])
    for name in (*TABLES, "sized_ops", "op_inputs"):
        assert getattr(back, name).equals(getattr(held, name)), name
    assert (back.names, back.notes) == (held.names, held.notes)
    assert len(spills) > 20


@pytest.mark.parametrize("source", ["kineto", "nsys"])
def test_a_cut_trace_is_whole_steps_of_the_whole(traces, at_most, source):
    whole = read_trace(traces[source])
    rows = sum(getattr(whole, name).height for name in TABLES)
    at_most(rows)  # about half of what there is, as kernels count several times
    part = read_trace(traces[source])
    assert part.notes[0].key == "window"
    per_step = whole.kernels.height // STEPS
    steps, rest = divmod(part.kernels.height, per_step)
    assert rest == 0
    assert 3 < steps < STEPS - 3
    shift = int(whole.kernels["start_ns"][_first(whole, part)]) - int(part.kernels["start_ns"][0])
    for name in ("kernels", "launches", "ops", "ranges", "copies", "syncs"):
        mine, theirs = getattr(part, name), getattr(whole, name)
        moved = theirs.with_columns(pl.col("start_ns") - shift, pl.col("end_ns") - shift)
        assert mine.height, name
        assert mine.join(moved, on=["start_ns", "end_ns"], how="anti").height == 0, name
    cut, all_of_it = explain_trace(part), explain_trace(whole)
    assert cut.steps == steps
    assert cut.steps_found_by == all_of_it.steps_found_by
    assert [one.name for one in cut.phases] == [one.name for one in all_of_it.phases]
    assert cut.gpu_ns == pytest.approx(all_of_it.gpu_ns, rel=0.02)
    assert cut.coverage["launch"] == 1
    assert {one.name: one.count for one in cut.kernels} == pytest.approx(
        {one.name: one.count for one in all_of_it.kernels}
    )


def _first(whole, part):
    """The row of the whole's kernels that is the part's first: by what follows it."""
    n = part.kernels.height
    lengths, some = (t.kernels["end_ns"].to_numpy() - t.kernels["start_ns"].to_numpy() for t in (whole, part))
    return next(i for i in range(len(lengths) - n + 1) if np.array_equal(lengths[i : i + n], some))


def test_events_of_one_moment_cannot_be_cut(tmp_path, at_most):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5, "dur": 1}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [event] * 100}))
    at_most(50)
    with pytest.raises(FlopwiseError, match="at almost one time"):
        read_trace(tmp_path / "t.json")


def test_a_range_around_the_window_is_kept_as_far_as_it_is_in_it():
    rows = {"start_ns": np.array([0, 12, 0, 25]), "end_ns": np.array([99, 13, 15, 26]), "name": np.arange(4)}
    kept = window.Window(10, 20).spans(rows)
    assert {name: values.tolist() for name, values in kept.items()} == {
        "start_ns": [10, 12],
        "end_ns": [20, 13],
        "name": [0, 1],
    }


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=5), max_size=8), st.integers(0, 255))
def test_a_table_returns_what_it_was_given(parts, spills):
    table = GrowingTable({"start_ns": np.int64})
    for place, part in enumerate(parts):
        table.append({"start_ns": np.array(part, dtype=np.int64)})
        if spills >> place & 1:
            table.spill()
    given = [value for part in parts for value in part]
    assert len(table) == len(given)
    assert [v for rows in table.pieces() for v in rows["start_ns"].tolist()] == given
    assert table.pop("start_ns").tolist() == given


def test_kernels_of_one_moment_are_refused(tmp_path, monkeypatch, at_most):
    with sqlite3.connect(tmp_path / "t.sqlite") as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.execute("INSERT INTO StringIds VALUES (1, 'gemm')")
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, demangledName)"
        )
        rows = [(5, 9, 0, 7, i + 1, 1) for i in range(1000)]
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?)", rows)
    db.close()
    assert read_trace(tmp_path / "t.sqlite").kernels.height == 1000
    at_most(2000)
    monkeypatch.setattr(nsys_file, "MOST_ROWS", 2000)
    with pytest.raises(FlopwiseError, match="at almost one time"):
        read_trace(tmp_path / "t.sqlite")
