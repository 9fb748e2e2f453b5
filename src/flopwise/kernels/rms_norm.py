"""RMSNorm over the last dimension, alone or with the residual's addition before it, forward and backward in Triton.

Weights may be fp32 beside half-precision activations (autocast). The weight's gradient is a sum over all rows: each
program sums its own rows, and the partial sums are added afterwards, always in the same order (no atomics).
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case
from flopwise.kernels.dispatch import (
    empty_in_order,
    from_rows,
    multiprocessors,
    require,
    require_float,
    row_order,
    runs_triton,
    to_rows,
    wide,
)
from flopwise.kernels.rms_norm_forward import COLUMNS, forward_case, launch_forward, tile_shape
from flopwise.spec.dtypes import item_bytes

BACKWARD_WARP = 512  # elements of a warp: 16 a thread
LOOP_BYTES, LOOP_WARPS = 8192, 16  # of a block of longer rows, which are read twice
WEIGHT_ROWS, WEIGHT_BLOCK = 16, 128  # of longer rows' weight gradient
WARPS_PER_SM = 16  # of the backward pass, which keeps its programs and gives each many rows
STAGES, NARROW_STAGES = 2, 3  # tiles in flight there, of fp32 and of 16 bits: the next comes while this one is reduced


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, in fp32 at least, cast back.

    >>> rms_norm_reference(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0)
    tensor([0.8485, 2.2627])
    """
    exact = x.to(wide(x.dtype))
    inverse_rms = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (exact * inverse_rms * weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x)."""
    total = residual + x
    return rms_norm_reference(total, weight, eps), total


def rms_norm_backward_reference(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Of rows: n = x r (r = 1/rms), g = dy · weight; dx = r (g − n · mean(g n)) + dtotal, dweight = Σ_rows dy n."""
    exact = wide(x.dtype)
    normed = x.to(exact) * inverse[:, None]
    g = dy.to(exact) * weight.to(exact)
    dx = inverse[:, None] * (g - normed * (g * normed).mean(-1, keepdim=True))
    if dtotal is not None:
        dx = dx + dtotal.to(exact)
    return dx.to(x.dtype), (dy.to(exact) * normed).sum(0).to(weight.dtype)


def _stages(element_bytes: int) -> int:
    return STAGES if element_bytes > 2 else NARROW_STAGES


def _held(columns: int) -> int:
    """The longest such rows that the backward pass holds: off the 16-byte grid their addresses take registers as well."""
    return COLUMNS // 2 if columns % 16 else COLUMNS


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    weight_ptr,
    inverse_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    dtotal_stride,
    x_stride,
    rows,
    columns,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program n takes tiles of rows n, n + programs, … and leaves its part of the weight's gradient in partial[n]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = tl.full([ROWS], tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)
        x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = x * inverse
        dweight += dy * normed
        g = dy * weight
        dx = inverse * (g - normed * (tl.sum(g * normed, 1) / columns)[:, None])
        if ADD:
            dx += tl.load(dtotal_ptr + row[:, None] * dtotal_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row[:, None] * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    lane = tl.arange(0, BLOCK)
    tl.store(partial_ptr + program.to(tl.int64) * columns + lane, tl.sum(dweight, 0), mask=lane < columns)


@triton.jit
def _rms_norm_long_backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    weight_ptr,
    inverse_ptr,
    dx_ptr,
    dy_stride,
    dtotal_stride,
    x_stride,
    columns,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inputs' gradient of one long row; its weight gradient is `_rms_norm_long_weight_kernel`'s."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inverse = tl.load(inverse_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lane
        x = tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        products += x * inverse * dy * tl.load(weight_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(products, 0) / columns
    blocks = tl.cdiv(columns, BLOCK)
    for block in range(blocks):  # backwards, as above
        at = (blocks - 1 - block) * BLOCK + lane
        x = tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        g = dy * tl.load(weight_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
        dx = inverse * (g - x * inverse * mean)
        if ADD:
            dx += tl.load(dtotal_ptr + row * dtotal_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def _rms_norm_long_weight_kernel(
    dy_ptr, x_ptr, inverse_ptr, partial_ptr, dy_stride, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (b, n) sums block b of the columns over rows n, n + programs, …, ROWS at a time."""
    program, programs = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row = tl.full([ROWS], tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dweight += dy * x * tl.load(inverse_ptr + row, mask=row < rows, other=0.0)[:, None]
    tl.store(partial_ptr + program.to(tl.int64) * columns + column, tl.sum(dweight, 0), mask=column < columns)


def _backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of rows [n, columns]."""
    n, columns = x.shape
    dx, add = x.new_empty((n, columns)), dtotal is not None
    other = dy if dtotal is None else dtotal
    tensors, strides = (dy, other, x, weight, inverse, dx), (dy.stride(0), other.stride(0), x.stride(0))
    sms = multiprocessors(x.device)
    if columns <= _held(columns):
        per, block, warps = tile_shape(columns, BACKWARD_WARP)
        programs = min(triton.cdiv(n, per), sms * max(1, WARPS_PER_SM // warps))
        partial = x.new_empty((programs, columns), dtype=torch.float32)
        stages = _stages(x.element_size())
        options = {"ADD": add, "ROWS": per, "BLOCK": block, "STAGES": stages, "num_warps": warps}
        _rms_norm_backward_kernel[(programs,)](*tensors, partial, *strides, n, columns, **options)
    else:
        options = {"ADD": add, "BLOCK": LOOP_BYTES // x.element_size(), "num_warps": LOOP_WARPS}
        _rms_norm_long_backward_kernel[(n,)](*tensors, *strides, columns, **options)
        blocks = triton.cdiv(columns, WEIGHT_BLOCK)
        programs = min(triton.cdiv(n, WEIGHT_ROWS), triton.cdiv(8 * sms, blocks))
        partial = x.new_empty((programs, columns), dtype=torch.float32)
        _rms_norm_long_weight_kernel[(blocks, programs)](
            dy, x, inverse, partial, dy.stride(0), x.stride(0), n, columns, ROWS=WEIGHT_ROWS, BLOCK=WEIGHT_BLOCK
        )
    return dx, partial.sum(0).to(weight.dtype)


@torch.library.custom_op("flopwise::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    order = row_order(x)
    if not x.numel():
        return empty_in_order(x, order), x.new_empty(math.prod(x.shape[:-1]), dtype=wide(x.dtype))
    rows = to_rows(x, order)
    if runs_triton(x):
        y, _, inverse = launch_forward(rows, None, weight.contiguous(), eps)
    else:
        y = rms_norm_reference(rows, weight, eps).contiguous()
        inverse = torch.rsqrt(rows.to(wide(x.dtype)).pow(2).mean(-1) + eps)
    return from_rows(y, x, order), inverse


@torch.library.custom_op("flopwise::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    order, dtype = row_order(x), torch.promote_types(x.dtype, residual.dtype)
    if not x.numel():
        inverse = x.new_empty(math.prod(x.shape[:-1]), dtype=wide(dtype))
        return empty_in_order(x, order, dtype), empty_in_order(x, order, dtype), inverse
    rows, others = to_rows(x, order), to_rows(residual, order)
    if runs_triton(x):
        y, total, inverse = launch_forward(rows, others, weight.contiguous(), eps)
    else:
        y, total = (t.contiguous() for t in add_rms_norm_reference(rows, others, weight, eps))
        inverse = torch.rsqrt(total.to(wide(dtype)).pow(2).mean(-1) + eps)
    return from_rows(y, x, order), from_rows(total, x, order), inverse


@torch.library.custom_op("flopwise::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    order = row_order(x)
    if not x.numel():
        return empty_in_order(x, order), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    more = None if dtotal is None else to_rows(dtotal, order)
    work = _backward if runs_triton(x) else rms_norm_backward_reference
    dx, dweight = work(to_rows(dy, order), more, to_rows(x, order), weight.contiguous(), inverse)
    return from_rows(dx.contiguous(), x, order), dweight


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return empty_in_order(x, row_order(x)), x.new_empty(math.prod(x.shape[:-1]), dtype=wide(x.dtype))


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    order, dtype = row_order(x), torch.promote_types(x.dtype, residual.dtype)
    inverse = x.new_empty(math.prod(x.shape[:-1]), dtype=wide(dtype))
    return empty_in_order(x, order, dtype), empty_in_order(x, order, dtype), inverse


@_rms_norm_backward.register_fake
def _(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return empty_in_order(x, row_order(x)), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, Tensor | None, None]:
    if dy is None:
        return None, None, None
    return *_rms_norm_backward(dy, None, *ctx.saved_tensors), None


def _add_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _ = inputs
    _, total, inverse = output
    ctx.save_for_backward(total, weight, inverse)
    ctx.dtypes = x.dtype, residual.dtype
    ctx.mark_non_differentiable(inverse)
    ctx.set_materialize_grads(False)


def _add_gradient(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    total, weight, inverse = ctx.saved_tensors
    dweight: Tensor | None = None
    dx = dtotal
    if dy is not None:
        dx, dweight = _rms_norm_backward(dy, dtotal, total, weight, inverse)
    if dx is None:
        return None, None, None, None
    return dx.to(ctx.dtypes[0]), dx.to(ctx.dtypes[1]), dweight, None


_rms_norm.register_autograd(_gradient, setup_context=_keep)
_add_rms_norm.register_autograd(_add_gradient, setup_context=_add_keep)


def _check(weight: Tensor, *inputs: Tensor) -> None:
    require_float("rms_norm", weight, *inputs)
    x = inputs[0]
    fits = x.dim() > 0 and weight.shape == x.shape[-1:]
    shapes = f"{list(weight.shape)} for x {list(x.shape)}"
    require(fits, f"the norm's weight does not fit, {shapes}: it has one element for each of x's last dimension")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in x's dtype, lying in memory as x does.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0)
    tensor([0.8485, 2.2627])
    """
    _check(weight, x)
    y, _ = _rms_norm(x, weight, eps)
    return y  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x): the residual stream is read once and written once.

    >>> add_rms_norm(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]), 0.0)
    (tensor([0.8485, 2.2627]), tensor([3., 4.]))
    """
    _check(weight, x, residual)
    shapes = f"{list(x.shape)} and {list(residual.shape)}"
    require(x.shape == residual.shape, f"x and the residual differ in shape, {shapes}: add_rms_norm does not broadcast")
    y, total, _ = _add_rms_norm(x, residual, weight, eps)
    return y, total


def cases() -> Iterator[Case]:
    whole = ("x_stride", "residual_stride", "dy_stride", "dtotal_stride", "columns")
    fp32 = dict.fromkeys(("inverse_ptr", "partial_ptr", "weight_ptr"), "*fp32")
    numbers = dict.fromkeys((*whole, "rows"), "i32") | fp32 | {"eps": "fp32"}
    pointers = ("x_ptr", "residual_ptr", "y_ptr", "total_ptr", "dy_ptr", "dtotal_ptr", "dx_ptr")
    for dtype, columns in (("bf16", 128), ("bf16", 4096), ("fp32", COLUMNS), ("fp32", COLUMNS // 2 - 1)):
        signature = dict.fromkeys(pointers, f"*{dtype}") | numbers
        divisible = () if columns % 16 else whole
        of = f"{dtype} {columns}"
        yield forward_case(of, columns, signature, divisible)
        rows, block, warps = tile_shape(columns, BACKWARD_WARP)
        tile = {"ADD": True, "ROWS": rows, "BLOCK": block, "STAGES": _stages(item_bytes(dtype))}
        yield Case(f"rms_norm backward {of}", _rms_norm_backward_kernel, signature, tile, warps, 3, divisible)
    for dtype, columns in (("bf16", 5120), ("bf16", 6144), ("fp32", 6144), ("fp32", 6143)):  # rows in two parts
        signature = dict.fromkeys(pointers, f"*{dtype}") | numbers
        yield forward_case(f"{dtype} {columns}", columns, signature, () if columns % 16 else whole)
    for columns in (COLUMNS + 1, 2 * COLUMNS):  # rows that are read twice
        yield forward_case(f"fp32 {columns}", columns, signature, whole)
    tile = {"ADD": True, "BLOCK": LOOP_BYTES // item_bytes("fp32")}
    yield Case("rms_norm backward fp32 longer", _rms_norm_long_backward_kernel, signature, tile, LOOP_WARPS, 3, whole)
    tile = {"ROWS": WEIGHT_ROWS, "BLOCK": WEIGHT_BLOCK}
    yield Case("rms_norm weight fp32 longer", _rms_norm_long_weight_kernel, signature, tile, 4, 3, whole)
