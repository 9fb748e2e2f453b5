"""A Hugging Face `config.json` as a ModelSpec: a local file, nothing downloaded, nothing executed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError, one_line
from flopwise.spec import fields
from flopwise.spec.model import ModelSpec

MAX_CONFIG_BYTES = 8 * 2**20  # real ones are a few KiB


def read(path: str | Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Read a config file (or the folder that holds one): the shape, and the fields of its text model."""
    file, config = _load(path)
    return from_config(config, name=file.parent.name or file.stem, source=str(file)), _text_model(config)


def notes(target: str, own_model: bool = True) -> tuple[str, ...]:
    """What an account of a workload's config file leaves out; `own_model`: flopwise's, which has no dropout."""
    try:
        return notes_of(_load(target.removeprefix("hf:"))[1], own_model) if target.startswith("hf:") else ()
    except FlopwiseError:  # a workload of another day, whose file is gone
        return ()


def notes_of(config: dict[str, Any], own_model: bool = True) -> tuple[str, ...]:
    """As `notes`, of a config that was read.

    >>> notes_of({"model_type": "llama", "attention_dropout": 0.1, "parallel_residual": True})
    ('dropout is not counted, neither masks nor time: attention_dropout = 0.1', 'not read: parallel_residual')
    """
    text, found = _text_model(config), []
    if text is not config:
        whole = config.get("model_type")
        rest = f"the rest of {fields.show(whole)}" if isinstance(whole, str) else "the rest of the model"
        found.append(f"text_config alone is accounted for, not {rest}")
    dropout = [k for k, v in text.items() if re.search(r"dropout|_pdrop$", k) and isinstance(v, int | float) and v > 0]
    if dropout and own_model:
        shown = ", ".join(f"{key} = {fields.show(text[key])}" for key in dropout[:_SHOWN])
        found.append(f"dropout is not counted, neither masks nor time: {shown}")
    unread = [key for key in text if not _is_known(key)]
    if unread and own_model:
        more = f" and {len(unread) - _SHOWN} more" if len(unread) > _SHOWN else ""
        found.append("not read: " + ", ".join(one_line(key, 60) for key in unread[:_SHOWN]) + more)
    return tuple(found)


def with_changes(config: dict[str, Any], spec: ModelSpec, source: str) -> dict[str, Any]:
    """The config of `spec`, a changed shape of this one, for whoever builds from the config.

    >>> with_changes(gpt2 := {"model_type": "gpt2", "n_embd": 64, "n_layer": 9, "n_head": 4, "vocab_size": 8},
    ...              from_config(gpt2).with_fields({"n_layers": 2}), "config.json")["n_layer"]
    2
    """
    names = _NAMES["gpt2" if config.get("model_type") == "gpt2" else "llama"]
    changed = config | {key: value for field, key in names.items() if (value := getattr(spec, field))}
    if isinstance(types := config.get("layer_types"), list):
        changed["layer_types"] = types[: spec.n_layers]
    said = msgspec.structs.asdict(from_config(changed, spec.name, source))
    left = [field for field, value in msgspec.structs.asdict(spec).items() if said[field] != value]
    if left:
        raise FlopwiseError(
            f"{left[0]} cannot be set for implementation = 'transformers': {source} has no one field for it",
            f"change the file, or use implementation = flopwise; to set here: {', '.join(names)}",
        )
    return changed


def _load(path: str | Path) -> tuple[Path, dict[str, Any]]:
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
    return file, config


def _text_model(config: dict[str, Any]) -> dict[str, Any]:
    """A multimodal file keeps its language model's fields apart."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _is_known(key: str) -> bool:
    read = any(key in names.values() for names in _NAMES.values())
    return read or key in _READ or key in _NO_COST or key in _BEYOND or bool(_NO_COST_LIKE.search(key))


def from_config(config: dict[str, Any], name: str = "hf", source: str = "config.json") -> ModelSpec:
    """The shape a config describes.

    >>> from_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}).d_ff
    3072
    """
    config = _text_model(config)
    family = config.get("model_type")
    if family is None:
        raise FlopwiseError(f"{source} has no field model_type", f"families read: {', '.join(_FAMILIES)}")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise FlopwiseError(
            f"{source}: model_type = {fields.show(family)} is not a family flopwise's own model can take the shape of",
            f"families read: {', '.join(_FAMILIES)}; for any other model use py:module:factory",
        )
    _refuse_what_is_beyond(config, source)
    names = _NAMES["gpt2" if family == "gpt2" else "llama"]
    missing = [names[field] for field in _NEEDED if field in names and config.get(names[field]) is None]
    missing = [key for key in missing if key != "n_inner"]
    if missing:
        raise FlopwiseError(
            f"{source} has no field{'s' * (len(missing) > 1)} {', '.join(missing)}",
            f"this family's config needs {'them' if len(missing) > 1 else 'it'}",
        )
    try:
        return _FAMILIES[family](_Config(config, source), name)
    except FlopwiseError as error:
        message, hint = (
            re.sub(r"[a-z_]+", lambda word: names.get(word[0], word[0]), said) for said in (error.message, error.hint)
        )
        raise FlopwiseError(error.message if source in error.message else f"{source}: {message}", hint) from None


class _Config:
    """A config with its source, so that a missing or mistyped field gets a clear line."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def whole(self, field: str, default: int | None = None) -> int:
        value = self.config.get(field)
        if value is None:
            assert default is not None, field  # what has none is asked for before
            return default
        fields.whole(field, value, 1, 10_000_000 if default is None or field == "n_inner" else 100_000_000)
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


# ModelSpec's fields and the files', where one is the other.
_NAMES = {
    "llama": {
        "d_model": "hidden_size", "d_ff": "intermediate_size", "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
        "vocab": "vocab_size", "norm_eps": "rms_norm_eps", "max_context": "max_position_embeddings",
    },
    "gpt2": {
        "d_model": "n_embd", "d_ff": "n_inner", "n_layers": "n_layer", "n_heads": "n_head", "vocab": "vocab_size",
        "norm_eps": "layer_norm_epsilon", "max_context": "n_positions",
    },
}  # fmt: skip
_NEEDED = ("d_model", "d_ff", "n_layers", "n_heads", "vocab")
_SHOWN = 5
_READ = {
    "model_type", "attention_bias", "mlp_bias", "hidden_act", "activation_function", "rope_theta", "rope_parameters",
    "tie_word_embeddings", "sliding_window", "use_sliding_window",
}  # fmt: skip
# What changes no FLOP, byte or kernel of a step.
_NO_COST = {
    "architectures", "auto_map", "dtype", "torch_dtype", "initializer_range", "use_cache", "pretraining_tp", "rope_scaling",
    "max_window_layers", "layer_types", "n_ctx", "task_specific_params", "reorder_and_upcast_attn", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "id2label", "label2id", "return_dict", "output_attentions", "output_hidden_states",
    "model_max_length", "attn_implementation", "is_encoder_decoder", "name_or_path", "gradient_checkpointing",
    "problem_type", "chunk_size_feed_forward", "torchscript", "finetuning_task", "tokenizer_class",
}  # fmt: skip
_NO_COST_LIKE = re.compile(r"^_|_token_ids?$|_version$|^summary_|dropout|_pdrop$")

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
        n_kv_heads=config.whole("num_key_value_heads", 8 if family == "mistral" else n_heads),  # Mistral's default
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
