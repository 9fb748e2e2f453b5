"""Attention six ways, causal or not, all with one signature: q [B, Hq, T, D], k and v [B, Hkv, T, D] -> [B, Hq, T, D].

Hkv may be a divisor of Hq (grouped KV heads), and [B, T, D] without heads works too.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flopwise import torch_private
from flopwise.errors import Unsupported
from flopwise.lm.layers import softmax_eager
from flopwise.lm.own_kernels import needs_triton

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_PINNED = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
_BACKEND_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}  # torch.nn.attention.SDPBackend


def attention_function(kind: str, compiled_elsewhere: bool, causal: bool = True) -> Attend:
    """The recipe's attention as a function. `compiled_elsewhere`: the caller runs it inside torch.compile.

    >>> q = torch.randn(2, 8, 16)
    >>> attend = attention_function("naive", compiled_elsewhere=False)
    >>> torch.equal(attend(q, q, q)[:, 0], q[:, 0])  # the first position sees itself alone
    True
    """
    if kind == "naive":
        return functools.partial(naive, causal=causal)
    if kind == "sdpa":
        return _with_heads(functools.partial(sdpa, causal=causal))
    if kind == "flex":
        return _with_heads(_Flex(compiled_elsewhere, causal))
    if kind == "flash":
        with needs_triton("attention = 'flash'"):
            from flopwise.kernels.attention_triton import flash_attention
        return functools.partial(flash_attention, causal=causal)
    return _with_heads(_pinned(kind, compiled_elsewhere, causal))


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """The definition, softmax(q kᵀ / √D) v: every score is written to memory and read back, several times."""
    context, head_dim = q.shape[-2:]
    k, v = _repeat_heads(q, k), _repeat_heads(q, v)
    with _range("attn_scores"):
        scores = torch.einsum("...qd, ...kd -> ...qk", q, k) / math.sqrt(head_dim)  # [B, H, T, T]
        if causal:
            future = torch.ones(context, context, dtype=torch.bool, device=q.device).triu(1)  # [T, T]
            scores = scores.masked_fill(future, float("-inf"))
    with _range("attn_softmax"):
        weights = softmax_eager(scores)
    with _range("attn_values"):
        return torch.einsum("...qk, ...kd -> ...qd", weights.to(v.dtype), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """PyTorch's fused attention: it picks the backend (see `sdpa_backend_name`)."""
    k, v = _heads_for_sdpa(q, k), _heads_for_sdpa(q, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])


def sdpa_backend_name(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> str:
    """The backend plain SDPA chooses for these tensors: flash, cudnn, efficient or math; unknown if it will not say.

    >>> q = torch.randn(1, 2, 16, 8)
    >>> sdpa_backend_name(q, q, q)
    'flash'
    """
    try:
        q, k, v = (x.unsqueeze(1) if x.dim() == 3 else x for x in (q, k, v))
        k, v = _heads_for_sdpa(q, k), _heads_for_sdpa(q, v)
        choice = torch_private.fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])
    except (RuntimeError, AttributeError, TypeError, IndexError):  # a private function: no promises
        return "unknown"
    return _BACKEND_NAMES.get(int(choice), "unknown")


def _pinned(kind: str, compiled_elsewhere: bool, causal: bool) -> Attend:
    """SDPA held to one backend, which runs or refuses: it never falls back to another."""
    backend = _PINNED[kind]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, causal)

    def attend_or_explain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            return attend(q, k, v)
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise Unsupported(
                    f"attention = '{kind}' cannot run {q.dtype} with head_dim {q.shape[-1]} on {q.device.type}",
                    "try precision = bf16, or attention = sdpa, which picks a backend that can",
                ) from error
            raise

    return attend if compiled_elsewhere else attend_or_explain


class _Flex:
    """FlexAttention, with a block mask where it is causal. Its fused kernel comes from torch.compile; without it it runs unfused.

    One mask per length and device is kept, with this object rather than with the module, so that a mask made of fake
    tensors in a dry run never meets a real one.
    """

    def __init__(self, compiled_elsewhere: bool, causal: bool) -> None:
        self.compiled_elsewhere, self.causal = compiled_elsewhere, causal
        self.masks: dict[tuple[int, torch.device], BlockMask] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if needs_grad and q.device.type == "cpu":
            raise Unsupported(
                "attention = 'flex' has no backward on the CPU", "use a GPU, phase = forward, or attention = sdpa"
            )
        alone = q.is_cuda and not self.compiled_elsewhere and not isinstance(q, torch_private.FakeTensor)
        run = cast(Callable[..., Tensor], _compiled_flex() if alone else flex_attention)
        mask = self.mask(q.shape[-2], q.device) if self.causal else None
        return run(q, k, v, block_mask=mask, enable_gqa=k.shape[1] != q.shape[1])

    def mask(self, context: int, device: torch.device) -> BlockMask:
        if self.compiled_elsewhere:  # a part of the compiled graph, where equal masks become one
            return _causal_mask(context, device)
        if (context, device) not in self.masks:
            with torch.inference_mode(False):  # a mask first made for inference must serve training too
                self.masks[context, device] = _causal_mask(context, device)
        return self.masks[context, device]


@functools.cache
def _compiled_flex() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=False)


def _causal_mask(context: int, device: torch.device) -> BlockMask:
    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(causal, B=None, H=None, Q_LEN=context, KV_LEN=context, device=device)


def _repeat_heads(q: Tensor, x: Tensor) -> Tensor:
    """k or v with each head repeated for the group of query heads that shares it."""
    if q.dim() == 3 or q.shape[1] == x.shape[1]:
        return x
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)  # [B, Hq, T, D]


def _heads_for_sdpa(q: Tensor, x: Tensor) -> Tensor:
    """On a GPU the one fused backend for fp32 does not take grouped heads; repeated ones keep it from the math path."""
    on_gpu = q.is_cuda or isinstance(q, torch_private.FakeTensor)  # fake tensors stand for a GPU's
    return _repeat_heads(q, x) if on_gpu and q.dtype == torch.float32 else x


def _with_heads(attend: Attend) -> Attend:
    """The fused backends want a head dimension: give [B, T, D] inputs one."""

    def attend_any(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dim() == 3:
            return attend(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
        return attend(q, k, v)

    return attend_any


def _range(name: str) -> AbstractContextManager[object]:
    """A named range in the profile. torch.compile drops ranges with a warning, so none is opened there."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else torch.profiler.record_function(name)
