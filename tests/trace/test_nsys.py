"""Nsight Systems exports: what a known run must read as, whatever the version, and that no bad file gets further."""

import gzip
import importlib
import json
import os
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from flopwise.errors import FlopwiseError
from flopwise.trace import nsys_file, nvtx, tables
from flopwise.trace.attribute import attribute
from flopwise.trace.nsys import read_nsys
from flopwise.trace.tables import Trace

HERE = Path(__file__).parent
REAL = HERE / "fixtures" / "h200-small-fp32-naive-2steps.nsys.sqlite.gz"
SCHEMAS = {
    "kernels": tables.KERNELS, "copies": tables.COPIES, "launches": tables.LAUNCHES, "graph_launches": tables.GRAPH_LAUNCHES,
    "graph_runs": tables.GRAPH_RUNS, "syncs": tables.SYNCS, "ops": tables.OPS, "ranges": tables.RANGES,
}  # fmt: skip
GP = (1 << 48) | (111 << 24)  # the generator's process
MAIN, AUTOGRAD = GP | 111, GP | 987


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Generated exports, one per set of options."""
    folder = tmp_path_factory.mktemp("nsys")

    def make(*options: str, steps: int = 3, layers: int = 2) -> Path:
        out = folder / ("_".join([*options, str(steps), str(layers)]).replace("--", "") + ".sqlite")
        if not out.exists():
            command = [
                sys.executable,
                "-B",
                str(HERE / "gen_nsys.py"),
                str(out),
                "--steps",
                str(steps),
                "--layers",
                str(layers),
            ]
            subprocess.run([*command, *options], check=True, capture_output=True)
        return out

    return make


@pytest.fixture
def small(made: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copy(made("--emit-nvtx", "--textid"), tmp_path / "small.sqlite"))


def spoil(path: Path, *statements: str) -> Path:
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
    return path


def named(trace: Trace, table: pl.DataFrame) -> list[str]:
    return [trace.names[i] for i in table["name"]]


def check_contract(trace: Trace) -> None:
    starts: list[int] = []
    for name, schema in SCHEMAS.items():
        table: pl.DataFrame = getattr(trace, name)
        assert dict(table.schema) == schema, name
        columns = table.get_columns()
        assert not any(column.null_count() for column in columns), name
        start, end = columns[0].to_numpy(), columns[1].to_numpy()
        assert (start[1:] >= start[:-1]).all(), name
        assert (end >= start).all(), name
        if "name" in schema and len(table):
            assert table["name"].to_numpy().max() < len(trace.names)
        starts += [int(start[0])] if len(start) else []
    assert min(starts, default=0) >= 0
    if not len(trace.graph_nodes):
        assert min(starts, default=0) == 0


# --- a real run ---


def test_two_real_steps_on_an_h200():
    trace = read_nsys(REAL)
    check_contract(trace)
    assert (trace.source, trace.gpu, trace.notes) == ("nsys", "NVIDIA H200", ())
    assert trace.kernels.height == 3798
    assert dict(trace.copies["kind"].value_counts().iter_rows()) == {"DtoD": 50, "memset": 220}
    assert trace.ops.height + trace.ranges.height == 20_068
    assert set(named(trace, trace.syncs)) == {"cudaDeviceSynchronize"}
    assert set(named(trace, trace.launches)) >= {
        "cuLaunchKernel",
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cudaMemcpyAsync",
    }
    work = pl.concat([t.select("process", "correlation") for t in (trace.kernels, trace.copies)])
    assert work.join(trace.launches, on=["process", "correlation"]).height == work.height  # each exactly one launch


def test_real_ops_and_annotations_are_told_apart():
    trace = read_nsys(REAL)
    assert "Optimizer.step#AdamW.step" in named(trace, trace.ranges)
    assert {"step", "forward", "backward", "optimizer", "attention"} <= set(named(trace, trace.ranges))
    assert not any(name.startswith("aten::") or name == "detach" for name in named(trace, trace.ranges))
    assert not any(", seq = " in name or ", op_id = " in name for name in trace.names)
    backward = trace.ops.filter("backward")
    assert trace.ops.filter("backward")["thread"].n_unique() == 1
    engine = [n.startswith("autograd::engine") for n in named(trace, backward)]
    engine_sequences = backward.filter(pl.Series(engine))
    nodes = backward.filter(~pl.Series(engine))
    # The engine's range and the node in it share a number; only AccumulateGrad has none.
    assert sorted(engine_sequences["sequence"]) == sorted(nodes["sequence"])
    unnumbered = nodes.filter(pl.col("sequence") == -1)
    assert set(named(trace, unnumbered)) == {"torch::autograd::AccumulateGrad"}


# --- generated runs: the answers are known ---


@pytest.mark.parametrize("options", [(), ("--emit-nvtx",), ("--emit-nvtx", "--textid"), ("--textid",)])
def test_counts_and_times_of_a_generated_run_are_exact(made, options):
    path = made(*options)
    truth = json.loads(Path(f"{path}.truth.json").read_text())
    trace = read_nsys(path)
    check_contract(trace)
    assert trace.kernels.height == truth["kernels"]
    assert trace.ops.height + trace.ranges.height == truth["nvtx"]
    busy = sum((t["end_ns"] - t["start_ns"]).sum() for t in (trace.kernels, trace.copies))
    assert busy == truth["busy_ns"]
    assert trace.launches.height == trace.kernels.height + trace.copies.height
    assert trace.syncs.height == truth["steps"]
    assert trace.gpu == "NVIDIA H100 80GB HBM3"
    assert set(trace.kernels["process"]) | set(trace.ranges["process"]) == {GP}


def test_text_and_text_id_read_the_same(made):
    by_text, by_id = (read_nsys(made(*o)) for o in (("--emit-nvtx",), ("--emit-nvtx", "--textid")))
    for name in ("ops", "ranges", "kernels", "launches"):
        one, other = getattr(by_text, name), getattr(by_id, name)
        assert one.drop("name").equals(other.drop("name"))
        assert named(by_text, one) == named(by_id, other)


def test_forward_and_backward_share_sequence_numbers_across_threads(made):
    trace = read_nsys(made("--emit-nvtx"))
    backward = trace.ops.filter(pl.col("backward") & (pl.col("sequence") >= 0))
    forward = trace.ops.filter(~pl.col("backward") & (pl.col("sequence") >= 0))
    assert set(backward["thread"]) == {AUTOGRAD}
    assert set(forward["thread"]) == {MAIN}
    assert set(backward["sequence"]) <= set(forward["sequence"])


def test_a_graph_traced_as_nodes(made):
    trace = read_nsys(made("--graph", "node", "--emit-nvtx"))
    check_contract(trace)
    inside = trace.kernels.filter(pl.col("graph_node") != tables.NO_ID)
    assert inside.height > 0
    assert trace.graph_launches.height == 3
    assert set(named(trace, trace.graph_launches)) == {"cudaGraphLaunch"}
    launched = inside.join(trace.graph_launches, on=["process", "correlation"], how="semi")
    assert launched.height == inside.height
    # Every clone leads to the place where its original was captured: before the first step, on either thread.
    nodes = inside.select("graph_node").unique().join(trace.graph_nodes, on="graph_node")
    assert nodes.height == inside["graph_node"].n_unique()
    assert set(nodes["thread"]) == {MAIN, AUTOGRAD}
    assert nodes["start_ns"].n_unique() == nodes.height


def test_a_graph_traced_as_a_whole(made):
    trace = read_nsys(made("--graph", "graph"))
    check_contract(trace)
    assert trace.graph_runs.height == trace.graph_launches.height == 3
    assert trace.graph_runs.join(trace.graph_launches, on=["process", "correlation"]).height == 3


# --- versions ---


def test_newer_table_names_and_a_report_of_an_older_version(small):
    expected = read_nsys(small)
    spoil(
        small,
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO CUPTI_ACTIVITY_KIND_KERNEL_V3",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL_V4 (start INTEGER, end INTEGER)",  # newer, but empty
        "ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME RENAME TO CUPTI_ACTIVITY_KIND_RUNTIME_V2",
        "ALTER TABLE NVTX_EVENTS RENAME TO NVTX_EVENTS_V2",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL_V3 DROP COLUMN globalPid",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL_V3 DROP COLUMN graphNodeId",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL_V3 DROP COLUMN greenContextId",
        "DROP TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        "DROP TABLE TARGET_INFO_GPU",
    )
    trace = read_nsys(small)
    check_contract(trace)
    assert trace.gpu == ""
    for name in ("kernels", "ops", "ranges", "launches"):
        assert getattr(trace, name).equals(getattr(expected, name)), name


def test_missing_tables_are_notes_not_failures(small):
    spoil(
        small,
        "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
        "DROP TABLE NVTX_EVENTS",
        "DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY",
    )
    trace = read_nsys(small)
    check_contract(trace)
    assert trace.kernels.is_empty()
    assert [note.key for note in trace.notes] == ["no_ranges", "no_kernels"]


def test_correlation_ids_are_per_process(small):
    other = GP + (5 << 24)
    spoil(
        small,
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start, end, eventClass, globalTid + {5 << 24}, correlationId, nameId, "
        "returnValue, callchainId FROM CUPTI_ACTIVITY_KIND_RUNTIME",
    )
    before = read_nsys(small)
    assert set(before.launches["process"]) == {GP}  # the other process launched nothing that ran
    spoil(small, f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = {other} WHERE rowid % 2")
    after = read_nsys(small)
    assert set(after.launches["process"]) == {GP, other}
    assert after.kernels.join(after.launches, on=["process", "correlation"]).height == after.kernels.height


@pytest.mark.parametrize(
    ("text", "table", "name", "extra"),
    [
        (
            "aten::mm, seq = 12, op_id = 345, sizes = [[2, 3], [3, 4]]",
            "ops",
            "aten::mm",
            {"sequence": 12, "backward": False},
        ),
        ("aten::mm, seq = 12", "ops", "aten::mm", {"sequence": 12}),
        ("aten::empty, op_id = 7", "ops", "aten::empty", {"sequence": -1}),
        ("aten::empty", "ops", "aten::empty", {"sequence": -1}),
        ("detach, op_id = 7", "ops", "detach", {"backward": False}),
        ("MyFunctionBackward, seq = 3, op_id = 9", "ops", "MyFunctionBackward", {"sequence": 3, "backward": True}),
        ("MyFunction, seq = 3, op_id = 8", "ops", "MyFunction", {"sequence": 3, "backward": False}),
        ("forward, op_id = 4", "ranges", "forward", {"kind": "annotation"}),
        ("load, shard 3, op_id = 4", "ranges", "load, shard 3", {"kind": "annotation"}),
        ("data, seq = none", "ranges", "data, seq = none", {"kind": "annotation"}),
        ("flopwise.module:blocks.0.mlp, op_id = 4", "ranges", "blocks.0.mlp", {"kind": "module"}),
        ("flopwise.step:3", "ranges", "flopwise.step:3", {"kind": "step"}),
        ("ProfilerStep#3", "ranges", "ProfilerStep#3", {"kind": "step"}),
        ("", "ranges", "", {"kind": "annotation"}),
    ],
)
def test_what_a_range_is(small, text, table, name, extra):
    spoil(small, "DELETE FROM NVTX_EVENTS WHERE rowid > 1", f"UPDATE NVTX_EVENTS SET text = '{text}', textId = NULL")
    trace = read_nsys(small)
    found = getattr(trace, table)
    assert (found.height, named(trace, found)) == (1, [name])
    assert {key: found[key][0] for key in extra} == extra


def test_start_end_ranges_overlap_and_belong_to_the_thread_that_opened_them(small):
    spoil(
        small,
        "DELETE FROM NVTX_EVENTS",
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, endGlobalTid) VALUES "
        f"(155360000000, 155360000100, 60, 'a', {MAIN}, {AUTOGRAD}), (155360000050, 155360000150, 60, 'b', {MAIN}, NULL), "
        f"(155360000050, NULL, 34, 'mark', {MAIN}, NULL)",
    )
    trace = read_nsys(small)
    assert [*zip(named(trace, trace.ranges), trace.ranges["thread"], strict=True)] == [("a", MAIN), ("b", MAIN)]


def test_a_range_still_open_ends_with_the_trace(small):
    spoil(small, "UPDATE NVTX_EVENTS SET end = NULL WHERE rowid = 1")
    trace = read_nsys(small)
    last = max(t["end_ns"].max() for t in (trace.kernels, trace.ops, trace.ranges, trace.launches, trace.syncs))
    both = pl.concat([t.select("end_ns") for t in (trace.ops, trace.ranges)])
    assert (both["end_ns"] == last).sum() >= 1
    assert trace.notes[0].key == "open_ranges"


# --- bad files ---


@pytest.mark.parametrize("column", ["start", "end"])
@pytest.mark.parametrize("value", ["'soon'", "'12 o''clock'", "x'00ff'"])
def test_a_time_that_is_no_number_is_dropped_and_counted(small, column, value):
    """A past bug: CAST made 0 of a word, and a kernel that began at 0."""
    whole = read_nsys(small)
    spoil(small, f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {column} = {value} WHERE rowid = 3")
    spoil(small, f"UPDATE NVTX_EVENTS SET {column} = {value} WHERE rowid = 5")
    trace = read_nsys(small)
    check_contract(trace)
    assert trace.kernels.height == whole.kernels.height - 1
    assert trace.ops.height + trace.ranges.height == whole.ops.height + whole.ranges.height - 1
    assert any(note.text.startswith("2 events dropped") for note in trace.notes)


def test_a_time_written_as_text_is_a_time(small):
    """Where a column has no type, SQLite keeps the quotes."""
    whole = read_nsys(small)
    spoil(
        small,
        "ALTER TABLE NVTX_EVENTS RENAME TO typed",
        "CREATE TABLE NVTX_EVENTS AS SELECT *, start + 0 || '' AS text_start FROM typed",
        "ALTER TABLE NVTX_EVENTS DROP COLUMN start",
        "ALTER TABLE NVTX_EVENTS RENAME COLUMN text_start TO start",
    )
    assert read_nsys(small).ops.equals(whole.ops)


def test_negative_durations_are_dropped_and_counted(small):
    all_of_them = read_nsys(small).kernels.height
    spoil(small, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 5 WHERE rowid <= 3")
    trace = read_nsys(small)
    assert trace.kernels.height == all_of_them - 3
    assert [note.text for note in trace.notes] == [
        "3 events dropped: no time, one far from all others, or an end before the start"
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "value", ["'text'", "NULL", "1e300", "-9223372036854775808", "9223372036854775807", "x'00ff'", "''"]
)
@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "start end deviceId streamId correlationId globalPid demangledName graphNodeId"),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", "bytes copyKind"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "start globalTid correlationId nameId"),
        ("NVTX_EVENTS", "start end globalTid text textId eventType"),
        ("StringIds", "value"),
        ("TARGET_INFO_GPU", "name"),
    ],
)
def test_any_value_in_any_column(small, table, columns, value):
    ddl = sqlite3.connect(small).execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    loose = ddl.replace(" NOT NULL", "").replace(f"TABLE {table}", "TABLE loose", 1)
    spoil(
        small,
        loose,
        f"INSERT INTO loose SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE loose RENAME TO {table}",
    )
    for column in columns.split():
        spoil(small, f"UPDATE {table} SET {column} = {value} WHERE rowid % 3 = 0")
        check_contract(read_nsys(small))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(FlopwiseError) as failure:
        read_nsys(path)
    assert "\n" not in failure.value.message
    assert all(word in failure.value.message for word in words), failure.value.message


def test_what_is_not_an_export_is_refused_in_one_line(tmp_path):
    for content in (
        b"",
        b"x",
        b"not sqlite" * 100,
        b"SQLite format 3\0",
        b"\x1f\x8b",
        b"\x1f\x8b" + b"x" * 99,
        b'{"traceEvents": []}',
    ):
        (tmp_path / "file.sqlite").write_bytes(content)
        refused(tmp_path / "file.sqlite")
    refused(spoil(tmp_path / "other.sqlite", "CREATE TABLE t (x)"), "not an Nsight Systems export")
    refused(tmp_path / "absent.sqlite", "absent.sqlite")
    refused(tmp_path, "it is a folder")


def test_views_virtual_tables_and_triggers_are_not_run(small):
    spoil(
        small,
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO hidden",
        "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS "
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start FROM n",
        "CREATE TRIGGER t INSTEAD OF INSERT ON CUPTI_ACTIVITY_KIND_KERNEL BEGIN SELECT 1; END",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (rowid TEXT, start INTEGER)",
        "CREATE TABLE CUDA_GRAPH_NODE_EVENTS (start INTEGER PRIMARY KEY, graphNodeId) WITHOUT ROWID",
    )
    assert read_nsys(small).kernels.is_empty()


def test_a_file_name_cannot_change_how_it_is_opened(small):
    odd = small.with_name("a?mode=rwc&x=#%41 'b.sqlite")
    small.rename(odd)
    assert read_nsys(odd).kernels.height > 0
    assert sorted(os.listdir(odd.parent)) == [odd.name]


def test_truncated_anywhere(small, tmp_path):
    whole, packed = small.read_bytes(), gzip.compress(small.read_bytes())
    for content in (whole, packed):
        for cut in random.Random(1).sample(range(len(content)), 25):
            (tmp_path / "cut.sqlite").write_bytes(content[:cut])
            refused(tmp_path / "cut.sqlite")


def test_a_gzip_bomb_is_stopped_and_nothing_is_left_behind(small, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setattr(nsys_file, "FREE_RATIO_BYTES", 4 << 20)
    head, zeros = small.read_bytes(), bytes(1 << 24)
    bomb = tmp_path / "bomb.sqlite.gz"
    bomb.write_bytes(gzip.compress(head) + gzip.compress(zeros, 9))
    refused(bomb, "unpacks to more than")  # than its header says
    unsure = head[:92] + b"\0\0\0\1" + head[96:]
    bomb.write_bytes(gzip.compress(unsure + zeros, 9))
    refused(bomb, "unpacks to more than")  # than any export does
    read_nsys(REAL)
    assert not list(scratch.iterdir())


def test_names_without_end_are_folded(small, monkeypatch):
    monkeypatch.setattr(nvtx, "MAX_NAMES", 20)
    spoil(small, "UPDATE NVTX_EVENTS SET text = 'range ' || rowid, textId = NULL")
    trace = read_nsys(small)
    assert "(other names)" in named(trace, trace.ranges)
    assert any(note.key == "names" for note in trace.notes)


def test_huge_texts_are_cut_or_refused(small, monkeypatch):
    monkeypatch.setattr(nsys_file, "MAX_TEXT_BYTES", 4 << 20)
    spoil(small, "UPDATE NVTX_EVENTS SET text = hex(zeroblob(5000)), textId = NULL")  # each fits, not all at once
    trace = read_nsys(small)
    assert {len(name) for name in named(trace, trace.ranges)} == {1000}
    spoil(small, "UPDATE NVTX_EVENTS SET text = hex(zeroblob(3000000)) WHERE rowid = 1")
    refused(small, "too big")


def test_work_has_a_deadline(small, monkeypatch):
    moments = iter([0.0, *[1e9] * 10_000])
    monkeypatch.setattr(time, "thread_time", lambda: next(moments))
    monkeypatch.setattr(nsys_file, "HANDLER_STEPS", 10)
    refused(small, "too long")


def test_pages_that_are_named_again_and_again_end_soon(tmp_path, monkeypatch):
    """A past bug: 2.7 MB took a minute and 2.2 GB."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "attack"))
    shared = tmp_path / "shared.sqlite"
    importlib.import_module("compressed").shared_pages(shared)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(shared, "too long")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB on Linux


def test_more_rows_than_the_file_has_room_for_are_refused(small, monkeypatch):
    monkeypatch.setattr(nsys_file, "SHORTEST_ROW", 1 << 20)
    refused(small, "again and again")


def test_sparse_rows_are_found(small):
    rows = read_nsys(small).kernels.height
    spoil(
        small,
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET rowid = rowid * 1000000007",
        "UPDATE NVTX_EVENTS SET rowid = -rowid * 99999",
    )
    assert read_nsys(small).kernels.height == rows


def test_a_message_of_sqlite_that_is_not_text(small):
    """A past bug: SQLite quotes the name of a table that it cannot parse, whatever its bytes."""
    spoil(small, "CREATE TABLE spoilt (x)")
    small.write_bytes(
        small.read_bytes()
        .replace(b"CREATE TABLE spoilt (x)", b"CREATE TABLE sp\xffilt (x(")
        .replace(b"spoilt", b"sp\xffilt")
    )
    refused(small, "damaged")


# --- reports ---


def test_a_report_without_nsys_says_where_to_export(tmp_path, monkeypatch):
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"report")
    monkeypatch.setattr(nsys_file, "find_nsys", lambda: "")
    with pytest.raises(FlopwiseError, match="not installed") as failure:
        read_nsys(report)
    assert "nsys export --type sqlite" in failure.value.hint


def test_a_report_goes_through_nsys(small, tmp_path, monkeypatch):
    report = tmp_path / "-run.nsys-rep"
    report.write_bytes(b"report")
    fake = tmp_path / "bin" / "nsys"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "export --type sqlite" ] && [ -f "$8" ] && cp "{small}" "$7"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    assert read_nsys(report).kernels.equals(read_nsys(small).kernels)
    fake.write_text("#!/bin/sh\necho 'bad report' >&2; exit 1\n")
    refused(report, "bad report")


def test_sizes_of_ops_are_kept_where_emit_nvtx_wrote_them(small):
    sizes = "[[48, 512, 64], [48, 64, 512]]"
    text = f"aten::bmm, seq = 1, op_id = 9000001, sizes = {sizes}, input_op_ids = [(3,0)]"
    spoil(
        small,
        f"UPDATE NVTX_EVENTS SET text = '{text}', textId = NULL WHERE rowid = 7",
        "UPDATE NVTX_EVENTS SET text = 'aten::add, seq = 2, sizes = [[2], [2]]', textId = NULL WHERE rowid = 8",
    )
    trace = read_nsys(small)
    (row,) = trace.sized_ops.iter_rows(named=True)
    assert trace.shapes[row["shape"]] == sizes
    assert trace.names[trace.ops["name"][row["op"]]] == "aten::bmm"


def test_autograds_names_are_ops_and_no_modules(made):
    """A graph's kernels belong to what was open at their capture; emit_nvtx does not number every range."""
    work = attribute(read_nsys(made("--emit-nvtx", "--graph", "node"))).table
    assert not work["module"].cast(pl.String).str.contains("Backward|autograd::").any()
    for name in ("MmBackward0", "autograd::engine::evaluate_function: AddBackward0", "torch::autograd::CopySlices"):
        assert nvtx.meaning(name).op


def test_no_room_to_unpack_is_not_the_files_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(nsys_file.shutil, "disk_usage", lambda _: SimpleNamespace(free=36_864))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FlopwiseError, match=f"no room to unpack .* in the temporary folder {tmp_path}") as refused:
        read_nsys(REAL)
    assert "TMPDIR" in refused.value.hint
