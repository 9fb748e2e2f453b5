"""The model a second time, in float64 and in other words: what every lever is held against."""

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwise.lm.transformer import Transformer
from flopwise.spec.model import ModelSpec, preset

TINY = preset("tiny")
GROUPED = ModelSpec(
    name="grouped", d_model=48, d_ff=80, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab=97, out_bias=True,
    mlp_bias=True,
)  # fmt: skip
GPT2_LIKE = ModelSpec(
    name="gpt2-like", d_model=32, d_ff=64, n_layers=3, n_heads=2, vocab=61, mlp="gelu", norm_kind="layer",
    positions="learned", max_context=40, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
QWEN3_LIKE = ModelSpec(
    name="qwen3-like", d_model=32, d_ff=48, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=16, vocab=61, qk_norm=True,
    rope_theta=1e6, norm_eps=1e-6, tied=True,
)  # fmt: skip
SPECS = {spec.name: spec for spec in (TINY, GROUPED, GPT2_LIKE, QWEN3_LIKE)}


def shake(model: Transformer, seed: int = 0) -> Transformer:
    """Random values everywhere: at initialisation biases are zero and norms one, and would hide a mistake in them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise if parameter.dim() == 2 else parameter + 0.2 * noise)
    return model


def batch(spec: ModelSpec, rows: int = 2, context: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, spec.vocab, (rows, context + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def reference_loss(spec: ModelSpec, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    logits = torch.stack([reference_logits(spec, weights, row) for row in tokens])
    picked = logits.gather(-1, targets[..., None]).squeeze(-1)
    return (torch.log(torch.exp(logits).sum(-1)) - picked).mean()


def reference_logits(spec: ModelSpec, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [T, V] of one sequence: one head at a time, positions as complex numbers."""
    x = weights["embedding.weight"][tokens]
    if spec.positions == "learned":
        x = x + weights["positions.weight"][torch.arange(len(tokens))]
    for i in range(spec.n_layers):
        own = {k.removeprefix(f"blocks.{i}."): w for k, w in weights.items() if k.startswith(f"blocks.{i}.")}
        x = x + _attention(spec, own, _norm(spec, own, "attention_norm", x))
        x = x + _mlp(spec, own, _norm(spec, own, "mlp_norm", x))
    head = weights["embedding.weight"] if spec.tied else weights["head.weight"]
    return _norm(spec, weights, "norm", x) @ head.T


def _norm(spec: ModelSpec, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if spec.norm_kind == "rms":
        return _rms(x, weights[f"{name}.weight"], spec.norm_eps)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + spec.norm_eps).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _attention(spec: ModelSpec, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    size, group = spec.head_dim, spec.n_heads // spec.n_kv_heads
    q, k, v = (_linear(weights, f"attention.{name}", x).split(size, -1) for name in "qkv")
    seen = torch.arange(len(x))[:, None] >= torch.arange(len(x))[None, :]
    heads = []
    for h in range(spec.n_heads):
        query, key, value = q[h], k[h // group], v[h // group]
        if spec.qk_norm:
            query = _rms(query, weights["attention.q_norm.weight"], spec.norm_eps)
            key = _rms(key, weights["attention.k_norm.weight"], spec.norm_eps)
        if spec.positions == "rope":
            query, key = _turn(query, spec.rope_theta), _turn(key, spec.rope_theta)
        scores = torch.exp(query @ key.T / size**0.5) * seen
        heads.append(scores / scores.sum(-1, keepdim=True) @ value)
    return _linear(weights, "attention.out", torch.cat(heads, -1))


def _turn(x: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(len(x), dtype=x.dtype)[:, None] * theta ** -(torch.arange(half, dtype=x.dtype) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def _mlp(spec: ModelSpec, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    up = _linear(weights, "mlp.up", x)
    if spec.mlp == "swiglu":
        gate = _linear(weights, "mlp.gate", x)
        return _linear(weights, "mlp.down", gate / (1 + torch.exp(-gate)) * up)
    return _linear(weights, "mlp.down", F.gelu(up, approximate="tanh"))
