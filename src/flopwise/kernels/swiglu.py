"""SwiGLU's pointwise half, silu(gate) · up, in one kernel each way; the backward pass keeps the two inputs alone."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case
from flopwise.kernels.dispatch import require, require_float, runs_triton, to_rows

BLOCK, WARPS = 1024, 4  # 8 elements a thread of each tensor: one 16-byte load in bf16


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """gate · σ(gate) · up, in fp32 at least, cast back.

    >>> swiglu_reference(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.4621])
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (gate.to(wide) * torch.sigmoid(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def swiglu_backward_reference(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate = dy · up · s (1 + gate (1 − s)) and dup = dy · gate · s, with s = σ(gate)."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    dy, g, u = dy.to(wide), gate.to(wide), up.to(wide)
    s = torch.sigmoid(g)
    return (dy * u * s * (1 + g * (1 - s))).to(gate.dtype), (dy * g * s).to(gate.dtype)


@triton.jit
def _swiglu_forward_kernel(gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, columns, blocks, BLOCK: tl.constexpr):
    """Program n takes block n % blocks of row n // blocks."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=at < columns).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=at < columns).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * columns + at, y.to(y_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def _swiglu_backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    columns,
    blocks,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * dy_stride + at, mask=at < columns).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=at < columns).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=at < columns).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * s * (1.0 + gate * (1.0 - s))
    tl.store(dgate_ptr + row * columns + at, dgate.to(dgate_ptr.dtype.element_ty), mask=at < columns)
    tl.store(dup_ptr + row * columns + at, (dy * gate * s).to(dup_ptr.dtype.element_ty), mask=at < columns)


def _as_rows(*tensors: Tensor) -> tuple[list[Tensor], int, int]:
    """Each as [rows, columns] with a stride of its own, and both numbers; all dense, they are one long row."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors], 1, tensors[0].numel()
    rows = [to_rows(x, tuple(range(x.dim()))) for x in tensors]
    return rows, rows[0].shape[0], rows[0].shape[1]


@torch.library.custom_op("flopwise::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if not runs_triton(gate):
        return swiglu_reference(gate, up).contiguous()
    y = gate.new_empty(gate.shape)
    if y.numel():
        (g, u), rows, columns = _as_rows(gate, up)
        blocks = triton.cdiv(columns, BLOCK)
        _swiglu_forward_kernel[(rows * blocks,)](
            g, u, y, g.stride(0), u.stride(0), columns, blocks, BLOCK=BLOCK, num_warps=WARPS
        )
    return y


@torch.library.custom_op("flopwise::swiglu_backward", mutates_args=())
def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if not runs_triton(gate):
        dgate, dup = swiglu_backward_reference(dy, gate, up)
        return dgate.contiguous(), dup.contiguous()
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    if dy.numel():
        (d, g, u), rows, columns = _as_rows(dy, gate, up)
        blocks, strides = triton.cdiv(columns, BLOCK), (d.stride(0), g.stride(0), u.stride(0))
        _swiglu_backward_kernel[(rows * blocks,)](
            d, g, u, dgate, dup, *strides, columns, blocks, BLOCK=BLOCK, num_warps=WARPS
        )
    return dgate, dup


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@_swiglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return _swiglu_backward(dy, *ctx.saved_tensors)  # type: ignore[no-any-return]


_swiglu.register_autograd(_gradient, setup_context=_keep)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up. The two may be halves of one tensor, `both.chunk(2, -1)`: row strides are honoured.

    >>> swiglu(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.4621])
    """
    require_float("swiglu", gate, up)
    same = gate.shape == up.shape and gate.dtype == up.dtype
    given = f"{list(gate.shape)} {gate.dtype} and {list(up.shape)} {up.dtype}"
    require(same, f"gate and up are not alike, {given}: swiglu takes two tensors of one shape and dtype")
    return _swiglu(gate, up)  # type: ignore[no-any-return]


def cases() -> Iterator[Case]:
    for dtype in ("fp32", "bf16"):
        pointers = dict.fromkeys(("dy_ptr", "gate_ptr", "up_ptr", "y_ptr", "dgate_ptr", "dup_ptr"), f"*{dtype}")
        whole = ("dy_stride", "gate_stride", "up_stride", "columns")
        signature = pointers | dict.fromkeys((*whole, "blocks"), "i32")
        for name, kernel in (("forward", _swiglu_forward_kernel), ("backward", _swiglu_backward_kernel)):
            yield Case(f"swiglu {name} {dtype}", kernel, signature, {"BLOCK": BLOCK}, WARPS, 3, whole)
