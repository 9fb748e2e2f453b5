"""Ops that PyTorch carries out otherwise on a GPU than on the CPU: attention, RMS norm, dropout.

While `cuda_ops()` is open, these ops take the GPU's path for CPU tensors too. What they compute is of no interest (the
tensors are fake); what they save for backward, and what they count as, is the GPU's.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwise import torch_private
from flopwise.errors import Unsupported
from flopwise.predict.dry.architecture import Architecture

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

# PyTorch has no autograd formula for its fused RMS norm on the CPU: two ops of our own stand for the GPU's.
_own = torch.library.Library("flopwise_dry", "DEF")
_own.define("_fused_rms_norm(Tensor x, Tensor? weight, int dims) -> (Tensor, Tensor)")
_own.define("_fused_rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)")


def _rms_norm_shapes(x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - dims], *(1,) * dims)
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward_shapes(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


_own.impl("_fused_rms_norm", _rms_norm_shapes, "Meta")
_own.impl("_fused_rms_norm_backward", _rms_norm_backward_shapes, "Meta")


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        y, rstd = torch.ops.flopwise_dry._fused_rms_norm(x, weight, dims)
        ctx.save_for_backward(x, rstd, weight)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, rstd, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.ops.flopwise_dry._fused_rms_norm_backward(grads[0], x, rstd, weight)
        return grad_x, None if weight is None else grad_weight, None


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel where input and weight have one dtype; else PyTorch's row of small ones."""
    if torch_private.in_fake_mode() and (weight is None or weight.dtype == x.dtype):
        return _RmsNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call, no-any-return]
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(tuple(range(-len(shape), 0)), keepdim=True) + (eps or 1e-6))
    return (normed if weight is None else normed * weight).to(x.dtype)


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """One kernel that makes the mask and applies it."""
    return x if p == 0 or not train else _aten.native_dropout(x, p, train)[0]


class Attention:
    """SDPA as the GPU's dispatcher carries it out (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""

    def __init__(self, architecture: Architecture, held_to: str = "") -> None:
        self.architecture, self.held_to = architecture, held_to
        self.backends: set[str] = set()  # that were used

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        backend = self.held_to or choose_backend(q, k, v, attn_mask, self.architecture)
        self.backends.add(backend)
        save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if backend == "flash":
            return _flash(q, k, v, dropout_p, is_causal, scale)
        out: Any
        if backend == "cudnn":
            out = torch_private.sdpa_cudnn(q, k, v, attn_mask, save, dropout_p, is_causal, False, scale=scale)
        elif backend == "efficient":
            out = torch_private.sdpa_efficient(q, k, v, attn_mask, save, dropout_p, is_causal, scale=scale)
        else:
            out = torch_private.sdpa_math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return cast(Tensor, out[0])


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """The kernel wants head dimensions in multiples of 8: others are padded, and the result is cut."""
    head_dim = q.shape[-1]
    if missing := -head_dim % 8:
        scale = scale or 1 / math.sqrt(head_dim)
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    out: Tensor = torch_private.sdpa_flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :head_dim] if missing else out


def choose_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, architecture: Architecture) -> str:
    """The first backend that can, in the GPU's order of preference, among those that `sdpa_kernel` allows.

    >>> from flopwise.predict.dry.architecture import architecture
    >>> q = torch.empty(1, 2, 16, 64)
    >>> choose_backend(q, q, q, None, architecture("hopper"))
    'efficient'
    >>> half = q.bfloat16()
    >>> choose_backend(half, half, half, None, architecture("hopper"))
    'cudnn'
    """
    able, allowed = _able_backends(q, k, v, mask), _allowed_backends()
    for backend in architecture.attention:
        if backend in able and backend in allowed:
            return backend
    raise Unsupported(
        f"attention held to {', '.join(allowed)} cannot run {q.dtype} with head_dim {q.shape[-1]} on a GPU",
        "try precision = bf16, or attention = sdpa, which picks a backend that can",
    )


def _able_backends(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> set[str]:
    """Those that have a kernel for such tensors: numbers of a row side by side; cuDNN's gives no gradient to a bias."""
    if q.dim() != 4 or not all(map(_lies_side_by_side, (q, k, v, mask))):
        return {"math"}
    half, head_dim, grouped = q.dtype in _HALF, q.shape[-1], q.shape[1] != k.shape[1]
    fits = half and v.shape[-1] == head_dim
    learnt = torch.is_grad_enabled() and mask is not None and mask.requires_grad
    able = {
        "cudnn": fits and head_dim % 8 == 0 and head_dim <= 128 and not learnt,
        "flash": fits and mask is None and head_dim <= 256,
        "efficient": not grouped and (half or q.dtype == torch.float32),
        "math": True,
    }
    return {backend for backend, can in able.items() if can}


def _lies_side_by_side(x: Tensor | None) -> bool:
    return x is None or x.stride(-1) == 1 or x.shape[-1] == 1


def _allowed_backends() -> list[str]:
    """Those that `sdpa_kernel` leaves switched on."""
    allowed = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return [backend for backend, is_on in allowed.items() if is_on]


@contextmanager
def cuda_ops(attention: Attention) -> Iterator[dict[Any, Callable[..., Any]]]:
    """While open, the ops take the GPU's path. Yields them for a dispatch mode too: in inference mode it sees them whole."""
    swaps: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": attention,
        "rms_norm": rms_norm,
        "dropout": dropout,
    }
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in swaps.items():
            library.impl(name, _plain(function), "AutogradCPU")
        yield {getattr(_aten, name).default: function for name, function in swaps.items()}
    finally:
        torch_private.destroy(library)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return kernel
