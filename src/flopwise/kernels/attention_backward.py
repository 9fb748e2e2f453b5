"""The backward pass of FlashAttention-2 in Triton: Δ, then dK and dV, then dQ, each in a kernel of its own.

No kernel adds to what another program writes, so the result is the same at every run. The scores are computed again in
both passes, seven matmuls where one pass with atomic additions would do five. The formulas are those of `attention.py`.
Long sequences on sm_90 go that other way, by `attention_hopper_backward.py`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.attention_gluon import gluon_kernels, gluon_on, trusted
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

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _flash_delta_kernel(o_in, g_in, d_out, o_b, o_h, o_t, g_b, g_h, g_t, query_length, C: tl.constexpr):
    """Δ = rowsum(dO ∘ O): the part of dS that is common to a query's scores. O and dO are read once."""
    start = tl.program_id(0) * C.block_m
    head = tl.program_id(1)
    batch = tl.program_id(2)
    o = load_tile((o_in, o_b, o_h, o_t), batch, head, start, query_length, C.block_m, True, C)
    g = load_tile((g_in, g_b, g_h, g_t), batch, head, start, query_length, C.block_m, True, C)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    queries = start + tl.arange(0, C.block_m)
    row = (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * query_length
    tl.store(d_out + row + queries, delta, queries < query_length)


@triton.jit
def _load_row(pointers, inside, other, CHECKED: tl.constexpr):
    if CHECKED:
        return tl.load(pointers, inside, other=other)
    return tl.load(pointers)


@triton.jit
def _add_queries(sums, k, v, q_from, g_from, rows, at, keys, start, problem, MASKED: tl.constexpr, C: tl.constexpr):
    """Add what one tile of queries sends back to one tile of keys.

    Scores stand transposed, [keys, queries]: so P and dS are the left operands, which the matrix unit takes from
    registers. A query past the end has L = inf and so P = 0; a key past the end is not stored.
    Late: a tile's product with Q is begun only after the next tile's scores: the matrix unit is at it while their
    exponentials are taken. `dscores` is then of the tile before, still to be added.
    """
    dk, dv, dscores = sums
    l_row, d_row = rows
    batch, head = at
    query_length, scale, window = problem
    queries = start + tl.arange(0, C.block_m)
    q = load_tile(q_from, batch, head, start, query_length, C.block_m, MASKED, C)
    logsumexp = _load_row(l_row + queries, queries < query_length, float("inf"), MASKED)
    scores = dot(k, q.T, C)  # [block_n, block_m]
    if C.late:
        before = tl.maximum(start - C.block_m, 0)  # of the first tile of all there is none, and dscores is 0
        q = load_tile(q_from, batch, head, before, query_length, C.block_m, MASKED, C)
        dk = dot_add(dscores.to(q.dtype), q, dk, C)
    weights = tl.exp2(scores * scale - (logsumexp * _LOG2E)[None, :])
    if MASKED and C.causal:
        weights = tl.where(visible(queries[None, :], keys[:, None], window, C), weights, 0.0)
    g = load_tile(g_from, batch, head, start, query_length, C.block_m, MASKED, C)
    dv = dot_add(weights.to(g.dtype), g, dv, C)
    dweights = dot(v, g.T, C)  # [block_n, block_m]
    delta = _load_row(d_row + queries, queries < query_length, 0.0, MASKED)  # this late: it takes registers
    dscores = weights * (dweights - delta[None, :])
    if not C.late:
        dk = dot_add(dscores.to(q.dtype), q, dk, C)
    return dk, dv, dscores


@triton.jit
def _walk_queries(sums, k, v, q_from, g_from, rows, at, keys, span, problem, MASKED: tl.constexpr, C: tl.constexpr):
    """Add what the queries of `span` of one head send back to one tile of keys."""
    dk, dv, dscores = sums
    for start in range(span[0], span[1], C.block_m):
        dk, dv, dscores = _add_queries(
            (dk, dv, dscores), k, v, q_from, g_from, rows, at, keys, start, problem, MASKED, C
        )
    return dk, dv, dscores


@triton.jit
def _walk_group(dk, dv, k, v, q_from, g_from, rows, at, keys, span, problem, MASKED: tl.constexpr, C: tl.constexpr):
    """The same of every head that shares the keys, in one loop: a loop around loops would keep the addresses of all of
    them in registers. `at`: the batch, the number of heads, the first head and how many share the keys."""
    batch, heads, first_head, group = at
    low, high = span
    tiles = tl.maximum(tl.cdiv(high - low, C.block_m), 0)
    for step in range(group * tiles):
        head = first_head + step // tiles
        row = (tl.cast(batch, tl.int64) * heads + head) * problem[0]
        dscores = tl.full([k.shape[0], C.block_m], 0.0, tl.float32)  # a group is never late: nothing is left to add
        of_head, start = (rows[0] + row, rows[1] + row), low + step % tiles * C.block_m
        dk, dv, dscores = _add_queries(
            (dk, dv, dscores), k, v, q_from, g_from, of_head, (batch, head), keys, start, problem, MASKED, C
        )
    return dk, dv


@triton.jit(do_not_specialize=["window"])
def _flash_dkdv_kernel(
    q_in,
    k_in,
    v_in,
    g_in,
    l_in,
    d_in,
    dk_out,
    dv_out,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    g_b,
    g_h,
    g_t,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    group,
    query_length,
    key_length,
    scale,
    window,
    C: tl.constexpr,
):
    """dK and dV of one tile of keys of one key head, over all queries of its group. The first keys, which the most
    queries see, start first."""
    first = tl.program_id(0) * C.block_n
    key_head = tl.program_id(1)
    batch = tl.program_id(2)
    keys = first + tl.arange(0, C.block_n)
    k = load_tile((k_in, k_b, k_h, k_t), batch, key_head, first, key_length, C.block_n, True, C)
    v = load_tile((v_in, v_b, v_h, v_t), batch, key_head, first, key_length, C.block_n, True, C)
    dk = tl.full([C.block_n, C.block_d], 0.0, tl.float32)
    dv = tl.full([C.block_n, C.block_d], 0.0, tl.float32)

    # Tiles of queries from `low`, which see all of these keys in [full_low, full_high), to `high`.
    low = 0
    full_low = 0
    high = query_length
    full_high = query_length // C.block_m * C.block_m
    if C.causal:
        low = tl.minimum(first // C.block_m * C.block_m, full_high)
        full_low = tl.minimum((first + C.block_n - 1 + C.block_m - 1) // C.block_m * C.block_m, full_high)
    if C.windowed:
        high = tl.minimum(high, first + C.block_n + window - 1)
        full_high = tl.maximum(tl.minimum(full_high, (first + window) // C.block_m * C.block_m), full_low)

    q_from, g_from, problem = (q_in, q_b, q_h, q_t), (g_in, g_b, g_h, g_t), (query_length, scale, window)
    if C.grouped:
        rows, group_at = (l_in, d_in), (batch, tl.num_programs(1) * group, key_head * group, group)
        if C.causal:
            dk, dv = _walk_group(dk, dv, k, v, q_from, g_from, rows, group_at, keys, (low, full_low), problem, True, C)
        dk, dv = _walk_group(
            dk, dv, k, v, q_from, g_from, rows, group_at, keys, (full_low, full_high), problem, False, C
        )
        if C.tail:
            dk, dv = _walk_group(
                dk, dv, k, v, q_from, g_from, rows, group_at, keys, (full_high, high), problem, True, C
            )
    else:
        row = (tl.cast(batch, tl.int64) * tl.num_programs(1) + key_head) * query_length
        rows, at = (l_in + row, d_in + row), (batch, key_head)
        sums = (dk, dv, tl.full([C.block_n, C.block_m], 0.0, tl.float32))
        if C.causal:
            sums = _walk_queries(sums, k, v, q_from, g_from, rows, at, keys, (low, full_low), problem, True, C)
        sums = _walk_queries(sums, k, v, q_from, g_from, rows, at, keys, (full_low, full_high), problem, False, C)
        if C.tail:
            sums = _walk_queries(sums, k, v, q_from, g_from, rows, at, keys, (full_high, high), problem, True, C)
        dk, dv, dscores = sums
        if C.late:
            last = tl.maximum(tl.cdiv(high, C.block_m) * C.block_m - C.block_m, 0)
            q = load_tile(q_from, batch, key_head, last, query_length, C.block_m, True, C)
            dk = dot_add(dscores.to(q.dtype), q, dk, C)
    store_tile((dv_out, dv_b, dv_h, dv_t), dv, batch, key_head, first, key_length, C.block_n, C)
    dk = dk * (scale / _LOG2E)
    store_tile((dk_out, dk_b, dk_h, dk_t), dk, batch, key_head, first, key_length, C.block_n, C)


@triton.jit
def _walk_keys_back(dq, q, g, rows, k_from, v_from, at, queries, span, problem, MASKED: tl.constexpr, C: tl.constexpr):
    """Add what the keys of `span` send back to one tile of queries. `rows`: L, of powers of two, and Δ."""
    logsumexp, delta = rows
    batch, head = at
    key_length, scale, window = problem
    for start in range(span[0], span[1], C.block_n):
        k = load_tile(k_from, batch, head, start, key_length, C.block_n, MASKED, C)
        scores = dot(q, k.T, C)  # [block_m, block_n]
        v = load_tile(v_from, batch, head, start, key_length, C.block_n, MASKED, C)
        dweights = dot(g, v.T, C)  # [block_m, block_n]
        weights = tl.exp2(scores * scale - logsumexp[:, None])
        if MASKED:
            keys = start + tl.arange(0, C.block_n)
            counts = (keys < key_length)[None, :]
            if C.causal:
                counts &= visible(queries[:, None], keys[None, :], window, C)
            weights = tl.where(counts, weights, 0.0)
        dscores = weights * (dweights - delta[:, None])
        dq = dot_add(dscores.to(k.dtype), k, dq, C)
    return dq


@triton.jit(do_not_specialize=["window"])
def _flash_dq_kernel(
    q_in,
    k_in,
    v_in,
    g_in,
    l_in,
    d_in,
    dq_out,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    g_b,
    g_h,
    g_t,
    dq_b,
    dq_h,
    dq_t,
    group,
    query_length,
    key_length,
    scale,
    window,
    C: tl.constexpr,
):
    """dQ of one tile of queries of one head: the forward pass's walk over the keys, in the same order."""
    tile = tl.program_id(0)
    if C.causal:
        tile = tl.num_programs(0) - 1 - tile
    head = tl.program_id(1)
    batch = tl.program_id(2)
    start = tile * C.block_m
    queries = start + tl.arange(0, C.block_m)
    q = load_tile((q_in, q_b, q_h, q_t), batch, head, start, query_length, C.block_m, True, C)
    g = load_tile((g_in, g_b, g_h, g_t), batch, head, start, query_length, C.block_m, True, C)
    row = (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * query_length
    inside = queries < query_length
    logsumexp = tl.load(l_in + row + queries, inside, other=float("inf")) * _LOG2E
    delta = tl.load(d_in + row + queries, inside, other=0.0)
    dq = tl.full([C.block_m, C.block_d], 0.0, tl.float32)
    low, full_low, full_high, high = key_ranges(start, key_length, window, C)
    k_from, v_from, at = (k_in, k_b, k_h, k_t), (v_in, v_b, v_h, v_t), (batch, head // group)
    rows, problem = (logsumexp, delta), (key_length, scale, window)
    if C.windowed:
        dq = _walk_keys_back(dq, q, g, rows, k_from, v_from, at, queries, (low, full_low), problem, True, C)
    dq = _walk_keys_back(dq, q, g, rows, k_from, v_from, at, queries, (full_low, full_high), problem, False, C)
    if C.tail:
        dq = _walk_keys_back(dq, q, g, rows, k_from, v_from, at, queries, (full_high, high), problem, True, C)
    dq = dq * (scale / _LOG2E)
    store_tile((dq_out, dq_b, dq_h, dq_t), dq, batch, head, start, query_length, C.block_m, C)


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

    def call(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        written: tuple[Tensor, ...],
        problem: "Problem",
        config: Config,
        tail: bool,
        grouped: bool = False,
    ) -> Call:
        """A launch, not yet made, of a kernel that reads all of these and writes the gradients `written`."""
        read = (self.q, self.k, self.v, self.grad)
        tma = config.tma and tma_ready(*read)
        rows = (config.block_m, config.block_n, config.block_n, config.block_m)
        sources = [tile_of(x, n, padded(self.q.shape[-1]), tma) for x, n in zip(read, rows, strict=True)]
        strides = [stride for x in (*read, *written) for stride in x.stride()[:3]]
        group = self.q.shape[1] // self.k.shape[1]
        numbers = (group, self.q.shape[2], self.k.shape[2], problem.scale * LOG2E, problem.window or 0)
        arguments = (*sources, self.logsumexp, self.delta, *written, *strides, *numbers)
        return config.call(kernel, grid, arguments, config.fixed(self.q, problem, tma, tail, grouped))


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
    gluon = None if dkdv or dq else gluon_on(q)
    dkdv = dkdv or choose(DKDV, q, k.shape[2])
    dq = dq or choose(DQ, q, k.shape[2])
    grad, q, k, v = (lined_up(x, dkdv) for x in (unit_stride(grad), q, k, v))
    if gluon and gluon.takes(grad, q, k, v, problem) and trusted(gluon, q, problem.causal):
        gluon.launch(grad, q, k, v, unit_stride(output), logsumexp.contiguous(), grads, problem)
        return grads
    saved = Saved(grad, q, k, v, logsumexp.contiguous(), torch.empty_like(logsumexp))
    delta_call(saved, unit_stride(output)).launch()
    dkdv_call(saved, grads[1], grads[2], problem, dkdv).launch()
    dq_call(saved, grads[0], problem, dq).launch()
    return grads


def delta_call(saved: Saved, output: Tensor) -> Call:
    """Δ into `saved.delta`."""
    batch, heads, length, _ = output.shape
    config = Config(32, 32, 4, 3)  # rows of a program; there are no keys here
    strides = *output.stride()[:3], *saved.grad.stride()[:3]
    grid = (triton.cdiv(length, config.block_m), heads, batch)
    fixed = config.fixed(output, Problem(False, None, 1.0), tma=False, tail=True)
    return config.call(_flash_delta_kernel, grid, (output, saved.grad, saved.delta, *strides, length), fixed)


def dkdv_call(saved: Saved, dk: Tensor, dv: Tensor, problem: Problem, config: Config) -> Call:
    """The launch that writes dk and dv, not yet made."""
    q, k = saved.q, saved.k
    tail = problem.window is not None or q.shape[2] % config.block_m != 0
    grid = (triton.cdiv(k.shape[2], config.block_n), k.shape[1], k.shape[0])
    return saved.call(_flash_dkdv_kernel, grid, (dk, dv), problem, config, tail, grouped=q.shape[1] != k.shape[1])


def dq_call(saved: Saved, dq: Tensor, problem: Problem, config: Config) -> Call:
    """The launch that writes dq, not yet made."""
    q, k = saved.q, saved.k
    tail = problem.causal or k.shape[2] % config.block_n != 0
    grid = (triton.cdiv(q.shape[2], config.block_m), q.shape[1], q.shape[0])
    return saved.call(_flash_dq_kernel, grid, (dq,), problem, config, tail)


def backward_cases() -> Iterator[Case]:
    """The kernels in the tiles they ship with."""
    yield from shipped("flash dK/dV", _flash_dkdv_kernel, DKDV)
    yield from shipped("flash dQ", _flash_dq_kernel, DQ)
    if gluon := gluon_kernels():
        yield from gluon.cases()
