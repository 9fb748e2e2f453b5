"""FlashAttention's forward pass for sm_90 in Gluon, where every wait and every copy is written out.

As `attention_triton.py` computes it, but with the matrix unit never idle: one warp loads tiles by the copy engine, and each
of two or three groups of four warps keeps 64 queries. A group begins the product of the next tile's scores and that of this
tile's weights with V, and takes the exponentials while the second is still under way. Import it through `gluon_kernels`.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
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

from flopwise.kernels.attention_tiles import LOG2E, Call, Problem, tma_ready
from flopwise.kernels.case import Case

_ROWS = gl.constexpr(64)  # queries of a group of four warps
_LN2 = gl.constexpr(1 / LOG2E)
KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Forward:
    """What the forward kernel is compiled for: its constants `C`."""

    head_dim: int
    block_n: int  # keys of a tile
    stages: int  # tiles of keys, and of values, in shared memory
    parts: int  # groups of four warps
    causal: bool


@gluon.jit
def dealt(item, tiles, rows, section):
    """A rank of tile and its row, of all heads of all batches: within each section of rows the first ranks come first."""
    first = item // (section * tiles) * section
    width = gl.minimum(section, rows - first)
    return (item - first * tiles) // width, first + (item - first * tiles) % width


@gluon.jit
def _load_tiles(q_in, k_in, v_in, q_s, k_s, v_s, bars, at, C: gl.constexpr):
    """The copying warp: each tile as soon as the one in its place is read. The last keys come first."""
    q_full, k_full, k_empty, v_full, v_empty = bars
    PARTS: gl.constexpr = C.parts
    tile, head, key_head, batch, count = at
    mbarrier.expect(q_full, PARTS * q_in.block_type.nbytes)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(q_in, [batch, head, (tile * PARTS + part) * _ROWS, 0], q_full, q_s.index(part))
    for i in range(count):
        start = (count - 1 - i) * C.block_n
        slot = i % C.stages
        phase = ((i // C.stages) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), k_in.block_type.nbytes)
        tma.async_copy_global_to_shared(k_in, [batch, key_head, start, 0], k_full.index(slot), k_s.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), v_in.block_type.nbytes)
        tma.async_copy_global_to_shared(v_in, [batch, key_head, start, 0], v_full.index(slot), v_s.index(slot))


@gluon.jit
def _attend(q_s, k_s, v_s, o_out, l_out, bars, at, sizes, o_strides, scale, PART: gl.constexpr, C: gl.constexpr):
    """Four warps: O and L of 64 queries. `scale` includes log2 e; m is scaled."""
    q_full, k_full, k_empty, v_full, v_empty = bars
    tile, head, _, batch, count = at
    heads, query_length, key_length = sizes
    D: gl.constexpr = C.head_dim
    N: gl.constexpr = C.block_n
    STAGES: gl.constexpr = C.stages
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    row: gl.constexpr = gl.SliceLayout(1, wide)
    q = q_s.index(PART).reshape([_ROWS, D])
    empty = gl.full([_ROWS, N], 0.0, gl.float32, square)
    step = 0
    start = (tile * C.parts + PART) * _ROWS
    mbarrier.wait(q_full, 0)
    if C.causal and C.parts > 2:  # tiles of keys that only later queries see
        own = gl.minimum(count, gl.cdiv(start + _ROWS, N))
        for _ in range(own, count):
            mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(k_empty.index(step % STAGES))
            mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(v_empty.index(step % STAGES))
            step += 1
        count = own
    slot = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(k_full.index(slot), phase)
    k = k_s.index(slot).reshape([N, D])
    token = warpgroup_mma(q, k.permute([1, 0]), empty, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [token])
    mbarrier.arrive(k_empty.index(slot))
    # The last keys, which alone are masked: 64 queries lie on the diagonal of one tile. Each sees one of them at least.
    keys = (count - 1) * N + gl.arange(0, N, gl.SliceLayout(0, square))
    queries = start + gl.arange(0, _ROWS, gl.SliceLayout(1, square))
    counts = (keys < key_length)[None, :]
    if C.causal:
        counts = counts & (keys[None, :] <= queries[:, None])
    scores = gl.where(counts, scores, float("-inf"))
    m = gl.max(scores, 1) * scale
    weights = gl.exp2(scores * scale - m[:, None])
    z = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(k_s.dtype), left)
    total = gl.full([_ROWS, D], 0.0, gl.float32, wide)
    mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1, pred=count > 1)
    for i in range(1, count):
        before = slot
        before_phase = phase
        step += 1
        slot = step % STAGES
        phase = (step // STAGES) & 1
        k = k_s.index(slot).reshape([N, D])
        token = warpgroup_mma(q, k.permute([1, 0]), empty, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), before_phase)
        total_token = warpgroup_mma(p, v_s.index(before).reshape([N, D]), total, is_async=True)
        scores = warpgroup_mma_wait(1, [token])
        mbarrier.arrive(k_empty.index(slot))
        new_m = gl.maximum(m, gl.max(scores, 1) * scale)
        weights = gl.exp2(scores * scale - new_m[:, None])
        shrink = gl.exp2(m - new_m)
        m = new_m
        z = z * shrink + gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(k_s.dtype), left)
        # For the next round, but here: over this loop ptxas does not move the wait below, else it stands before the
        # exponentials and the matrix unit stands still while they are taken.
        mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1, pred=i + 1 < count)
        total = warpgroup_mma_wait(0, [total_token])
        mbarrier.arrive(v_empty.index(before))
        total = total * gl.convert_layout(shrink, row)[:, None]
    mbarrier.wait(v_full.index(slot), phase)
    total_token = warpgroup_mma(p, v_s.index(slot).reshape([N, D]), total, is_async=True)
    total = warpgroup_mma_wait(0, [total_token])
    mbarrier.arrive(v_empty.index(slot))
    total = total * gl.convert_layout(1.0 / z, row)[:, None]
    lines = start + gl.arange(0, _ROWS, row)
    columns = gl.arange(0, D, gl.SliceLayout(0, wide))
    corner = o_out + batch.to(gl.int64) * o_strides[0] + head.to(gl.int64) * o_strides[1]
    pointers = corner + lines.to(gl.int64)[:, None] * o_strides[2] + columns[None, :]
    gl.store(pointers, total.to(o_out.dtype.element_ty), (lines < query_length)[:, None])
    corner = l_out + (batch.to(gl.int64) * heads + head) * query_length
    gl.store(corner + queries, (m + gl.log2(z)) * _LN2, queries < query_length)


@gluon.jit(do_not_specialize=["tiles", "heads", "rows", "section", "group", "query_length", "key_length"])
def _flash_forward_hopper_kernel(
    q_in,
    k_in,
    v_in,
    o_out,
    l_out,
    o_b,
    o_h,
    o_t,
    tiles,
    heads,
    rows,
    section,
    group,
    query_length,
    key_length,
    scale,
    C: gl.constexpr,
):
    """O and L of one tile of queries of one head: the shared memory, the barriers, and which warps do what."""
    STAGES: gl.constexpr = C.stages
    q_s = gl.allocate_shared_memory(q_in.dtype, [C.parts, 1, 1, _ROWS, C.head_dim], q_in.layout)
    k_s = gl.allocate_shared_memory(k_in.dtype, [STAGES, 1, 1, C.block_n, C.head_dim], k_in.layout)
    v_s = gl.allocate_shared_memory(v_in.dtype, [STAGES, 1, 1, C.block_n, C.head_dim], v_in.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=C.parts)
        mbarrier.init(v_empty.index(i), count=C.parts)
    fence_async_shared()
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    tile, row = dealt(gl.program_id(0), tiles, rows, section)
    count = gl.cdiv(key_length, C.block_n)
    if C.causal:  # the last queries see the most keys: they come first
        tile = tiles - 1 - tile
        count = gl.minimum(count, gl.cdiv((tile + 1) * (C.parts * _ROWS), C.block_n))
    at = (tile, row % heads, row % heads // group, row // heads, count)
    sizes = (heads, query_length, key_length)
    strides = (o_b, o_h, o_t)
    if C.parts == 2:
        gl.warp_specialize(
            [
                (_attend, (q_s, k_s, v_s, o_out, l_out, bars, at, sizes, strides, scale, 0, C)),
                (_attend, (q_s, k_s, v_s, o_out, l_out, bars, at, sizes, strides, scale, 1, C)),
                (_load_tiles, (q_in, k_in, v_in, q_s, k_s, v_s, bars, at, C)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (q_s, k_s, v_s, o_out, l_out, bars, at, sizes, strides, scale, 0, C)),
                (_attend, (q_s, k_s, v_s, o_out, l_out, bars, at, sizes, strides, scale, 1, C)),
                (_attend, (q_s, k_s, v_s, o_out, l_out, bars, at, sizes, strides, scale, 2, C)),
                (_load_tiles, (q_in, k_in, v_in, q_s, k_s, v_s, bars, at, C)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


# By head dimension: keys of a tile, tiles in shared memory, groups of warps.
FORWARD = {64: (128, 2, 3), 128: (128, 2, 2)}
LONG = 4096  # from this length on they were measured to be faster than the Triton kernels
SECTION = 8  # heads whose tiles are dealt out together: the longest first, with keys that stay in the L2 cache


@functools.cache
def _layout(rows: int, head_dim: int, kind: Any) -> Any:
    """How a tile of rows lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], kind)


def described(x: Tensor, rows: int) -> TensorDescriptor:
    """What the copy engine needs to know of a [B, H, T, D] tensor."""
    layout = _layout(rows, x.shape[-1], KINDS.get(x.dtype, gl.float32))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[-1]], layout)


def tile_kind(dtype: str, rows: int, head_dim: int) -> str:
    """The type of what `described` makes, as Triton writes it."""
    layout = _layout(rows, head_dim, gl.float32 if dtype == "fp32" else gl.bfloat16)
    return f"tensordesc<{dtype}[1, 1, {rows}, {head_dim}],{layout!r}>"


def takes(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> bool:
    """These tensors are among those that the kernel is written for."""
    known = q.shape[-1] in FORWARD and q.dtype in KINDS and problem.window is None
    return known and max(q.shape[2], k.shape[2]) >= LONG and tma_ready(q, k, v)


def forward_call(q: Tensor, k: Tensor, v: Tensor, output: Tensor, logsumexp: Tensor, problem: Problem) -> Call:
    """The kernel's launch, not yet made, for what it `takes`."""
    batch, heads, length, head_dim = q.shape
    block_n, stages, parts = FORWARD[head_dim]
    rows, tiles = batch * heads, triton.cdiv(length, _ROWS.value * parts)
    section = min(SECTION if problem.causal else 1, rows)
    sources = (described(q, _ROWS.value), described(k, block_n), described(v, block_n))
    sizes = (tiles, heads, rows, section, heads // k.shape[1], length, k.shape[2])
    arguments = (*sources, output, logsumexp, *output.stride()[:3], *sizes, problem.scale * LOG2E)
    options = {"C": Forward(head_dim, block_n, stages, parts, problem.causal), "num_warps": 4}
    return Call(_flash_forward_hopper_kernel, (tiles * rows, 1, 1), arguments, options)


def cases() -> Iterator[Case]:
    """The kernel as it is shipped."""
    strides = ("o_b", "o_h", "o_t")
    numbers = ("tiles", "heads", "rows", "section", "group", "query_length", "key_length", *strides)
    for head_dim, (block_n, stages, parts) in FORWARD.items():
        signature = {"o_out": "*bf16", "l_out": "*fp32", "scale": "fp32"} | dict.fromkeys(numbers, "i32")
        for name, rows in (("q_in", _ROWS.value), ("k_in", block_n), ("v_in", block_n)):
            signature[name] = tile_kind("bf16", rows, head_dim)
        for causal in (True, False):
            words = "" if causal else " full"
            constants = {"C": Forward(head_dim, block_n, stages, parts, causal)}
            name = f"flash forward gluon bf16 d{head_dim} {_ROWS.value * parts}x{block_n}{words}"
            kernel = _flash_forward_hopper_kernel
            yield Case(name, kernel, signature, constants, 4, divisible=strides, archs=(90,))
