"""What only a GPU can show of the levers: compiled blocks, joined projections, and levers from outside in a CUDA graph."""

import os
from pathlib import Path
from statistics import median

import pytest
import torch

from flopwise.analysis.clocks import compile_ns
from flopwise.capture.isolate import Worker
from flopwise.records.run import OK, UNSUPPORTED
from flopwise.spec.workload import Sampling, Trial, workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def measure():
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{before}"
    with Worker(True) as worker:

        def run(target, **options):
            trial = Trial(workload=workload(target, **options), sampling=Sampling(samples=20), device="cuda")
            point = worker.run(trial)
            told = f"{point.reason} {point.hint}".strip() or round(median(point.times().wall_ns) / 1e6, 3)
            print(trial.workload.label(), point.status, told, compile_ns(point), point.ran, flush=True)
            return point

        yield run
    os.environ["PYTHONPATH"] = before


DEEP = {"set": {"n_layers": 8}, "precision": "bf16"}


@pytest.mark.parametrize("levers", [{}, {"graph": "on", "optimizer": "fused"}, {"checkpoint": 2}])
def test_compiled_blocks_train_as_the_eager_step_does(measure, levers):
    eager, blocks, whole = (measure("small", compile=c, **DEEP, **levers) for c in ("off", "blocks", "default"))
    assert (eager.status, blocks.status, whole.status) == (OK, OK, OK)


@pytest.mark.parametrize(
    "levers", [{}, {"graph": "on", "activation": "triton", "attention": "flash", "rope": "triton"}]
)
def test_joined_projections_run_on_the_gpu(measure, levers):
    separate, fused = (measure("small", projections=p, **DEEP, **levers) for p in ("separate", "fused"))
    assert (separate.status, fused.status) == (OK, OK)


def test_the_compilers_graphs_replay_and_their_memory_is_counted(measure):
    whole, replayed = (measure("small", compile=c, optimizer="fused", **DEEP) for c in ("default", "reduce-overhead"))
    assert (whole.status, replayed.status) == (OK, OK)
    launched = [median(point.times().launch_ns) for point in (whole, replayed)]
    assert launched[1] < launched[0]  # some hundred launches less
    peaks = [max(one.peak_bytes for one in point.memory) for point in (whole, replayed)]
    assert peaks[1] > 0.8 * peaks[0]


OUTSIDE = [
    {}, {"precision": "bf16"}, {"precision": "tf32"}, {"optimizer": "fused"}, {"compile": "default"}, {"compile": "blocks"},
    {"compile": "reduce-overhead"}, {"compile": "reduce-overhead", "precision": "bf16", "optimizer": "fused"},
    {"checkpoint": 1}, {"graph": "on"}, {"precision": "bf16", "attention": "sdpa-flash"},
    {"precision": "bf16", "attention": "sdpa-cudnn", "graph": "on", "optimizer": "fused", "compile": "blocks"},
    {"precision": "bf16", "graph": "on", "checkpoint": 1},
]  # fmt: skip


@pytest.mark.parametrize("levers", OUTSIDE, ids=str)
def test_levers_from_outside(measure, levers):
    point = measure("py:gpu_steps:transformer", **levers)
    assert point.status == OK, point.reason
    assert ("capturable" in point.ran.optimizer) == (levers.get("graph") == "on")


@pytest.mark.parametrize(
    ("name", "levers", "line"),
    [
        ("reads_its_loss", {"graph": "on"}, "cannot be captured"),
        ("copies_from_the_cpu", {"graph": "on"}, "cannot be captured"),
        ("with_dropout", {"graph": "on", "checkpoint": 1}, "random numbers"),
        ("transformer", {"attention": "sdpa-flash"}, "cannot run this step's attention"),
    ],
)
def test_what_a_graph_cannot_hold_is_a_row(measure, name, levers, line):
    point = measure(f"py:gpu_steps:{name}", **levers)
    assert point.status == UNSUPPORTED
    assert line in point.reason
    assert point.hint
