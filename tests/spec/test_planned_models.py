"""Models as a plan sees them: published sizes, and configs of mixtures of experts."""

import json

import pytest

from flopwise.errors import FlopwiseError
from flopwise.spec.layout import Layout, misfit
from flopwise.spec.planned_presets import planned_model

# Billions of parameters, all and those of one token, as each model's makers state them.
PUBLISHED = [
    ("gpt3-175b", 175, 175), ("mt-nlg-530b", 530, 530), ("mixtral-8x7b", 46.7, 12.9), ("mixtral-8x22b", 141, 39),
    ("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235, 22), ("gpt-oss-20b", 20.9, 4.2), ("gpt-oss-120b", 117, 5.7),
    ("deepseek-v3", 671, 37), ("kimi-k2", 1030, 32.6), ("llama3-405b", 405, 405),
]  # fmt: skip
_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "mixtral": {"intermediate_size": 128, "num_key_value_heads": 4, "num_local_experts": 8, "sliding_window": None},
    "qwen3_moe": {"intermediate_size": 256, "moe_intermediate_size": 32, "num_experts": 16, "mlp_only_layers": [0]},
    "gpt_oss": {"intermediate_size": 64, "head_dim": 8, "num_local_experts": 32, "quantization_config": {"bits": 4}},
    "glm4_moe": {"intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1},
    "deepseek_v3": {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}


@pytest.mark.parametrize(("name", "total", "active"), PUBLISHED)
def test_sizes_are_the_published_ones(name, total, active):
    model = planned_model(name)
    assert model.parameters() / 1e9 == pytest.approx(total, rel=0.01)
    assert model.active_parameters() / 1e9 == pytest.approx(active, rel=0.03)


def written(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return f"hf:{path}"


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_with_experts_is_read(tmp_path, family):
    model = planned_model(written(tmp_path, _COMMON | {"model_type": family} | CONFIGS[family]))
    assert (model.experts.chosen, model.spec.d_model) == (2, 64)
    assert model.active_parameters() < model.parameters()
    if family == "deepseek_v3":
        assert (model.latent.q_rank, model.latent.kv_rank, model.experts.shared_d_ff) == (0, 16, 64)
    assert model.experts.dense_layers == {"deepseek_v3": 1, "qwen3_moe": 1}.get(family, 0)


def test_a_config_without_experts_is_read_as_elsewhere(tmp_path):
    config = {"model_type": "llama", **_COMMON, "intermediate_size": 128}
    assert planned_model(written(tmp_path, config)).experts is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_local_experts": None}, "there is no field num_local_experts or num_experts or n_routed_experts"),
        ({"num_experts_per_tok": 9}, "a token cannot choose 9 of 8 experts"),
        ({"num_local_experts": "many"}, "num_local_experts = 'many' is not allowed"),
        ({"hidden_size": None}, "has no field hidden_size"),
        ({"model_type": "mamba"}, "is not a family"),
        ({"kv_lora_rank": 4}, "there is no field qk_nope_head_dim"),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(tmp_path, change, says):
    config = _COMMON | {"model_type": "mixtral"} | CONFIGS["mixtral"] | change
    with pytest.raises(FlopwiseError) as error:
        planned_model(written(tmp_path, config))
    assert says in error.value.message
    assert "config.json" in error.value.message


def test_an_unknown_model_is_refused():
    with pytest.raises(FlopwiseError, match="there is no model preset 'deepseek-v4'") as error:
        planned_model("deepseek-v4")
    assert "did you mean 'deepseek-v3'?" in error.value.hint


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("llama3-8b", Layout(data=3), "a batch of 64 does not divide among 3 data ranks"),
        ("llama3-8b", Layout(tensor=3), "32 heads do not divide among 3 tensor ranks"),
        ("llama3-8b", Layout(pipeline=64), "64 × 1 stages are more than 32 layers"),
        ("llama3-8b", Layout(virtual=2), "need a pipeline"),
        ("llama3-8b", Layout(context=3), "a context of 4096 does not divide"),
        ("llama3-8b", Layout(tensor=8, context=8, context_way="ulysses"), "8 × 8 ranks"),
        ("llama3-8b", Layout(data=4, shard_ranks=3), "groups of 3"),
        ("llama3-8b", Layout(data=8, expert=8), "has no experts"),
        ("mixtral-8x7b", Layout(data=16, expert=16), "8 experts do not divide among 16 ranks"),
        ("mixtral-8x7b", Layout(data=1, expert=8), "8 expert ranks do not divide 1 × 1 × 1 ranks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(name, layout, says):
    found = misfit(planned_model(name), layout, 64, 4096)
    assert says in found[0]


def test_a_layout_that_can_be_has_no_misfit():
    assert misfit(planned_model("gpt-oss-20b"), Layout(tensor=64, expert=32), 64, 4096) is None
