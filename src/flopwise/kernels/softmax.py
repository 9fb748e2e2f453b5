"""Softmax over the last dimension, rows of any length, forward and backward in Triton.

A row that fits into a program's registers is read once. A longer one is read twice: the first pass keeps, per lane, the
largest value so far and the sum of exponentials relative to it (online softmax, Milakov and Gimelshein 2018).
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case
from flopwise.kernels.dispatch import require, require_float, runs_triton, to_rows

FORWARD_COLUMNS, BACKWARD_COLUMNS = 32768, 16384  # the longest rows that are held in registers without a spill
TILE = 2048  # elements of a program that takes several short rows
LOOP_BLOCK, LOOP_WARPS = 4096, 8  # of the rows that are read twice


def softmax_reference(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """exp(x − max) / Σ exp(x − max) over the last dimension, in fp32 at least, cast to `dtype` (else x's own).

    >>> softmax_reference(torch.tensor([0.0, 0.0, float("-inf")]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    exponential = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (exponential / exponential.sum(-1, keepdim=True)).to(dtype or x.dtype)


def softmax_backward_reference(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """dx = y (dy − Σ dy y)."""
    wide = torch.promote_types(y.dtype, torch.float32)
    product = dy.to(wide) * y.to(wide)
    return (product - y.to(wide) * product.sum(-1, keepdim=True)).to(dtype)


def _shape(columns: int) -> tuple[int, int, int]:
    """Rows of a program, columns of its tile, warps: 8 to 32 elements a thread, at most 1024 threads."""
    block = max(16, triton.next_power_of_2(columns))
    warps = 4 if block <= 2048 else 8 if block <= 8192 else block // 1024
    return max(1, TILE // block), block, warps


@triton.jit
def _softmax_forward_kernel(x_ptr, y_ptr, x_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    exponential = tl.exp(x - tl.max(x, 1)[:, None])
    y = exponential * (1.0 / tl.sum(exponential, 1))[:, None]
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, dy_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    y = tl.load(y_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(dy * y, 1)[:, None])
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_long_forward_kernel(x_ptr, y_ptr, x_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(x_ptr + start + lane, mask=start + lane < columns, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        base = tl.where(larger == -float("inf"), 0.0, larger)  # a lane that has seen only -inf adds zeros, not NaN
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = larger
    top = tl.max(largest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    inverse = 1.0 / tl.sum(total * tl.exp(largest - base), 0)
    # Backwards: what was read last is still in the L2 cache.
    blocks = tl.cdiv(columns, BLOCK)
    for block in range(blocks):
        at = (blocks - 1 - block) * BLOCK + lane
        x = tl.load(x_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (tl.exp(x - top) * inverse).to(y_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def _softmax_long_backward_kernel(dy_ptr, y_ptr, dx_ptr, dy_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * columns
    dx_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        y = tl.load(y_ptr + start + lane, mask=start + lane < columns, other=0.0).to(tl.float32)
        total += y * tl.load(dy_ptr + start + lane, mask=start + lane < columns, other=0.0).to(tl.float32)
    product = tl.sum(total, 0)
    blocks = tl.cdiv(columns, BLOCK)
    for block in range(blocks):  # backwards, as above
        at = (blocks - 1 - block) * BLOCK + lane
        y = tl.load(y_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, (y * (dy - product)).to(dx_ptr.dtype.element_ty), mask=at < columns)


@torch.library.custom_op("flopwise::softmax", mutates_args=())
def _softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = x.new_empty(x.shape, dtype=dtype)
    if not x.numel():  # also without columns, which have no largest
        return y
    if not runs_triton(x):
        return softmax_reference(x, dtype).contiguous()
    rows = to_rows(x, tuple(range(x.dim())))
    (n, columns), stride = rows.shape, rows.stride(0)
    if columns <= FORWARD_COLUMNS:
        per, block, warps = _shape(columns)
        grid = (triton.cdiv(n, per),)
        _softmax_forward_kernel[grid](rows, y, stride, n, columns, ROWS=per, BLOCK=block, num_warps=warps)
    else:
        _softmax_long_forward_kernel[(n,)](rows, y, stride, columns, BLOCK=LOOP_BLOCK, num_warps=LOOP_WARPS)
    return y


@torch.library.custom_op("flopwise::softmax_backward", mutates_args=())
def _softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    if not runs_triton(y):
        return softmax_backward_reference(dy, y, dtype).contiguous()
    dx = y.new_empty(y.shape, dtype=dtype)
    if not y.numel():
        return dx
    rows, y = to_rows(dy, tuple(range(dy.dim()))), y.contiguous()
    (n, columns), stride = rows.shape, rows.stride(0)
    if columns <= BACKWARD_COLUMNS:
        per, block, warps = _shape(columns)
        grid = (triton.cdiv(n, per),)
        _softmax_backward_kernel[grid](rows, y, dx, stride, n, columns, ROWS=per, BLOCK=block, num_warps=warps)
    else:
        _softmax_long_backward_kernel[(n,)](rows, y, dx, stride, columns, BLOCK=LOOP_BLOCK, num_warps=LOOP_WARPS)
    return dx


@_softmax.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@_softmax_backward.register_fake
def _(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
    ctx.save_for_backward(output)  # the output alone: the input can go
    ctx.dtype = inputs[0].dtype


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return _softmax_backward(dy, *ctx.saved_tensors, ctx.dtype), None


_softmax.register_autograd(_gradient, setup_context=_keep)


def softmax(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax over the last dimension, computed in fp32. As torch's, it gives fp32 under CUDA autocast.

    >>> softmax(torch.tensor([[0.0, 0.0, float("-inf")]]))
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    require_float("softmax", x)
    require(x.dim() > 0, "softmax needs a dimension: a scalar has none")
    if dtype is None:
        dtype = torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype
    require(dtype.is_floating_point, f"softmax gives numbers between 0 and 1, which {dtype} cannot hold")
    return _softmax(x, dtype)  # type: ignore[no-any-return]


def cases() -> Iterator[Case]:
    whole = ("columns", "x_stride", "dy_stride")
    pointers = ("x_ptr", "dy_ptr", "y_ptr", "dx_ptr")
    sizes = dict.fromkeys(("x_stride", "dy_stride", "rows", "columns"), "i32")
    for dtype, columns in (("fp32", 128), ("bf16", 4096), ("fp32", BACKWARD_COLUMNS), ("fp32", FORWARD_COLUMNS - 1)):
        rows, block, warps = _shape(columns)
        signature, tile = dict.fromkeys(pointers, f"*{dtype}") | sizes, {"ROWS": rows, "BLOCK": block}
        divisible = () if columns % 16 else whole
        yield Case(f"softmax forward {dtype} {columns}", _softmax_forward_kernel, signature, tile, warps, 3, divisible)
        if columns <= BACKWARD_COLUMNS:
            yield Case(
                f"softmax backward {dtype} {columns}", _softmax_backward_kernel, signature, tile, warps, 3, divisible
            )
    signature, tile = dict.fromkeys(pointers, "*fp32") | sizes, {"BLOCK": LOOP_BLOCK}
    yield Case("softmax forward fp32 longer", _softmax_long_forward_kernel, signature, tile, LOOP_WARPS, 3, whole)
    yield Case("softmax backward fp32 longer", _softmax_long_backward_kernel, signature, tile, LOOP_WARPS, 3, whole)
