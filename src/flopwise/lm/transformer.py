"""A decoder-only Transformer, read top to bottom: GPT-2, Llama, Mistral, Qwen2 and Qwen3 are settings of one ModelSpec.

Shapes: B batch, T context, D d_model, H heads, K head_dim, V vocabulary.
"""

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flopwise.errors import FlopwiseError
from flopwise.lm.attention import Attend, attention_function
from flopwise.lm.fp8 import Activation, Fp8, fp8_of, in_fp8
from flopwise.lm.layers import (
    Embedding,
    JoinedLinear,
    LayerNorm,
    Linear,
    RMSNorm,
    RopeTable,
    fused_swiglu,
    gelu_function,
    rope_function,
    silu_function,
)
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe

Angles = tuple[Tensor, Tensor] | None  # rotary cosine and sine, [T, K/2] each


class Transformer(nn.Module):
    """The model. Build it inside `with torch.device(...)`: weights are created and initialised there.

    >>> from flopwise.spec.model import preset
    >>> model = Transformer(preset("tiny"), Recipe())
    >>> model(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 512])
    """

    def __init__(self, spec: ModelSpec, recipe: Recipe, context: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.recipe = recipe
        attend = attention_function(recipe.attention, compiled_elsewhere=recipe.compile != "off")
        self.embedding = Embedding(spec.vocab, spec.d_model)
        self.positions = Embedding(spec.max_context, spec.d_model) if spec.positions == "learned" else None
        # `context`: the longest the model is meant for; rotary angles of longer ones are computed at every call.
        self.rope = RopeTable(context, spec.head_dim, spec.rope_theta) if spec.positions == "rope" else None
        self.blocks = nn.ModuleList(Block(spec, recipe, attend) for _ in range(spec.n_layers))
        in_fp8(self.blocks, fp8_of(recipe))
        self.norm = _norm(spec, recipe)
        # A tied head shares the embedding's weight: its own is never allocated.
        self.head = Linear(spec.d_model, spec.vocab, bias=False, device="meta" if spec.tied else None)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] for tokens [B, T]."""
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(self, tokens: Tensor, past: int | Tensor = 0) -> Tensor:
        """What the head sees: the last block's output after the final norm, [B, T, D].

        `past`: how many positions are before the first; or, as a tensor [T], the tokens' positions, which a CUDA graph reads.
        """
        fixed, end = isinstance(past, Tensor), tokens.shape[1] + (0 if isinstance(past, Tensor) else past)
        place = past if isinstance(past, Tensor) else slice(past, end)
        self._check(end)
        x = self.embedding(tokens)  # [B, T, D]
        angles: Angles = None
        if self.positions is not None:
            x = x + self.positions.weight[place]
        elif self.rope is not None:
            cos, sin = self.rope(self.rope.context if fixed else end, tokens.device)
            angles = (cos[place], sin[place]) if fixed or past else (cos, sin)
        x = self._run_blocks(x, angles)
        normed: Tensor = self.norm(x)
        return normed

    def _run_blocks(self, x: Tensor, angles: Angles) -> Tensor:
        blocks, every = list(self.blocks), self.recipe.checkpoint
        if not every or not torch.is_grad_enabled():
            return _run(blocks, x, angles)
        for start in range(0, len(blocks), every):
            # Keep the segment's input alone and compute the rest again in the backward pass. The segment draws no
            # random numbers, so no generator's state is kept either.
            segment = blocks[start : start + every]
            x = checkpoint(_run, segment, x, angles, use_reentrant=False, preserve_rng_state=False)
        return x

    def _check(self, context: int) -> None:
        table = self.spec.max_context if self.spec.positions == "learned" else 0
        for limit, what in ((table, "position table"), (self.spec.window, "sliding window")):
            if limit and context > limit:
                raise FlopwiseError(
                    f"context = {context} is longer than the model's {what} of {limit}", f"allowed: 1 to {limit}"
                )

    @property
    def head_weight(self) -> Tensor:
        """The head's weight [V, D]; where `tied`, the embedding's own."""
        return self.head.weight

    def n_parameters(self) -> int:
        """Parameters, a shared one counted once."""
        return sum(p.numel() for p in self.parameters())


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, recipe: Recipe, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = _norm(spec, recipe)
        self.attention = Attention(spec, recipe, attend)
        self.mlp_norm = _norm(spec, recipe)
        self.mlp = SwiGLU(spec, recipe) if spec.mlp == "swiglu" else GeluMLP(spec, recipe)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention with grouped KV heads; queries and keys are normed (Qwen3) and turned by their position."""

    fp8: Fp8 | None = None

    def __init__(self, spec: ModelSpec, recipe: Recipe, attend: Attend) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.attend = attend
        self.turn = rope_function(recipe.rope)
        self.heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)  # of q, k and v
        self.joined = recipe.projections == "fused"
        widths = [heads * spec.head_dim for heads in self.heads]
        if self.joined:
            self.qkv = JoinedLinear(spec.d_model, widths, spec.qkv_bias, ("q", "k", "v"))
        else:
            self.q, self.k, self.v = (Linear(spec.d_model, width, bias=spec.qkv_bias) for width in widths)
        self.out = _residual(Linear(spec.n_heads * spec.head_dim, spec.d_model, bias=spec.out_bias), spec)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, recipe.norm, False) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, recipe.norm, False) if spec.qk_norm else None

    def forward(self, x: Activation, angles: Angles) -> Tensor:
        q, k, v = self._project(x)  # [B, H, T, K]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = self.turn(q, k, *angles)
        y = self.attend(q, k, v)  # [B, H, T, K]
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _project(self, x: Activation) -> tuple[Tensor, ...]:
        if not self.joined:
            x = x if self.fp8 is None else self.fp8.prepared(x)
            return tuple(self._heads(project(x)).transpose(1, 2) for project in (self.q, self.k, self.v))
        # Split by heads, not by columns: their gradients, in whatever order they lie, then are joined in one copy.
        each = self._heads(self.qkv(x)).split(self.heads, -2)
        return tuple(part.transpose(1, 2) for part in each)

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (-1, self.head_dim))  # [B, T, H·K] -> [B, T, H, K]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    fp8: Fp8 | None = None

    def __init__(self, spec: ModelSpec, recipe: Recipe) -> None:
        super().__init__()
        self.joined = recipe.projections == "fused"
        if self.joined:
            self.gate_up = JoinedLinear(spec.d_model, (spec.d_ff, spec.d_ff), spec.mlp_bias, ("gate", "up"))
        else:
            self.gate = Linear(spec.d_model, spec.d_ff, bias=spec.mlp_bias)
            self.up = Linear(spec.d_model, spec.d_ff, bias=spec.mlp_bias)
        self.down = _residual(Linear(spec.d_ff, spec.d_model, bias=spec.mlp_bias), spec)
        self.fused = fused_swiglu(recipe.activation)
        self.activation = silu_function(recipe.activation) if self.fused is None else None

    def forward(self, x: Activation) -> Tensor:
        if self.joined and self.fp8 is not None and self.activation is None:
            return self.down(self.fp8.gated_linear(x, self.gate_up.weight, self.gate_up.bias))  # type: ignore[no-any-return]
        if self.joined:
            return self.down(self._gated(*self.gate_up(x).chunk(2, -1)))  # type: ignore[no-any-return]
        x = x if self.fp8 is None else self.fp8.prepared(x)
        if self.activation is None:
            return self.down(self._gated(self.gate(x), self.up(x)))  # type: ignore[no-any-return]
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]

    def _gated(self, gate: Tensor, up: Tensor) -> Activation:
        if self.activation is None:
            return self.fused(gate, up) if self.fp8 is None else self.fp8.gated(gate, up)  # type: ignore[misc]
        return self.activation(gate) * up


class GeluMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, spec: ModelSpec, recipe: Recipe) -> None:
        super().__init__()
        self.up = Linear(spec.d_model, spec.d_ff, bias=spec.mlp_bias)
        self.down = _residual(Linear(spec.d_ff, spec.d_model, bias=spec.mlp_bias), spec)
        self.activation = gelu_function(recipe.activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]


def _run(blocks: list[nn.Module], x: Tensor, angles: Angles) -> Tensor:
    for block in blocks:
        x = block(x, angles)
    return x


def _norm(spec: ModelSpec, recipe: Recipe) -> RMSNorm | LayerNorm:
    kind = RMSNorm if spec.norm_kind == "rms" else LayerNorm
    return kind(spec.d_model, spec.norm_eps, recipe.norm)


@torch.no_grad()
def _residual(linear: Linear, spec: ModelSpec) -> Linear:
    """GPT-2's scaling of what is added to the residual stream: its variance then does not grow with depth."""
    linear.weight.mul_(1 / math.sqrt(2 * spec.n_layers))
    return linear
