"""The law of the levers on a GPU: eager, in a CUDA graph or compiled, our kernels change how a step runs, not its result."""

import functools

import pytest
import torch

from flopwise.advice.decisions import describe, disagreement
from flopwise.capture.agreement import compare
from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.compared_steps import StepFollower, follow_steps
from flopwise.capture.reference_runs import Reference, run_reference
from flopwise.spec.workload import workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

OWN = {
    "attention": "flash",
    "norm": "triton",
    "activation": "triton",
    "rope": "triton",
    "loss": "fused",
    "optimizer": "flopwise",
}
PLAIN = {"attention": "naive", "norm": "eager", "activation": "eager", "optimizer": "adamw-loop"}
MODES = {
    "eager": {},
    "graph": {"graph": "on"},
    "compile": {"compile": "default"},
    "compile and graph": {"compile": "default", "graph": "on"},
    "graphs by the compiler": {"compile": "reduce-overhead"},
}
SIZE = {"batch": 2, "context": 256, "phase": "train"}


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


@functools.cache
def reference(target: str) -> Reference:
    return run_reference(workload(target, **SIZE, **PLAIN), resolve_device("auto"), ("bf16",))


def assert_right(target: str, **levers: str) -> None:
    """By the rule of `tune`: no further from eager fp32 than plain PyTorch in the same precision."""
    work, follower = workload(target, **SIZE, **levers), StepFollower()
    found = follow_steps(build_step(work, resolve_device("auto"), follower), follower)
    agreement = compare(found, reference(target), work)
    wrong = disagreement(agreement)
    assert wrong is None, describe(wrong)
    assert len(agreement.losses) == 6
    assert agreement.losses[0] > agreement.losses[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lever", OWN)
def test_every_lever_alone(lever: str, precision: str) -> None:
    assert_right("small", precision=precision, **PLAIN | {lever: OWN[lever]})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_all_levers_together(mode: str, precision: str) -> None:
    assert_right("tiny" if "compile" in mode else "small", precision=precision, **OWN, **MODES[mode])
