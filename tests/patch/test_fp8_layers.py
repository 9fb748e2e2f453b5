"""Linear layers of a model that somebody else wrote, in fp8: which, how near, and what is said."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.errors import Unsupported
from flopwise.patch.applied import Applied
from flopwise.patch.fp8 import layers
from flopwise.patch.levers import PatchedModel
from flopwise.spec.recipe import FP8


class Block(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.small, self.odd = nn.Linear(width, rank), nn.Linear(width, width + 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x))) + self.small(x).mean() + self.odd(input=x).mean()


class Model(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.first = nn.Linear(32, width)
        self.layers = nn.ModuleList(Block(width, 16) for _ in range(2))
        self.head = nn.Linear(width, 32)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def patched(levers, width=256):
    torch.manual_seed(0)
    model = Model(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    put = PatchedModel([model], [optimizer], levers)
    put.install()
    return model, optimizer, put


def losses(model, optimizer, rows=32):
    torch.manual_seed(1)
    x, y, found = torch.randn(rows, 32), torch.randn(rows, 32), []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("precision", [FP8[0], *(pytest.param(one, marks=pytest.mark.slow) for one in FP8[1:])])
def test_large_layers_of_the_blocks_are_in_fp8_and_the_others_are_named(precision):
    model, optimizer, put = patched({"precision": precision})
    line = next(line for line in put.patched.done if "fp8" in line)
    assert line.startswith("precision: 4 linear layers in fp8")
    assert "first, head (outside the blocks)" in line
    assert "layers.0.small, layers.1.small (under 256 features)" in line
    assert "layers.0.odd, layers.1.odd (no multiple of 16)" in line
    found, right = losses(model, optimizer), losses(*patched({"precision": "bf16-master"})[:2])
    assert found != right
    assert found == pytest.approx(right, rel=0.03)
    assert found[-1] < found[0]


@pytest.mark.parametrize("precision", [FP8[0], *(pytest.param(one, marks=pytest.mark.slow) for one in FP8[1:])])
def test_rows_that_tensor_cores_do_not_take_are_in_fp8_too(precision):
    """As of `tokens[:, :-1]`."""
    levers = {"precision": precision, "optimizer": "flopwise"}
    found, right = (losses(*patched(levers | {"precision": one})[:2], rows=23) for one in (precision, "bf16-master"))
    assert found != right
    assert found == pytest.approx(right, rel=0.03)
    model, _, _ = patched(levers)
    x = torch.randn(2, 16, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x[:, :5])[:, 4], model(x)[:, 4], rtol=0.05, atol=0.05)


def test_the_way_back():
    model, optimizer, put = patched({"precision": "fp8", "optimizer": "flopwise"})
    losses(model, optimizer)
    put.undo()
    assert "forward" not in vars(model.layers[0].up)
    assert model.layers[0].up.weight.dtype == torch.float32


def applied(model, **levers):
    return Applied([model], [torch.optim.AdamW(model.parameters())], levers)


def test_what_it_cannot_have_is_said_and_bf16_is_left():
    with pytest.raises(Unsupported, match="found no linear layer"):
        patched({"precision": "fp8"}, width=64)
    model = Model()
    found = applied(model, precision="fp8", optimizer="flopwise")
    needed = "an NVIDIA GPU of compute capability 8.9 or higher"
    assert found.refused == [f"precision = 'fp8' needs {needed}: bf16-master instead"]
    assert model.head.weight.dtype == torch.bfloat16


def test_joined_projections_give_way_to_fp8(monkeypatch):
    monkeypatch.setattr("flopwise.patch.applied._has_fp8", lambda models: True)
    model = Model()
    found = applied(model, precision="fp8", projections="fused")
    assert any("4 linear layers in fp8" in line for line in found.done)
    assert found.refused == ["projections = 'fused' does not go with fp8 on a step of your own"]
    assert model.head.weight.dtype == torch.bfloat16


def test_a_model_without_layers_for_fp8_has_bf16(monkeypatch):
    monkeypatch.setattr("flopwise.patch.applied._has_fp8", lambda models: True)
    model = Model(64)
    found = applied(model, precision="fp8")
    assert found.refused[0].endswith("bf16-master instead")
    assert model.head.weight.dtype == torch.bfloat16


def test_weights_in_bf16_need_no_masters(monkeypatch):
    monkeypatch.setattr("flopwise.patch.applied._has_fp8", lambda models: True)
    model = Model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = Applied([model], [optimizer], {"precision": "fp8", "optimizer": "flopwise"})
    assert found.refused == []
    told = losses(model, optimizer)
    assert told[-1] < told[0]


class Like(nn.Linear):
    """As nn.Linear computes it."""


class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class Odd(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.like, self.other = Like(width, width), Other(width, width)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.attention = nn.MultiheadAttention(width, 4)
        self.experts = nn.Parameter(torch.zeros(4, width, width))
        self.table = nn.Embedding(width, width)


def test_every_matrix_that_is_left_out_is_named():
    root = nn.Sequential(*(Odd() for _ in range(2)))
    chosen, left = layers(root, list(root))
    assert chosen == [root[0].like, root[1].like]
    named = {name for names in left.values() for name in names}
    assert named == {f"{n}{part}" for n in "01" for part in ("", *parts)}
    assert "Other, no plain nn.Linear" in left


parts = (".other", ".normed", ".attention", ".attention.out_proj")


def test_what_is_in_fp8_and_what_is_not_is_kept_for_the_record():
    _, _, put = patched({"precision": "fp8", "optimizer": "flopwise"})
    (told,) = put.in_fp8
    assert told.startswith("4 linear layers in fp8; not first, head (outside the blocks)")
