"""The law of the levers on a GPU: eager, in a CUDA graph or compiled, our kernels change how a step runs, not its result."""

import functools

import pytest
import torch
from torch import Tensor

from flopwise.capture.model_step import ModelStep
from flopwise.capture.step import Step, captured
from flopwise.spec.workload import workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

OWN = {"attention": "flash", "norm": "triton", "activation": "triton", "rope": "triton", "loss": "fused"}
MODES = {
    "eager": {},
    "graph": {"graph": "on"},
    "compile": {"compile": "default"},
    "compile and graph": {"compile": "default", "graph": "on"},
}
SIZE = {"batch": 2, "context": 256}
# fp32 differs by the order of its sums alone. In 16 bits plain PyTorch is off as well: a lever may be half as much again.
FP32_ERROR, SLACK = 1e-4, 1.5
CAPTURED_STEPS = 3  # `captured` runs these before it captures


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


def run(target: str, steps: int, phase: str, **levers: str) -> ModelStep:
    """The model after `steps` steps from the same weights on the same batch."""
    torch.manual_seed(0)
    device = torch.device("cuda:0")
    made = ModelStep(workload(target, phase=phase, **SIZE, **levers), device)
    each, done = made.phases(), 0
    if levers.get("graph") == "on":
        rate = made.set_learning_rate if made.optimizer is not None else None
        each, done = captured(Step(each, made.ran, before_replay=rate), device).phases, CAPTURED_STEPS
    for _ in range(steps - done):
        for part in each.values():
            part()
    torch.cuda.synchronize()
    return made


def gradients(target: str, **levers: str) -> tuple[float, Tensor]:
    """One step's loss, and all gradients as one vector."""
    made = run(target, CAPTURED_STEPS + 1, "backward", **levers)
    assert made.loss is not None
    return float(made.loss), torch.cat([p.grad.double().flatten() for p in made.model.parameters()])


@functools.cache
def plain(target: str, precision: str) -> tuple[float, Tensor]:
    return gradients(target, precision=precision, attention="naive", norm="eager", activation="eager")


def assert_as_good_as_plain(target: str, precision: str, **levers: str) -> None:
    loss, found = gradients(target, precision=precision, **levers)
    right_loss, right = plain(target, "fp32")
    error = float((found - right).norm() / right.norm())
    allowed = FP32_ERROR
    if precision != "fp32":
        allowed = SLACK * float((plain(target, precision)[1] - right).norm() / right.norm())
    assert error <= allowed, f"gradients are off by {error:.1e}, plain PyTorch by {allowed / SLACK:.1e}"
    assert loss == pytest.approx(right_loss, rel=1e-5 if precision == "fp32" else 2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lever", OWN)
def test_every_lever_alone(lever: str, precision: str) -> None:
    assert_as_good_as_plain("small", precision, **{lever: OWN[lever]})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_all_levers_together(mode: str, precision: str) -> None:
    assert_as_good_as_plain("tiny" if "compile" in mode else "small", precision, **OWN, **MODES[mode])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_all_levers_train_as_plain_pytorch_does(mode: str, precision: str) -> None:
    """Six steps with our optimizer: the losses agree, and fall."""
    target = "tiny" if "compile" in mode else "small"
    found = run(target, 6, "train", precision=precision, optimizer="flopwise", **OWN, **MODES[mode])
    right = run(target, 6, "train", precision=precision, optimizer="adamw-loop", norm="eager", activation="eager")
    assert found.loss is not None
    assert right.loss is not None
    assert float(found.loss) == pytest.approx(float(right.loss), rel=1e-4 if precision == "fp32" else 1e-2)
    assert float(found.loss) < plain(target, "fp32")[0]
