"""FlashAttention-2 in Triton: the forward kernel, the registered ops, and `flash_attention`.

The formulas and the meaning of causal, window and grouped heads are those of `attention.py`; the backward kernels are in
`attention_backward.py`. Each program keeps one tile of queries and walks over the tiles of keys it can see: first those
seen whole, where nothing is masked and nothing checked, then those on the diagonal or at the end. Long sequences on sm_90
go through `attention_hopper.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from flopwise.errors import Unsupported
from flopwise.kernels.attention import check, tiled_backward, tiled_forward, with_heads
from flopwise.kernels.attention_backward import backward_cases, launch_backward
from flopwise.kernels.attention_gluon import gluon_on, trusted
from flopwise.kernels.attention_tiles import (
    LOG2E,
    Call,
    Config,
    Problem,
    Table,
    choose,
    dot,
    dot_add,
    key_ranges,
    lined_up,
    load_tile,
    padded,
    shipped,
    store_tile,
    tile_of,
    tma_ready,
    unit_stride,
    visible,
)
from flopwise.kernels.case import Case
from flopwise.kernels.dispatch import GRID, autocast_dtype, runs_triton

_LN2 = tl.constexpr(1 / LOG2E)


@triton.jit
def _walk_keys(total, m, z, q, k_from, v_from, at, queries, span, problem, MASKED: tl.constexpr, C: tl.constexpr):
    """Add the keys of `span` to the output of one tile of queries. `scale` includes log2 e; m is scaled."""
    batch, head = at
    key_length, scale, window = problem
    for start in range(span[0], span[1], C.block_n):
        k = load_tile(k_from, batch, head, start, key_length, C.block_n, MASKED, C)
        scores = dot(q, k.T, C)  # [block_m, block_n]
        if MASKED:
            keys = start + tl.arange(0, C.block_n)
            counts = (keys < key_length)[None, :]
            if C.causal:
                counts &= visible(queries[:, None], keys[None, :], window, C)
            scores = tl.where(counts, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1) * scale)
        base = new_m
        if MASKED:  # a query that has seen no key yet: −inf − −inf would be NaN
            base = tl.where(new_m == float("-inf"), 0.0, new_m)
        weights = tl.exp2(scores * scale - base[:, None])  # one multiply-add and one exponential per score
        shrink = tl.exp2(m - base)
        m, z = new_m, z * shrink + tl.sum(weights, 1)
        v = load_tile(v_from, batch, head, start, key_length, C.block_n, MASKED, C)
        total = dot_add(weights.to(v.dtype), v, total * shrink[:, None], C)
    return total, m, z


@triton.jit(do_not_specialize=["window"])
def _flash_forward_kernel(
    q_in,
    k_in,
    v_in,
    o_out,
    l_out,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    o_b,
    o_h,
    o_t,
    group,
    query_length,
    key_length,
    scale,
    window,
    C: tl.constexpr,
):
    """O and L of one tile of queries of one head. Neighbouring programs share a head, and so its keys in the L2 cache."""
    tile = tl.program_id(0)
    if C.causal:  # the last queries see the most keys: they start first, so that no long program runs alone at the end
        tile = tl.num_programs(0) - 1 - tile
    head = tl.program_id(1)
    batch = tl.program_id(2)
    start = tile * C.block_m
    queries = start + tl.arange(0, C.block_m)
    q = load_tile((q_in, q_b, q_h, q_t), batch, head, start, query_length, C.block_m, True, C)
    total = tl.full([C.block_m, C.block_d], 0.0, tl.float32)
    m = tl.full([C.block_m], float("-inf"), tl.float32)
    z = tl.full([C.block_m], 0.0, tl.float32)
    low, full_low, full_high, high = key_ranges(start, key_length, window, C)
    k_from, v_from, at = (k_in, k_b, k_h, k_t), (v_in, v_b, v_h, v_t), (batch, head // group)
    problem = (key_length, scale, window)
    if C.windowed:
        total, m, z = _walk_keys(total, m, z, q, k_from, v_from, at, queries, (low, full_low), problem, True, C)
    total, m, z = _walk_keys(total, m, z, q, k_from, v_from, at, queries, (full_low, full_high), problem, False, C)
    if C.tail:
        total, m, z = _walk_keys(total, m, z, q, k_from, v_from, at, queries, (full_high, high), problem, True, C)
    none = z == 0.0
    total = total * (1.0 / tl.where(none, 1.0, z))[:, None]
    store_tile((o_out, o_b, o_h, o_t), total, batch, head, start, query_length, C.block_m, C)
    row = (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * query_length
    logsumexp = tl.where(none, float("-inf"), (m + tl.log2(z)) * _LN2)
    tl.store(l_out + row + queries, logsumexp, queries < query_length)


# What `benchmarks/attention_tune.py` finds best among the tiles that spill no registers.
FORWARD: Table = {
    (80, 64): Config(128, 64, 8, 3),
    (80, 128): Config(128, 64, 8, 3),
    (80, 256): Config(64, 64, 8, 2),
    (90, 64): Config(64, 128, 4, 3, tma=True),
    (90, 128): Config(64, 64, 4, 3, tma=True),
    (90, 256): Config(128, 64, 8, 2, tma=True),
}


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """O and L of [B, H, T, D] tensors; the caller has checked them."""
    output = torch.empty_like(unit_stride(q))
    logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if not output.numel():
        return output, logsumexp
    if not k.shape[2]:
        return output.zero_(), logsumexp.fill_(float("-inf"))
    chosen = config or choose(FORWARD, q, k.shape[2])
    q, k, v = (lined_up(unit_stride(x), chosen) for x in (q, k, v))
    gluon = None if config else gluon_on(q)
    if gluon and gluon.forward.takes(q, k, v, problem) and trusted(gluon, q, problem.causal):
        gluon.forward.forward_call(q, k, v, output, logsumexp, problem).launch()
    else:
        forward_call(q, k, v, output, logsumexp, problem, chosen).launch()
    return output, logsumexp


def forward_call(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, logsumexp: Tensor, problem: Problem, config: Config
) -> Call:
    """The kernel's launch, not yet made; the last stride of all is 1."""
    batch, heads, length, head_dim = q.shape
    tma = config.tma and tma_ready(q, k, v)
    rows = (config.block_m, config.block_n, config.block_n)
    sources = [tile_of(x, n, padded(head_dim), tma) for x, n in zip((q, k, v), rows, strict=True)]
    strides = [stride for x in (q, k, v, output) for stride in x.stride()[:3]]
    numbers = (heads // k.shape[1], length, k.shape[2], problem.scale * LOG2E, problem.window or 0)
    tail = problem.causal or k.shape[2] % config.block_n != 0
    grid = (triton.cdiv(length, config.block_m), heads, batch)
    arguments = (*sources, output, logsumexp, *strides, *numbers)
    return config.call(_flash_forward_kernel, grid, arguments, config.fixed(q, problem, tma, tail))


@torch.library.custom_op("flopwise::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """O and L of [B, H, T, D] tensors."""
    if runs_triton(q) and q.dtype != torch.float64:
        return launch_forward(q, k, v, Problem(causal, window, scale))
    return tiled_forward(unit_stride(q), k, v, causal, window, scale)


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(unit_stride(q)), q.new_empty(q.shape[:-1], dtype=wide)


@torch.library.custom_op("flopwise::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of [B, H, T, D] tensors."""
    if runs_triton(q) and q.dtype != torch.float64:
        return launch_backward(grad, q, k, v, output, logsumexp, Problem(causal, window, scale))
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    found = tiled_backward(grad, q, k, v, output, logsumexp, causal, window, scale)
    dq, dk, dv = (torch.empty_like(x).copy_(gradient) for x, gradient in zip((q, k, v), found, strict=True))
    return dq, dk, dv


@flash_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(unit_stride(q)), torch.empty_like(unit_stride(k)), torch.empty_like(unit_stride(v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.problem = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for L's


def _send_back(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    return *flash_backward(grad, *ctx.saved_tensors, *ctx.problem), None, None, None


flash_forward.register_autograd(_send_back, setup_context=_keep)


@register_flop_formula(torch.ops.flopwise.flash_forward)
def _forward_flops(q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:
    """Two matmuls over the whole square of scores, as PyTorch counts its own SDPA; a causal kernel does half of it."""
    batch, heads, length, head_dim = q_shape
    return int(4 * batch * heads * length * k_shape[2] * head_dim)


@register_flop_formula(torch.ops.flopwise.flash_backward)
def _backward_flops(_grad: Any, q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:
    """Five matmuls, as PyTorch counts: the second computation of the scores is no work of the model's."""
    return _forward_flops(q_shape, k_shape) * 5 // 2


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttentionTriton.apply(q, k, v, is_causal=False): as `attention.FlashAttention`, by the kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check_kernels(q, k, v, is_causal)
        scale = q.shape[-1] ** -0.5
        found: tuple[Tensor, Tensor] = flash_forward(*(with_heads(x) for x in (q, k, v)), is_causal, None, scale)
        output, logsumexp = found
        if q.dim() == 3:
            output, logsumexp = output.squeeze(1), logsumexp.squeeze(1)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.is_causal = is_causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        tensors = [with_heads(x) for x in (grads[0], q, k, v, output)]
        heads = logsumexp.unsqueeze(1) if q.dim() == 3 else logsumexp
        found = flash_backward(*tensors, heads, ctx.is_causal, None, q.shape[-1] ** -0.5)
        return *(x.squeeze(1) if q.dim() == 3 else x for x in found), None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, scale: float | None = None
) -> Tensor:
    """softmax(scale · q kᵀ) v without the scores in memory; scale is 1/√D unless given.

    q [B, Hq, T, D], k and v [B, Hkv, Tk, D], or all without heads; fp32, bf16 or fp16 on a GPU, in any strides. Under
    autocast it runs in autocast's dtype, as SDPA does. `window` keeps of the causal keys the last `window`.

    >>> q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16)
    >>> flash_attention(q, k, k, causal=True).shape
    torch.Size([2, 4, 7, 16])
    """
    narrow = autocast_dtype(q)
    if narrow is not None:
        q, k, v = q.to(narrow), k.to(narrow), v.to(narrow)
    check_kernels(q, k, v, causal, window, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.dim() == 4:
        output: Tensor = flash_forward(q, k, v, causal, window, scale)[0]
        return output
    output = flash_forward(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), causal, window, scale)[0]
    return output.squeeze(1)


def check_kernels(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, scale: float | None = None
) -> None:
    """What is no attention, and what the kernels cannot do."""
    check(q, k, v, causal, window, scale)
    largest = 128 if q.dtype == torch.float32 else 256  # what fits a block's registers
    if q.shape[-1] > largest and q.dtype != torch.float64 and runs_triton(q):
        raise Unsupported(f"flash attention with head dimension {q.shape[-1]} in {q.dtype}: at most {largest}")
    if max(with_heads(q).shape[:2]) > GRID and runs_triton(q):
        raise Unsupported(f"flash attention of q {list(q.shape)}: at most {GRID} sequences and heads at a time")


def cases() -> Iterator[Case]:
    """The kernels in the tiles they ship with."""
    yield from shipped("flash forward", _flash_forward_kernel, FORWARD)
    yield from backward_cases()
