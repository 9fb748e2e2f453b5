"""The backward pass of FlashAttention-2 in Triton: Δ, then dK and dV, then dQ, each in a kernel of its own.

No kernel adds to what another program writes, so the result is the same at every run. The scores are computed again in
both passes, seven matmuls where one pass with atomic additions would do five. The formulas are those of `attention.py`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    seen,
    shipped,
    store_tile,
    tile_of,
    tma_ready,
    unit_stride,
)
from flopwise.kernels.resources import Case

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _flash_delta_kernel(
    o_in, g_in, d_out, o_b, o_h, o_t, g_b, g_h, g_t, query_length,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Δ = rowsum(dO ∘ O): the part of dS that is common to a query's scores. O and dO are read once."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    o = load_tile(o_in, batch, head, start, o_b, o_h, o_t, query_length, D, BLOCK_M, BLOCK_D, True, False)
    g = load_tile(g_in, batch, head, start, g_b, g_h, g_t, query_length, D, BLOCK_M, BLOCK_D, True, False)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    queries = start + tl.arange(0, BLOCK_M)
    row = (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * query_length
    tl.store(d_out + row + queries, delta, queries < query_length)


@triton.jit
def _load_row(pointers, inside, other, CHECKED: tl.constexpr):
    if CHECKED:
        return tl.load(pointers, inside, other=other)
    return tl.load(pointers)


@triton.jit
def _add_queries(
    dk, dv, dscores, k, v, q_in, g_in, l_row, d_row, batch, head, keys, start, query_length, scale, window,
    q_b, q_h, q_t, g_b, g_h, g_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Add what one tile of queries sends back to one tile of keys.

    Scores stand transposed, [keys, queries]: so P and dS are the left operands, which the matrix unit takes from
    registers. A query past the end has L = inf and so P = 0; a key past the end is not stored.
    LATE: a tile's product with Q is begun only after the next tile's scores: the matrix unit is at it while their
    exponentials are taken. `dscores` is then of the tile before, still to be added.
    """
    queries = start + tl.arange(0, BLOCK_M)
    q = load_tile(q_in, batch, head, start, q_b, q_h, q_t, query_length, D, BLOCK_M, BLOCK_D, MASKED, TMA)
    logsumexp = _load_row(l_row + queries, queries < query_length, float("inf"), MASKED)
    scores = dot(k, q.T, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_M]
    if LATE:
        before = tl.maximum(start - BLOCK_M, 0)  # of the first tile of all there is none, and dscores is 0
        q = load_tile(q_in, batch, head, before, q_b, q_h, q_t, query_length, D, BLOCK_M, BLOCK_D, MASKED, TMA)
        dk = dot_add(dscores.to(q.dtype), q, dk, PRECISION, INTERPRET)
    weights = tl.exp2(scores * scale - (logsumexp * _LOG2E)[None, :])
    if MASKED and CAUSAL:
        weights = tl.where(seen(queries[None, :], keys[:, None], window, WINDOW), weights, 0.0)
    g = load_tile(g_in, batch, head, start, g_b, g_h, g_t, query_length, D, BLOCK_M, BLOCK_D, MASKED, TMA)
    dv = dot_add(weights.to(g.dtype), g, dv, PRECISION, INTERPRET)
    dweights = dot(v, g.T, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_M]
    delta = _load_row(d_row + queries, queries < query_length, 0.0, MASKED)  # this late: it takes registers
    dscores = weights * (dweights - delta[None, :])
    if not LATE:
        dk = dot_add(dscores.to(q.dtype), q, dk, PRECISION, INTERPRET)
    return dk, dv, dscores


@triton.jit
def _walk_queries(
    dk, dv, dscores, k, v, q_in, g_in, l_row, d_row, batch, head, keys, low, high, query_length, scale, window,
    q_b, q_h, q_t, g_b, g_h, g_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Add what the queries of [low, high) of one head send back to one tile of keys."""
    for start in range(low, high, BLOCK_M):
        dk, dv, dscores = _add_queries(
            dk, dv, dscores, k, v, q_in, g_in, l_row, d_row, batch, head, keys, start, query_length, scale, window,
            q_b, q_h, q_t, g_b, g_h, g_t, D, BLOCK_D, BLOCK_M, MASKED, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET, LATE,
        )  # fmt: skip
    return dk, dv, dscores


@triton.jit
def _walk_group(
    dk, dv, k, v, q_in, g_in, l_in, d_in, batch, heads, first_head, group, keys, low, high, query_length, scale, window,
    q_b, q_h, q_t, g_b, g_h, g_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The same of every head that shares the keys, in one loop: a loop around loops would keep the addresses of all of
    them in registers."""
    tiles = tl.maximum(tl.cdiv(high - low, BLOCK_M), 0)
    for step in range(group * tiles):
        head = first_head + step // tiles
        row = (tl.cast(batch, tl.int64) * heads + head) * query_length
        dscores = tl.zeros([k.shape[0], BLOCK_M], tl.float32)  # not LATE: nothing is left to add
        dk, dv, dscores = _add_queries(
            dk, dv, dscores, k, v, q_in, g_in, l_in + row, d_in + row, batch, head, keys,
            low + step % tiles * BLOCK_M, query_length, scale, window, q_b, q_h, q_t, g_b, g_h, g_t,
            D, BLOCK_D, BLOCK_M, MASKED, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET, False,
        )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=["window"])
def _flash_dkdv_kernel(
    q_in, k_in, v_in, g_in, l_in, d_in, dk_out, dv_out,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    group, query_length, key_length, scale, window,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, LATE: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys of one key head, over all queries of its group. The first keys, which the most
    queries see, start first."""
    first = tl.program_id(0) * BLOCK_N
    key_head = tl.program_id(1)
    batch = tl.program_id(2)
    keys = first + tl.arange(0, BLOCK_N)
    k = load_tile(k_in, batch, key_head, first, k_b, k_h, k_t, key_length, D, BLOCK_N, BLOCK_D, True, TMA)
    v = load_tile(v_in, batch, key_head, first, v_b, v_h, v_t, key_length, D, BLOCK_N, BLOCK_D, True, TMA)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # Tiles of queries from `low`, which see all of these keys in [full_low, full_high), to `high`.
    low = 0
    full_low = 0
    high = query_length
    full_high = query_length // BLOCK_M * BLOCK_M
    if CAUSAL:
        low = tl.minimum(first // BLOCK_M * BLOCK_M, full_high)
        full_low = tl.minimum((first + BLOCK_N - 1 + BLOCK_M - 1) // BLOCK_M * BLOCK_M, full_high)
    if WINDOW:
        high = tl.minimum(high, first + BLOCK_N + window - 1)
        full_high = tl.maximum(tl.minimum(full_high, (first + window) // BLOCK_M * BLOCK_M), full_low)

    if GROUPED:
        heads = tl.num_programs(1) * group
        first_head = key_head * group
        if CAUSAL:
            dk, dv = _walk_group(
                dk, dv, k, v, q_in, g_in, l_in, d_in, batch, heads, first_head, group, keys, low, full_low, query_length,
                scale, window, q_b, q_h, q_t, g_b, g_h, g_t,
                D, BLOCK_D, BLOCK_M, True, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET,
            )  # fmt: skip
        dk, dv = _walk_group(
            dk, dv, k, v, q_in, g_in, l_in, d_in, batch, heads, first_head, group, keys, full_low, full_high, query_length,
            scale, window, q_b, q_h, q_t, g_b, g_h, g_t,
            D, BLOCK_D, BLOCK_M, False, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET,
        )  # fmt: skip
        if TAIL:
            dk, dv = _walk_group(
                dk, dv, k, v, q_in, g_in, l_in, d_in, batch, heads, first_head, group, keys, full_high, high, query_length,
                scale, window, q_b, q_h, q_t, g_b, g_h, g_t,
                D, BLOCK_D, BLOCK_M, True, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET,
            )  # fmt: skip
    else:
        head = key_head
        row = (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * query_length
        l_row = l_in + row
        d_row = d_in + row
        dscores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if CAUSAL:
            dk, dv, dscores = _walk_queries(
                dk, dv, dscores, k, v, q_in, g_in, l_row, d_row, batch, head, keys, low, full_low, query_length, scale, window,
                q_b, q_h, q_t, g_b, g_h, g_t, D, BLOCK_D, BLOCK_M, True, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET, LATE,
            )  # fmt: skip
        dk, dv, dscores = _walk_queries(
            dk, dv, dscores, k, v, q_in, g_in, l_row, d_row, batch, head, keys, full_low, full_high, query_length, scale, window,
            q_b, q_h, q_t, g_b, g_h, g_t, D, BLOCK_D, BLOCK_M, False, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET, LATE,
        )  # fmt: skip
        if TAIL:
            dk, dv, dscores = _walk_queries(
                dk, dv, dscores, k, v, q_in, g_in, l_row, d_row, batch, head, keys, full_high, high, query_length, scale, window,
                q_b, q_h, q_t, g_b, g_h, g_t, D, BLOCK_D, BLOCK_M, True, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET, LATE,
            )  # fmt: skip
        if LATE:
            last = tl.maximum(tl.cdiv(high, BLOCK_M) * BLOCK_M - BLOCK_M, 0)
            q = load_tile(q_in, batch, head, last, q_b, q_h, q_t, query_length, D, BLOCK_M, BLOCK_D, True, TMA)
            dk = dot_add(dscores.to(q.dtype), q, dk, PRECISION, INTERPRET)
    store_tile(dv_out, dv, batch, key_head, first, dv_b, dv_h, dv_t, key_length, D, BLOCK_N, BLOCK_D)
    dk = dk * (scale / _LOG2E)
    store_tile(dk_out, dk, batch, key_head, first, dk_b, dk_h, dk_t, key_length, D, BLOCK_N, BLOCK_D)


@triton.jit
def _walk_keys_back(
    dq, q, g, logsumexp, delta, k_in, v_in, batch, head, queries, low, high, key_length, scale, window,
    k_b, k_h, k_t, v_b, v_h, v_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add what the keys of [low, high) send back to one tile of queries. `logsumexp` is of powers of two."""
    for start in range(low, high, BLOCK_N):
        k = load_tile(k_in, batch, head, start, k_b, k_h, k_t, key_length, D, BLOCK_N, BLOCK_D, MASKED, TMA)
        scores = dot(q, k.T, PRECISION, INTERPRET)  # [BLOCK_M, BLOCK_N]
        v = load_tile(v_in, batch, head, start, v_b, v_h, v_t, key_length, D, BLOCK_N, BLOCK_D, MASKED, TMA)
        dweights = dot(g, v.T, PRECISION, INTERPRET)  # [BLOCK_M, BLOCK_N]
        weights = tl.exp2(scores * scale - logsumexp[:, None])
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            counts = (keys < key_length)[None, :]
            if CAUSAL:
                counts &= seen(queries[:, None], keys[None, :], window, WINDOW)
            weights = tl.where(counts, weights, 0.0)
        dscores = weights * (dweights - delta[:, None])
        dq = dot_add(dscores.to(k.dtype), k, dq, PRECISION, INTERPRET)
    return dq


@triton.jit(do_not_specialize=["window"])
def _flash_dq_kernel(
    q_in, k_in, v_in, g_in, l_in, d_in, dq_out,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    group, query_length, key_length, scale, window,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries of one head: the forward pass's walk over the keys, in the same order."""
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile
    head = tl.program_id(1)
    batch = tl.program_id(2)
    start = tile * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    q = load_tile(q_in, batch, head, start, q_b, q_h, q_t, query_length, D, BLOCK_M, BLOCK_D, True, TMA)
    g = load_tile(g_in, batch, head, start, g_b, g_h, g_t, query_length, D, BLOCK_M, BLOCK_D, True, TMA)
    row = (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * query_length
    inside = queries < query_length
    logsumexp = tl.load(l_in + row + queries, inside, other=float("inf")) * _LOG2E
    delta = tl.load(d_in + row + queries, inside, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, full_low, full_high, high = key_ranges(start, BLOCK_M, key_length, window, CAUSAL, WINDOW, BLOCK_N)
    key_head = head // group
    if WINDOW:
        dq = _walk_keys_back(
            dq, q, g, logsumexp, delta, k_in, v_in, batch, key_head, queries, low, full_low, key_length, scale, window,
            k_b, k_h, k_t, v_b, v_h, v_t, D, BLOCK_D, BLOCK_N, True, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET,
        )  # fmt: skip
    dq = _walk_keys_back(
        dq, q, g, logsumexp, delta, k_in, v_in, batch, key_head, queries, full_low, full_high, key_length, scale, window,
        k_b, k_h, k_t, v_b, v_h, v_t, D, BLOCK_D, BLOCK_N, False, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET,
    )  # fmt: skip
    if TAIL:
        dq = _walk_keys_back(
            dq, q, g, logsumexp, delta, k_in, v_in, batch, key_head, queries, full_high, high, key_length, scale, window,
            k_b, k_h, k_t, v_b, v_h, v_t, D, BLOCK_D, BLOCK_N, True, CAUSAL, WINDOW, TMA, PRECISION, INTERPRET,
        )  # fmt: skip
    store_tile(dq_out, dq * (scale / _LOG2E), batch, head, start, dq_b, dq_h, dq_t, query_length, D, BLOCK_M, BLOCK_D)


# What `benchmarks/attention_tune.py` finds best among the tiles that spill no registers.
DKDV: Table = {
    (80, 64): Config(64, 128, 8, 2),
    (80, 128): Config(64, 64, 8, 2),
    (80, 256): Config(32, 64, 8, 1),
    (90, 64): Config(128, 64, 4, 2, tma=True),
    (90, 128): Config(32, 64, 4, 2, tma=True, late=True),
    (90, 256): Config(16, 64, 8, 2, tma=True),
    (100, 64): Config(64, 128, 8, 2, tma=True),  # where that of 90 spills
}
DQ: Table = {
    (80, 64): Config(128, 64, 8, 2),
    (80, 128): Config(128, 32, 8, 2),
    (80, 256): Config(64, 32, 8, 2),
    (90, 64): Config(64, 128, 4, 3, tma=True),
    (90, 128): Config(64, 64, 4, 2, tma=True),
    (90, 256): Config(64, 64, 8, 2, tma=True),
}


class Saved(NamedTuple):
    """What the backward pass is given, with L and Δ contiguous and the last stride of the others 1."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    logsumexp: Tensor
    delta: Tensor

    def arguments(self, block_m: int, block_n: int, tma: bool) -> tuple[Any, ...]:
        block_d = padded(self.q.shape[-1])
        return (
            tile_of(self.q, block_m, block_d, tma),
            tile_of(self.k, block_n, block_d, tma),
            tile_of(self.v, block_n, block_d, tma),
            tile_of(self.grad, block_m, block_d, tma),
            self.logsumexp,
            self.delta,
        )

    def strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *self.grad.stride()[:3])

    def numbers(self, problem: Problem) -> tuple[Any, ...]:
        group = self.q.shape[1] // self.k.shape[1]
        return (group, self.q.shape[2], self.k.shape[2], problem.scale * LOG2E, problem.window or 0)


def launch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    problem: Problem,
    dkdv: Config | None = None,
    dq: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of [B, H, T, D] tensors; the caller has checked them."""
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not q.numel() or not k.numel():
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_()
    dkdv = dkdv or choose(DKDV, q, k.shape[2])
    dq = dq or choose(DQ, q, k.shape[2])
    grad, q, k, v = (lined_up(x, dkdv) for x in (unit_stride(grad), q, k, v))
    saved = Saved(grad, q, k, v, logsumexp.contiguous(), torch.empty_like(logsumexp))
    delta_call(saved, unit_stride(output)).launch()
    dkdv_call(saved, grads[1], grads[2], problem, dkdv).launch()
    dq_call(saved, grads[0], problem, dq).launch()
    return grads


def delta_call(saved: Saved, output: Tensor) -> Call:
    """Δ into `saved.delta`."""
    batch, heads, length, head_dim = output.shape
    rows = 32
    strides = *output.stride()[:3], *saved.grad.stride()[:3]
    constants = {"D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": rows, "num_warps": 4}
    grid = (triton.cdiv(length, rows), heads, batch)
    return Call(_flash_delta_kernel, grid, (output, saved.grad, saved.delta, *strides, length), constants)


def dkdv_call(saved: Saved, dk: Tensor, dv: Tensor, problem: Problem, config: Config) -> Call:
    """The launch that writes dk and dv, not yet made."""
    q, k = saved.q, saved.k
    grouped = q.shape[1] != k.shape[1]
    tma = config.tma and tma_ready(saved.grad, q, k, saved.v)
    arguments = *saved.arguments(config.block_m, config.block_n, tma), dk, dv
    strides = *saved.strides(), *dk.stride()[:3], *dv.stride()[:3]
    tail = problem.window is not None or q.shape[2] % config.block_m != 0
    options = (
        problem.constants
        | {"TAIL": tail, "LATE": config.late and not grouped, "GROUPED": grouped}
        | config.options(q, tma)
    )
    grid = (triton.cdiv(k.shape[2], config.block_n), k.shape[1], k.shape[0])
    return Call(_flash_dkdv_kernel, grid, (*arguments, *strides, *saved.numbers(problem)), options)


def dq_call(saved: Saved, dq: Tensor, problem: Problem, config: Config) -> Call:
    """The launch that writes dq, not yet made."""
    q, k = saved.q, saved.k
    tma = config.tma and tma_ready(saved.grad, q, k, saved.v)
    arguments = *saved.arguments(config.block_m, config.block_n, tma), dq
    tail = problem.causal or k.shape[2] % config.block_n != 0
    options = problem.constants | {"TAIL": tail} | config.options(q, tma)
    grid = (triton.cdiv(q.shape[2], config.block_m), q.shape[1], q.shape[0])
    return Call(
        _flash_dq_kernel, grid, (*arguments, *saved.strides(), *dq.stride()[:3], *saved.numbers(problem)), options
    )


def backward_cases() -> Iterator[Case]:
    """The kernels in the tiles they ship with."""
    yield from shipped("flash dK/dV", _flash_dkdv_kernel, DKDV)
    yield from shipped("flash dQ", _flash_dq_kernel, DQ)
