"""What only a GPU can show of the measuring: three clocks that disagree where they should, memory, TF32, OOM."""

import os
from pathlib import Path
from statistics import median

import pytest
import torch

from flopwise.analysis.clocks import summarise
from flopwise.capture.isolate import Worker
from flopwise.records.run import OK, OOM, UNSUPPORTED
from flopwise.spec.workload import Sampling, Trial, workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def measure():
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{before}"
    with Worker() as worker:

        def run(target, **options):
            trial = Trial(workload=workload(target, **options), sampling=Sampling(samples=20), device="cuda")
            return worker.run(trial)

        yield run
    os.environ["PYTHONPATH"] = before


def test_many_small_launches_are_launch_bound(measure):
    (step,) = summarise(measure("py:gpu_steps:many_launches"))
    assert (step.bound, step.gpu_exact) == ("launch", True)
    assert step.gpu.median < step.wall.median


def test_one_large_launch_is_gpu_bound(measure):
    (step,) = summarise(measure("py:gpu_steps:one_matmul"))
    assert (step.bound, step.gpu_exact) == ("gpu", True)
    assert step.launch.median < step.wall.median


def test_waiting_inside_makes_the_gpu_time_an_upper_bound(measure):
    (step,) = summarise(measure("py:gpu_steps:waits_inside"))
    assert not step.gpu_exact


def test_a_graph_takes_the_launches_away(measure):
    eager = measure("op:mlp")
    graph = measure("op:mlp", graph="on")
    assert (eager.status, graph.status) == (OK, OK)
    assert median(graph.times().launch_ns) < median(eager.times().launch_ns)  # one launch in place of many


def test_memory_is_told_by_phase(measure):
    first, second = measure("py:gpu_steps:allocates").memory
    assert first.peak_bytes - first.end_bytes == 2**28
    assert second.end_bytes - second.start_bytes == 2**27


@pytest.mark.parametrize(("precision", "ran"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
def test_tf32_is_never_on_unless_asked_for(measure, precision, ran):
    assert measure("tiny", precision=precision).ran.fp32_matmul == ran


def test_every_lever_trains(measure):
    """On one batch again and again the loss must fall; that levers agree on it is shown in tests/lm."""
    levers = [
        {"precision": "bf16"}, {"precision": "fp16"}, {"precision": "tf32"}, {"attention": "naive"}, {"loss": "chunked"},
        {"optimizer": "adamw-loop"}, {"optimizer": "fused"}, {"checkpoint": 1}, {"norm": "eager"}, {"activation": "eager"},
        {"precision": "bf16", "attention": "sdpa-flash"}, {"precision": "bf16", "attention": "sdpa-cudnn"},
    ]  # fmt: skip
    losses = {str(lever): measure("tiny", set={"n_heads": 2}, **lever).ran.loss for lever in ({}, *levers)}
    start = 6.3  # ln 512 and a little: what an untrained model has
    assert all(loss < 0.9 * start for loss in losses.values()), losses


def test_an_oom_is_a_row_and_the_next_point_runs(measure):
    assert measure("small", batch=100_000).status == OOM
    assert measure("tiny").status == OK


def test_what_the_gpu_cannot_do_is_said(measure):
    point = measure("tiny", attention="sdpa-flash")  # flash takes no fp32
    assert point.status == UNSUPPORTED
    assert "sdpa-flash" in point.reason
