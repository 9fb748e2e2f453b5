"""FlashAttention's backward pass for sm_90 in Gluon: dK, dV and dQ in one pass over the scores, five products where the two
passes of `attention_backward.py` take seven.

A program keeps 128 keys. Eight warps multiply, one warp loads. Each of a tile's five products is begun before the arithmetic
that does not need it, so that the matrix unit has work while exponentials are taken and tiles are stored. dQ is summed in
fp32 over programs, by the copy engine's additions: in another order at every run. Import it through `gluon_kernels`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flopwise.kernels import attention_hopper as forward
from flopwise.kernels.attention_hopper import KINDS, SECTION, dealt, described, tile_kind
from flopwise.kernels.attention_tiles import LOG2E, Call, Problem, tma_ready
from flopwise.kernels.case import Case
from flopwise.kernels.triton_private import gluon_add_to_global

_LN2 = gl.constexpr(1 / LOG2E)
_LOG2E = tl.constexpr(LOG2E)
_LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)  # L and Δ of a tile
_add_to_global = gluon_add_to_global()


@dataclass(frozen=True)
class Backward:
    """What the backward kernel is compiled for: its constants `C`."""

    head_dim: int
    block_m: int  # queries of a tile
    block_n: int  # keys of a program
    stages: int  # tiles of queries, and of dO, in shared memory
    causal: bool
    tail: bool  # the last keys are fewer than block_n


@gluon.jit
def _load_tiles(q_in, k_in, v_in, g_in, l_in, d_in, buffers, bars, at, span, C: gl.constexpr):
    """The copying warp: K and V once, then each tile as soon as the one in its place is read."""
    k_s, v_s, q_s, g_s, l_s, d_s = buffers
    kv_full, q_full, q_empty, g_full, g_empty = bars
    batch, head, row, first = at
    mbarrier.expect(kv_full, k_in.block_type.nbytes + v_in.block_type.nbytes)
    tma.async_copy_global_to_shared(k_in, [batch, head, first, 0], kv_full, k_s)
    tma.async_copy_global_to_shared(v_in, [batch, head, first, 0], kv_full, v_s)
    for i in range(span[1]):
        slot = i % C.stages
        phase = ((i // C.stages) & 1) ^ 1
        start = span[0] + i * C.block_m
        mbarrier.wait(q_empty.index(slot), phase)
        mbarrier.expect(q_full.index(slot), q_in.block_type.nbytes + l_in.block_type.nbytes)
        tma.async_copy_global_to_shared(q_in, [batch, head, start, 0], q_full.index(slot), q_s.index(slot))
        tma.async_copy_global_to_shared(l_in, [row, start], q_full.index(slot), l_s.index(slot))
        mbarrier.wait(g_empty.index(slot), phase)
        mbarrier.expect(g_full.index(slot), g_in.block_type.nbytes + d_in.block_type.nbytes)
        tma.async_copy_global_to_shared(g_in, [batch, head, start, 0], g_full.index(slot), g_s.index(slot))
        tma.async_copy_global_to_shared(d_in, [row, start], g_full.index(slot), d_s.index(slot))


@gluon.jit
def _store(out, strides, value, batch, head, first, length, layout: gl.constexpr):
    rows = first + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    corner = out + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    pointers = corner + rows.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    gl.store(pointers, value.to(out.dtype.element_ty), (rows < length)[:, None])


@gluon.jit
def _send_back(buffers, s_s, dq_s, dq_out, dk_out, dv_out, bars, at, span, strides, problem, C: gl.constexpr):
    """Eight warps. Scores stand transposed, [keys, queries]: P and dS are left operands, which come from registers."""
    k_s, v_s, q_s, g_s, l_s, d_s = buffers
    kv_full, q_full, q_empty, g_full, g_empty = bars
    batch, head, _, first = at
    scale, key_length = problem
    D: gl.constexpr = C.head_dim
    M: gl.constexpr = C.block_m
    N: gl.constexpr = C.block_n
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, M, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    across: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 128 // M], [16, D * M // 128, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    line: gl.constexpr = gl.SliceLayout(0, square)
    k = k_s.reshape([N, D])
    v = v_s.reshape([N, D])
    empty = gl.full([N, M], 0.0, gl.float32, square)
    empty_dq = gl.full([M, D], 0.0, gl.float32, across)
    dk = gl.full([N, D], 0.0, gl.float32, wide)
    dv = gl.full([N, D], 0.0, gl.float32, wide)
    keys = first + gl.arange(0, N, gl.SliceLayout(1, square))
    mbarrier.wait(kv_full, 0)
    for i in range(span[1]):
        slot = i % C.stages
        phase = (i // C.stages) & 1
        start = span[0] + i * M
        q = q_s.index(slot).reshape([M, D])
        g = g_s.index(slot).reshape([M, D])
        mbarrier.wait(q_full.index(slot), phase)
        s_token = warpgroup_mma(k, q.permute([1, 0]), empty, use_acc=False, is_async=True)
        mbarrier.wait(g_full.index(slot), phase)
        dp_token = warpgroup_mma(v, g.permute([1, 0]), empty, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [s_token])
        logsumexp = l_s.index(slot).reshape([M]).load(line)  # of a query past the end inf, and so P = 0
        p = gl.exp2(scores * scale - logsumexp[None, :])
        if C.causal:  # noqa: SIM102  the one is known when compiling
            if i * M < N:
                queries = start + gl.arange(0, M, line)
                # Not to be compared before the loop, where the results would take registers all along.
                queries = gl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=r,r", [queries], dtype=gl.int32, is_pure=False, pack=1
                )
                p = gl.where(keys[:, None] <= queries[None, :], p, 0.0)
        if C.tail:
            p = gl.where((keys < key_length)[:, None], p, 0.0)
        dv_token = warpgroup_mma(gl.convert_layout(p.to(q_s.dtype), left), g, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp_token])
        delta = d_s.index(slot).reshape([M]).load(line)
        ds = (p * (dp - delta[None, :])).to(q_s.dtype)
        s_s.store(ds)
        fence_async_shared()
        dq_token = warpgroup_mma(s_s.permute([1, 0]), k, empty_dq, use_acc=False, is_async=True)
        dk_token = warpgroup_mma(gl.convert_layout(ds, left), q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, [dv_token, dq_token])
        mbarrier.arrive(g_empty.index(slot))
        tma.store_wait(0)
        dq_s.reshape([M, D]).store(dq)
        fence_async_shared()
        _add_to_global(dq_out, [batch, head, start, 0], dq_s)
        dk = warpgroup_mma_wait(0, [dk_token])
        mbarrier.arrive(q_empty.index(slot))
    tma.store_wait(0)
    _store(dv_out, strides[3:], dv, batch, head, first, key_length, wide)
    _store(dk_out, strides[:3], dk * (scale * _LN2), batch, head, first, key_length, wide)


@gluon.jit(do_not_specialize=["tiles", "heads", "rows", "section", "query_length", "key_length"])
def _flash_backward_hopper_kernel(
    q_in,
    k_in,
    v_in,
    g_in,
    l_in,
    d_in,
    dq_out,
    dk_out,
    dv_out,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    tiles,
    heads,
    rows,
    section,
    query_length,
    key_length,
    scale,
    C: gl.constexpr,
):
    """dK and dV of 128 keys of one head, and what they add to dQ. `l_in` is of powers of two; dQ is still to be scaled."""
    D: gl.constexpr = C.head_dim
    M: gl.constexpr = C.block_m
    N: gl.constexpr = C.block_n
    STAGES: gl.constexpr = C.stages
    k_s = gl.allocate_shared_memory(k_in.dtype, [1, 1, N, D], k_in.layout)
    v_s = gl.allocate_shared_memory(v_in.dtype, [1, 1, N, D], v_in.layout)
    q_s = gl.allocate_shared_memory(q_in.dtype, [STAGES, 1, 1, M, D], q_in.layout)
    g_s = gl.allocate_shared_memory(g_in.dtype, [STAGES, 1, 1, M, D], g_in.layout)
    l_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, M], l_in.layout)
    d_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, M], d_in.layout)
    s_s = gl.allocate_shared_memory(k_in.dtype, [N, M], gl.NVMMASharedLayout.get_default_for([N, M], k_in.dtype))
    dq_s = gl.allocate_shared_memory(gl.float32, [1, 1, M, D], dq_out.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_empty.index(i), count=1)
    fence_async_shared()
    tile, row = dealt(gl.program_id(0), tiles, rows, section)
    first = tile * N
    low = 0
    if C.causal:
        low = first // M * M
    at = (row // heads, row % heads, row, first)
    span = (low, gl.maximum(gl.cdiv(query_length - low, M), 0))
    buffers = (k_s, v_s, q_s, g_s, l_s, d_s)
    bars = (kv_full, q_full, q_empty, g_full, g_empty)
    strides = (dk_b, dk_h, dk_t, dv_b, dv_h, dv_t)
    gl.warp_specialize(
        [
            (_send_back, (buffers, s_s, dq_s, dq_out, dk_out, dv_out, bars, at, span, strides, (scale, key_length), C)),
            (_load_tiles, (q_in, k_in, v_in, g_in, l_in, d_in, buffers, bars, at, span, C)),
        ],
        [1],
        [24],
    )


@triton.jit(do_not_specialize=["query_length", "padded_length"])
def _flash_prepare_kernel(
    o_in,
    g_in,
    l_in,
    l_out,
    d_out,
    dq_out,
    o_b,
    o_h,
    o_t,
    g_b,
    g_h,
    g_t,
    query_length,
    padded_length,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Δ = rowsum(dO ∘ O), and L of powers of two, both padded to whole tiles; and zeros to add dQ to."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    columns = tl.arange(0, D)[None, :]
    inside = rows < query_length
    o = tl.load(
        o_in + batch * o_b + head.to(tl.int64) * o_h + rows[:, None] * o_t + columns, inside[:, None], other=0.0
    )
    g = tl.load(
        g_in + batch * g_b + head.to(tl.int64) * g_h + rows[:, None] * g_t + columns, inside[:, None], other=0.0
    )
    row = batch * tl.num_programs(1) + head
    logsumexp = tl.load(l_in + row * query_length + rows, inside, other=float("inf"))
    tl.store(l_out + row * padded_length + rows, logsumexp * _LOG2E, rows < padded_length)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(d_out + row * padded_length + rows, delta, rows < padded_length)
    zeros = tl.full([ROWS, D], 0.0, tl.float32)
    tl.store(dq_out + (row * query_length + rows[:, None]) * D + columns, zeros, inside[:, None])


# By head dimension: queries of a tile, keys of a program, tiles in shared memory.
BACKWARD = {128: (64, 128, 2)}


def takes(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> bool:
    """These tensors are among those that the kernel is written for; dQ need not be the same at every run."""
    known = q.shape[-1] in BACKWARD and q.dtype in KINDS and problem.window is None and q.shape[1] == k.shape[1]
    long = max(q.shape[2], k.shape[2]) >= forward.LONG
    return known and long and tma_ready(grad, q, k, v) and not torch.are_deterministic_algorithms_enabled()


def launch(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    written: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
) -> None:
    """dQ, dK and dV into `written`, of what it `takes`."""
    batch, heads, length, head_dim = q.shape
    block_m = BACKWARD[head_dim][0]
    padded = triton.cdiv(length, block_m) * block_m
    lines = q.new_empty(2, batch * heads, padded, dtype=torch.float32)
    sums = q.new_empty(q.shape, dtype=torch.float32)
    strides = (*output.stride()[:3], *grad.stride()[:3])
    _flash_prepare_kernel[triton.cdiv(padded, 32), heads, batch](
        output, grad, logsumexp, lines[0], lines[1], sums, *strides, length, padded, ROWS=32, D=head_dim
    )
    dq, dk, dv = written
    backward_call(grad, q, k, v, lines, (sums, dk, dv), problem).launch()
    torch.mul(sums, problem.scale, out=dq)


def backward_call(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lines: Tensor, sums: tuple[Tensor, Tensor, Tensor], problem: Problem
) -> Call:
    """The launch that adds to dQ and writes dK and dV, not yet made. `lines`: L of powers of two, and Δ."""
    batch, heads, length, head_dim = q.shape
    block_m, block_n, stages = BACKWARD[head_dim]
    rows, tiles = batch * heads, triton.cdiv(k.shape[2], block_n)
    described_lines = [TensorDescriptor(x, list(x.shape), list(x.stride()), [1, block_m], _LINE) for x in lines]
    sources = (described(q, block_m), described(k, block_n), described(v, block_n), described(grad, block_m))
    dq, dk, dv = sums
    sizes = (tiles, heads, rows, min(SECTION if problem.causal else 1, rows), length, k.shape[2])
    written = (described(dq, block_m), dk, dv, *dk.stride()[:3], *dv.stride()[:3])
    fixed = Backward(head_dim, block_m, block_n, stages, problem.causal, k.shape[2] % block_n != 0)
    arguments = (*sources, *described_lines, *written, *sizes, problem.scale * LOG2E)
    return Call(_flash_backward_hopper_kernel, (tiles * rows, 1, 1), arguments, {"C": fixed, "num_warps": 8})


def cases() -> Iterator[Case]:
    """Both kernels as they are shipped."""
    yield from forward.cases()
    strides = ("dk_b", "dk_h", "dk_t", "dv_b", "dv_h", "dv_t")
    numbers = ("tiles", "heads", "rows", "section", "query_length", "key_length", *strides)
    for head_dim, (block_m, block_n, stages) in BACKWARD.items():
        line = f"tensordesc<fp32[1, {block_m}],{_LINE!r}>"
        signature: dict[str, Any] = {"l_in": line, "d_in": line, "scale": "fp32", "dk_out": "*bf16", "dv_out": "*bf16"}
        for name, rows in (("q_in", block_m), ("k_in", block_n), ("v_in", block_n), ("g_in", block_m)):
            signature[name] = tile_kind("bf16", rows, head_dim)
        signature["dq_out"] = tile_kind("fp32", block_m, head_dim)
        signature |= dict.fromkeys(numbers, "i32")
        for causal, tail in ((True, True), (False, False)):
            words = "" if causal else " full"
            constants = {"C": Backward(head_dim, block_m, block_n, stages, causal, tail)}
            name = f"flash backward gluon bf16 d{head_dim} {block_m}x{block_n}{words}"
            kernel = _flash_backward_hopper_kernel
            yield Case(name, kernel, signature, constants, 8, divisible=strides, archs=(90,))
