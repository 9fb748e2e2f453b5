"""Linear layers of a model that somebody else wrote, in fp8: which, how near, and what is said."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.errors import Unsupported
from flopwise.patch.applied import Applied
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


@pytest.mark.parametrize("precision", FP8)
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


def test_the_way_back_and_rows_that_tensor_cores_do_not_take():
    model, optimizer, put = patched({"precision": "fp8", "optimizer": "flopwise"})
    assert losses(model, optimizer, rows=24) == losses(
        *patched({"precision": "bf16-master", "optimizer": "flopwise"})[:2], rows=24
    )
    put.undo()
    assert "forward" not in vars(model.layers[0].up)
    assert model.layers[0].up.weight.dtype == torch.float32


def test_what_it_cannot_have_is_said():
    with pytest.raises(Unsupported, match="found no linear layer"):
        patched({"precision": "fp8"}, width=64)
    with pytest.raises(Unsupported, match="does not go with joined projections"):
        patched({"precision": "fp8", "projections": "fused"})
    model = Model()
    applied = Applied([model], [torch.optim.AdamW(model.parameters())], {"precision": "fp8"})
    assert applied.refused == ["precision = 'fp8' needs a GPU of compute capability 8.9"]
