"""Linear layers that read the same input run as one matmul; their parameters stay what they are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise.patch import projections
from flopwise.patch.patched import Patched
from patch.models import OwnGPT, assert_alike, check_patch, hugging_face, loss_of

MODELS = [("Llama", {}), ("Llama", {"attention_bias": True, "mlp_bias": True}), ("Qwen2", {}), ("Gemma2", {})]


@pytest.fixture
def matmuls(monkeypatch):
    calls = []
    original = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: calls.append(1) or original(*args))
    return calls


@pytest.mark.parametrize(("name", "settings"), MODELS)
def test_models_of_transformers_are_joined(name, settings, matmuls):
    model = hugging_face(name, **settings)
    loss_of(model)
    before = len(matmuls)
    patched = check_patch(model, projections.replace)
    assert [line.split()[2] for line in patched.done] == [f"{name}Attention", f"{name}MLP"]
    projections.replace(model, Patched())
    loss_of(model)
    matmuls.clear()
    loss_of(model)
    assert len(matmuls) == before - 2 * 3


def test_layers_of_one_file_are_joined_where_they_read_the_same():
    patched = check_patch(OwnGPT(), projections.replace)
    assert patched.done == ["projections: 2 OwnBlock run linear layers as one matmul"]


def test_weights_that_move_run_alone_again_and_are_right():
    model, plain, patched = hugging_face("Llama"), hugging_face("Llama"), Patched()
    projections.replace(model, patched)
    assert_alike(model, plain)
    assert_alike(model.double(), plain.double())
    patched.undo()
    assert torch.equal(loss_of(model), loss_of(plain))


def test_a_copy_computes_with_its_own_weights():
    model, patched = hugging_face("Llama"), Patched()
    projections.replace(model, patched)
    loss_of(model)
    twin, plain = copy.deepcopy(model), hugging_face("Llama")
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    plain.load_state_dict(twin.state_dict())
    assert_alike(twin, plain)
    assert_alike(model, hugging_face("Llama"))


def test_parameters_that_lie_in_a_buffer_of_somebody_else_stay_there():
    model, patched = OwnGPT(), Patched()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    assert projections.replace(model, patched) == 0
    assert "share memory" in patched.refused[0]


class Viewed(nn.Module):
    """Code that only takes results which lie by themselves in memory, or writes into them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        if self.how == "view":
            return a.view(-1).view(x.shape) + b
        return a.mul_(2) + b


@pytest.mark.parametrize("how", ["view", "write"])
def test_code_that_needs_each_result_apart_is_left(how):
    patched = check_patch(OwnGPT(lambda: Viewed(how)), projections.replace)
    assert [line for line in patched.refused if "Viewed" in line]
    assert not [line for line in patched.done if "Viewed" in line]


def test_a_frozen_weight_gets_no_gradient():
    model, plain = OwnGPT(), OwnGPT()
    for one in (model, plain):
        one.h[0].w1.weight.requires_grad_(False)
    projections.replace(model, Patched())
    for _ in range(2):
        assert_alike(model, plain)
    assert model.h[0].w1.weight.grad is None
