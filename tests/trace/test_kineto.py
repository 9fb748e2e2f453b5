"""Reading PyTorch traces: exact against a generator that knows the truth, and one clear line for anything else."""

import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from gen_kineto import generate

from flopwise.errors import FlopwiseError
from flopwise.trace import input_file, json_text, kineto, kineto_columns, kineto_stream, tables
from flopwise.trace.kineto import read_kineto
from flopwise.trace.tables import NO_ID, Trace
from flopwise.work.recorded import BETWEEN
from quick import ALL

FIXTURES = Path(__file__).parent / "fixtures"
TABLES = {
    "kernels": tables.KERNELS,
    "copies": tables.COPIES,
    "launches": tables.LAUNCHES,
    "graph_launches": tables.GRAPH_LAUNCHES,
    "graph_runs": tables.GRAPH_RUNS,
    "syncs": tables.SYNCS,
    "ops": tables.OPS,
    "ranges": tables.RANGES,
}


def event(cat: str, name: str, ts: float, dur: float, pid: Any = 9, tid: Any = 9, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def small_events() -> list[dict[str, Any]]:
    """One op, forward and backward, a copy, a graph, a wait: each kind of event once."""
    backward = {"Sequence number": 5, "Fwd thread id": 1}
    gpu = {"pid": 0, "tid": 7, "device": 0, "stream": 7}
    return [
        event("user_annotation", "ProfilerStep#3", 100.0, 90.5),
        event("user_annotation", "forward", 101.0, 20.0),
        event("python_function", "nn.Module: Linear_0", 102.0, 18.0, **{"Python id": 1}),
        event("python_function", "model.py(3): forward", 102.5, 17.0),
        event("cpu_op", "aten::mm", 103.0, 9.0, **{"Sequence number": 5, "Fwd thread id": 0, "External id": 77}),
        event("cuda_runtime", "cudaLaunchKernel", 104.0, 3.125, correlation=11),
        {"ph": "s", "id": 11, "pid": 9, "tid": 9, "ts": 104.0, "cat": "ac2g", "name": "ac2g"},
        event("kernel", 'void gemm<"x">(int)\\', 110.001, 4.5, correlation=11, **gpu),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 130.0, 9.0, tid=12, **backward),
        event("cpu_op", "MmBackward0", 131.0, 7.0, tid=12, **backward),
        event("cuda_driver", "cuLaunchKernelEx", 132.0, 2.0, tid=12, correlation=12),
        event("kernel", "gemm", 140.0, 8.25, correlation=12, **gpu),
        event("cuda_runtime", "cudaMemcpyAsync", 150.0, 2.0, correlation=13),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 155.0, 1.5, correlation=13, bytes=4096, **gpu),
        event("cuda_runtime", "cudaGraphLaunch", 160.0, 2.0, correlation=14),
        event("kernel", "node", 165.0, 1.0, correlation=14, **gpu, **{"graph node id": 501}),
        event("cuda_runtime", "cudaStreamIsCapturing", 170.0, 0.5, correlation=15),
        event("cuda_runtime", "cudaDeviceSynchronize", 171.0, 10.0, correlation=16),
        {"ph": "M", "name": "process_name", "pid": "Spans", "tid": "x", "ts": 0, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 200.0, "s": "g"},
    ]


def text_of(events: list[dict[str, Any]], **keys: Any) -> str:
    """Laid out as Kineto does: a line per group of fields, events indented."""
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], **keys}
    body = ",\n  ".join(json.dumps(e) for e in events)
    return json.dumps(head)[:-1] + ',\n  "traceEvents": [\n  ' + body + '\n  ],\n  "traceName": "t.json"\n}\n'


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_trace(content: str | bytes, name: str = "trace.json") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_trace


def same(one: Trace, two: Trace) -> bool:
    """Equal tables, names spelt out: their numbers follow from the chunks."""

    def spelt(trace: Trace, table: str) -> pl.DataFrame:
        found: pl.DataFrame = getattr(trace, table)
        return found.with_columns(name=pl.Series([trace.names[i] for i in found["name"]])) if "name" in found else found

    return all(spelt(one, table).equals(spelt(two, table)) for table in TABLES)


def busy_ns(*spans: pl.DataFrame) -> int:
    """The length of the union of intervals."""
    rows = pl.concat([s.select("start_ns", "end_ns") for s in spans]).sort("start_ns")
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    before = np.concatenate([[start[0]], np.maximum.accumulate(end)[:-1]])
    return int(np.maximum(0, end - np.maximum(start, before)).sum())


@pytest.mark.parametrize(
    "options", [(), ("--stack", "--shapes", "--mem"), ("--mode", "compile"), ("--mode", "cudagraph")]
)
def test_generated_trace_is_read_to_the_nanosecond(tmp_path: Path, options: tuple[str, ...]) -> None:
    truth = generate(tmp_path / "t.json", "--steps", 2, "--layers", 3, *options)
    trace = read_kineto(tmp_path / "t.json")
    both = pl.concat([t.select("start_ns", "end_ns") for t in (trace.kernels, trace.copies)])
    assert len(both) == truth["kernels"]
    assert (both["end_ns"] - both["start_ns"]).sum() == sum(truth["class_ns"].values())
    assert busy_ns(trace.kernels, trace.copies) == truth["gpu_busy_ns"]
    assert both["end_ns"].max() - both["start_ns"].min() == truth["gpu_span_ns"]  # type: ignore[operator]
    assert trace.ranges.filter(kind="step").height == 2
    assert trace.ranges.filter(kind="module").is_empty() == ("--stack" not in options)
    assert trace.gpu == "NVIDIA H100 80GB HBM3"
    assert trace.notes == ()
    linked = pl.concat([trace.launches, trace.graph_launches])["correlation"]
    assert set(trace.kernels["correlation"]) | set(trace.copies["correlation"]) == set(linked)


@pytest.mark.parametrize(("name", "kernels", "copies"), [("fp32-naive", 3798, 270), ("bf16-compiled", 1348, 50)])
def test_real_captures(name: str, kernels: int, copies: int) -> None:
    trace = read_kineto(FIXTURES / f"h200-small-{name}-2steps.kineto.json.gz")
    assert (len(trace.kernels), len(trace.copies)) == (kernels, copies)
    assert len(trace.launches) == kernels + copies
    assert trace.launches.select("process", "correlation").is_unique().all()
    assert trace.gpu == "NVIDIA H200"
    nodes = trace.ops.filter(pl.col("backward"), pl.col("sequence") != NO_ID)
    assert set(nodes["forward_thread"]) == {395}
    assert set(nodes["thread"]) == {470}


def test_tables_keep_their_contract(write: Any) -> None:
    trace = read_kineto(write(text_of(small_events())))
    starts = []
    for name, schema in TABLES.items():
        table = getattr(trace, name)
        assert dict(table.schema) == schema, name
        assert table["start_ns"].is_sorted()
        assert (table["end_ns"] >= table["start_ns"]).all()
        assert table.null_count().sum_horizontal().sum() == 0
        starts += table["start_ns"].to_list()
    assert min(starts) == 0


def test_every_kind_of_event(write: Any) -> None:
    trace = read_kineto(write(text_of(small_events())))

    def named(table: pl.DataFrame) -> list[str]:
        return [trace.names[i] for i in table["name"]]

    assert named(trace.kernels) == ['void gemm<"x">(int)\\', "gemm", "node"]
    assert trace.kernels.select("start_ns", "end_ns").row(0) == (10_001, 14_501)
    assert trace.kernels["graph_node"].to_list() == [NO_ID, NO_ID, 501]
    assert set(trace.kernels["process"]) == {9}
    assert trace.copies.select("kind", "bytes").row(0) == ("DtoH", 4096)
    assert named(trace.launches) == ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync"]
    assert named(trace.graph_launches) == ["cudaGraphLaunch"]
    assert named(trace.syncs) == ["cudaDeviceSynchronize"]
    assert trace.ops["backward"].to_list() == [False, True, True]
    assert trace.ops["forward_thread"].to_list() == [NO_ID, 9, 9]  # logical thread 1 is thread 9: they share sequence 5
    assert list(zip(named(trace.ranges), trace.ranges["kind"], strict=True)) == [
        ("ProfilerStep#3", "step"),
        ("forward", "annotation"),
        ("Linear_0", "module"),
    ]


def test_layout_does_not_matter(write: Any) -> None:
    events = small_events()
    expected = read_kineto(write(text_of(events)))
    keys = {"deviceProperties": [{"name": "NVIDIA H200"}], "traceEvents": events}
    nested = {"decoy": {"traceEvents": []}, "text": '"traceEvents": [', **keys}
    layouts = [
        json.dumps(keys, separators=(",", ":")),
        json.dumps(keys, indent=1).replace("},", "}\n,"),
        json.dumps(dict(reversed(keys.items()))),  # traceEvents before the rest
        json.dumps(nested),
        json.dumps(events),  # a bare list of events is a Chrome trace too
        "\ufeff \n" + json.dumps(keys),
        text_of([*events, {"ph": "X"}, {}]).replace("{}\n", "{},\n"),  # a comma too many
        text_of([{**e, "args": {**e.get("args", {}), "list": [{"a": 1}, {"b": 2}]}} for e in events]),
    ]
    for layout in layouts:
        assert same(read_kineto(write(layout)), expected), layout[:60]
    assert same(read_kineto(write(gzip.compress(layouts[0].encode()), "a.json")), expected)
    shuffled = read_kineto(write(text_of(random.Random(1).sample(events, len(events)))))
    assert same(shuffled, expected)


def test_cuts_between_chunks_do_not_matter(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a chunk, in the fast path as in the careful one."""
    events = small_events()
    paths = [
        write(text_of(events), "a.json"),
        write(json.dumps({"traceEvents": events}, separators=(",", ":")), "b.json"),
    ]
    expected = read_kineto(paths[0])
    for size in (1, 7, 64, 300, 301, 302, 303, 1000):
        monkeypatch.setattr(kineto_stream, "CHUNK_BYTES", size)
        for path in paths:
            assert same(read_kineto(path), expected), size


def test_absolute_epochs_keep_their_nanoseconds(write: Any) -> None:
    """Microseconds since 1970 with decimals do not fit a float: 0.25 µs is its resolution there."""
    kernels = [("1706218000000000.123", "2.501"), ("1706218000000002.624", "0.001"), ("1706218000000003", "1")]
    rows = ",".join(
        f'{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{ts},"dur":{dur}}}' for ts, dur in kernels
    )
    trace = read_kineto(write('{"traceEvents":[' + rows + "]}"))
    assert trace.kernels["start_ns"].to_list() == [0, 2501, 2877]
    assert trace.kernels["end_ns"].to_list() == [2501, 2502, 3877]


@pytest.mark.parametrize("base_us", [0, 3_845_976_557_080, 7_884_000_000_000, 1_790_857_026_000_000])
def test_times_of_any_size_are_exact(write: Any, base_us: int) -> None:
    rng = random.Random(base_us)
    starts = sorted(base_us * 1000 + rng.randrange(10**9) for _ in range(2000))
    rows = ",".join(
        f'{{"ph":"X","cat":"cpu_op","name":"o","ts":{t // 1000}.{t % 1000:03d},"dur":0.007}}' for t in starts
    )
    trace = read_kineto(write("[" + rows + "]"))
    assert trace.ops["start_ns"].to_list() == [t - starts[0] for t in starts]
    assert ((trace.ops["end_ns"] - trace.ops["start_ns"]) == 7).all()


def test_careless_writers_are_understood(write: Any) -> None:
    events = small_events()
    expected = read_kineto(write(text_of(events)))
    clean = text_of([{**e, "args": {**e.get("args", {}), "gb/s": "@"}} for e in events])
    for word in (b"inf", b"-inf", b"NaN", b"nan", b"-nan", b"Infinity", b"-nan(ind)"):
        assert same(read_kineto(write(clean.encode().replace(b'"@"', word))), expected), word
    for junk in (b'"\xff\xfe"', rb'"\ud800"', rb'"\udc00\ud800"', b'"\x00\x1f\n"', rb'"C:\users\x"', b'": inf, nan,"'):
        assert same(read_kineto(write(clean.encode().replace(b'"@"', junk))), expected), junk
    odd = [{**e, "args": None} if "cpu_op" in e.values() else e for e in events]
    assert read_kineto(write(text_of(odd))).kernels.equals(expected.kernels)
    text = {"device": "0", "stream": 7.0, "correlation": "11"}
    assert read_kineto(write(text_of([{**e, "args": {**e.get("args", {}), **text}} for e in events[:8]]))).kernels.row(
        0
    )[3:5] == (0, 7)


def test_names_of_any_bytes_are_kept_as_well_as_they_can_be(write: Any) -> None:
    raw = text_of([event("kernel", "a@b", 1, 1)]).encode()
    assert read_kineto(write(raw.replace(b"@", b"\xff"))).names == ("a\ufffdb",)
    assert read_kineto(write(raw.replace(b"@", b"\n"))).names == ("a b",)
    assert read_kineto(write(raw.replace(b"@", rb"\ud83d\ude00"))).names == ("a😀b",)
    assert read_kineto(write(raw.replace(b"@", rb"\ud83d"))).names == ("a\ufffdb",)


def test_impossible_events_are_dropped_and_counted(write: Any) -> None:
    events = small_events()
    expected = read_kineto(write(text_of(events)))
    bad = [
        event("kernel", "gemm", 120, -3),
        event("kernel", "gemm", 1e300, 1),
        event("kernel", "gemm", 120, 1e17),
        event("kernel", "gemm", None, 1),  # type: ignore[arg-type]
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 120},
    ]
    trace = read_kineto(write(text_of(events + bad)))
    assert trace.kernels.equals(expected.kernels)
    assert [(note.key, note.text[:8]) for note in trace.notes] == [("dropped", "5 events")]
    instant = {**event("cpu_op", "x", 1, 1), "ph": "i"}
    assert [note.key for note in read_kineto(write(text_of([*events, instant]))).notes] == ["incomplete"]


def test_sizes_of_matmuls_and_softmaxes_are_kept(write: Any) -> None:
    sizes = [[48, 512, 64], [48, 64, 512]]
    ops = [
        event("cpu_op", "aten::add", 1, 1, **{"Input Dims": [[2], [2]]}),
        event("cpu_op", "aten::bmm", 3, 1, **{"Input Dims": sizes}),
        event("cpu_op", "aten::mm", 5, 1),
    ]
    trace = read_kineto(write(text_of(ops)))
    (row,) = trace.sized_ops.iter_rows(named=True)
    assert (row["op"], json.loads(trace.shapes[row["shape"]])) == (1, sizes)


def test_what_ops_were_given_is_kept_once_for_those_with_bytes(write: Any) -> None:
    given = {"Input Dims": [[2]], "Input type": ["float"], "Input Strides": [[1]], "Concrete Inputs": [""]}
    names = ("aten::exp", "aten::view", "aten::exp", "triton_poi_fused_add_0")
    trace = read_kineto(write(text_of([event("cpu_op", name, at, 1, **given) for at, name in enumerate(names)])))
    assert trace.op_inputs.rows() == [(0, 1), (2, 1), (3, 1)]
    assert [json.loads(one) for one in trace.inputs[1].split(BETWEEN)] == list(given.values())
    assert trace.sized_ops.rows() == [(0, 1), (2, 1)]  # of `exp` the sizes alone are asked for, too


def test_ids_that_are_no_numbers_or_too_large(write: Any) -> None:
    rows = [event("cpu_op", "o", i, 1, pid, tid) for i, (pid, tid) in enumerate([("p", "t"), ("p", "u"), (2**80, "7")])]
    rows += [event("kernel", "k", 9, 1, "GPU 0", "stream 7", correlation=2**70)]
    trace = read_kineto(write(text_of(rows)))
    assert trace.ops["process"].n_unique() == 2
    assert trace.ops["thread"].n_unique() == 3
    assert 7 in trace.ops["thread"]
    assert trace.kernels["correlation"].to_list() == [NO_ID]


def test_older_names_of_categories(write: Any) -> None:
    rows = [
        event("Operator", "ProfilerStep#0", 0, 9),
        event("Operator", "aten::mm", 1, 2),
        event("Kernel", "k", 5, 1, correlation=3),
    ]
    rows += [event("Runtime", "cudaLaunchKernel", 2, 1, correlation=3), event("Memset", "Memset (Device)", 7, 1)]
    trace = read_kineto(write(text_of(rows)))
    assert [len(t) for t in (trace.ops, trace.ranges, trace.kernels, trace.launches, trace.copies)] == [1, 1, 1, 1, 1]
    assert trace.ranges["kind"].to_list() == ["step"]
    assert trace.copies["kind"].to_list() == ["memset"]


def test_processes_keep_their_own_correlation_ids(write: Any) -> None:
    """Two ranks in one file: the caller of an id owns the kernel; an id that both used belongs to no one."""
    calls = [
        event("cuda_runtime", "cudaLaunchKernel", i, 1, pid=pid, correlation=c)
        for i, (pid, c) in enumerate([(1, 5), (2, 6), (1, 7), (2, 7)])
    ]
    kernels = [event("kernel", "k", 10 + c, 1, pid=0, correlation=c) for c in (5, 6, 7)]
    trace = read_kineto(write(text_of(calls + kernels)))
    assert trace.kernels["process"].to_list() == [1, 2, NO_ID]
    assert trace.launches.select("process", "correlation").rows() == [(1, 5), (2, 6)]
    assert [note.text for note in trace.notes] == ["1 piece of GPU work of no known process"]


def test_of_a_call_within_a_call_the_inner_one_launched(write: Any) -> None:
    outer = event("cuda_runtime", "cudaLaunchKernel", 1, 9, correlation=5)
    inner = event("cuda_driver", "cuLaunchKernel", 2, 7, correlation=5)
    trace = read_kineto(write(text_of([outer, inner, event("kernel", "k", 20, 1, correlation=5)])))
    assert [trace.names[i] for i in trace.launches["name"]] == ["cuLaunchKernel"]


def test_forward_threads_that_cannot_be_told_apart_stay_unknown(write: Any) -> None:
    forward = [event("cpu_op", "f", t, 1, tid=t, **{"Sequence number": 5}) for t in (1, 2)]
    backward = [event("cpu_op", "b", 5, 1, tid=3, **{"Sequence number": 5, "Fwd thread id": 4})]
    assert set(read_kineto(write(text_of(forward + backward))).ops["forward_thread"]) == {NO_ID}


def test_without_kernels_there_is_a_trace_and_a_note(write: Any) -> None:
    trace = read_kineto(write(text_of([event("cpu_op", "aten::mm", 1, 1)])))
    assert len(trace.kernels) == 0
    assert trace.notes[0].key == "no_kernels"


NOT_TRACES = [
    (b"", "is empty"),
    (b" \n ", "is empty"),
    (b"SQLite format 3\x00", "is an SQLite file"),
    (b"\x00" * 100, "is not a PyTorch trace"),
    (b'{"a": 1}', "no list named traceEvents"),
    (b'{"traceEvents": null}', "no list named traceEvents"),
    (b'{"traceEvents": {"a": [1]}}', "no list named traceEvents"),
    (b'{"traceEvents": []}', "no events"),
    (b"[]", "no events"),
    (b"[1, 2, 3]", "is not a PyTorch trace"),
    (b'["a", null, []]', "is not a PyTorch trace"),
    (b'{"traceEvents": [{"ph": "X", "cat": "v8", "ts": 1, "dur": 1}]}', "none of its 1 events"),
    (b'{"traceEvents": [{"ph": X}]}', "is not valid JSON"),
    (b'{"traceEvents": [{"ph": "X"} {}]}', "is not valid JSON"),
    (b'{"traceEvents": [{]}]}', "is not valid JSON"),
    (b'{"traceEvents": []} {}', "is not valid JSON"),
    (b"[{}] x", "is not valid JSON"),
    (b'{"traceEvents": [{"ph": "X"', "is truncated at byte 27"),
    (b"[" * 1_000_000, "nested more than"),
    (b'{"traceEvents": [{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", "nested more than"),
    (b'{"a":' * 100_000, "nested more than"),
    (gzip.compress(b"[{}]")[:-3], "is truncated"),
    (gzip.compress(b"[{}]")[:-8] + b"\xff" * 8, "cannot read"),
    (b"\x1f\x8b" + b"\x00" * 50, "cannot read"),
]


@pytest.mark.parametrize(("content", "message"), NOT_TRACES, ids=range(len(NOT_TRACES)))
def test_what_is_not_a_trace_is_one_clear_line(write: Any, content: bytes, message: str) -> None:
    with pytest.raises(FlopwiseError, match=message) as caught:
        read_kineto(write(content))
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json", tmp_path / "a\0b"):
        with pytest.raises(FlopwiseError, match="cannot open"):
            read_kineto(path)


def test_truncated_anywhere_is_told(write: Any) -> None:
    whole = text_of(small_events()).encode().rstrip()
    for cut in [*range(0, len(whole), 4 if ALL else 41), *range(len(whole) - 40, len(whole))]:
        with pytest.raises(FlopwiseError, match=r"truncated at byte|is empty"):
            read_kineto(write(whole[:cut]))


def test_giant_strings_and_headers_are_refused(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_stream, "EVENT_BYTES", 1 << 20)
    big = "x" * (3 << 20)
    for content in (
        text_of([event("kernel", big, 1, 1)]),
        text_of(small_events(), note=big),
        text_of(small_events())[:-3] + f', "z": "{big}"}}',
    ):
        with pytest.raises(FlopwiseError, match="larger than 1 MiB"):
            read_kineto(write(content))


def test_gzip_bombs_are_refused(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "INFLATED_FREE", 2 << 20)
    tiny_events = b"[" + b"{}," * (4 << 20) + b"{}]"
    with pytest.raises(FlopwiseError, match="unpacks to more than"):
        read_kineto(write(gzip.compress(tiny_events, 9), "bomb.json.gz"))
    packer = zlib.compressobj(9, wbits=31)
    spaces = b"".join(
        [packer.compress(b"[")] + [packer.compress(b" " * (1 << 20)) for _ in range(12)] + [packer.flush()]
    )
    with pytest.raises(FlopwiseError, match=r"larger than|unpacks"):
        read_kineto(write(spaces, "bomb.json.gz"))


def test_events_that_say_nothing_are_not_read_to_their_end(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "_SILENT_EVENTS", 50_000)
    with pytest.raises(FlopwiseError, match=r"none of its \d+,\d+ events") as refused:
        read_kineto(write(b"[{}" + b",{}" * 1_000_000 + b"]"))
    assert "1,000," not in refused.value.message
    kernel = b'{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 5}'
    with pytest.raises(FlopwiseError, match="1 are a PyTorch op"):
        read_kineto(write(b"[" + kernel + b",{}" * 1_000_000 + b"]"))
    assert read_kineto(write(b"[" + b",".join([kernel] * 60_000) + b"]")).kernels.height == 60_000


def test_names_without_end_are_one_name(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_columns, "MAX_NAMES_CHARACTERS", 1000)
    event = '{"ph": "X", "cat": "kernel", "name": "kernel %04d", "pid": 0, "tid": 7, "ts": %d, "dur": 5}'
    trace = read_kineto(write(("[" + ",".join(event % (i, i * 10) for i in range(200)) + "]").encode()))
    assert (trace.kernels.height, len(trace.names), trace.names[-1]) == (200, 91, "(other names)")
    assert [note.text[:3] for note in trace.notes if note.key == "names"] == ["110"]


def test_structure_ignores_what_strings_hold() -> None:
    structure = json_text.Structure(rb'{"a\"}]": "}"}, {"b": [1, "\\"]} ] tail')
    assert structure.last_event_end() == 32
    assert structure.list_end() == 33


def test_frames_of_the_users_own_are_kept_and_others_are_not(tmp_path):
    names = ["train.py(7): step", "/home/me/run/torch_things.py(3): f", "torch/nn/modules/module.py(1): _call_impl",
             "<built-in method item of Tensor object at 0x1>", "contextlib.py(1): inner", "nn.Module: Linear_0",
             "/usr/lib/python3.11/asyncio/base.py(1): run", "flopwise/capture/trials.py(1): run_trial"]  # fmt: skip
    events = [
        {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 1, "ts": float(i), "dur": 5.0}
        for i, name in enumerate(names)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_kineto(path)
    assert [found.names[i] for i in found.frames["name"]] == names[:2]
    assert [found.names[i] for i in found.ranges["name"]] == ["Linear_0"]
