"""What a recipe meets in scripts: caches, inference, methods beside forward, running statistics, a cell that is run twice."""

import pytest
import torch
from torch import nn

import flopwise
from flopwise.errors import FlopwiseError

transformers = pytest.importorskip("transformers")
IDS = torch.arange(32).reshape(2, 16)


def llama(attention="eager"):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation=attention))


def applied(model, **levers):
    optimizer = torch.optim.AdamW(model.parameters())
    return flopwise.apply(model, optimizer, recipe=levers, quiet=True), optimizer


class Block(nn.Module):
    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm(8)

    def forward(self, x):
        return x + self.norm(self.linear(x))


class Model(nn.Sequential):
    def loss(self, x):
        return self[1](self[0](x)).square().mean()


def test_a_check_adds_nothing_to_a_cache_that_is_given():
    model = llama().eval()
    expected = model(input_ids=IDS).logits
    applied(model, attention="sdpa")
    cache = transformers.DynamicCache()
    first = model(input_ids=IDS[:, :8], past_key_values=cache).logits
    assert cache.get_seq_length() == 8
    rest = model(input_ids=IDS[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), expected, rtol=1e-4, atol=1e-4)
    model(input_ids=IDS)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_blocks_that_are_computed_again_do_not_cache_again(attention):
    model, mask = llama(attention).train(), torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)

    def gradients():
        model.zero_grad()
        model(input_ids=IDS, labels=IDS, attention_mask=mask).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    before = gradients()
    applied(model, checkpoint=1)
    torch.testing.assert_close(gradients(), before)


def test_a_second_recipe_is_refused_until_the_first_is_undone():
    model = Model(Block(), Block())
    first, _ = applied(model, precision="bf16")
    with pytest.raises(FlopwiseError, match="recipe on already"):
        applied(model, precision="bf16")
    first.undo()
    applied(model, precision="bf16")


def test_a_step_that_does_not_call_the_model_is_told_that_it_runs_without_autocast(capsys):
    model = Model(Block(), Block())
    done, optimizer = applied(model, precision="bf16")
    model.loss(torch.randn(4, 8)).backward()
    optimizer.step()
    assert any("without autocast" in line for line in done.refused)
    assert "without autocast" in capsys.readouterr().err
    other = Model(Block(), Block())
    done, optimizer = applied(other, precision="bf16")
    other(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    assert done.refused == []


def test_running_statistics_are_not_counted_twice():
    model = Model(Block(nn.BatchNorm1d), Block(nn.BatchNorm1d))
    done, _ = applied(model, checkpoint=1)
    assert any("BatchNorm1d" in line for line in done.refused)


def test_a_first_call_under_inference_mode_is_no_check():
    model = llama("sdpa")
    done, optimizer = applied(model, projections="fused")
    with torch.inference_mode():
        model(input_ids=IDS)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert done.refused == []


def test_a_norm_whose_eps_is_the_dtypes_is_recognised():
    model = Model(Block(nn.RMSNorm), Block(nn.RMSNorm))
    done, optimizer = applied(model, norm="triton")
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    assert done.refused == []
    assert any("RMSNorm" in line for line in done.done)


def test_a_lever_that_is_not_for_ones_own_model_is_said():
    model = Model(Block(), Block())
    done, _ = applied(model, precision="bf16", parallel="ddp")
    assert done.refused == ["parallel = 'ddp' cannot be put onto a model of your own"]


@pytest.mark.parametrize("recipe", [None, 8, ["fp8"]])
def test_what_is_no_recipe_is_said(recipe):
    with pytest.raises(FlopwiseError, match=r"recipe = .* is not allowed"):
        flopwise.apply(Model(Block(), Block()), recipe=recipe)
