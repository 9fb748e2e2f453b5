"""The shape of a decoder-only language model: presets, and the checks that keep a shape buildable."""

import math
from typing import Any, Self

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields

MLPS = ("swiglu", "gelu")
NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """The shape of a decoder: enough to build it, and to count what it costs.

    >>> ModelSpec(name="mine", d_model=256, d_ff=1024, n_layers=2, n_heads=4).head_dim
    64
    """

    name: str
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int = 0  # 0: as many as n_heads
    head_dim: int = 0  # 0: d_model / n_heads
    vocab: int = 10_000
    mlp: str = "swiglu"
    norm_kind: str = "rms"
    norm_eps: float = 1e-5
    positions: str = "rope"
    rope_theta: float = 10_000.0
    qkv_bias: bool = False
    out_bias: bool = False  # on attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # the head shares the embedding's weights
    max_context: int = 0  # 0: no limit (learned positions need one)
    window: int = 0  # sliding attention window; 0: none

    def __post_init__(self) -> None:
        fields.text("name", self.name)
        for field in ("d_model", "d_ff", "n_layers", "n_heads", "vocab"):
            fields.whole(field, getattr(self, field), 1, 10_000_000)
        for field in ("n_kv_heads", "head_dim", "max_context", "window"):
            fields.whole(field, getattr(self, field), 0, 100_000_000)
        fields.number("rope_theta", self.rope_theta, 1.0, 1e12)
        fields.number("norm_eps", self.norm_eps, 0.0, 1.0)
        fields.one_of("mlp", self.mlp, MLPS)
        fields.one_of("norm_kind", self.norm_kind, NORMS)
        fields.one_of("positions", self.positions, POSITIONS)
        for field in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "tied"):
            fields.flag(field, getattr(self, field))
        for field in ("rope_theta", "norm_eps"):  # 10000 and 10000.0 are one model, with one key
            msgspec.structs.force_setattr(self, field, float(getattr(self, field)))
        msgspec.structs.force_setattr(self, "n_kv_heads", self.n_kv_heads or self.n_heads)
        if not self.head_dim:
            if self.d_model % self.n_heads:
                raise FlopwiseError(
                    f"n_heads = {self.n_heads} does not divide d_model = {self.d_model}",
                    f"allowed near it: {_near_divisors(self.d_model, self.n_heads)}; or set head_dim",
                )
            msgspec.structs.force_setattr(self, "head_dim", self.d_model // self.n_heads)
        if self.n_heads % self.n_kv_heads:
            raise FlopwiseError(
                f"n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}",
                f"allowed near it: {_near_divisors(self.n_heads, self.n_kv_heads)}",
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise FlopwiseError(
                f"head_dim = {self.head_dim} is odd: rotary positions turn pairs",
                "use an even head_dim, or positions = learned",
            )
        if self.positions == "learned" and not self.max_context:
            raise FlopwiseError("positions = 'learned' needs max_context", "set max_context to the longest context")

    def parameters(self) -> int:
        """How many parameters the model has, a shared one counted once.

        >>> preset("gpt2").parameters(), preset("2.7B").parameters()
        (124439808, 3406809600)
        """
        norm = self.d_model * (2 if self.norm_kind == "layer" else 1)
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = self.d_model * (2 * q + 2 * kv) + (q + 2 * kv) * self.qkv_bias + self.d_model * self.out_bias
        attention += 2 * self.head_dim * self.qk_norm
        matrices = 3 if self.mlp == "swiglu" else 2
        mlp = matrices * self.d_model * self.d_ff + ((matrices - 1) * self.d_ff + self.d_model) * self.mlp_bias
        positions = self.max_context * self.d_model if self.positions == "learned" else 0
        embeddings = self.vocab * self.d_model * (1 if self.tied else 2)
        return self.n_layers * (attention + mlp + 2 * norm) + norm + embeddings + positions

    def with_fields(self, changes: dict[str, Any]) -> Self:
        """The same model with some fields changed; what follows from them (head_dim, n_kv_heads) is derived anew.

        >>> preset("small").with_fields({"n_heads": 6}).head_dim
        128
        """
        fields.known("the model", changes, [field for field in self.__struct_fields__ if field != "name"])
        derived = {}
        if ("n_heads" in changes or "d_model" in changes) and self.head_dim * self.n_heads == self.d_model:
            derived["head_dim"] = 0
        if "n_heads" in changes and self.n_kv_heads == self.n_heads:
            derived["n_kv_heads"] = 0
        return msgspec.structs.replace(self, **(derived | changes))


def _near_divisors(whole: int, near: int) -> str:
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    divisors = sorted({*small, *(whole // d for d in small)}, key=lambda d: abs(d - near))
    return ", ".join(str(d) for d in sorted(divisors[:4]))


# GPT-2 (Radford et al. 2019, table 2), with the published configs' vocabulary and context.
GPT2: dict[str, Any] = {
    "vocab": 50_257,
    "mlp": "gelu",
    "norm_kind": "layer",
    "positions": "learned",
    "max_context": 1024,
}
GPT2 |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True}
# Llama 3 (Dubey et al. 2024, table 3; the 3.2 sizes from their published configs): 8 KV heads throughout.
_LLAMA3: dict[str, Any] = {"n_kv_heads": 8, "vocab": 128_256, "rope_theta": 500_000.0, "max_context": 131_072}


def _model(name: str, d_model: int, d_ff: int, n_layers: int, n_heads: int, **others: Any) -> ModelSpec:
    return ModelSpec(name=name, d_model=d_model, d_ff=d_ff, n_layers=n_layers, n_heads=n_heads, **others)


_PRESETS = {
    spec.name: spec
    for spec in (
        _model("tiny", 64, 192, 2, 4, vocab=512),
        _model("small", 768, 3072, 12, 12),  # this and the next five: the course's
        _model("medium", 1024, 4096, 24, 16),
        _model("large", 1280, 5120, 36, 20),
        _model("xl", 1600, 6400, 48, 25),
        _model("2.7B", 2560, 10240, 32, 32),
        _model("10B", 4608, 12288, 50, 36),
        _model("gpt2", 768, 3072, 12, 12, **GPT2),
        _model("gpt2-medium", 1024, 4096, 24, 16, **GPT2),
        _model("gpt2-large", 1280, 5120, 36, 20, **GPT2),
        _model("gpt2-xl", 1600, 6400, 48, 25, **GPT2),
        _model("llama3.2-1b", 2048, 8192, 16, 32, tied=True, **_LLAMA3),
        _model("llama3.2-3b", 3072, 8192, 28, 24, tied=True, **_LLAMA3),
        _model("llama3-8b", 4096, 14336, 32, 32, **_LLAMA3),
        _model("llama3-70b", 8192, 28672, 80, 64, **_LLAMA3),
        _model("llama3-405b", 16384, 53248, 126, 128, **_LLAMA3),
    )
}


def preset_names() -> tuple[str, ...]:
    """Every preset, smallest family first.

    >>> preset_names()[:3]
    ('tiny', 'small', 'medium')
    """
    return tuple(_PRESETS)


def preset(name: str) -> ModelSpec:
    """The preset called `name` (case does not matter).

    >>> preset("2.7b").d_ff
    10240
    """
    for key, spec in _PRESETS.items():
        if key.lower() == name.lower():
            return spec
    raise FlopwiseError(
        f"there is no model preset {fields.show(name)}",
        f"{fields.did_you_mean(name, _PRESETS)}presets: {', '.join(_PRESETS)}; "
        "or hf:PATH/config.json, path/file.py:factory, py:module:factory, op:NAME",
    )
