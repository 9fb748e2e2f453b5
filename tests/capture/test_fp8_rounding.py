"""How far right steps in fp8 may be off: measured in plain PyTorch, and enough for our own."""

import pytest
import torch

from flopwise.advice.decisions import disagreement
from flopwise.capture import model_step
from flopwise.capture.agreement import compare
from flopwise.capture.build import build_step
from flopwise.capture.compared_steps import StepFollower, follow_steps
from flopwise.capture.fp8_rounding import rounded
from flopwise.capture.reference_runs import run_reference
from flopwise.lm import fp8
from flopwise.spec.recipe import FP8
from flopwise.spec.workload import workload

SIZE = {"batch": 1, "context": 32}
PLAIN = workload("tiny", attention="naive", norm="eager", activation="eager", **SIZE)


def test_a_scale_for_what_is_summed_and_one_for_all():
    x = torch.tensor([[1.0, 2.0], [300.0, 448.0]])
    assert torch.equal(rounded(x, torch.float8_e4m3fn, None), torch.tensor([[1.0, 2.0], [288.0, 448.0]]))
    assert torch.equal(rounded(x, torch.float8_e4m3fn, -1)[0], x[0])


@pytest.fixture(scope="module")
def reference():
    return run_reference(PLAIN, torch.device("cpu"), ("bf16-master", *FP8))


def agreement(reference, asked):
    follower = StepFollower()
    found = follow_steps(build_step(asked, torch.device("cpu"), follower), follower)
    return compare(found, reference, asked)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", FP8)
def test_fp8_is_right_by_its_own_rounding_and_not_by_that_of_bf16(precision, reference, monkeypatch):
    monkeypatch.setattr(model_step, "check_supported", lambda *_: None)
    own, plain = reference.rounding.precisions[precision], reference.rounding.precisions["bf16-pure"]
    assert own.of("gradient", 1).overall > 3 * plain.of("gradient", 1).overall
    asked = workload("tiny", precision=precision, optimizer="flopwise", norm="triton", activation="triton", **SIZE)
    found = agreement(reference, asked)
    assert disagreement(found) is None
    assert found.gradient_error > 3 * plain.of("gradient", 1).overall


def test_a_wrong_layer_is_still_found(reference, monkeypatch):
    monkeypatch.setattr(model_step, "check_supported", lambda *_: None)
    right = fp8.Fp8.linear
    monkeypatch.setattr(fp8.Fp8, "linear", lambda self, x, w, b: 1.2 * right(self, x, w, b))
    asked = workload("tiny", precision="fp8", optimizer="flopwise", **SIZE)
    assert disagreement(agreement(reference, asked)) is not None
