"""RMSNorm's forward pass in Triton."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case

COLUMNS = 8192  # the longest rows that are held in registers without a spill, forward and backward
TILE = 2048  # elements of a program that takes several short rows
FORWARD_WARP = 512  # elements of a warp: 16 a thread
WIDE_WARP, WIDE = 1024, 5120  # and of rows in two parts with more columns than that
LOOP_BLOCKS, LOOP_WARPS = (4096, 2048), 16  # of longer rows, which are read twice: the first block that divides them


def tile_shape(columns: int, of_warp: int) -> tuple[int, int, int]:
    """Rows of a program, columns of its tile, warps."""
    block = max(16, triton.next_power_of_2(columns))
    return max(1, TILE // block), block, max(4, block // of_warp)


def _tile(columns: int) -> dict[str, Any]:
    """What the kernel is compiled for: rows in two parts, each a power of two wide, where that leaves fewer lanes idle."""
    rows, block, warps = tile_shape(columns, FORWARD_WARP)
    half, rest = block // 2, 0
    if rows == 1 and columns <= half + half // 2:
        block, rest = half, max(16, triton.next_power_of_2(columns - half))
        warps = max(1, block // (WIDE_WARP if columns > WIDE else FORWARD_WARP))
    return {"ROWS": rows, "BLOCK": block, "REST": rest, "WHOLE": block + rest == columns, "num_warps": warps}


def _loop(columns: int) -> dict[str, int]:
    block = next((block for block in LOOP_BLOCKS if columns % block == 0), LOOP_BLOCKS[-1])
    return {"BLOCK": block, "num_warps": LOOP_WARPS}


@triton.jit
def _inside(row, rows, column, columns, WHOLE: tl.constexpr):
    inside = (row < rows)[:, None]
    if not WHOLE:
        inside = inside & (column < columns)
    return inside


@triton.jit
def _weight(weight_ptr, column, columns):
    """To be kept in the caches, since every program reads it."""
    return tl.load(weight_ptr + column, mask=column < columns, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _added(x, residual_ptr, residual_stride, total_ptr, row, column, columns, inside):
    """The sum, stored and rounded: what is normed is what the next layer reads."""
    x += tl.load(residual_ptr + row[:, None] * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row[:, None] * columns + column, rounded, mask=inside)
    return rounded.to(tl.float32)


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    inverse_ptr,
    x_stride,
    residual_stride,
    rows,
    columns,
    eps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Some rows in one part, or one row in two: BLOCK columns and the REST."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = _inside(row, rows, column, columns, WHOLE or REST > 0)
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if REST > 0:
        column2 = BLOCK + tl.arange(0, REST)[None, :]
        inside2 = _inside(row, rows, column2, columns, WHOLE)
        x2 = tl.load(x_ptr + row[:, None] * x_stride + column2, mask=inside2, other=0.0).to(tl.float32)
    weight = _weight(weight_ptr, column, columns)  # after x, which comes from far
    if REST > 0:
        weight2 = _weight(weight_ptr, column2, columns)
    if ADD:
        x = _added(x, residual_ptr, residual_stride, total_ptr, row, column, columns, inside)
        if REST > 0:
            x2 = _added(x2, residual_ptr, residual_stride, total_ptr, row, column2, columns, inside2)
    squares = tl.sum(x * x, 1)
    if REST > 0:
        # As numbers of one row, which have no layout: else x would be laid out anew as the rest is.
        squares = tl.full([1], tl.sum(squares, 0) + tl.sum(tl.sum(x2 * x2, 1), 0), tl.float32)
    inverse = tl.rsqrt(squares / columns + eps)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    y = y_ptr + row[:, None] * columns
    tl.store(y + column, (x * inverse[:, None] * weight).to(y_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        tl.store(y + column2, (x2 * inverse[:, None] * weight2).to(y_ptr.dtype.element_ty), mask=inside2)


@triton.jit
def _rms_norm_long_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    inverse_ptr,
    x_stride,
    residual_stride,
    columns,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row twice: what is read for the sum of squares is to stay in the caches until it is normed."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    x_row, residual_row = x_ptr + row * x_stride, residual_ptr + row * residual_stride
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lane
        x = tl.load(x_row + at, mask=at < columns, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if ADD:
            x += tl.load(residual_row + at, mask=at < columns, other=0.0, eviction_policy="evict_last").to(tl.float32)
            x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
        squares += x * x
    inverse = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    tl.store(inverse_ptr + row, inverse)
    blocks = tl.cdiv(columns, BLOCK)
    for block in range(blocks):  # backwards: what was read last is nearest
        at = (blocks - 1 - block) * BLOCK + lane
        x = tl.load(x_row + at, mask=at < columns, other=0.0, eviction_policy="evict_first").to(tl.float32)
        weight = _weight(weight_ptr, at, columns)
        if ADD:
            x += tl.load(residual_row + at, mask=at < columns, other=0.0, eviction_policy="evict_first").to(tl.float32)
            rounded = x.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + row * columns + at, rounded, mask=at < columns)
            x = rounded.to(tl.float32)
        tl.store(y_ptr + row * columns + at, (x * inverse * weight).to(y_ptr.dtype.element_ty), mask=at < columns)


def launch_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, total, 1/rms of every row) of rows [n, columns]; without a residual `total` is x."""
    (n, columns), stride = x.shape, x.stride(0)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y, inverse = x.new_empty((n, columns), dtype=dtype), x.new_empty(n, dtype=torch.float32)
    total = x if residual is None else torch.empty_like(y)
    other = x if residual is None else residual
    arguments = (x, other, weight, y, total, inverse, stride, other.stride(0))
    add = residual is not None
    if columns <= COLUMNS:
        tile = _tile(columns)
        _rms_norm_forward_kernel[(triton.cdiv(n, tile["ROWS"]),)](*arguments, n, columns, eps, ADD=add, **tile)
    else:
        _rms_norm_long_forward_kernel[(n,)](*arguments, columns, eps, ADD=add, **_loop(columns))
    return y, total, inverse


def forward_case(of: str, columns: int, signature: Mapping[str, str], divisible: tuple[str, ...]) -> Case:
    """The forward pass as it is shipped for rows so long."""
    held = columns <= COLUMNS
    tile = _tile(columns) if held else _loop(columns)
    kernel = _rms_norm_forward_kernel if held else _rms_norm_long_forward_kernel
    warps = tile.pop("num_warps")
    return Case(f"rms_norm forward {of}", kernel, signature, {"ADD": True} | tile, warps, 3, divisible)
