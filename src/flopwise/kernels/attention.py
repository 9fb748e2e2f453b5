"""FlashAttention-2 in PyTorch: the definition, and the same in tiles, to be read beside the Triton kernels.

    S = scale · Q Kᵀ,  L = logsumexp(S),  P = exp(S − L),  O = P V
    dV = Pᵀ dO,  dP = dO Vᵀ,  Δ = rowsum(dO ∘ O),  dS = P ∘ (dP − Δ),  dQ = scale · dS K,  dK = scale · dSᵀ Q

Shapes: q [B, Hq, T, D], k and v [B, Hkv, Tk, D] where Hkv divides Hq (each key head serves a group of query heads); or
all of them without heads, [B, T, D]. Causal means that query i sees keys j ≤ i, counted from the first of each, as in
torch's SDPA, also where T and Tk differ. A window of w leaves of those the last w: i − w < j ≤ i. A query that sees no
key has output 0, L = −inf and no gradient.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flopwise.errors import Unsupported
from flopwise.kernels.dispatch import require_float

TILE = 128  # queries and keys at a time


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: int | None = None, scale: float | None = None
) -> Tensor:
    """The definition: every score of every head lives in memory at once.

    >>> q = torch.randn(2, 8, 16)
    >>> torch.allclose(attention_reference(q, q, q, causal=True)[:, 0], q[:, 0])  # the first position sees itself alone
    True
    """
    k, v = _spread(k, q), _spread(v, q)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)  # [..., T, Tk]
    seen = visible(range(q.shape[-2]), range(k.shape[-2]), causal, window, q.device)
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return weights.masked_fill(~seen.any(-1, keepdim=True), 0.0) @ v


def visible(queries: range, keys: range, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Which key each query may see, [queries, keys].

    >>> visible(range(3), range(3), True, 2, torch.device("cpu")).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    i = torch.arange(queries.start, queries.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= (j > i - window) & (j <= i)
    return seen


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float, tile: int = TILE
) -> tuple[Tensor, Tensor]:
    """O and L of [B, H, T, D] tensors, one tile of queries after the other, each over the tiles of keys it can see.

    A running maximum m and sum z per query make the softmax exact although no row of scores is ever whole.
    """
    output, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=_wide(q))
    k, v = _spread(k, q), _spread(v, q)
    for rows in _tiles(range(q.shape[-2]), tile):
        wide_q = _rows(q, rows) * scale
        accumulator = torch.zeros_like(wide_q)
        m = wide_q.new_full(wide_q.shape[:-1], -math.inf)
        z = torch.zeros_like(m)
        for columns in _tiles(_keys_seen(rows, k.shape[-2], causal, window), tile):
            seen = visible(rows, columns, causal, window, q.device)
            scores = (wide_q @ _rows(k, columns).mT).masked_fill(~seen, -math.inf)
            new_m = torch.maximum(m, scores.amax(-1))
            base = new_m.masked_fill(new_m == -math.inf, 0.0)  # of a query that has seen no key yet: −inf − −inf is NaN
            weights = torch.exp(scores - base[..., None])
            shrink = torch.exp(m - base)
            z = z * shrink + weights.sum(-1)
            accumulator = accumulator * shrink[..., None] + weights @ _rows(v, columns)
            m = new_m
        none = z == 0
        output[..., rows.start : rows.stop, :] = (accumulator / z.masked_fill(none, 1.0)[..., None]).to(q.dtype)
        logsumexp[..., rows.start : rows.stop] = torch.where(none, -math.inf, m + torch.log(z))
    return output, logsumexp


def tiled_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    tile: int = TILE,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV: the scores are computed again, tile by tile, from Q, K and L."""
    key_heads = k.shape[1]
    k, v = _spread(k, q), _spread(v, q)
    dq, dk, dv = (torch.zeros_like(x, dtype=_wide(x)) for x in (q, k, v))
    delta = (grad.to(dq.dtype) * output.to(dq.dtype)).sum(-1)
    for rows in _tiles(range(q.shape[-2]), tile):
        here = slice(rows.start, rows.stop)
        wide_q, wide_grad = _rows(q, rows), _rows(grad, rows)
        for columns in _tiles(_keys_seen(rows, k.shape[-2], causal, window), tile):
            there = slice(columns.start, columns.stop)
            wide_k = _rows(k, columns)
            seen = visible(rows, columns, causal, window, q.device)
            weights = torch.exp((wide_q @ wide_k.mT) * scale - logsumexp[..., here, None]).masked_fill(~seen, 0.0)
            dv[..., there, :] += weights.mT @ wide_grad
            dscores = weights * (wide_grad @ _rows(v, columns).mT - delta[..., here, None]) * scale
            dq[..., here, :] += dscores @ wide_k
            dk[..., there, :] += dscores.mT @ wide_q
    return dq.to(q.dtype), _gathered(dk, key_heads).to(k.dtype), _gathered(dv, key_heads).to(v.dtype)


class FlashAttention(torch.autograd.Function):
    """FlashAttention.apply(q, k, v, is_causal=False): it keeps Q, K, V, O and L for the backward pass, no scores.

    >>> q = torch.randn(2, 5, 8, requires_grad=True)
    >>> output = FlashAttention.apply(q, q, q, True)
    >>> [tuple(x.shape) for x in output.grad_fn.saved_tensors]
    [(2, 5, 8), (2, 5, 8), (2, 5, 8), (2, 5, 8), (2, 5)]
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check(q, k, v, is_causal)
        scale = q.shape[-1] ** -0.5
        output, logsumexp = tiled_forward(with_heads(q), with_heads(k), with_heads(v), is_causal, None, scale)
        output, logsumexp = output.reshape(q.shape), logsumexp.view(q.shape[:-1])
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.is_causal = is_causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        g, wide_q, wide_k, wide_v, wide_output = (with_heads(x) for x in (grads[0], q, k, v, output))
        heads = logsumexp.view(wide_q.shape[:-1])
        scale = q.shape[-1] ** -0.5
        dq, dk, dv = tiled_backward(g, wide_q, wide_k, wide_v, wide_output, heads, ctx.is_causal, None, scale)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), None


def check(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, scale: float | None = None) -> None:
    """Say what is no attention before something else is computed."""
    require_float("flash attention", q, k, v)
    if problem := _shape_problem(q, k, v) or _option_problem(causal, window, scale):
        raise Unsupported(f"flash attention {problem}")


def _shape_problem(q: Tensor, k: Tensor, v: Tensor) -> str:
    shapes = f"of q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() not in (3, 4) or k.dim() != q.dim() or k.shape != v.shape or q.shape[0] != k.shape[0]:
        return f"{shapes}: q is [B, Hq, T, D] and k, v are [B, Hkv, Tk, D], or without H"
    if q.shape[-1] != k.shape[-1] or not q.shape[-1]:
        return f"{shapes}: one head dimension D, at least 1"
    if q.dim() == 4 and (not k.shape[1] or q.shape[1] % k.shape[1]):
        return f"{shapes}: the heads of q are a multiple of those of k and v, at least 1"
    same = q.dtype == k.dtype == v.dtype
    return "" if same else f"of {q.dtype}, {k.dtype} and {v.dtype}: give q, k and v one dtype"


def _option_problem(causal: bool, window: int | None, scale: float | None) -> str:
    if window is not None and not (causal and isinstance(window, int) and window >= 1):
        return f"with window {window}, causal {causal}: a window is causal and a whole number from 1"
    if torch.is_grad_enabled() and getattr(scale, "requires_grad", False):  # a tensor would pass for a number
        return "has no gradient for its scale: multiply q by it and give scale=1.0"
    if scale is not None and not 0 < scale < math.inf:
        return f"with scale {scale}: the scale is positive and finite"
    return ""


def with_heads(x: Tensor) -> Tensor:
    """[B, T, D] as [B, 1, T, D]."""
    return x.unsqueeze(1) if x.dim() == 3 else x


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """k or v with each head repeated for the query heads that share it."""
    return x if x.dim() == 3 or x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _gathered(x: Tensor, heads: int) -> Tensor:
    """The gradient of `_spread`: summed over the query heads that share a key head."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, x.shape[1] // heads)).sum(2)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x: Tensor, rows: range) -> Tensor:
    return x[..., rows.start : rows.stop, :].to(_wide(x))


def _tiles(positions: range, tile: int) -> Iterator[range]:
    for start in range(positions.start, positions.stop, tile):
        yield range(start, min(start + tile, positions.stop))


def _keys_seen(rows: range, length: int, causal: bool, window: int | None) -> range:
    """The keys that some query of these rows sees: tiles outside are skipped."""
    first = 0 if window is None else max(0, rows.start - window + 1)
    stop = min(length, rows.stop) if causal or window is not None else length
    return range(first, max(first, stop))
