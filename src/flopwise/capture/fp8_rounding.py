"""Linear layers of a model as fp8 rounds them, in plain PyTorch: how far right steps in fp8 are from the truth.

Nothing of `kernels/fp8.py` is used, which is judged by it.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise.patch.blocks import blocks_of
from flopwise.patch.fp8 import layers

FORWARD = torch.float8_e4m3fn


def rounded(x: Tensor, dtype: torch.dtype, summed: int | None) -> Tensor:
    """Through fp8 and back, with one scale, or one for all that dimension `summed` of a product adds up."""
    x = x.float()
    amax = x.abs().amax() if summed is None else x.abs().amax(summed, keepdim=True)
    scale = amax.clamp_min(1e-30) / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by_rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_rows, ctx.biased = by_rows, bias is not None
        last = -1 if by_rows else None
        y = F.linear(rounded(x, FORWARD, last), rounded(weight, FORWARD, last), None if bias is None else bias.float())
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), dy = ctx.saved_tensors, grads[0].flatten(0, -2)
        first, last = (0, -1) if ctx.by_rows else (None, None)
        dtype = FORWARD if ctx.by_rows else torch.float8_e5m2
        dx = rounded(dy, dtype, last) @ rounded(weight, FORWARD, first)
        dw = rounded(dy, dtype, first).t() @ rounded(x.flatten(0, -2), FORWARD, first)
        db = dy.sum(0) if ctx.biased else None
        return dx.view(x.shape).to(x.dtype), dw.to(weight.dtype), db, None


def round_to_fp8(model: nn.Module, by_rows: bool, *, own: bool = True) -> None:
    """Let every linear layer of the model's blocks round as fp8 does; of a model not our `own`, those that are put into fp8."""
    inside = getattr(model, "blocks", model).modules() if own else layers(model, blocks_of([model]))[0]
    for layer in [one for one in inside if isinstance(one, nn.Linear)]:
        setattr(layer, "forward", partial(_rounded_linear, layer, by_rows))  # noqa: B010  not for a class


def _rounded_linear(layer: nn.Linear, by_rows: bool, x: Tensor) -> Tensor:
    return _RoundedLinear.apply(x, layer.weight, layer.bias, by_rows)  # type: ignore[no-any-return, no-untyped-call]
