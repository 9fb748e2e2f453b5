"""A trace without GPU work: self times are the profiler's own, parts add up to the step, threads do not add to each other."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_traces import profiled, written
from flopwise.analysis.host_explanation import (
    DATA_BOUND,
    LOADING,
    OP_BOUND,
    PYTHON_BOUND,
    explain_host,
    without_gpu_work,
)
from flopwise.records.run import STEP, PhaseTimes, Point
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.trace.host_time import host_time
from flopwise.trace.read import read_trace
from quick import tenth

US = 1000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("cpu") / "train.json"
    averages = profiled(path)
    return explain_host(read_trace(path)), averages


def test_counts_and_self_times_are_those_of_the_profiler(made):
    explained, averages = made
    assert explained.steps == 2
    assert len(explained.ops) > 40
    for op in explained.ops:
        count, self_ns, total_ns = averages[op.name]
        assert 2 * op.count == count
        assert 2 * op.self_ns == pytest.approx(self_ns, abs=10 * count, rel=1e-3), op.name  # the file has whole ns
        assert 2 * op.total_ns == pytest.approx(total_ns, abs=10 * count, rel=1e-3), op.name


def test_phases_modules_and_ops_add_up_to_the_step(made):
    explained, _ = made
    assert sum(one.wall_ns for one in explained.phases) == pytest.approx(explained.window_ns)
    assert sum(one.wall_ns for one in explained.modules) == pytest.approx(explained.window_ns)
    assert sum(op.self_ns for op in explained.ops) + explained.outside_ns == pytest.approx(explained.window_ns)
    assert sum(one.outside_ns for one in explained.phases) == pytest.approx(explained.outside_ns)
    assert {one.name for one in explained.phases} >= {LOADING, "forward", "loss", "backward", "optimizer"}
    assert explained.loaders == ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",)


SPANS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=25)


@settings(max_examples=tenth(300), deadline=None)
@given(SPANS)
def test_a_thread_never_has_more_self_time_than_time_has_passed(tmp_path_factory, spans):
    """However its ops overlap: what is counted is what at least one of them covers."""
    events = [
        ("cpu_op", f"op{number}", thread, start, start + length) for number, (thread, start, length) in enumerate(spans)
    ]
    trace = read_trace(written(tmp_path_factory.mktemp("spans") / "t.json", *events))
    origin = min(start for _, start, _ in spans)
    for (thread,), rows in host_time(trace).filter(pl.col("op").is_not_null()).group_by("thread"):
        covered = {tick for one, start, length in spans if one == thread for tick in range(start, start + length)}
        assert rows["duration_ns"].sum() == US * len(covered)
        assert rows["start_ns"].min() == US * (min(covered) - origin)


def test_a_child_takes_its_time_from_its_parent(tmp_path):
    path = written(
        tmp_path / "t.json",
        ("cpu_op", "aten::linear", 1, 0, 100),
        ("cpu_op", "aten::addmm", 1, 10, 90),
        ("cpu_op", "aten::copy_", 1, 20, 30),
    )
    explained = explain_host(read_trace(path))
    assert {op.name: op.self_ns for op in explained.ops} == {
        "aten::addmm": 70 * US,
        "aten::linear": 20 * US,
        "aten::copy_": 10 * US,
    }
    assert explained.outside_ns == 0
    assert explained.bound == OP_BOUND
    assert "traced_only" in explained.note_keys


def test_of_threads_at_once_the_busiest_is_explained_and_the_others_are_listed(tmp_path):
    path = written(
        tmp_path / "t.json",
        ("user_annotation", "ProfilerStep#1", 1, 0, 100),
        ("cpu_op", "aten::mm", 1, 0, 80),
        ("cpu_op", "aten::add", 2, 10, 70),
        ("cpu_op", "aten::mul", 2, 70, 80),
    )
    explained = explain_host(read_trace(path))
    assert explained.window_ns == 100 * US
    assert [(op.name, op.self_ns) for op in explained.ops] == [("aten::mm", 80 * US)]
    (other,) = explained.threads
    assert (other.thread, other.busy_ns, other.share, other.largest_op) == (2, 70 * US, 0.7, "aten::add")
    assert "threads" in explained.note_keys


def test_python_between_two_ops_of_a_phase_is_of_that_phase(tmp_path):
    path = written(
        tmp_path / "t.json",
        ("user_annotation", "ProfilerStep#1", 1, 0, 100),
        ("user_annotation", "Optimizer.step#AdamW.step", 1, 60, 90),
        ("cpu_op", "aten::mm", 1, 0, 20, ("Sequence number", 1)),
        ("cpu_op", "aten::mm", 1, 40, 45, ("Sequence number", 2)),
        ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1, 48, 50),
        ("cpu_op", "aten::add_", 1, 65, 75),
    )
    phases = {one.name: (one.wall_ns, one.outside_ns) for one in explain_host(read_trace(path)).phases}
    assert phases == {
        "forward": (45 * US, 20 * US),
        "backward": (2 * US, 0),
        "optimizer": (30 * US, 20 * US),
        "other": (23 * US, 23 * US),  # between two phases
    }


def test_backward_on_the_thread_of_a_compiled_forward_pass_is_not_all_of_it(tmp_path):
    path = written(
        tmp_path / "t.json",
        ("user_annotation", "ProfilerStep#1", 1, 0, 100),
        ("cpu_op", "Torch-Compiled Region: 0/0", 1, 0, 40),
        ("cpu_op", "CompiledFunctionBackward", 1, 50, 90),
    )
    explained = explain_host(read_trace(path))
    assert explained.compiled
    assert {one.name: one.wall_ns for one in explained.phases} == {"backward": 40 * US, "other": 60 * US}


@pytest.mark.parametrize(
    ("name", "end", "bound"),
    [("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 30, DATA_BOUND), ("my range", 30, PYTHON_BOUND)],
)
def test_the_verdict_names_what_takes_the_time(tmp_path, name, end, bound):
    path = written(
        tmp_path / "t.json",
        ("user_annotation", "ProfilerStep#1", 1, 0, 100),
        ("user_annotation", name, 1, 0, end),
        ("cpu_op", "aten::mm", 1, 40, 100),
    )
    assert explain_host(read_trace(path)).bound == bound


def test_what_the_profiler_adds_is_not_called_python(tmp_path):
    """40 µs of 100 are outside the ops; the untraced step takes 70 µs, so that 10 of them are left at the least."""
    path = written(
        tmp_path / "t.json", ("user_annotation", "ProfilerStep#1", 1, 0, 100), ("cpu_op", "aten::mm", 1, 40, 100)
    )
    trial = Trial(workload=workload("tiny"), sampling=Sampling(samples=1), device="cpu")
    point = Point(key="k", trial=trial, status="ok", phases=(PhaseTimes(phase=STEP, wall_ns=(70 * US,)),))
    explained = explain_host(read_trace(path), point)
    assert explained.untraced_outside_ns == 10 * US
    assert (explained.step_ns, explained.bound) == (70 * US, OP_BOUND)
    assert "untraced" in explained.note_keys
    assert "traced_only" not in explained.note_keys


def test_a_trace_with_a_kernel_is_not_of_the_cpu_alone(tmp_path):
    op = ("cpu_op", "aten::mm", 1, 0, 10)
    kernel = ("kernel", "gemm", 7, 2, 3, ("correlation", 1), ("device", 0), ("stream", 7))
    assert without_gpu_work(read_trace(written(tmp_path / "cpu.json", op)))
    assert not without_gpu_work(read_trace(written(tmp_path / "gpu.json", op, kernel)))
