"""Tokens drawn with a cache are those that the whole model would give."""

import pytest
import torch

from flopwise.lm.generation import Place
from flopwise.lm.sampling import Sampler, choose
from flopwise.lm.transformer import Transformer
from flopwise.spec.model import preset
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import workload


def model(**changes):
    torch.manual_seed(0)
    spec = workload("tiny", set={"n_layers": 2, "vocab": 64} | changes).subject
    return Transformer(spec, Recipe(), 40)


@torch.no_grad()
def greedy(whole, prompt, new):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(whole(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize(
    "changes", [{}, {"positions": "learned", "max_context": 40}, {"n_kv_heads": 1}, {"qk_norm": True}]
)
@pytest.mark.parametrize("fixed", [False, True], ids=["grows", "as in a graph"])
def test_with_a_cache_it_says_the_same(changes, fixed, monkeypatch):
    prompts = [[1, 2, 3, 4, 5], [7, 8], [9]]
    expected = [greedy(model(**changes), prompt, 12) for prompt in prompts]
    sampler = Sampler(model(**changes), 3, 17, torch.float32, graph=fixed)
    monkeypatch.setattr(sampler, "_captured", lambda *_: sampler._advance)
    found = sampler.draw(prompts, 12, temperature=0.0)
    assert found.tokens == expected
    assert found.new_tokens == 36
    assert found.decode_steps == 15


def test_the_same_seed_says_the_same():
    texts = [Sampler(model(), 1, 20, torch.float32).draw([[1]], 19, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_p_leaves_only_what_is_likely():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(500, 3)
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (1.0, {0, 1, 2})):
        assert set(choose(logits, 1.0, top_p).tolist()) == kept


def test_a_fixed_place_sees_what_is_before_it():
    place = Place(2)
    place.fix(5, torch.device("cpu"))
    assert place.mask.tolist() == [True, True, True, False, False]
    place.move(4)
    assert (place.index.tolist(), place.mask.all()) == ([4], True)


def test_a_cache_in_half_precision_takes_half():
    spec = preset("tiny")
    sizes = [
        Sampler(Transformer(spec, Recipe(), 8), 1, 8, dtype).cache_bytes for dtype in (torch.float32, torch.bfloat16)
    ]
    assert sizes[0] == 2 * sizes[1] == spec.n_layers * 2 * spec.n_kv_heads * 8 * spec.head_dim * 4
