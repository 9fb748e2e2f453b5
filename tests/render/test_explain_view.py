"""What `explain` shows: nothing left out in silence, rows that add up, no two things under one name."""

import csv
import gzip
import json
from pathlib import Path

import msgspec
import pytest

from flopwise.analysis.explanation import changes
from flopwise.analysis.host_explanation import HostExplanation, HostOp, HostShare, HostThread
from flopwise.api.explain import explain, with_gpu_work
from flopwise.cli.main import main
from flopwise.errors import FlopwiseError
from flopwise.records.run import Point, Ran
from flopwise.records.table import Table
from flopwise.render.explain_view import changes_view, explanation_view, explanations_view
from flopwise.render.names import short_name, short_paths, unique_names
from flopwise.render.table import csv_text, markdown, shown
from flopwise.render.views import view_of
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import Run

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
COMPILED = FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"
ELEMENTWISE = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float, "
    "float, at::native::binary_internal::{}<float> > >(at::TensorIteratorBase&, at::native::BinaryFunctor<float> const&)"
    "::{{lambda(int)#1}}>(int, at::native::gpu_kernel_impl_nocast)"
)


def event(cat, name, ts, dur, tid, pid, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def write(path, durations, slower=1):
    """One step: a kernel in a module of its own for each duration, then a copy."""
    events, at = [], 0
    for i, duration in enumerate(durations):
        ids = {"correlation": i + 1, "External id": i + 1}
        module = {"Python id": i + 1, "Python module id": i}
        events += [
            event("python_function", f"nn.Module: Layer{chr(97 + i)}_{i}", at, 9, 5, 100, **module),
            event("cpu_op", "aten::mm", at + 1, 7, 5, 100, **{"External id": i + 1}),
            event("cuda_runtime", "cudaLaunchKernel", at + 2, 2, 5, 100, **ids),
            event("kernel", f"gemm_{i}", 10 * at + 20, slower * duration, 7, 0, device=0, stream=7, **ids),
        ]
        at += 10
    ids = {"correlation": 999, "External id": 999}
    events += [
        event("cuda_runtime", "cudaMemcpyAsync", at, 2, 5, 100, **ids),
        event("gpu_memcpy", "Memcpy DtoH", 10 * at + 20, 4 * slower, 7, 0, device=0, stream=7, bytes=4, **ids),
    ]
    path.parent.mkdir(exist_ok=True)
    properties = [{"id": 0, "name": "NVIDIA H200"}]
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": properties, "traceEvents": events}))
    return path


@pytest.fixture
def two(tmp_path):
    """Thirty kernels, half of which became slower."""
    before = write(tmp_path / "a" / "trace.json", range(50, 80))
    after = write(tmp_path / "b" / "trace.json", [d + (9 if i % 2 else -9) for i, d in enumerate(range(50, 80))], 1)
    return explain(before), explain(after)


def table(tables, key):
    return next(t for t in tables if t.key == key)


# --- nothing left out in silence ---


def test_tables_of_the_largest_say_what_they_leave_out(two):
    tables, _ = explanation_view(two[0])
    for key, everything in (("modules", two[0].modules), ("kernels", two[0].kernels)):
        found = table(tables, key)
        assert len(everything) == len(found.rows) > len(shown(found).cells) == 12
        assert found.notes[0].startswith(f"and {len(everything) - 12} more: ")
        rest = sum(one.gpu_ns for one in everything[12:])
        assert f"{rest / 1e6:.4g}" in found.notes[0]


# --- before and after ---


def test_the_rows_of_a_comparison_add_up(two):
    before, after = two
    tables, document = changes_view(before, after)
    rows = tables[1].rows
    assert rows[-1]["name"] == "all"
    assert rows[-2]["name"].startswith("everything else: 6 more kernels")
    for key, whole in (("before_ns", before.gpu_ns), ("after_ns", after.gpu_ns)):
        assert sum(row[key] for row in rows[:-1]) == pytest.approx(whole)
        assert rows[-1][key] == whole
        listed = sum(row[key] for row in document["kernels"]) + document["everything_else"][key]
        assert listed == pytest.approx(whole)
    assert sum(row["before_count"] for row in rows[:-1]) == pytest.approx(31)
    assert document["everything_else"]["before_ns"] == pytest.approx(4000)  # the copy
    assert {"name", "kind"} <= set(document["kernels"][0])


def test_a_kernel_of_both_profilers_is_one_row():
    """They spell 40 of 47 kernels' names differently; as the same two steps were seen by both, nothing came or went."""
    seen = [explain(FIXTURES / f"h200-small-fp32-naive-2steps.{s}") for s in ("kineto.json.gz", "nsys.sqlite.gz")]
    names = [{kernel.name for kernel in e.kernels} for e in seen]
    assert len(names[0] - names[1]) == 40
    found = changes(*seen)
    assert len(found) == len(names[0]) == len(names[1])
    assert all(c.before_count == c.after_count for c in found)
    assert sum(c.before_ns for c in found) == pytest.approx(sum(k.gpu_ns for k in seen[0].kernels))
    assert {c.name for c in found} == names[0]


def test_a_comparison_has_step_busy_and_idle_and_reads_in_the_order_typed(two):
    before, after = two
    tables, document = changes_view(before, after)
    assert tables[0].title == "b/trace.json compared with a/trace.json, per step"
    totals = document["totals"]
    assert totals["step"]["before_ns"] == before.window_ns
    for key in ("before_ns", "after_ns", "saved_ns"):
        assert totals["gpu_busy"][key] + totals["gpu_idle"][key] == pytest.approx(totals["step"][key])
    assert [row["what"] for row in tables[0].rows] == ["step", "GPU busy", "GPU idle", "GPU time, added up"]


# --- one name, one thing ---


def test_functors_tell_elementwise_kernels_apart():
    div, mul = (ELEMENTWISE.format(functor) for functor in ("DivFunctor", "MulFunctor"))
    assert short_name(div) == "at::native::elementwise_kernel<DivFunctor>"
    assert short_name(mul) == "at::native::elementwise_kernel<MulFunctor>"


def test_no_two_kernels_look_the_same():
    names = [
        *(f"void k<{width}, MulFunctor<{kind}> >(int)" for width in (1, 2) for kind in ("float", "c10::Half")),
        "void k<1, MulFunctor<float> >(long)", "void k<1, MulFunctor<float> >(char)",
        *(f"triton_{'very_' * 40}long_{i}_{'tail_' * 40}" for i in range(3)),
    ]  # fmt: skip
    shown = unique_names([*names, *names])
    assert list(shown) == names
    assert len(set(shown.values())) == len(names)
    assert sum("#2" in text for text in shown.values()) >= 1
    real = [kernel.name for kernel in explain(COMPILED).kernels]
    assert len(set(unique_names(real).values())) == len(real) > 30


@pytest.mark.parametrize(
    "name", ["", "<", ">", "void ", "a<b", "operator<<", "a<b>>(c)", "(x)", "<unnamed>::", "a<" * 3000]
)
def test_any_name_can_be_short_name(name):
    assert len(short_name(name)) <= 70
    assert set(unique_names([name])) == {name}


def test_traces_of_one_name_are_unique_names(two):
    tables, _ = explanations_view(two)
    assert [[row["trace"] for row in t.rows] for t in tables] == [["a/trace.json", "b/trace.json"]]
    assert short_paths(["/t.json", "a/t.json", "u.json"]) == ["/t.json", "a/t.json", "u.json"]


# --- words and forms ---


def test_one_step_is_one_step(two):
    assert "measured: 1 step, the whole trace; times are of one step" in explanation_view(two[0])[0][0].notes


def test_markdown_has_a_blank_line_before_every_title(two, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["explain", two[0].path, "--format", "markdown"])
    lines = capsys.readouterr().out.splitlines()
    titles = [i for i, line in enumerate(lines) if line.startswith("**")]
    assert len(titles) == 10
    assert all(lines[i - 1] == "" for i in titles[1:])
    assert markdown(Table("t", "t", (), (), ("n",))).endswith("- n\n")


def test_several_csv_tables_have_their_titles_and_one_has_none(two, capsys):
    with pytest.raises(SystemExit):
        main(["explain", two[0].path, "--format", "csv"])
    blocks = capsys.readouterr().out.replace("\r\n", "\n").split("\n\n")
    assert len(blocks) == 10
    for block in blocks:
        title, header, *rows = csv.reader(block.splitlines())
        assert len(title) == 1
        assert title[0].startswith("# ")
        assert all(len(row) == len(header) for row in rows)
    with pytest.raises(SystemExit):
        main(["runs", "--format", "csv"])
    assert "# " not in capsys.readouterr().out


HOST = (HostExplanation, HostShare, HostOp, HostThread)


def test_every_field_is_documented(two, capsys):
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
    parts = (part.partition("**`flopwise.")[0] for part in reference.split("**`flopwise.explain")[1:])
    explained, of_host, compared = parts
    with pytest.raises(SystemExit):
        main(["explain", str(COMPILED), "--format", "json"])
    trace = json.loads(capsys.readouterr().out)["traces"][0]
    fields = {
        *trace,
        *trace["idle"],
        *trace["kernels"][0],
        *trace["phases"][0],
        *trace["attention"],
        *trace["coverage"],
        *trace["waterfall"],
        *trace["waterfall"]["parts"][0],
    }
    assert {field for field in fields if f"`{field}`" not in explained} == set()
    fields = {name for form in HOST for name in form.__struct_fields__}
    assert {field for field in fields if f"`{field}`" not in of_host} == set()
    _, document = changes_view(*two)
    fields = {*document, *document["totals"], *document["kernels"][0], *document["everything_else"]} - {"schema"}
    assert {field for field in fields if f"`{field}`" not in compared} == set()


# --- targets ---


@pytest.mark.parametrize("name", ["kj", "k.txt"])
def test_a_file_without_a_traces_suffix_is_told_so(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("{}")
    for target in (name, tmp_path / name):
        with pytest.raises(FlopwiseError, match="suffix") as failure:
            explain(target)
        assert ".json.gz, .sqlite" in failure.value.hint


def test_a_run_on_the_cpu_is_explained_by_the_cpus_time(tmp_path):
    trial = Trial(workload=workload("tiny"), sampling=Sampling(samples=3), device="cpu")
    point = Point(key=trial.key(), trial=trial, status="ok", ran=Ran(device="cpu"), trace_file="t.kineto.json.gz")
    with Run.create(tmp_path, "profile", "tiny", "", (trial,)) as run:
        run.append(point)
        op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1, "args": {}}
        run.trace_path("t.kineto.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [op]}).encode()))
    found = explain("last", runs=tmp_path)
    tables, document = view_of(found)
    assert document["schema"] == "flopwise.explain-host/1"
    assert shown(table(tables, "ops")).cells[0][:4] == ["aten::mm", "matmul", "1", "0.00100"]
    with pytest.raises(FlopwiseError, match="no GPU work"):
        with_gpu_work(found)


def test_a_spreadsheet_has_whole_names_and_a_person_short_ones():
    found = explain(FIXTURES / "h200-small-fp32-naive-2steps.kineto.json.gz")
    kernels = table(explanation_view(found)[0], "kernels")
    assert found.top_forward.name in csv_text(kernels)
    assert short_name(found.kernels[0].name) in shown(kernels).cells[0]


def test_a_verdict_on_the_traced_step_alone_says_that_tracing_slows_the_host():
    traced = msgspec.structs.replace(explain(COMPILED), launch_bound=True, untraced_idle=None)
    slowed = "this is the traced step: a profiler slows the CPU"
    assert any(note.startswith(slowed) for note in explanation_view(traced)[0][0].notes)
    known = msgspec.structs.replace(traced, untraced_idle=traced.idle)
    assert not any(note.startswith(slowed) for note in explanation_view(known)[0][0].notes)
