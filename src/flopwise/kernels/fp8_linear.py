"""A linear layer whose products run in fp8: y = x Wᵀ, dx = dy W and, where asked for, dW = dyᵀ x; all leave bf16.

x and W are e4m3; gradients, whose range is wider, are e5m2 with one scale for the tensor and e4m3 with one for every row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flopwise.kernels import fp8
from flopwise.kernels.direct_op import direct_op
from flopwise.kernels.fp8 import E4M3, E5M2
from flopwise.kernels.fp8_rows import joined_swiglu_gradient, rms_norm_cast, swiglu_cast


class Scaling(NamedTuple):
    """How a layer's matrices are scaled, and which of its products are fp8."""

    axis: bool  # a scale for every row of what is multiplied; else one for the tensor
    narrow_weight_gradient: bool = False  # dW in fp8; else in bf16
    fast_backward: bool = False  # gradients' sums stay in the tensor cores, with fewer bits

    @property
    def gradient(self) -> torch.dtype:
        return E4M3 if self.axis else E5M2


def usual_scaling(by_rows: bool) -> Scaling:
    """What `precision = fp8` (and `fp8-rowwise`) multiplies with: all three products in fp8, and with one scale for a tensor
    gradients' sums stay in the tensor cores. Losses of 2,000 steps were no higher than those of bf16's own seeds
    (benchmarks/results/fp8-2026-11.md).
    """
    return Scaling(by_rows, narrow_weight_gradient=True, fast_backward=not by_rows)


class Input(NamedTuple):
    """A layer's input [..., k] in bf16, and its rows in fp8."""

    value: Tensor
    cast: fp8.Cast


@direct_op("flopwise::fp8_linear")
def _linear(
    x: Tensor,
    x_rows: Tensor,
    x_row_scale: Tensor,
    x_columns: Tensor | None,
    x_column_scale: Tensor,
    weight: Tensor,
    w_rows: Tensor,
    w_row_scale: Tensor,
    w_columns: Tensor | None,
    w_column_scale: Tensor,
    bias: Tensor | None,
    gradient: torch.dtype,
    axis: bool,
    fast: bool,
) -> Tensor:
    """`x` and `weight` are not read: their gradients are what this op is asked for."""
    return fp8.matmul(x_rows, x_row_scale, w_rows, w_row_scale, bias, True)  # type: ignore[no-any-return]


@_linear.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], others[4].shape[0]), dtype=torch.bfloat16)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*_kept(ctx, inputs))


def _kept(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    x, _, _, x_columns, x_column_scale, _, _, _, w_columns, w_column_scale, _, gradient, axis, fast = inputs
    ctx.gradient, ctx.axis, ctx.fast = gradient, axis, fast
    ctx.narrow = x_columns is not None
    return (w_columns, w_column_scale, *((x_columns, x_column_scale) if ctx.narrow else (x,)))


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _products(ctx, dy, None, *ctx.saved_tensors)


def _products(
    ctx: Any, dy: Tensor, amax: Tensor | None, w_columns: Tensor, w_column_scale: Tensor, *kept: Tensor
) -> tuple[Tensor | None, ...]:
    wants_x, wants_w, wants_b = (ctx.needs_input_grad[n] for n in (0, 5, 10))
    narrow = ctx.narrow and wants_w
    orders = {"by_rows": wants_x, "by_columns": narrow}
    d = fp8.cast(dy, ctx.gradient, axis=ctx.axis, amax=amax, **orders) if wants_x or narrow else None
    dx = dw = db = None
    if d is not None and d.by_rows is not None:
        dx = fp8.matmul(d.by_rows, d.row_scale, w_columns, w_column_scale, None, ctx.fast)
    if narrow:
        assert d is not None
        dw = fp8.matmul(d.by_columns, d.column_scale, *kept, None, ctx.fast)
    elif wants_w:
        dw = dy.t() @ kept[0]
    if wants_b:
        db = dy.sum(0)
    return dx, None, None, None, None, dw, None, None, None, None, db, None, None, None


_linear.register_autograd(_gradient, setup_context=_keep)


@direct_op("flopwise::fp8_gated_linear")
def _gated_linear(
    x: Tensor,
    x_rows: Tensor,
    x_row_scale: Tensor,
    x_columns: Tensor | None,
    x_column_scale: Tensor,
    weight: Tensor,
    w_rows: Tensor,
    w_row_scale: Tensor,
    w_columns: Tensor | None,
    w_column_scale: Tensor,
    bias: Tensor | None,
    gradient: torch.dtype,
    axis: bool,
    fast: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """SwiGLU of a layer whose weight has gate and up one below the other: the result, its amax, and the layer's own.

    One op, so that its backward pass leaves gate's and up's gradients in one matrix with its amax.
    """
    joined = fp8.matmul(x_rows, x_row_scale, w_rows, w_row_scale, bias, True)
    y, _, amax = swiglu_cast(*joined.chunk(2, -1), by_rows=False)
    return y, amax, joined


@_gated_linear.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    outs = others[4].shape[0]
    y, joined = (x.new_empty((x.shape[0], width), dtype=torch.bfloat16) for width in (outs // 2, outs))
    return y, x.new_empty(1, dtype=torch.int32), joined


def _keep_gated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[2], *_kept(ctx, inputs))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gated_gradient(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    joined, *kept = ctx.saved_tensors
    d, amax = joined_swiglu_gradient(dy, joined)
    return _products(ctx, d, None if ctx.axis else amax, *kept)


_gated_linear.register_autograd(_gated_gradient, setup_context=_keep_gated)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def prepared(x: Tensor | Input, scaling: Scaling) -> Input:
    """A layer's input with its fp8 form; several layers may share it.

    >>> prepared(torch.ones(2, 16, 16), Scaling(axis=True)).cast.row_scale.shape
    torch.Size([32])
    """
    if isinstance(x, Input):
        return x
    columns = scaling.narrow_weight_gradient and torch.is_grad_enabled()
    return Input(x, fp8.cast(_rows(x).detach(), E4M3, axis=scaling.axis, by_columns=columns))


def linear(x: Tensor | Input, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """x Wᵀ + bias in bf16, for x [..., k] and W [n, k] in bf16.

    >>> linear(torch.ones(16, 16), torch.ones(32, 16), None, Scaling(axis=False))[0, :2]
    tensor([16., 16.], dtype=torch.bfloat16)
    """
    value, operands = _operands(x, weight, bias, scaling)
    y: Tensor = _linear(*operands)
    return y.view(*value.shape[:-1], weight.shape[0])


def _operands(
    x: Tensor | Input, weight: Tensor, bias: Tensor | None, scaling: Scaling
) -> tuple[Tensor, tuple[Any, ...]]:
    """The layer's input, and the arguments of its op."""
    value, x8 = prepared(x, scaling)
    w8 = fp8.cast(weight.detach(), E4M3, axis=scaling.axis, by_columns=torch.is_grad_enabled())
    how = scaling.gradient, scaling.axis, scaling.fast_backward
    return value, (_rows(value), *x8, weight, *w8, bias, *how)


def gated_linear(x: Tensor | Input, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Input:
    """silu(gate) · up as the next layer's input, of a weight [2 n, k] with gate's rows first."""
    value, operands = _operands(x, weight, bias, scaling)
    y, amax, _ = _gated_linear(*operands)
    shape = torch.Size((*value.shape[:-1], weight.shape[0] // 2))
    return prepared(y.view(shape), scaling) if scaling.axis else _input((y, y, amax), shape, scaling)


def _input(made: tuple[Tensor, Tensor, Tensor], shape: torch.Size, scaling: Scaling) -> Input:
    """Of what a kernel has left: the fp8 rows with their scales, or the amax, by which the tensor is cast."""
    y, quantised, scale = made
    if _whole_rows(scaling):
        return Input(y.view(shape), fp8.Cast(quantised, scale, None, scale))
    columns = scaling.narrow_weight_gradient and torch.is_grad_enabled()
    return Input(y.view(shape), fp8.cast(y.detach(), E4M3, axis=False, by_columns=columns, amax=scale))


def _whole_rows(scaling: Scaling) -> bool:
    return scaling.axis and not scaling.narrow_weight_gradient


def normed(x: Tensor, weight: Tensor, eps: float, scaling: Scaling) -> Input:
    """RMSNorm of x as the next layer's input. Scales of columns too take a pass of their own."""
    made = rms_norm_cast(_rows(x), weight, eps, by_rows=_whole_rows(scaling))
    return prepared(made[0].view(x.shape), scaling) if _columns_scaled(scaling) else _input(made, x.shape, scaling)


def gated(gate: Tensor, up: Tensor, scaling: Scaling) -> Input:
    """silu(gate) · up as the next layer's input."""
    made = swiglu_cast(_rows(gate), _rows(up), by_rows=_whole_rows(scaling))
    return (
        prepared(made[0].view(gate.shape), scaling) if _columns_scaled(scaling) else _input(made, gate.shape, scaling)
    )


def _columns_scaled(scaling: Scaling) -> bool:
    return scaling.axis and scaling.narrow_weight_gradient
