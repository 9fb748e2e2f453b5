"""What makes a linear layer's input, with that input's fp8 form or its amax made on the way: RMSNorm and SwiGLU.

Scales by rows: a program holds whole rows, so the fp8 numbers leave with the bf16 ones and no pass over memory is added. One
scale for the tensor: the amax is found on the way, and `fp8.cast` makes the fp8 numbers with it, one pass fewer.
The bf16 result stays: autograd's graph goes through it, and weight gradients in bf16 read it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case
from flopwise.kernels.direct_op import direct_op
from flopwise.kernels.dispatch import runs_triton
from flopwise.kernels.fp8 import E4M3, HELD, LARGEST, LEAST, quantised_reference, row_shape, scale_of
from flopwise.kernels.rms_norm import _rms_norm_backward, rms_norm_reference
from flopwise.kernels.swiglu import BLOCK, WARPS, _swiglu_backward, swiglu_backward_reference, swiglu_reference

SLOTS = 256  # places for amaxes: programs that write to one wait for one another

# By rows: y, its fp8 form, a scale for every row. Of the tensor: y, nothing, the bits of its amax.
Made = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _leave(y, y_ptr, quantised_ptr, scale_ptr, row, rows, at, inside, largest, least, BY_ROWS: tl.constexpr):
    """Store rows in bf16, and in fp8 or their amax; of the numbers as they are stored, not as they were computed."""
    rounded = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, rounded, mask=inside)
    y = tl.where(inside, rounded.to(tl.float32), 0.0)
    if BY_ROWS:
        amax = tl.maximum(tl.max(tl.abs(y), 1), least)
        tl.store(scale_ptr + row, amax / largest, mask=row < rows)
        tl.store(quantised_ptr + at, (y * (largest / amax)[:, None]).to(quantised_ptr.dtype.element_ty), mask=inside)
    else:
        tl.atomic_max(scale_ptr, tl.max(tl.abs(y)).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _rms_norm_cast_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    quantised_ptr,
    scale_ptr,
    inverse_ptr,
    stride,
    rows,
    columns,
    eps,
    largest,
    least,
    BY_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    x = tl.load(x_ptr + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0, eviction_policy="evict_last").to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    at = row[:, None] * columns + column
    y = x * inverse[:, None] * weight
    _leave(y, y_ptr, quantised_ptr, scale_ptr, row, rows, at, inside, largest, least, BY_ROWS)


@triton.jit
def _swiglu_cast_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    quantised_ptr,
    scale_ptr,
    gate_stride,
    up_stride,
    rows,
    columns,
    largest,
    least,
    BY_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row[:, None] * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    at = row[:, None] * columns + column
    y = gate / (1.0 + tl.exp(-gate)) * up
    _leave(y, y_ptr, quantised_ptr, scale_ptr, row, rows, at, inside, largest, least, BY_ROWS)


@triton.jit
def _joined_swiglu_gradient_kernel(
    dy_ptr, joined_ptr, d_ptr, amax_ptr, stride, columns, blocks, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program n takes block n % blocks of row n // blocks; of gate and up, which share a row, and of their gradients."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside, gate_at = at < columns, row * 2 * columns + at
    dy = tl.load(dy_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(joined_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined_ptr + gate_at + columns, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    dgate = (dy * up * s * (1.0 + gate * (1.0 - s))).to(d_ptr.dtype.element_ty)
    dup = (dy * gate * s).to(d_ptr.dtype.element_ty)
    tl.store(d_ptr + gate_at, dgate, mask=inside)
    tl.store(d_ptr + gate_at + columns, dup, mask=inside)
    largest = tl.max(tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32))))
    tl.atomic_max(amax_ptr + tl.program_id(0) % SLOTS, largest.to(tl.int32, bitcast=True), sem="relaxed")


def _buffers(x: Tensor, by_rows: bool) -> Made:
    """Of rows [n, columns]. An amax starts at zero."""
    quantised = x.new_empty(x.shape if by_rows else (0,), dtype=E4M3)
    scale = x.new_empty(x.shape[0], dtype=torch.float32) if by_rows else x.new_zeros(1, dtype=torch.int32)
    return x.new_empty(x.shape), quantised, scale


def _reference(y: Tensor, by_rows: bool) -> Made:
    y = y.contiguous()
    if by_rows:
        scale = scale_of(y.float().abs().amax(1), E4M3)
        return y, quantised_reference(y, scale[:, None], E4M3), scale
    return y, y.new_empty(0, dtype=E4M3), y.float().abs().amax().view(1).view(torch.int32)


def _options(columns: int, by_rows: bool) -> dict[str, Any]:
    rows, block, warps = row_shape(columns)
    return {"BY_ROWS": by_rows, "ROWS": rows, "BLOCK": block, "num_warps": warps}


@direct_op("flopwise::rms_norm_cast")
def _rms_norm_cast(x: Tensor, weight: Tensor, eps: float, by_rows: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not runs_triton(x) or x.shape[1] > HELD:
        inverse = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        return *_reference(rms_norm_reference(x, weight, eps), by_rows), inverse
    (rows, columns), inverse = x.shape, x.new_empty(x.shape[0], dtype=torch.float32)
    made, options = _buffers(x, by_rows), _options(columns, by_rows)
    numbers = (x.stride(0), rows, columns, eps, LARGEST[E4M3], LEAST)
    _rms_norm_cast_kernel[(triton.cdiv(rows, options["ROWS"]),)](x, weight, *made, inverse, *numbers, **options)
    return *made, inverse


@direct_op("flopwise::swiglu_cast")
def _swiglu_cast(gate: Tensor, up: Tensor, by_rows: bool) -> Made:
    if not runs_triton(gate) or gate.shape[1] > HELD:
        return _reference(swiglu_reference(gate, up), by_rows)
    rows, columns = gate.shape
    made, options = _buffers(gate, by_rows), _options(columns, by_rows)
    numbers = (gate.stride(0), up.stride(0), rows, columns, LARGEST[E4M3], LEAST)
    _swiglu_cast_kernel[(triton.cdiv(rows, options["ROWS"]),)](gate, up, *made, *numbers, **options)
    return made


@direct_op("flopwise::joined_swiglu_gradient")
def joined_swiglu_gradient(dy: Tensor, joined: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of rows [n, 2 columns] with gate first, and the bits of its amax, in parts."""
    rows, columns = dy.shape
    if not runs_triton(dy):
        d = torch.cat(swiglu_backward_reference(dy, *joined.chunk(2, -1)), -1)
        return d, d.float().abs().amax().view(1).view(torch.int32)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    d, amax = torch.empty_like(joined), torch.zeros(SLOTS, dtype=torch.int32, device=dy.device)
    blocks = triton.cdiv(columns, BLOCK)
    _joined_swiglu_gradient_kernel[(rows * blocks,)](
        dy, joined, d, amax, dy.stride(0), columns, blocks, SLOTS=SLOTS, BLOCK=BLOCK, num_warps=WARPS
    )
    return d, amax


@joined_swiglu_gradient.register_fake
def _(dy: Tensor, joined: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(joined), dy.new_empty(SLOTS, dtype=torch.int32)


@_rms_norm_cast.register_fake
def _(x: Tensor, weight: Tensor, eps: float, by_rows: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_buffers(x, by_rows), x.new_empty(x.shape[0], dtype=torch.float32)


@_swiglu_cast.register_fake
def _(gate: Tensor, up: Tensor, by_rows: bool) -> Made:
    return _buffers(gate, by_rows)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight, output[3])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _norm_gradient(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
    if dy is None:
        return None, None, None, None
    return *_rms_norm_backward(dy, None, *ctx.saved_tensors), None, None


def _keep_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _swiglu_gradient(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, Tensor | None, None]:
    if dy is None:
        return None, None, None
    return *_swiglu_backward(dy, *ctx.saved_tensors), None


_rms_norm_cast.register_autograd(_norm_gradient, setup_context=_keep_norm)
_swiglu_cast.register_autograd(_swiglu_gradient, setup_context=_keep_swiglu)


def rms_norm_cast(x: Tensor, weight: Tensor, eps: float, *, by_rows: bool) -> Made:
    """RMSNorm of rows [n, columns]; with `by_rows` its fp8 form and scales, else the bits of its amax."""
    y, quantised, scale, _ = _rms_norm_cast(x if x.stride(-1) == 1 else x.contiguous(), weight, eps, by_rows)
    return y, quantised, scale


def swiglu_cast(gate: Tensor, up: Tensor, *, by_rows: bool) -> Made:
    """silu(gate) · up of rows [n, columns]; with `by_rows` its fp8 form and scales, else the bits of its amax."""
    gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up))
    return _swiglu_cast(gate, up, by_rows)  # type: ignore[no-any-return]


def cases() -> Iterator[Case]:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "gate_ptr", "up_ptr", "y_ptr"), "*bf16")
    whole = ("stride", "gate_stride", "up_stride", "rows", "columns")
    numbers = dict.fromkeys(whole, "i32") | dict.fromkeys(("eps", "largest", "least"), "fp32")
    joined = dict.fromkeys(("dy_ptr", "joined_ptr", "d_ptr"), "*bf16") | {"amax_ptr": "*i32", "blocks": "i32"}
    options: dict[str, Any] = {"SLOTS": SLOTS, "BLOCK": BLOCK}
    kernel = _joined_swiglu_gradient_kernel
    yield Case("swiglu joined backward", kernel, joined | numbers, options, WARPS, 3, whole, (90, 100))
    for by_rows in (True, False):
        scale = {"inverse_ptr": "*fp32", "quantised_ptr": "*fp8e4nv", "scale_ptr": "*fp32" if by_rows else "*i32"}
        signature = pointers | numbers | scale
        for name, kernel, columns in (
            ("rms_norm", _rms_norm_cast_kernel, 2560),
            ("rms_norm", _rms_norm_cast_kernel, 8192),
            ("swiglu", _swiglu_cast_kernel, 10240),
        ):
            options = _options(columns, by_rows)
            warps = options.pop("num_warps")
            of = f"{'fp8' if by_rows else 'amax'} {columns}"
            yield Case(f"{name} with {of}", kernel, signature, options, warps, 3, whole, (90, 100))
