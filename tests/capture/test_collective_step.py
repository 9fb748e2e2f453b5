"""Collectives as steps: checked before they are timed, begun together, refused where the backend cannot run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flopwise
from flopwise.capture.clock import clock_for
from flopwise.capture.collective_step import check_received
from flopwise.errors import Failed, FlopwiseError, WrongResult
from flopwise.lm.ranks import Ranks, backend_named, check_backend
from flopwise.records.run import STEP
from flopwise.spec.operations import COLLECTIVES

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
# What rank 1 of 3 receives where each sends its number, from 1 on.
RECEIVED = {
    "all-reduce": [6.0, 6.0, 6.0],
    "all-gather": [1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
    "reduce-scatter": [6.0, 6.0],
    "all-to-all": [1.0, 2.0, 3.0],
    "send-recv": [1.0, 1.0],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_is_received_is_checked(name):
    ranks = Ranks(rank=1, world=3)
    check_received(name, torch.tensor(RECEIVED[name]), ranks)
    for place in (0, -1):
        wrong = torch.tensor(RECEIVED[name])
        wrong[place] = 2.5
        with pytest.raises(WrongResult, match="rank 1 received"):
            check_received(name, wrong, ranks)


def test_ranks_begin_together_before_every_timing():
    seen = []
    clock = clock_for({STEP: lambda: seen.append("step")}, CPU, single_op=False, align=lambda: seen.append("align"))
    clock.once()
    clock.sample()
    assert seen == ["align", "step"] * 2


def test_nccl_needs_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_backend("nccl", 2, GPU)
    check_backend("gloo", 9, GPU)
    with pytest.raises(FlopwiseError, match="a GPU for each of 3 ranks; this machine has 2 GPUs"):
        check_backend("nccl", 3, GPU)
    with pytest.raises(FlopwiseError, match="needs NVIDIA GPUs"):
        check_backend("nccl", 1, CPU)


def test_the_backend_is_the_one_that_fits_unless_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked = {(n, d.type): backend_named(Ranks(local_world=n), d) for n in (2, 3) for d in (CPU, GPU)}
    assert asked == {(2, "cpu"): "gloo", (3, "cpu"): "gloo", (2, "cuda"): "nccl", (3, "cuda"): "gloo"}
    assert backend_named(Ranks(local_world=2), GPU, "gloo") == "gloo"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_collective_runs_over_gloo(ranks, tmp_path):
    script = Path(__file__).with_name("collective_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*command, str(script), str(tmp_path)], check=True, timeout=300, capture_output=True)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(found.values()) == {"gloo"}
        assert len(found) == 2 * len(COLLECTIVES)


@pytest.mark.slow
def test_bench_times_the_ranks_together(tmp_path):
    run = flopwise.bench("op:all-reduce", set={"bytes": 4096}, device="cpu", samples=3, warmup=1, runs=tmp_path)
    (point,) = run.points
    assert [len(row.wall_ns) for row in point.ranks] == [3, 3]
    assert point.ran.backend == "gloo"
    assert run.mfu is None
    with pytest.raises(Failed, match="needs NVIDIA GPUs"):
        flopwise.bench("op:all-reduce", impl="nccl", device="cpu", runs=tmp_path)
