"""Numbers that no program can have reach no table: they are dropped and counted, or the file is refused in one line."""

import contextlib
import json
import math
import sqlite3

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.api.explain import explain
from flopwise.errors import FlopwiseError
from flopwise.trace import kineto_stream
from flopwise.trace.lanes import MOST_THREADS
from flopwise.trace.read import read_trace

LONGEST_NS = 100 * 2**50  # no figure of a trace of a few events is longer
ODD = ["1e308", "-1e308", "1e999", "-5", "0", "1e-300", "NaN", "Infinity", "null", '"x"', "18446744073709551616"]
ODD += ["9223372036854775807", "4611686018427387904", "-9223372036854775808", "1125899906842624", "1" + "0" * 400]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for one in value for number in numbers(one)]
    return [value] if isinstance(value, int | float) else []


def plausible(explained):
    found = numbers(msgspec.to_builtins(explained))
    assert all(math.isfinite(number) for number in found)
    assert all(abs(number) <= LONGEST_NS for number in found), max(found)
    assert explained.gpu_ns >= 0
    assert all(one.bytes >= 0 and one.bytes_per_s >= 0 for one in explained.transfers)


def kineto(path, spoiled):
    """A trace of forty launches, some of whose fields are spoiled: by (event, field, JSON)."""
    events = []
    for i in range(40):
        args = {"correlation": i + 1, "device": 0, "stream": 7, "bytes": 4096}
        call = {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 1,
            "tid": 1,
            "ts": 20 * i,
            "dur": 3,
        }
        work = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20 * i + 5, "dur": 10}
        if i % 4 == 3:
            work |= {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)"}
        events += [call | {"args": {"correlation": i + 1}}, work | {"args": args}]
    texts = [json.dumps(event) for event in events]
    for place, field, odd in spoiled:
        given = {**events[place], **events[place]["args"]}.get(field)
        texts[place] = texts[place].replace(f'"{field}": {json.dumps(given)}', f'"{field}": {odd}')
    path.write_text('{"traceEvents": [' + ",".join(texts) + "]}")
    return path


fields = st.sampled_from(["ts", "dur", "bytes", "correlation", "device", "stream", "pid", "tid"])


@QUICK
@given(st.lists(st.tuples(st.integers(0, 79), fields, st.sampled_from(ODD)), min_size=1, max_size=12))
def test_a_pytorch_trace_with_odd_numbers(tmp_path, spoiled):
    with contextlib.suppress(FlopwiseError):
        plausible(explain(kineto(tmp_path / "t.json", spoiled)))


def export(path, spoiled):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "gemm"), (2, "cudaLaunchKernel")])
        work = "start, end, deviceId, streamId, correlationId, globalPid"
        db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({work}, demangledName)")
        db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({work}, bytes, copyKind)")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)")
        for i in range(40):
            row = (20_000 * i + 5000, 20_000 * i + 15_000, 0, 7, i + 1, 1 << 24)
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 2)",
                       (20_000 * i, 20_000 * i + 3000, (1 << 24) + 1, i + 1))  # fmt: skip
            if i % 4 == 3:
                db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, 4096, 1)", row)
            else:
                db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, 1)", row)
        for table, row, column, odd in spoiled:
            db.execute(f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET {column} = {odd} WHERE rowid = {row}")
    db.close()
    return path


cells = st.tuples(st.just("KERNEL"), st.integers(1, 30), st.sampled_from(["start", "end", "deviceId", "streamId"]))
cells |= st.tuples(st.just("MEMCPY"), st.integers(1, 10), st.sampled_from(["start", "end", "bytes", "copyKind"]))
cells |= st.tuples(st.just("RUNTIME"), st.integers(1, 40), st.sampled_from(["start", "end", "globalTid"]))
SQL = [odd for odd in ODD if odd not in ("NaN", "Infinity", '"x"')] + ["'x'", "x'00'"]


@QUICK
@given(st.lists(st.tuples(cells, st.sampled_from(SQL)), min_size=1, max_size=12))
def test_an_export_with_odd_numbers(tmp_path, spoiled):
    path = tmp_path / "t.sqlite"
    path.unlink(missing_ok=True)
    with contextlib.suppress(FlopwiseError):
        plausible(explain(export(path, [(*cell, odd) for cell, odd in spoiled])))


def test_an_export_without_any_usable_time_is_refused(tmp_path):
    """A past bug: an internal error."""
    spoiled = [(table, "start", "'x'") for table in ("KERNEL", "MEMCPY", "RUNTIME")]
    path = export(
        tmp_path / "t.sqlite", [(table, row, column, odd) for table, column, odd in spoiled for row in range(1, 41)]
    )
    with pytest.raises(FlopwiseError, match="no GPU work with usable times"):
        explain(path)


@pytest.mark.parametrize("first", ["-1e15", "1e15"])
def test_an_event_of_another_year_is_dropped(tmp_path, first):
    usual = read_trace(kineto(tmp_path / "a.json", [(0, "ts", '"x"')]))
    trace = read_trace(kineto(tmp_path / "b.json", [(0, "ts", first)]))
    assert trace.notes[0] == usual.notes[0]
    assert trace.kernels.equals(usual.kernels)


def test_a_copy_of_more_bytes_than_there_are_has_no_size(tmp_path):
    e = explain(kineto(tmp_path / "t.json", [(7, "bytes", str(2**61)), (15, "bytes", str(2**61))]))
    assert e.transfers[0].bytes * e.steady_steps == 8 * 4096
    assert "sizes" in e.note_keys


def test_kernels_of_a_hundred_years_together_are_refused(tmp_path):
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 2**49 / 1000}
    events = [event | {"ts": i} for i in range(10_000)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(FlopwiseError, match="take 178 years together"):
        read_trace(tmp_path / "t.json")


def test_threads_beyond_the_busiest_are_one(tmp_path):
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "dur": 1}
    busy = [op | {"ts": i, "tid": i % 2} for i in range(100)]
    others = [op | {"ts": 1000 + i, "tid": 10 + i} for i in range(MOST_THREADS + 50)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": busy + others}))
    trace = read_trace(tmp_path / "t.json")
    assert trace.ops["thread"].n_unique() == MOST_THREADS + 1
    assert trace.ops.height == len(busy + others)
    assert trace.ops["thread"].is_in([0, 1]).sum() == len(busy)
    assert [note.text.split()[0] for note in trace.notes if note.key == "threads"] == ["52"]


@pytest.mark.parametrize("text", ["[" + "0," * 200_000 + "0]", '{"traceEvents": [' + '"a",' * 300_000 + "{}]}"])
def test_a_list_of_something_else_is_refused_at_once(tmp_path, text):
    """A past bug: megabytes of zeros were looked at one by one, for a minute."""
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(FlopwiseError, match="holds no events"):
        read_trace(tmp_path / "t.json")


def test_events_of_odd_types_are_read_one_by_one_up_to_a_limit(tmp_path, monkeypatch):
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": f"{i}", "dur": "2"} for i in range(100)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert read_trace(tmp_path / "t.json").ops.height == 100
    monkeypatch.setattr(kineto_stream, "MOST_LOOSE", 99)
    with pytest.raises(FlopwiseError, match="odd types"):
        read_trace(tmp_path / "t.json")
