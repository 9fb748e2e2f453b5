"""GeLU five ways: the same function as eight kernels, as torch's one, compiled, in CUDA C++ and in Triton.

The tanh approximation, as GPT-2 uses it. With u = √(2/π) (x + 0.044715 x³), 0.5 x (1 + tanh u) = x σ(2u): one exponential
and one division, and no cancellation where tanh u is near −1.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from flopwise.errors import Unsupported
from flopwise.kernels import nvrtc
from flopwise.kernels.case import Case
from flopwise.kernels.dispatch import FLOATS, require_float, runs_triton

BLOCK, WARPS = 512, 4  # Triton: 4 elements a thread, one 16-byte load in fp32
THREADS = 128  # CUDA: of a block, each with one 16-byte load


def gelu_manual(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))): eight kernels, each reading and writing all of x.

    >>> gelu_manual(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588,  0.0000,  0.8412])
    """
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_torch(x: Tensor) -> Tensor:
    """torch's own kernel."""
    return F.gelu(x, approximate="tanh")


def gelu_compiled(x: Tensor) -> Tensor:
    """The manual one through torch.compile, which fuses its eight kernels; compiled at the first call."""
    return _compiled()(x)


@cache
def _compiled() -> Callable[[Tensor], Tensor]:
    return torch.compile(gelu_manual)


@triton.jit
def _gate(x):
    """σ(2u)."""
    return 1.0 / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))


@triton.jit
def _slope(x):
    """d/dx [x s] = s + x s (1 − s) 2u' with s = σ(2u) and 2u' = 2 √(2/π) (1 + 3 · 0.044715 x²)."""
    s = _gate(x)
    x = tl.minimum(tl.maximum(x, -16.0), 16.0)  # beyond, s is 0 or 1 and only 0 times infinity is left
    return s * (1.0 + x * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))


@triton.jit
def _gelu_forward_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # without a mask: 16-byte loads, whatever n is
        x = tl.load(x_ptr + at).to(tl.float32)
        tl.store(y_ptr + at, (x * _gate(x)).to(y_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
        tl.store(y_ptr + at, (x * _gate(x)).to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _gelu_backward_kernel(dy_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        x = tl.load(x_ptr + at).to(tl.float32)
        dy = tl.load(dy_ptr + at).to(tl.float32)
        tl.store(dx_ptr + at, (dy * _slope(x)).to(dx_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=at < n).to(tl.float32)
        tl.store(dx_ptr + at, (dy * _slope(x)).to(dx_ptr.dtype.element_ty), mask=at < n)


@torch.library.custom_op("flopwise::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    if not runs_triton(x):
        return F.gelu(x.contiguous(), approximate="tanh")
    x, y = x.contiguous(), x.new_empty(x.shape)
    if n := x.numel():
        _gelu_forward_kernel[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK, num_warps=WARPS)
    return y


@torch.library.custom_op("flopwise::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    if not runs_triton(x):
        return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")  # type: ignore[no-any-return]
    dx = x.new_empty(x.shape)
    if n := x.numel():
        _gelu_backward_kernel[(triton.cdiv(n, BLOCK),)](dy, x, dx, n, BLOCK=BLOCK, num_warps=WARPS)
    return dx


@cache
def _cuda_kernels(dtype: torch.dtype, index: int) -> list[nvrtc.Function]:
    """Forward and backward of gelu.cu, compiled once for a dtype and a GPU."""
    source = Path(__file__).with_name("gelu.cu").read_text()
    given = {"SCALAR": list(FLOATS).index(dtype), "THREADS": THREADS}
    options = [f"-D{name}={value}" for name, value in given.items()]
    return nvrtc.load(source, "gelu.cu", ("gelu_forward", "gelu_backward"), index, options)


def _launch(which: int, *tensors: Tensor) -> None:
    x = tensors[0]
    if not x.is_cuda:
        raise Unsupported("the CUDA kernel of GeLU needs a tensor on a GPU", nvrtc.HINT)
    n, tile = x.numel(), THREADS * 16 // x.element_size()
    if n:
        kernel = _cuda_kernels(x.dtype, x.device.index)[which]
        kernel(-(-n // tile), THREADS, *map(nvrtc.pointer, tensors), ctypes.c_longlong(n))


@torch.library.custom_op("flopwise::gelu_cuda", mutates_args=())
def _gelu_cuda(x: Tensor) -> Tensor:
    x, y = x.contiguous(), x.new_empty(x.shape)
    _launch(0, x, y)
    return y


@torch.library.custom_op("flopwise::gelu_cuda_backward", mutates_args=())
def _gelu_cuda_backward(dy: Tensor, x: Tensor) -> Tensor:
    x, dx = x.contiguous(), x.new_empty(x.shape)
    _launch(1, x, dy.contiguous(), dx)
    return dx


def _register(forward: Any, backward: Any) -> None:
    """Shapes and gradients, which the two kernels share. The input alone is kept: the gate is computed again."""
    forward.register_fake(lambda x: x.new_empty(x.shape))
    backward.register_fake(lambda dy, x: x.new_empty(x.shape))
    forward.register_autograd(
        lambda ctx, dy: backward(dy, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


_register(_gelu, _gelu_backward)
_register(_gelu_cuda, _gelu_cuda_backward)


def gelu_triton(x: Tensor) -> Tensor:
    """Our Triton kernel; on the CPU torch's.

    >>> gelu_triton(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588,  0.0000,  0.8412])
    """
    require_float("gelu", x)
    return _gelu(x)  # type: ignore[no-any-return]


def gelu_cuda(x: Tensor) -> Tensor:
    """Our CUDA C++ kernel, gelu.cu, compiled by NVRTC at the first call. On a GPU alone: elsewhere `Unsupported`."""
    require_float("gelu", x)
    return _gelu_cuda(x)  # type: ignore[no-any-return]


GELU: dict[str, Callable[[Tensor], Tensor]] = {
    "manual": gelu_manual,
    "torch": gelu_torch,
    "compile": gelu_compiled,
    "cuda": gelu_cuda,
    "triton": gelu_triton,
}


def cases() -> Iterator[Case]:
    constants = {"BLOCK": BLOCK}
    for dtype in ("fp32", "bf16"):
        for name, kernel, tensors in (
            ("forward", _gelu_forward_kernel, ("x_ptr", "y_ptr")),
            ("backward", _gelu_backward_kernel, ("dy_ptr", "x_ptr", "dx_ptr")),
        ):
            signature = dict.fromkeys(tensors, f"*{dtype}") | {"n": "i32"}
            yield Case(f"gelu {name} {dtype}", kernel, signature, constants, WARPS, 3, ("n",))
