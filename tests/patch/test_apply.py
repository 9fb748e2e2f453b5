"""`flopwise.apply` in a script: what it says, what it leaves out, and the way back."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flopwise
from flopwise.errors import FlopwiseError
from flopwise.patch.captured import CapturedStep
from flopwise.patch.patched import Patched

TOKENS = torch.arange(32).reshape(2, 16) % 24


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def trained(model, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made():
    model = Gpt()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_a_recipe_file_is_applied_and_undone(tmp_path, capsys):
    file = tmp_path / "fast.toml"
    file.write_text('precision = "bf16-master"\noptimizer = "flopwise"\nloss = "fused"\ngraph = "on"\n')
    expected = trained(*made())
    model, optimizer = made()
    applied = flopwise.apply(model, optimizer, recipe=file)
    said = capsys.readouterr().err
    assert "waits for its cross entropy" in said
    assert "not done: graph = 'on' needs a model on a GPU" in said
    assert applied.step(trained) is trained  # no graph here
    assert trained(model, optimizer) == pytest.approx(expected, rel=1e-2)
    applied.undo()
    assert "forward" not in vars(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert trained(model, optimizer, 1)[0] < expected[-1]


def test_what_leaves_a_model_under_autocast_is_fp32():
    model, optimizer = made()
    flopwise.apply(model, optimizer, recipe={"precision": "bf16"}, quiet=True)
    assert model(TOKENS).dtype == torch.float32


def test_levers_that_cannot_be_are_left_out_by_name():
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = flopwise.apply(model, optimizer, recipe={"optimizer": "flopwise", "loss": "fused"}, quiet=True)
    assert any("does not know SGD" in line for line in applied.refused)
    assert any(line.startswith("loss") for line in applied.done)


@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [(None, {}, "model"), (3, {}, "model"), (Gpt(), {"speed": "high"}, "speed"), (Gpt(), "none.toml", "none.toml")],
)
def test_wrong_arguments_are_one_line(model, recipe, message):
    with pytest.raises(FlopwiseError, match=message):
        flopwise.apply(model, recipe=recipe)


def test_without_a_gpu_a_captured_step_is_the_step():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert CapturedStep(lambda x: x + 1, [], Patched())(torch.ones(1)).item() == 2
