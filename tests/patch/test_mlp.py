"""Activations and gates as one kernel, wherever a model writes them out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise.patch import mlp
from flopwise.patch.patched import Patched
from patch import models
from patch.models import OwnGPT, check_patch, hugging_face


def replace(value):
    return lambda model, patched: mlp.replace(model, value, patched)


@pytest.mark.parametrize("value", ["torch", "triton"])
def test_gpt2s_gelu_is_one_kernel(value):
    patched = check_patch(hugging_face("GPT2"), replace(value))
    assert patched.done == ["activation: 2 NewGELUActivation run as one kernel"]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3"])
def test_gates_of_transformers_models_are_one_kernel(name):
    patched = check_patch(hugging_face(name), replace("triton"))
    assert patched.done == [f"activation: 2 {name}MLP run silu(gate) · up as one kernel"]
    assert patched.refused == []


def test_a_gelu_gate_is_left_as_it_is():
    patched = check_patch(hugging_face("Gemma2"), replace("triton"))
    assert patched.done == []


def test_functions_and_gates_in_one_file():
    original = models.new_gelu
    patched = check_patch(OwnGPT(), replace("triton"))
    assert sorted(patched.done) == [
        "activation: 2 OwnBlock run new_gelu as one kernel",
        "activation: 2 OwnBlock run silu(gate) · up as one kernel",
    ]
    assert models.new_gelu is original


@pytest.mark.parametrize(
    "written", ["x * torch.sigmoid(1.702 * x)", "F.gelu(x)", "torch.relu(x) * x", "x.mul_(2) * torch.sigmoid(x)"]
)
def test_other_activations_are_left(written):
    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return eval(written, {"x": x, "torch": torch, "F": F})

    patched = Patched()
    assert mlp.replace(nn.Sequential(Activation()), "torch", patched) == 0
    assert patched.done == []


def test_a_gate_that_is_used_twice_is_left_as_written():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            gate = F.silu(self.gate(x))
            return self.up(x) * gate + gate.abs()

    patched = check_patch(OwnGPT(Twice), replace("triton"))
    assert "activation: Twice: abs is done to what would be fused" in patched.refused
