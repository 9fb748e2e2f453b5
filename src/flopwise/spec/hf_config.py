"""A Hugging Face `config.json` as a ModelSpec: a local file, nothing downloaded, nothing executed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.model import ModelSpec

MAX_CONFIG_BYTES = 8 * 2**20  # real ones are a few KiB


def read(path: str | Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Read a config file (or the folder that holds one): the shape, and the file's own fields."""
    file = Path(path)
    try:
        file = file.expanduser()
        file = file / "config.json" if file.is_dir() else file
        if file.is_fifo():
            raise FlopwiseError(f"{file} is a pipe, not a file", "hf: takes the path of a local config.json")
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise FlopwiseError(f"{file} is too large for a model's config", "a config.json has a few KiB")
        config = msgspec.json.decode(text)
    except OSError as error:
        raise FlopwiseError(
            f"cannot read {file}: {error.strerror}", "hf: takes the path of a local config.json"
        ) from None
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:  # or nested too deep, no such home
        raise FlopwiseError(f"{file} is not JSON: {error}", "hf: takes the path of a local config.json") from None
    if not isinstance(config, dict):
        raise FlopwiseError(f"{file} holds no JSON object", "hf: takes the path of a local config.json")
    return from_config(config, name=file.parent.name or file.stem, source=str(file)), config


def from_config(config: dict[str, Any], name: str = "hf", source: str = "config.json") -> ModelSpec:
    """The shape a config describes.

    >>> from_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}).d_ff
    3072
    """
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    family = config.get("model_type")
    if family is None:
        raise FlopwiseError(f"{source} has no field model_type", f"families read: {', '.join(_FAMILIES)}")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise FlopwiseError(
            f"{source}: model_type = {fields.show(family)} is not a family flopwise's own model can take the shape of",
            f"families read: {', '.join(_FAMILIES)}; for any other model use py:module:factory",
        )
    _refuse_what_is_beyond(config, source)
    try:
        return _FAMILIES[family](_Config(config, source), name)
    except FlopwiseError as error:
        raise FlopwiseError(
            error.message if source in error.message else f"{source}: {error.message}", error.hint
        ) from None


class _Config:
    """A config with its source, so that a missing or mistyped field gets a clear line."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def whole(self, field: str, default: int | None = None) -> int:
        value = self.config.get(field)
        if value is None:
            if default is None:
                raise FlopwiseError(f"{self.source} has no field {field}", "this family's config needs it")
            return default
        fields.whole(field, value, 1, 100_000_000)
        return int(value)

    def real(self, field: str, default: float) -> float:
        value = self.config.get(field)
        if value is None:
            return default
        fields.number(field, value, 0.0, 1e12)
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.config.get(field)
        if value is None:
            return default
        fields.flag(field, value)
        return bool(value)

    def rope_theta(self) -> float:
        nested = self.config.get("rope_parameters")  # transformers 5 writes it here
        if isinstance(nested, dict) and nested.get("rope_theta") is not None:
            fields.number("rope_theta", nested["rope_theta"], 1.0, 1e12)
            return float(nested["rope_theta"])
        return self.real("rope_theta", 10_000.0)

    def window(self) -> int:
        on = self.flag("use_sliding_window", self.config.get("model_type") == "mistral")
        return self.whole("sliding_window", 0) if on and self.config.get("sliding_window") not in (None, 0) else 0


# Fields that change what a model is, and that no spec here can say: better refused than counted wrongly.
_BEYOND = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "vision_config": "a model with a vision part",
    "audio_config": "a model with an audio part",
    "quantization_config": "a quantised model",
}


def _refuse_what_is_beyond(config: dict[str, Any], source: str) -> None:
    for field, what in _BEYOND.items():
        if config.get(field) not in (None, 0, 1, {}, []):
            raise FlopwiseError(
                f"{source} describes {what} ({field}), which flopwise cannot account for",
                "take the field out to count the rest as a plain decoder, or give your own step as py:module:factory",
            )


def _llama(config: _Config, name: str) -> ModelSpec:
    family = config.config["model_type"]
    n_heads = config.whole("num_attention_heads")
    bias = config.flag("attention_bias", False)
    activation = config.config.get("hidden_act", "silu")
    fields.one_of("hidden_act", activation, ("silu", "swish"))
    return ModelSpec(
        name=name,
        d_model=config.whole("hidden_size"),
        d_ff=config.whole("intermediate_size"),
        n_layers=config.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=config.whole("num_key_value_heads", n_heads),
        head_dim=config.whole("head_dim", 128 if family == "qwen3" else 0),  # Qwen3's default, whatever the width
        vocab=config.whole("vocab_size"),
        norm_eps=config.real("rms_norm_eps", 1e-6),
        rope_theta=config.rope_theta(),
        qkv_bias=True if family == "qwen2" else bias,  # Qwen2 has biases on q, k and v alone, whatever the file says
        out_bias=False if family == "qwen2" else bias,
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        tied=config.flag("tie_word_embeddings", False),
        max_context=config.whole("max_position_embeddings", 0),
        window=config.window(),
    )


def _gpt2(config: _Config, name: str) -> ModelSpec:
    d_model = config.whole("n_embd")
    fields.one_of(
        "activation_function",
        config.config.get("activation_function", "gelu_new"),
        ("gelu_new", "gelu", "gelu_pytorch_tanh"),
    )
    return ModelSpec(
        name=name,
        d_model=d_model,
        d_ff=config.whole("n_inner", 4 * d_model),
        n_layers=config.whole("n_layer"),
        n_heads=config.whole("n_head"),
        vocab=config.whole("vocab_size"),
        mlp="gelu",
        norm_kind="layer",
        norm_eps=config.real("layer_norm_epsilon", 1e-5),
        positions="learned",
        max_context=config.whole("n_positions", 1024),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=config.flag("tie_word_embeddings", True),
    )


_FAMILIES: dict[str, Callable[[_Config, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt2": _gpt2,
}
