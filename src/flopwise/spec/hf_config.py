"""A Hugging Face `config.json` as a ModelSpec: a local file, nothing downloaded, nothing executed."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError, one_line
from flopwise.spec import fields
from flopwise.spec.model import GPT2, ModelSpec

MAX_CONFIG_BYTES = 8 * 2**20  # real ones are a few KiB
_LOCAL = "hf: takes the path of a local config.json"


def read(path: str | Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Read a config file (or the folder that holds one): the shape, and the fields of its text model."""
    file, config = load(path)
    return from_config(config, name=file.parent.name or file.stem, source=str(file)), text_model(config)


def notes(target: str, own_model: bool = True) -> tuple[str, ...]:
    """What an account of a workload's config file leaves out; `own_model`: flopwise's, which has no dropout."""
    try:
        return notes_of(load(target.removeprefix("hf:"))[1], own_model) if target.startswith("hf:") else ()
    except FlopwiseError:  # the file of a stored workload may be gone
        return ()


def notes_of(config: dict[str, Any], own_model: bool = True) -> tuple[str, ...]:
    """As `notes`, of a config that was read.

    >>> notes_of({"model_type": "llama", "attention_dropout": 0.1, "parallel_residual": True})
    ('dropout is not counted, neither masks nor time: attention_dropout = 0.1', 'not read: parallel_residual')
    """
    text, found = text_model(config), []
    if text is not config:
        whole = config.get("model_type")
        rest = f"the rest of {fields.show(whole)}" if isinstance(whole, str) else "the rest of the model"
        found.append(f"text_config alone is accounted for, not {rest}")
    if own_model:
        found += [*_dropout_note(text), *_unread_note(text)]
    return tuple(found)


def _dropout_note(text: dict[str, Any]) -> list[str]:
    dropout = [k for k, v in text.items() if re.search(r"dropout|_pdrop$", k) and isinstance(v, int | float) and v > 0]
    shown = ", ".join(f"{key} = {fields.show(text[key])}" for key in dropout[:_SHOWN])
    return [f"dropout is not counted, neither masks nor time: {shown}"] if dropout else []


def _unread_note(text: dict[str, Any]) -> list[str]:
    read = {name for names in _NAMES.values() for name in names.values()}
    unread = [key for key in text if key not in read and key not in _BEYOND and not _KNOWN.fullmatch(key)]
    more = f" and {len(unread) - _SHOWN} more" if len(unread) > _SHOWN else ""
    return ["not read: " + ", ".join(one_line(key, 60) for key in unread[:_SHOWN]) + more] if unread else []


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
    read = msgspec.structs.asdict(from_config(changed, spec.name, source))
    left = [field for field, value in msgspec.structs.asdict(spec).items() if read[field] != value]
    if left:
        raise FlopwiseError(
            f"{left[0]} cannot be set for implementation = 'transformers': {source} has no one field for it",
            f"change the file, or use implementation = flopwise; to set here: {', '.join(names)}",
        )
    return changed


def load(path: str | Path) -> tuple[Path, dict[str, Any]]:
    file = Path(path)
    try:
        file = file.expanduser()
        file = file / "config.json" if file.is_dir() else file
        if file.is_fifo():
            raise FlopwiseError(f"{file} is a pipe, not a file", _LOCAL)
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise FlopwiseError(f"{file} is too large for a model's config", "a config.json has a few KiB")
        config = msgspec.json.decode(text)
    except OSError as error:
        raise FlopwiseError(f"cannot read {file}: {error.strerror}", _LOCAL) from None
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:  # or nested too deep, no such home
        said = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise FlopwiseError(f"{file} is not JSON: {said}", _LOCAL) from None
    if not isinstance(config, dict):
        raise FlopwiseError(f"{file} holds no JSON object", _LOCAL)
    return file, config


def text_model(config: dict[str, Any]) -> dict[str, Any]:
    """A multimodal file keeps its language model's fields apart."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def from_config(config: dict[str, Any], name: str = "hf", source: str = "config.json") -> ModelSpec:
    """The shape a config describes.

    >>> from_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}).d_ff
    3072
    """
    config = text_model(config)
    family = config.get("model_type")
    if family is None:
        raise FlopwiseError(f"{source} has no field model_type", f"families read: {', '.join(FAMILIES)}")
    if not isinstance(family, str) or family not in FAMILIES:
        raise FlopwiseError(
            f"{source}: model_type = {fields.show(family)} is not a family flopwise's own model can take the shape of",
            f"families read: {', '.join(FAMILIES)}; for any other model use py:module:factory",
        )
    _refuse_what_is_beyond(config, source)
    names = _NAMES["gpt2" if family == "gpt2" else "llama"]
    missing = [names[field] for field in _NEEDED if names[field] != "n_inner" and config.get(names[field]) is None]
    if missing:
        raise FlopwiseError(
            f"{source} has no field{'s' * (len(missing) > 1)} {', '.join(missing)}",
            f"this family's config needs {'them' if len(missing) > 1 else 'it'}",
        )
    try:
        return FAMILIES[family](Config(config), name)
    except FlopwiseError as error:
        message, hint = (
            re.sub(r"[a-z_]+", lambda word: names.get(word[0], word[0]), text) for text in (error.message, error.hint)
        )
        raise FlopwiseError(error.message if source in error.message else f"{source}: {message}", hint) from None


class Config:
    """A config's fields; a mistyped one gets a clear line."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def _read(self, field: str, default: Any, check: Callable[[str, object], None]) -> Any:
        value = self.config.get(field)
        if value is None:
            return default
        check(field, value)
        return value

    def whole(self, field: str, default: int | None = None) -> int:
        most = 10_000_000 if default is None or field == "n_inner" else 100_000_000
        return int(self._read(field, default or 0, partial(fields.whole, low=1, high=most)))

    def real(self, field: str, default: float) -> float:
        return float(self._read(field, default, partial(fields.number, low=0.0, high=1e12)))

    def flag(self, field: str, default: bool) -> bool:
        return bool(self._read(field, default, fields.flag))

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
_NEEDED = ("d_model", "d_ff", "n_layers", "n_heads", "vocab")
_LLAMA = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_GPT2 = ("n_embd", "n_inner", "n_layer", "n_head", "vocab_size")
_NAMES = {
    "llama": dict(zip(_NEEDED, _LLAMA, strict=True))
    | {"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps"}
    | {"max_context": "max_position_embeddings"},
    "gpt2": dict(zip(_NEEDED, _GPT2, strict=True)) | {"norm_eps": "layer_norm_epsilon", "max_context": "n_positions"},
}
_SHOWN = 5
_KNOWN = re.compile(
    # what is read besides
    "model_type|attention_bias|mlp_bias|hidden_act|activation_function|rope_theta|rope_parameters|tie_word_embeddings"
    "|sliding_window|use_sliding_window"
    # what changes no FLOP, byte or kernel of a step
    "|_.*|.*_token_ids?|.*_version|summary_.*|.*dropout.*|.*_pdrop|architectures|auto_map|dtype|torch_dtype|initializer_range"
    "|use_cache|pretraining_tp|rope_scaling|max_window_layers|layer_types|n_ctx|task_specific_params|reorder_and_upcast_attn"
    "|scale_attn_weights|scale_attn_by_inverse_layer_idx|id2label|label2id|return_dict|output_attentions"
    "|output_hidden_states|model_max_length|attn_implementation|is_encoder_decoder|name_or_path|gradient_checkpointing"
    "|problem_type|chunk_size_feed_forward|torchscript|finetuning_task|tokenizer_class"
)

# Fields that change what a model is, and that no spec here can say: better refused than counted wrongly.
_BEYOND = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), "a mixture of experts"),
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


def _llama(config: Config, name: str) -> ModelSpec:
    family = config.config["model_type"]
    sizes: dict[str, Any] = {field: config.whole(_NAMES["llama"][field]) for field in _NEEDED}
    bias = config.flag("attention_bias", False)
    fields.one_of("hidden_act", config.config.get("hidden_act", "silu"), ("silu", "swish"))
    return ModelSpec(
        name=name,
        **sizes,
        n_kv_heads=config.whole("num_key_value_heads", 8 if family == "mistral" else sizes["n_heads"]),
        head_dim=config.whole("head_dim", 128 if family == "qwen3" else 0),  # theirs, whatever the width
        norm_eps=config.real("rms_norm_eps", 1e-6),
        rope_theta=config.rope_theta(),
        qkv_bias=family == "qwen2" or bias,  # Qwen2 has biases on q, k and v alone, whatever the file says
        out_bias=family != "qwen2" and bias,
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        tied=config.flag("tie_word_embeddings", False),
        max_context=config.whole("max_position_embeddings", 0),
        window=config.window(),
    )


def _gpt2(config: Config, name: str) -> ModelSpec:
    sizes = {field: config.whole(_NAMES["gpt2"][field]) for field in _NEEDED}
    activation = config.config.get("activation_function", "gelu_new")
    fields.one_of("activation_function", activation, ("gelu_new", "gelu", "gelu_pytorch_tanh"))
    own: dict[str, Any] = {"max_context": config.whole("n_positions", 1024)}
    own |= {"d_ff": config.whole("n_inner", 4 * sizes["d_model"])}
    own |= {"norm_eps": config.real("layer_norm_epsilon", 1e-5), "tied": config.flag("tie_word_embeddings", True)}
    return ModelSpec(name=name, **GPT2 | sizes | own)


FAMILIES = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama) | {"gpt2": _gpt2}
