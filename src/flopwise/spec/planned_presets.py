"""Models that a plan knows by name: all presets, and those that only a cluster trains."""

from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields, hf_experts
from flopwise.spec.model import GPT2, ModelSpec, preset, preset_names
from flopwise.spec.planned_model import Experts, Latent, PlannedModel

# Sizes and vocabularies as in each model's published config.json on the Hugging Face hub (deepseek-ai/DeepSeek-V3,
# moonshotai/Kimi-K2-Base, Qwen/Qwen3-30B-A3B and -235B-A22B, mistralai/Mixtral-8x7B-v0.1 and -8x22B-v0.1,
# openai/gpt-oss-20b and -120b); GPT-3: Brown et al. 2020, table 2.1; MT-NLG: Smith et al. 2022, section 3.1.
# What they have besides and a step's cost barely feels is left out: sliding windows of every second layer, multi-token heads.
_MLA = Latent(q_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
_QWEN3: dict[str, Any] = {"n_kv_heads": 4, "head_dim": 128, "vocab": 151_936, "qk_norm": True, "rope_theta": 1e6}
_GPT_OSS: dict[str, Any] = {"n_kv_heads": 8, "head_dim": 64, "vocab": 201_088, "qkv_bias": True, "out_bias": True}
_GPT3: dict[str, Any] = GPT2 | {"max_context": 2048}


def _model(
    name: str,
    sizes: tuple[int, int, int, int],
    experts: Experts | None = None,
    latent: Latent | None = None,
    **others: Any,
) -> PlannedModel:
    """`sizes`: d_model, d_ff, layers and heads, as of the other presets."""
    d_model, d_ff, n_layers, n_heads = sizes
    spec = ModelSpec(name=name, d_model=d_model, d_ff=d_ff, n_layers=n_layers, n_heads=n_heads, **others)
    return PlannedModel(spec=spec, experts=experts, latent=latent)


def _experts(count: int, chosen: int, d_ff: int, shared_d_ff: int = 0, dense_layers: int = 0) -> Experts:
    return Experts(count=count, chosen=chosen, d_ff=d_ff, shared_d_ff=shared_d_ff, dense_layers=dense_layers)


_PRESETS = {
    one.name: one
    for one in (
        _model("gpt3-175b", (12288, 49152, 96, 96), **_GPT3),
        _model("mt-nlg-530b", (20480, 81920, 105, 128), **_GPT3),
        _model("mixtral-8x7b", (4096, 14336, 32, 32), _experts(8, 2, 14336), n_kv_heads=8, vocab=32_000),
        _model("mixtral-8x22b", (6144, 16384, 56, 48), _experts(8, 2, 16384), n_kv_heads=8, vocab=32_000),
        _model("qwen3-30b-a3b", (2048, 6144, 48, 32), _experts(128, 8, 768), **_QWEN3),
        _model("qwen3-235b-a22b", (4096, 12288, 94, 64), _experts(128, 8, 1536), **_QWEN3),
        _model("gpt-oss-20b", (2880, 2880, 24, 64), _experts(32, 4, 2880), **_GPT_OSS),
        _model("gpt-oss-120b", (2880, 2880, 36, 64), _experts(128, 4, 2880), **_GPT_OSS),
        _model(
            "deepseek-v3", (7168, 18432, 61, 128), _experts(256, 8, 2048, 2048, 3), _MLA, head_dim=192, vocab=129_280
        ),
        _model("kimi-k2", (7168, 18432, 61, 64), _experts(384, 8, 2048, 2048, 1), _MLA, head_dim=192, vocab=163_840),
    )
}


def planned_names() -> tuple[str, ...]:
    """Every model that a plan knows by name.

    >>> planned_names()[-1]
    'kimi-k2'
    """
    return (*preset_names(), *_PRESETS)


def planned_model(target: str, changes: dict[str, Any] | None = None) -> PlannedModel:
    """A preset, or `hf:PATH/config.json`; `changes` to fields of its shape.

    >>> planned_model("deepseek-v3").parameters() // 10**9, planned_model("llama3-8b", {"n_layers": 2}).spec.n_layers
    (671, 2)
    """
    fields.text("model", target)
    if target.startswith("hf:"):
        found = hf_experts.read(target.removeprefix("hf:"))
    elif (known := next((key for key in planned_names() if key.lower() == target.lower()), None)) is not None:
        found = _PRESETS.get(known) or PlannedModel(spec=preset(known))
    else:
        near = fields.did_you_mean(target.lower(), planned_names())
        hint = f"{near}presets: {', '.join(planned_names())}; or hf:PATH/config.json"
        raise FlopwiseError(f"there is no model preset {fields.show(target)}", hint)
    return msgspec.structs.replace(found, spec=found.spec.with_fields(changes)) if changes else found
