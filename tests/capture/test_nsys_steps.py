"""What the process under nsys does: which ranges it opens, in which order, and what it says when it cannot."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler as autograd_profiler

from flopwise.capture import nsys_steps
from flopwise.capture.build import build_step
from flopwise.capture.ranges import named, named_modules
from flopwise.records.events import Done, NsysJob, TraceRequest, TraceWritten
from flopwise.records.run import ERROR, OK, OOM
from flopwise.spec.workload import Sampling, Trial, workload

CPU = torch.device("cpu")


def traced_ranges(monkeypatch, steps=2, **options):
    """flopwise's own ranges as a profiler sees them inside the captured range: (name, start, end), in the order they begin."""
    recorder = autograd_profiler.profile()

    @contextmanager
    def captured(device):
        with torch.profiler.record_function("captured"):
            yield

    monkeypatch.setattr(nsys_steps, "op_ranges", lambda device, shapes: recorder)
    monkeypatch.setattr(nsys_steps, "captured_range", captured)
    step = build_step(workload("tiny", batch=1, context=8, **options), CPU)
    assert nsys_steps.trace_steps(step, CPU, TraceRequest(path="", steps=steps)) > 0
    spans = sorted((e.time_range.start, -e.time_range.end, e.name) for e in recorder.function_events)
    marks = [(name, start, -end) for start, end, name in spans if name == "captured" or name.startswith("flopwise.")]
    ((_, low, high),) = [mark for mark in marks if mark[0] == "captured"]
    return [mark for mark in marks if low <= mark[1] and mark[2] <= high][1:]


def inside(spans, outer):
    return [span for span in spans if outer[1] <= span[1] and span[2] <= outer[2] and span != outer]


def test_steps_hold_phases_hold_modules(monkeypatch):
    spans = traced_ranges(monkeypatch, steps=3)
    steps = [span for span in spans if span[0].startswith("flopwise.step:")]
    assert [name for name, *_ in steps] == ["flopwise.step:0", "flopwise.step:1", "flopwise.step:2"]
    for step in steps:
        within = inside(spans, step)
        phases = [span for span in within if ":" not in span[0]]
        assert [name for name, *_ in phases] == [f"flopwise.{p}" for p in ("forward", "loss", "backward", "optimizer")]
        modules = [name for name, *_ in inside(spans, phases[0])]
        assert modules.count("flopwise.module:blocks.1.attention.q") == 1
        assert len(within) == len(phases) + len(
            modules
        )  # every range is inside a phase, and modules are inside forward
    assert sum(len(inside(spans, step)) + 1 for step in steps) == len(spans)


def test_ranges_close_in_order_under_checkpointing(monkeypatch):
    """NVTX closes whichever range was opened last. A recomputation ends by an exception inside a module, whose range must
    end there: else every later one would be in it."""
    opened, still_open, wrong = [], [], []

    class Range:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            opened.append(self.name)
            still_open.append(self.name)

        def __exit__(self, *_):
            if still_open.pop() != self.name:
                wrong.append(self.name)

    monkeypatch.setattr(torch.profiler, "record_function", Range)
    step = build_step(workload("tiny", batch=1, context=8, checkpoint=1), CPU)
    with named_modules(step.model):
        for phase in step.phases.values():
            phase()
    assert opened.count("flopwise.module:blocks.1") == 2  # once in forward, once to recompute it
    assert (still_open, wrong) == ([], [])


def test_phases_are_named_under_emit_nvtx(monkeypatch):
    """`named` is free without a profiler, and goes by a flag that emit_nvtx has to set."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(autograd_profiler, "_enable_profiler", lambda config, activities: None)
    monkeypatch.setattr(autograd_profiler, "_disable_profiler", lambda: None)
    with nsys_steps.op_ranges(torch.device("cuda"), shapes=True):
        assert isinstance(named("forward"), torch.profiler.record_function)
        assert not isinstance(named("step"), torch.profiler.record_function)  # the whole is no phase of itself
    assert not isinstance(named("forward"), torch.profiler.record_function)


def test_only_the_steps_are_captured_on_a_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    with nsys_steps.captured_range(torch.device("cuda")):
        calls.append("step")
    with nsys_steps.captured_range(CPU):
        calls.append("step on the CPU")
    assert calls == ["start", "step", "stop", "step on the CPU"]


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(nsys_steps, "limit_memory", lambda: None)  # of this process, which has more to do
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])  # the steps of a user's own are there

    def make(name):
        trial = Trial(workload=workload(f"py:steps:{name}"), sampling=Sampling(seconds=0.1, warmup=1), device="cpu")
        return NsysJob(trial=trial, trace=TraceRequest(path="trace"), events="", key="", timeout_s=60.0)

    return make


def test_the_job_says_how_it_went(job):
    said = []
    nsys_steps.run_job(job("matmul"), said.append)
    traced, done = said
    assert isinstance(traced, TraceWritten)
    assert (traced.path, traced.step_ns > 0, done.status) == ("trace", True, OK)


@pytest.mark.parametrize(
    ("name", "status", "reason", "raised"),
    [("raises", ERROR, "ValueError: no luck", ValueError), ("out_of_memory", OOM, "memory", RuntimeError)],
)
def test_a_step_that_fails_says_why_and_leaves_its_traceback(job, name, status, reason, raised):
    said = []
    with pytest.raises(raised):
        nsys_steps.run_job(job(name), said.append)
    assert [type(event) for event in said] == [Done]
    assert said[0].status == status
    assert reason in said[0].reason
