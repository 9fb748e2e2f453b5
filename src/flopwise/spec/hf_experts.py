"""A Hugging Face `config.json` of a mixture of experts as a PlannedModel; of any other model, as `hf_config` reads it."""

from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields, hf_config
from flopwise.spec.planned_model import Experts, Latent, PlannedModel

# Families with experts, and the family without that the rest of each is like.
_LIKE = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2",
    "qwen3_moe": "qwen3",
    "glm4_moe": "qwen3",
    "gpt_oss": "llama",
    "deepseek_v2": "llama",
    "deepseek_v3": "llama",
    "kimi_k2": "llama",
}
_ANY, _HASH = {"model", "models", "config", "configs", "hf", "checkpoint", "tmp", "download", "downloads"}, 40
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_COUNT = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token")
_LEFT_OUT = {*_COUNT, "quantization_config", "sliding_window"}  # a plan trains in the precision that it is asked for


def read(path: str | Path) -> PlannedModel:
    """Read a config file, or the folder that holds one."""
    file, config = hf_config.load(path)
    return from_config(config, _name(config, file), str(file))


def _name(config: dict[str, Any], file: Path) -> str:
    """What the config calls itself; else its folder, unless that could be any model's; else its family."""
    own = config.get("_name_or_path")
    if isinstance(own, str) and (name := own.rstrip("/").rpartition("/")[2]) not in ("", ".", ".."):
        return name
    folder, family = file.resolve().parent.name, _family(config)
    says_little = folder.lower() in _ANY or len(folder) == _HASH or not folder
    return family if says_little and family else folder or file.stem


def _family(config: dict[str, Any]) -> str:
    family = hf_config.text_model(config).get("model_type")
    return family if isinstance(family, str) else ""


def from_config(config: dict[str, Any], name: str = "hf", source: str = "config.json") -> PlannedModel:
    """The model that a config describes.

    >>> from_config({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    ...     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    ...     "num_experts_per_tok": 2}).parameters() // 10**9
    46
    """
    text = hf_config.text_model(config)
    family = text.get("model_type")
    known = (*hf_config.FAMILIES, *_LIKE)
    if isinstance(family, str) and family not in known:
        message = f"{source}: model_type = {fields.show(family)} is not a family that a plan reads"
        raise FlopwiseError(message, f"families read: {', '.join(known)}")
    if not isinstance(family, str) or family not in _LIKE:
        return PlannedModel(spec=hf_config.from_config(config, name, source))
    plain = {key: value for key, value in text.items() if key not in _LEFT_OUT} | {"model_type": _LIKE[family]}
    given = hf_config.Config(text)
    try:
        latent = _latent(given)
        if latent is not None:  # its heads are projected from a latent vector: their number and width are its own
            plain |= {
                "head_dim": latent.plain_dim + latent.rope_dim,
                "num_key_value_heads": text["num_attention_heads"],
            }
        spec = hf_config.from_config(plain, name, source)
        experts = _experts(given, spec.n_layers, spec.d_ff)
        return PlannedModel(spec=msgspec.structs.replace(spec, name=name), experts=experts, latent=latent)
    except FlopwiseError as error:
        raise FlopwiseError(
            error.message if source in error.message else f"{source}: {error.message}", error.hint
        ) from None


def _first(given: hf_config.Config, names: tuple[str, ...]) -> int:
    name = next((one for one in names if given.config.get(one) is not None), None)
    if name is None:
        raise FlopwiseError(f"there is no field {' or '.join(names)}", "this family's config needs it")
    return given.whole(name)


def _experts(given: hf_config.Config, layers: int, d_ff: int) -> Experts:
    own = given.whole("moe_intermediate_size", d_ff)
    shared = given.config.get("n_shared_experts") or 0
    every = given.whole("decoder_sparse_step", 1)
    only = given.config.get("mlp_only_layers")
    plain = {one for one in only if isinstance(one, int)} if isinstance(only, list) else set()
    dense = sum((layer + 1) % every != 0 or layer in plain for layer in range(layers)) if plain or every > 1 else 0
    return Experts(
        count=_first(given, _COUNT),
        chosen=_first(given, _CHOSEN),
        d_ff=own,
        shared_d_ff=given.whole("n_shared_experts", 0) * own
        if shared
        else given.whole("shared_expert_intermediate_size", 0),
        dense_layers=dense
        or (given.whole("first_k_dense_replace", 0) if given.config.get("first_k_dense_replace") else 0),
    )


def _latent(given: hf_config.Config) -> Latent | None:
    if not any(given.config.get(name) for name in _LATENT):
        return None
    _first(given, ("num_attention_heads",))
    sizes = {"kv_rank": "kv_lora_rank", "plain_dim": "qk_nope_head_dim", "value_dim": "v_head_dim"}
    found = {field: _first(given, (name,)) for field, name in sizes.items()}
    return Latent(q_rank=given.whole("q_lora_rank", 0), rope_dim=given.whole("qk_rope_head_dim", 0), **found)
