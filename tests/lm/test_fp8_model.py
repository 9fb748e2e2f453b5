"""Precision fp8: the model's step learns as in bf16, under every lever that it goes with; and what it does not go with."""

import pytest
import torch

from flopwise.capture import model_step
from flopwise.capture.model_step import ModelStep, check_supported
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.kernels import fp8_linear
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict
from flopwise.spec.gpu import gpu
from flopwise.spec.recipe import FP8, Recipe
from flopwise.spec.workload import workload

OWN = {"norm": "triton", "activation": "triton"}
LEVERS = ({}, OWN, OWN | {"projections": "fused"}, {"checkpoint": 1}, {"overlap": "on"}, {"loss": "fused"})


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """On a CPU it is refused, except here."""
    monkeypatch.setattr(model_step, "check_supported", lambda *_: None)


def losses(precision, steps=6, **levers):
    torch.manual_seed(0)
    asked = workload("tiny", batch=2, context=32, precision=precision, optimizer="flopwise", **levers)
    step = ModelStep(asked, torch.device("cpu"))
    found = []
    for _ in range(steps):
        for phase in step.phases().values():
            phase()
        found.append(float(step.loss))
    return found


@pytest.mark.parametrize("precision", [FP8[0], *(pytest.param(one, marks=pytest.mark.slow) for one in FP8[1:])])
@pytest.mark.parametrize("narrow", [pytest.param(False, marks=pytest.mark.slow), True])
def test_losses_stay_near_those_of_bf16(precision, narrow, monkeypatch):
    monkeypatch.setattr(fp8_linear, "usual_scaling", lambda by_rows: fp8_linear.Scaling(by_rows, narrow))
    right = losses("bf16-master")
    assert right[-1] < right[0]
    for levers in LEVERS:
        found = losses(precision, **levers)
        assert found != right
        assert found == pytest.approx(right, abs=2e-3)


@pytest.mark.slow
def test_recomputed_and_updated_in_backward_are_the_same_numbers():
    plain = losses("fp8")
    assert losses("fp8", checkpoint=1) == losses("fp8", overlap="on") == plain


def test_queries_and_keys_that_are_normed_stay_tensors():
    step = losses("fp8-rowwise", set={"qk_norm": True}, **OWN, steps=1)
    assert step[0] > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"optimizer": "fused"}, "keeps masters"),
        ({"phase": "decode"}, "is for training"),
        ({"batch": 1, "context": 40}, "multiples of 16"),
        ({"set": {"d_ff": 200}}, "multiples of 16"),
    ],
)
def test_what_it_does_not_go_with_is_one_line(asked, said):
    with pytest.raises(FlopwiseError, match=said):
        workload("tiny", precision="fp8", **{"optimizer": "flopwise"} | asked)


def test_a_gpu_without_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(Unsupported, match=r"precision = 'fp8' needs .* 8\.9 or higher; this one has 8\.0"):
        check_supported(Recipe(precision="fp8"), torch.device("cuda"))


def test_so_does_a_cpu():
    with pytest.raises(Unsupported, match="precision = 'fp8-rowwise' needs an NVIDIA GPU; this device is 'cpu'"):
        check_supported(Recipe(precision="fp8-rowwise"), torch.device("cpu"))


def test_nothing_is_predicted_for_a_gpu_without_it():
    asked = workload("tiny", precision="fp8", optimizer="flopwise")
    with pytest.raises(FlopwiseError, match="A100 SXM 80 GB has no fp8"):
        predict(asked, Machine(gpu=gpu("a100")))
    assert predict(asked, Machine(gpu=gpu("h200"))).limit is not None
