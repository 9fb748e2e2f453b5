"""Copies of a patched model are of the original; logits that wait are those of the weights they were asked of."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import flopwise
from flopwise.errors import Unsupported

V, D = 33, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(12).reshape(2, 6)
RECIPES = [
    {"precision": "bf16"},
    {"precision": "bf16-master", "optimizer": "flopwise"},
    {"precision": "bf16-master"},
    {"loss": "fused"},
    {"checkpoint": 1},
    {"attention": "sdpa-flash"},
]


def _patched(recipe):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    return model, optimizer, plain, flopwise.apply(model, optimizer, recipe=recipe, quiet=True)


def _loss(model):
    return F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())


def _pickled(model):
    return torch.load(io.BytesIO(_saved(model)), weights_only=False)


def _saved(model) -> bytes:
    place = io.BytesIO()
    torch.save(model, place)
    return place.getvalue()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: AveragedModel(model).module, _pickled])
def test_a_copy_is_of_the_original_and_stands_alone(recipe, make):
    model, _, plain, applied = _patched(recipe)
    made = make(model)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(made.parameters(), plain.parameters(), strict=True)
    )
    _loss(made).backward()
    _loss(plain).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(made.parameters(), plain.parameters(), strict=True))
    assert not any(p.grad is not None for p in model.parameters())
    _loss(model).backward()  # and is patched still
    applied.undo()
    assert "forward" not in vars(model)
    assert "__deepcopy__" not in vars(model)


def test_hooks_of_the_user_are_in_the_copy():
    model, _, _, _ = _patched({"precision": "bf16-master", "optimizer": "flopwise"})
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    copy.deepcopy(model)(TOKENS)
    assert seen == [1]


def test_logits_read_before_the_step_are_right_and_after_it_refused():
    model, optimizer, plain, _ = _patched({"loss": "fused"})
    logits = model(TOKENS)
    F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    assert torch.allclose(logits + 0, plain(TOKENS), atol=1e-5)
    late = model(TOKENS)
    optimizer.step()
    with pytest.raises(Unsupported, match="after the weights were updated") as error:
        late.argmax(-1)
    assert error.value.levers == ("loss",)


@pytest.mark.parametrize("recipe", [{"loss": "fused"}, {"loss": "fused", "optimizer": "flopwise"}], ids=str)
def test_any_optimizer_makes_waiting_logits_old(recipe):
    model, optimizer, _, _ = _patched(recipe)
    logits = model(TOKENS)
    F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    optimizer.step()
    with pytest.raises(Unsupported, match="after the weights were updated"):
        float(logits.sum())


def test_given_weights_are_those_of_the_head():
    model, _, _, _ = _patched({"loss": "fused"})
    given = {name: p * 0 if name == "head.weight" else p for name, p in model.named_parameters()}
    assert (torch.func.functional_call(model, given, (TOKENS,)) + 0).abs().max() == 0


def test_logits_computed_later_have_the_dtype_they_had():
    model, _, _, _ = _patched({"loss": "fused"})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(TOKENS)
    assert logits.dtype == (logits + 0).dtype == torch.bfloat16


def test_a_backward_hook_of_the_head_runs():
    model, _, _, _ = _patched({"loss": "fused"})
    seen = []
    model.head.register_full_backward_hook(lambda *_: seen.append(1))
    _loss(model).backward()
    assert seen == [1]


def test_attention_that_is_named_is_looked_for():
    _, _, _, applied = _patched({"attention": "sdpa"})
    assert any(line.startswith("attention") for line in (*applied.done, *applied.refused))


def test_what_our_optimizer_does_not_take_is_refused_at_once():
    model = Model().double()
    applied = flopwise.apply(model, torch.optim.AdamW(model.parameters()), recipe={"optimizer": "flopwise"}, quiet=True)
    assert "not torch.float64" in applied.refused[0]
