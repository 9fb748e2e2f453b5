"""Chains of elementwise operations as one Triton kernel each: sin² + cos², and three stacked sigmoids with their gradient.

The sigmoids come in two forms. One keeps what backward needs (its two inner results), the other keeps nothing and
computes them again from the input.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case

BLOCK, WARPS = 1024, 4
_SINE_STACK = {80: 40, 90: 40, 100: 32}  # bytes: sin and cos of large numbers reduce them on the stack


@triton.jit
def _pointwise_sin_cos_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    sine, cosine = tl.sin(x), tl.cos(x)
    tl.store(y_ptr + at, sine * sine + cosine * cosine, mask=at < n)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _pointwise_forward_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, _sigmoid(_sigmoid(_sigmoid(x))), mask=at < n)


@triton.jit
def _pointwise_forward_keeping_kernel(x_ptr, first_ptr, second_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = _sigmoid(tl.load(x_ptr + at, mask=at < n))
    second = _sigmoid(first)
    tl.store(first_ptr + at, first, mask=at < n)
    tl.store(second_ptr + at, second, mask=at < n)
    tl.store(y_ptr + at, _sigmoid(second), mask=at < n)


@triton.jit
def _slope(first, second):
    """s' = s (1 − s), of each of the three; the third one's value comes from the second's."""
    third = _sigmoid(second)
    return first * (1.0 - first) * second * (1.0 - second) * third * (1.0 - third)


@triton.jit
def _pointwise_backward_recomputing_kernel(dy_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = _sigmoid(tl.load(x_ptr + at, mask=at < n))
    dy = tl.load(dy_ptr + at, mask=at < n)
    tl.store(dx_ptr + at, dy * _slope(first, _sigmoid(first)), mask=at < n)


@triton.jit
def _pointwise_backward_keeping_kernel(dy_ptr, first_ptr, second_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(first_ptr + at, mask=at < n)
    second = tl.load(second_ptr + at, mask=at < n)
    dy = tl.load(dy_ptr + at, mask=at < n)
    tl.store(dx_ptr + at, dy * _slope(first, second), mask=at < n)


def sin_cos(x: Tensor) -> Tensor:
    """sin²(x) + cos²(x) of an fp32 tensor: one read, one write."""
    y = torch.empty_like(x)
    _pointwise_sin_cos_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return y


def sigmoids_keeping(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Three sigmoids and their gradient: 1 read and 3 writes, then 3 reads and 1 write."""
    first, second, y = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    n, grid = x.numel(), (triton.cdiv(x.numel(), BLOCK),)
    _pointwise_forward_keeping_kernel[grid](x, first, second, y, n, BLOCK=BLOCK, num_warps=WARPS)
    dx = torch.empty_like(x)
    _pointwise_backward_keeping_kernel[grid](dy, first, second, dx, n, BLOCK=BLOCK, num_warps=WARPS)
    return y, dx


def sigmoids_recomputing(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the input alone: 1 read and 1 write, then 2 reads and 1 write."""
    y, dx = torch.empty_like(x), torch.empty_like(x)
    n, grid = x.numel(), (triton.cdiv(x.numel(), BLOCK),)
    _pointwise_forward_kernel[grid](x, y, n, BLOCK=BLOCK, num_warps=WARPS)
    _pointwise_backward_recomputing_kernel[grid](dy, x, dx, n, BLOCK=BLOCK, num_warps=WARPS)
    return y, dx


def cases() -> Iterator[Case]:
    sigmoids = (
        _pointwise_forward_kernel,
        _pointwise_forward_keeping_kernel,
        _pointwise_backward_recomputing_kernel,
        _pointwise_backward_keeping_kernel,
    )
    for kernel in (_pointwise_sin_cos_kernel, *sigmoids):
        tensors = [argument for argument in kernel.arg_names if argument.endswith("_ptr")]
        signature = dict.fromkeys(tensors, "*fp32") | {"n": "i32"}
        spills = _SINE_STACK if kernel is _pointwise_sin_cos_kernel else {}
        yield Case(kernel.fn.__name__, kernel, signature, {"BLOCK": BLOCK}, WARPS, divisible=("n",), spills=spills)
