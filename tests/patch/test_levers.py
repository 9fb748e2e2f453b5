"""Levers on a model of transformers and its AdamW: results, checkpoints both ways, the way back."""

import copy

import pytest
import torch
from torch import nn

from flopwise.errors import Unsupported
from flopwise.patch.levers import PatchedModel

transformers = pytest.importorskip("transformers")
VOCABULARY = 160
MASTER = {"optimizer": "flopwise", "precision": "bf16-master"}
LEVERS = [
    {"loss": "fused"},
    {"optimizer": "fused", "checkpoint": 1},
    {"optimizer": "flopwise", "overlap": "on"},
    {"precision": "bf16-master"},
    {"loss": "fused", "overlap": "on", **MASTER},
]


def made(seed=0, tied=False):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(model, optimizer, steps=3, half=False):
    tokens = torch.arange(64).reshape(2, 32) * 7 % VOCABULARY
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return list(one) == list(other) and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


@pytest.mark.parametrize("levers", LEVERS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_levers_train_alike_and_checkpoints_fit_both_ways(levers, tied):
    half = "precision" in levers
    expected = trained(*made(tied=tied), half=half)
    model, optimizer = made(tied=tied)
    before = values(model)
    patched = PatchedModel([model], [optimizer], levers)
    patched.install()
    assert same(before, model.state_dict())
    assert trained(model, optimizer, half=half) == pytest.approx(expected, rel=1e-3 if half else 1e-5)
    saved, states = values(model), copy.deepcopy(optimizer.state_dict())
    patched.undo()
    assert same(saved, model.state_dict())
    plain = made(1, tied)  # the checkpoint of a patched model in one that is not
    plain[0].load_state_dict(saved)
    plain[1].load_state_dict(copy.deepcopy(states))
    continued = trained(*plain, steps=2)
    assert trained(model, optimizer, steps=2) == pytest.approx(continued, rel=1e-6)
    again = made(2, tied)  # and in one that is patched
    PatchedModel([again[0]], [again[1]], levers).install()
    again[0].load_state_dict(saved)
    again[1].load_state_dict(states)
    assert trained(*again, steps=2, half=half) == pytest.approx(continued, rel=1e-3 if half else 1e-5)


def test_what_cannot_be_done_is_named_and_nothing_is_changed():
    model, _ = made()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    patched = PatchedModel([model], [optimizer], {"loss": "fused", "optimizer": "flopwise", "overlap": "on"})
    with pytest.raises(Unsupported, match="decay goes through the moments") as caught:
        patched.install()
    assert caught.value.levers == ("optimizer", "overlap")
    assert "forward" not in vars(model.lm_head)
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize(
    "lever", [{"norm": "eager"}, {"activation": "eager"}, {"rope": "eager"}, {"projections": "separate"}]
)
def test_what_is_written_is_not_put_onto_a_step(lever):
    """Not as one kernel, which is what the other values do."""
    model, optimizer = made()
    ((name, value),) = lever.items()
    patched = PatchedModel([model], [optimizer], lever)
    with pytest.raises(Unsupported, match=f"{name} = '{value}' cannot be put onto a step: it runs as it is written"):
        patched.install()
    assert patched.patched.done == []


@pytest.mark.parametrize("between", ["clips", "accumulates"])
def test_overlap_is_refused_where_gradients_are_used_before_the_step(between):
    model, optimizer = made()
    PatchedModel([model], [optimizer], {"optimizer": "flopwise", "overlap": "on"}).install()
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(2 if between == "accumulates" else 1):
        model(input_ids=tokens, labels=tokens).loss.backward()
    if between == "clips":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(Unsupported, match="overlap") as caught:
        optimizer.step()
    assert caught.value.levers == ("overlap",)


def test_a_second_moment_in_bf16_needs_a_beta_that_decays():
    model, optimizer = made()
    with pytest.raises(Unsupported, match="would never decay"):
        PatchedModel([model], [optimizer], {"optimizer": "flopwise-bf16"}).install()


@pytest.mark.filterwarnings("error:.*lr_scheduler")
def test_a_schedule_and_groups_reach_our_optimizer():
    losses = []
    for levers in ({}, {"optimizer": "flopwise"}, {"optimizer": "flopwise", "overlap": "on"}):
        model, _ = made()
        thin = [p for p in model.parameters() if p.dim() < 2]
        wide = [p for p in model.parameters() if p.dim() >= 2]
        groups = [{"params": wide, "weight_decay": 0.5}, {"params": thin, "lr": 1e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)
        PatchedModel([model], [optimizer], levers).install()
        found = []
        for _ in range(4):
            found += trained(model, optimizer, steps=1)
            schedule.step()
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
