"""A user's own step in fp8: what it computes is counted in fp8, and what is left out is said."""

import pytest
import torch

from flopwise.advice.decisions import disagreement
from flopwise.advice.moves import moves
from flopwise.api.tune import tune
from flopwise.capture.agreement import compare
from flopwise.capture.build import build_step
from flopwise.capture.compared_steps import StepFollower, follow_steps
from flopwise.capture.reference_runs import run_reference
from flopwise.capture.seen_step import watch_step
from flopwise.capture.watch.own_ops import factor_shapes
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.kernels import fp8_linear
from flopwise.predict.dry.run import dry_run
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict
from flopwise.predict.recorded.step import recorded_step, to_record
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload

WIDTH, ROWS, BLOCKS = 256, 64, 2
STEP = """
import torch
from torch import nn

def make(device="cpu"):
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(256, 64)}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 256, device=device)

    def step():
        optimizer.zero_grad()
        y = x
        for block in model["blocks"]:
            y = y + block(y)
        loss = model["head"](y).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step
"""
PRODUCTS = BLOCKS * 2 * 3 * 2 * ROWS * WIDTH * 2 * WIDTH - 2 * ROWS * WIDTH * 2 * WIDTH  # x needs no gradient
HEAD = 3 * 2 * ROWS * WIDTH * 64


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "own.py").write_text(STEP)
    return lambda **levers: workload(f"{tmp_path / 'own.py'}:make", **levers)


def test_it_is_counted_in_fp8_without_a_run(asked):
    found = predict(asked(precision="fp8", optimizer="flopwise"), Machine(gpu=gpu("h200")))
    by_dtype = {}
    for op in found.ops:
        by_dtype[op.dtype] = by_dtype.get(op.dtype, 0) + op.flops
    assert by_dtype["fp8"] == PRODUCTS
    assert by_dtype["bf16"] == HEAD
    assert "4 linear layers in fp8; not head (outside the blocks)" in found.step.notes
    plain = predict(asked(precision="bf16"), Machine(gpu=gpu("h200")))
    assert sum(op.flops for op in plain.ops) == by_dtype["fp8"] + by_dtype["bf16"]


def test_a_gpu_without_fp8_is_one_line(asked):
    with pytest.raises(Unsupported, match="has no fp8"):
        predict(asked(precision="fp8"), Machine(gpu=gpu("a100")))
    with pytest.raises(Unsupported, match="precision = 'fp8' needs an NVIDIA GPU"):
        build_step(asked(precision="fp8"), torch.device("cpu"))


def test_a_step_that_runs_shows_it(asked, monkeypatch):
    monkeypatch.setattr("flopwise.capture.applied_levers.check_supported", lambda recipe, device: None)  # emulated here
    step = build_step(asked(precision="fp8", optimizer="flopwise"), torch.device("cpu"))
    for _ in range(2):
        for run in step.phases.values():
            run()
    seen = watch_step(step, torch.device("cpu"))
    assert seen.dtype == "fp8"
    assert step.ran().linear == step.linear == "4 linear layers in fp8; not head (outside the blocks)"


def followed(asked, device=torch.device("cpu")):  # noqa: B008  a constant
    follower = StepFollower()
    return follow_steps(build_step(asked, device, follower), follower)


def test_it_is_right_by_the_rounding_of_fp8_and_a_wrong_layer_is_found(asked, monkeypatch):
    """As `tune --allow fp8` judges it: the reference is plain PyTorch, with those layers rounded that are put into fp8."""
    monkeypatch.setattr("flopwise.capture.applied_levers.check_supported", lambda recipe, device: None)  # emulated here
    reference = run_reference(asked(), torch.device("cpu"), ("bf16", "bf16-master", "fp8"))
    rounding = {name: one.of("gradient", 1).overall for name, one in reference.rounding.precisions.items()}
    assert rounding["fp8"] > 3 * rounding["bf16"]
    lever = asked(precision="fp8", optimizer="flopwise")
    found = compare(followed(lever), reference, lever)
    assert disagreement(found) is None
    assert found.gradient_error > 3 * rounding["bf16"]
    right = fp8_linear.linear
    monkeypatch.setattr(fp8_linear, "linear", lambda *args: 1.2 * right(*args))
    assert disagreement(compare(followed(lever), reference, lever)) is not None


def test_tune_tries_it_with_our_optimizer_and_predicts_it(asked, tmp_path):
    (move,) = [one for one in moves(asked(), allow=["fp8"]) if one.value == "fp8"]
    assert move.levers == {"precision": "fp8", "optimizer": "flopwise"}
    assert "fp8" not in {one.value for one in moves(asked())}
    recorded = recorded_step(to_record(asked(), ["fp8"]), [dry_run(one) for one in to_record(asked(), ["fp8"])])
    in_fp8 = sum(op.flops for op in recorded.under(move.workload).ops if op.dtype == "fp8")
    assert in_fp8 == PRODUCTS
    with pytest.raises(FlopwiseError, match="fp8 needs a GPU"):  # refused for its device alone
        tune(asked(), allow=["fp8"], device="cpu", runs=tmp_path / "runs")


def test_a_products_sizes_are_those_that_are_multiplied():
    a, b, scale = torch.ones(8, 4), torch.ones(6, 4), torch.ones(1)
    assert factor_shapes("fp8_matmul", (a, scale, b, scale, None, True)) == ((8, 4), (4, 6))
    assert factor_shapes("mm", (a, b)) is None
