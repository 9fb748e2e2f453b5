"""CUDA's autocast policy for tensors on the CPU.

CPU autocast casts other ops than CUDA's does (it leaves exp, pow and sum in bf16), so that a step on fake CPU tensors would
save tensors of other sizes than on a GPU: 10 to 18 % of the peak. While `cuda_autocast()` is open, every op of torch's
dispatcher has CUDA's policy under the AutocastCPU key, which is above autograd: the casts are a part of the graph, as
they are on the GPU, and a weight's half-precision copy is made once and kept until autocast is left.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopwise import torch_private


def _names(text: str) -> list[str]:
    return text.split()


# aten/src/ATen/autocast_mode.h, AT_FORALL_…, of torch 2.13, for a torch that comes without its headers; a test compares them.
LOWER_PRECISION = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
""")
FP32_SET_DTYPE = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
FP32_APPEND_DTYPE = ("norm.Scalar", "norm.ScalarOpt_dim")
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")

Kernel = Callable[..., Any]


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """While open, `torch.autocast("cpu")` casts what `torch.autocast("cuda")` would. For the whole process."""
    library = torch.library.Library("aten", "IMPL")
    casts = _Casts()
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        casts.kept.clear()
        clear()

    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that the CPU's own policy is overridden
            for name, kernel in _policy(casts).items():
                library.impl(name, kernel, torch_private.AUTOCAST_CPU, allow_override=True)
        torch.clear_autocast_cache = clear_both  # what `autocast.__exit__` calls when the outermost is left
        yield
    finally:
        torch.clear_autocast_cache = clear
        casts.kept.clear()
        torch_private.destroy(library)


class _Casts:
    """Casts, with the cache of weights' casts: leaves that need a gradient and go from fp32 to the lower precision."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, dtype)
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return [self(each, dtype) for each in value]
        return value

    def all(self, args: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
        """Every argument, the last first: the order in which the C++ compiler evaluates them, and so of the allocations."""
        return [self(a, dtype) for a in reversed(args)][::-1]

    def _tensor(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if not x.is_floating_point() or x.dtype in (torch.float64, dtype):
            return x
        if not _is_cached(x, dtype):
            return x.to(dtype)
        if id(x) not in self.kept:
            self.kept[id(x)] = (x, x.to(dtype))
        return self.kept[id(x)][1]


def _is_cached(x: Tensor, dtype: torch.dtype) -> bool:
    if x.dtype != torch.float32 or dtype != torch.get_autocast_dtype("cpu"):
        return False
    return x.requires_grad and x.is_leaf and not torch_private.is_view(x) and torch.is_autocast_cache_enabled()


def _policy(casts: _Casts) -> dict[str, Kernel]:
    """Every op's kernel under the autocast key; what only the CPU's own policy casts is let through."""
    policy: dict[str, Kernel] = {}
    installed = installed_lists()
    for names, make in (
        (installed.get("LOWER_PRECISION_FP", LOWER_PRECISION), _lower_precision),
        (installed.get("FP32", FP32), _fp32),
        (installed.get("FP32_SET_OPT_DTYPE", FP32_SET_DTYPE), _fp32_set_dtype),
        (FP32_APPEND_DTYPE, _fp32_append_dtype),
        (installed.get("PROMOTE", PROMOTE), _promote),
    ):
        policy |= {name: make(_overload(name), casts) for name in names if _exists(name)}
    for name in torch_private.ops_with_kernel(torch_private.AUTOCAST_CPU):
        bare = name.removeprefix("aten::")
        if bare not in policy and name.startswith("aten::"):
            policy[bare] = torch.library.fallthrough_kernel
    return policy


def _lower_precision(op: Any, casts: _Casts) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with torch_private.without_cpu_autocast():
            return op(*casts.all(args, dtype), **{k: casts(v, dtype) for k, v in kwargs.items()})

    return kernel


def _fp32(op: Any, casts: _Casts) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch_private.without_cpu_autocast():
            return op(*casts.all(args, torch.float32), **{k: casts(v, torch.float32) for k, v in kwargs.items()})

    return kernel


def _fp32_set_dtype(op: Any, casts: _Casts) -> Kernel:
    """The op takes a dtype: it is told fp32, instead of being given a cast tensor. The op then casts inside, or not at all."""

    def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch_private.without_cpu_autocast():
            if x.is_floating_point() and kwargs.get("dtype") is None and not _dtype_given(args):
                kwargs["dtype"] = torch.float32 if x.dtype != torch.float64 else None
            return op(x, *args, **kwargs)

    return kernel


def _fp32_append_dtype(op: Any, casts: _Casts) -> Kernel:
    overload = torch_private.overload_name(op)
    wide = getattr(torch.ops.aten.norm, {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}[overload])

    def kernel(x: Tensor, p: Any = 2, *args: Any, **kwargs: Any) -> Any:
        with torch_private.without_cpu_autocast():
            if x.is_floating_point() and x.dtype != torch.float64:
                if overload == "ScalarOpt_dim" and len(args) == 1:
                    args = (*args, kwargs.pop("keepdim", False))
                return wide(x, p, *args, dtype=torch.float32, **kwargs)
            return op(x, p, *args, **kwargs)

    return kernel


def _promote(op: Any, casts: _Casts) -> Kernel:
    """All to the widest floating dtype among the arguments."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        wide = torch.get_autocast_dtype("cpu")
        for tensor in tensors:
            wide = torch.promote_types(wide, tensor.dtype)
        with torch_private.without_cpu_autocast():
            return op(*casts.all(args, wide), **{k: casts(v, wide) for k, v in kwargs.items()})

    return kernel


def _dtype_given(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.dtype) for a in args)


def _exists(name: str) -> bool:
    packet, _, overload = name.partition(".")
    return hasattr(torch.ops.aten, packet) and (overload or "default") in getattr(torch.ops.aten, packet).overloads()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@cache
def installed_lists() -> dict[str, list[str]]:
    """The policy of the installed torch: releases add ops to it. Empty where its headers are not there."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    return header_lists(header.read_text()) if header.exists() else {}


def header_lists(header: str) -> dict[str, list[str]]:
    """The lists in the text of torch's ATen/autocast_mode.h, as `name` or `name.overload`.

    >>> header_lists("#define AT_FORALL_PROMOTE(_) \\\\\\n  _(addcdiv) \\\\\\n  _(pow, Scalar)\\n\\n")
    {'PROMOTE': ['addcdiv', 'pow.Scalar']}
    """
    lists = {}
    for name, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)\s*\\\n(.*?)\n\n", header + "\n\n", re.DOTALL):
        entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)
        lists[name] = [f"{op}.{overload}" if overload else op for op, overload in entries]
    return lists
