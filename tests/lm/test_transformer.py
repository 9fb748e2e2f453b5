"""The model is the models it claims to be, and a language model at all."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.lm.transformer import Transformer
from flopwise.spec.hf_config import from_config
from flopwise.spec.model import preset, preset_names
from flopwise.spec.recipe import Recipe

from .reference import GROUPED, SPECS, batch, shake

_LLAMA = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
CONFIGS = {
    "llama": {**_LLAMA, "rms_norm_eps": 1e-5},
    "llama-biased": {**_LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16, "rope_theta": 500_000.0},
    "mistral": {**_LLAMA, "sliding_window": None},
    "qwen2": {**_LLAMA, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "head_dim": 20, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    "gpt2": {
        "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0,
    },
}  # fmt: skip

_NAMES = {  # transformers' name for ours
    "model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head", "model.layers": "blocks",
    "self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out", "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down",
    "transformer.wte": "embedding", "transformer.wpe": "positions", "transformer.ln_f": "norm",
    "transformer.h": "blocks", "ln_1": "attention_norm", "ln_2": "mlp_norm",
    "attn.c_proj": "attention.out", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down",
}  # fmt: skip


def theirs(name: str, device: str) -> tuple[torch.nn.Module, dict[str, object]]:
    """The transformers library's own model, and its config as a config.json would have it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **CONFIGS[name])
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config), config.to_dict()


def copy_weights(their_model: torch.nn.Module, our_model: Transformer) -> None:
    weights = {}
    for their_name, weight in their_model.named_parameters():
        if ".c_" in their_name:  # GPT-2 keeps these matrices transposed
            weight = weight.T if weight.dim() == 2 else weight
        name = their_name
        for theirs_part, our_part in _NAMES.items():
            name = name.replace(theirs_part + ".", our_part + ".")
        if "attn.c_attn" in name:  # and q, k and v in one
            for part, piece in zip("qkv", weight.chunk(3), strict=True):
                weights[name.replace("attn.c_attn", f"attention.{part}")] = piece
        else:
            weights[name] = weight
    if our_model.spec.tied:
        weights["head.weight"] = weights["embedding.weight"]
    our_model.load_state_dict(weights)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_count_equals_the_transformers_library(name: str) -> None:
    their_model, config = theirs(name, "meta")
    with torch.device("meta"):
        model = Transformer(from_config(config), Recipe())
    assert model.n_parameters() == sum(p.numel() for p in their_model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_transformers_library(name: str) -> None:
    their_model, config = theirs(name, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in their_model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    model = Transformer(from_config(config), Recipe(attention="naive"))
    copy_weights(their_model, model)
    tokens, _ = batch(model.spec, context=40)
    with torch.no_grad():
        expected = their_model.eval()(input_ids=tokens).logits
        torch.testing.assert_close(model(tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),  # the published checkpoints
        ("gpt2-xl", 1_557_611_200),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("small", 128_625_408),
        ("2.7B", 3_406_809_600),
    ],
)
def test_parameter_counts_known_from_elsewhere(name: str, count: int) -> None:
    with torch.device("meta"):
        assert Transformer(preset(name), Recipe()).n_parameters() == count


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied, untied = (Transformer(GROUPED.with_fields({"tied": t}), Recipe()) for t in (True, False))
    assert tied.head_weight is tied.embedding.weight
    assert untied.head_weight is not untied.embedding.weight
    assert untied.n_parameters() - tied.n_parameters() == GROUPED.vocab * GROUPED.d_model
    assert tied.to(torch.bfloat16).head_weight is tied.embedding.weight


def test_initial_loss_is_that_of_guessing_and_no_lever_moves_the_weights() -> None:
    spec = preset("tiny")
    weights = []
    for recipe in (Recipe(), Recipe(attention="naive", norm="eager", activation="eager", checkpoint=1)):
        torch.manual_seed(0)
        weights.append(Transformer(spec, recipe).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    model = Transformer(spec, Recipe())
    tokens, targets = batch(spec, rows=4, context=64)
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(spec.vocab), rel=0.02)


def test_rotary_frequencies_survive_bf16_weights() -> None:
    """A past bug of many models: bf16 cannot tell position 257 from 256."""
    spec = GROUPED
    model = shake(Transformer(spec, Recipe()))
    tokens = torch.full((1, 600), 5)
    tokens[0, ::2] = 7
    with torch.no_grad():
        exact = model(tokens)
        pure = model.to(torch.bfloat16)(tokens).float()
    late = (pure - exact)[:, 300:].abs().mean() / exact[:, 300:].abs().mean()
    early = (pure - exact)[:, :100].abs().mean() / exact[:, :100].abs().mean()
    assert late < 2 * early


_MODELS = {
    (name, attention): shake(Transformer(spec, Recipe(attention=attention)))
    for name, spec in SPECS.items()
    for attention in ("naive", "sdpa")
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(_MODELS)), st.integers(1, 32), st.data())
def test_a_later_token_never_changes_an_earlier_logit(
    which: tuple[str, str], context: int, data: st.DataObject
) -> None:
    model = _MODELS[which]
    position = data.draw(st.integers(0, context - 1))
    tokens, _ = batch(model.spec, rows=1, context=context, seed=data.draw(st.integers(0, 99)))
    changed = tokens.clone()
    changed[0, position] = (tokens[0, position] + 1) % model.spec.vocab
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(before[:, position:], after[:, position:], atol=1e-4)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", [n for n in preset_names() if n not in ("llama3-70b", "llama3-405b")])
def test_parameters_are_counted_without_building_the_model(name):
    with torch.device("meta"):
        assert Transformer(preset(name), Recipe()).n_parameters() == preset(name).parameters()


def test_parameters_are_counted_for_every_odd_shape():
    for spec in SPECS.values():
        with torch.device("meta"):
            assert Transformer(spec, Recipe()).n_parameters() == spec.parameters()
