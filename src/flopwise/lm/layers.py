"""The pieces between the matmuls: norms, activations, softmax and rotary positions.

Each comes twice or more. `*_eager` is the formula, one kernel per operation, which is what a first implementation does and what
a profiler shows as a row of small memory-bound kernels; `*_torch` is PyTorch's own fused kernel; our own are in
`kernels/`. They compute the same.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise.errors import Unsupported
from flopwise.lm.fp8 import Activation, Fp8
from flopwise.lm.own_kernels import needs_triton, own_operation

INIT_STD = 0.02  # GPT-2's

Pointwise = Callable[[Tensor], Tensor]


class Linear(nn.Linear):
    """nn.Linear that is initialised once, with the model's own distribution, instead of twice."""

    fp8: Fp8 | None = None  # the recipe's, of a block's layers

    def forward(self, x: Activation) -> Tensor:
        return super().forward(x) if self.fp8 is None else self.fp8.linear(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class JoinedLinear(Linear):
    """Several projections of one input as one matmul. Drawn one after the other, as if each were made by itself: the
    weights are the same numbers, one below the other.
    """

    def __init__(self, ins: int, outs: Sequence[int], bias: bool, names: Sequence[str]) -> None:
        self.outs, self.names = tuple(outs), tuple(names)  # before the weights are drawn
        super().__init__(ins, sum(outs), bias=bias)

    def reset_parameters(self) -> None:
        for part in self.weight.split(self.outs):
            nn.init.normal_(part, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding with the model's own initialisation."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


def rms_norm_eager(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, in fp32, cast back."""
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight).to(x.dtype)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """F.rms_norm. Half-precision activations meet fp32 weights under autocast; the fused kernel wants one dtype."""
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def layer_norm_eager(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias, in fp32, cast back."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    inverse_std = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (centred * inverse_std * weight + bias).to(x.dtype)


def layer_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """F.layer_norm, in the weights' dtype, cast back."""
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; `kind` is the recipe's norm lever."""

    fp8: Fp8 | None = None  # that of the layers that read the result

    def __init__(self, dim: int, eps: float, kind: str, feeds_linear: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        norms: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {"eager": rms_norm_eager, "torch": rms_norm_torch}
        self.norm = own_operation("rms_norm", "norm = 'triton'") if kind == "triton" else norms[kind]
        self.casts = feeds_linear and kind == "triton"  # our kernel makes the fp8 form on the way

    def forward(self, x: Tensor) -> Activation:
        if self.fp8 is not None and self.casts:
            return self.fp8.normed(x, self.weight, self.eps)
        return self.norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm over the last dimension; `kind` is the recipe's norm lever."""

    def __init__(self, dim: int, eps: float, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps
        if kind == "triton":
            raise Unsupported("norm = 'triton' is a kernel for RMSNorm, not for LayerNorm", "use norm = torch")
        self.norm = {"eager": layer_norm_eager, "torch": layer_norm_torch}[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.bias, self.eps)


def gelu_eager(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))): eight kernels, each reading and writing all of x.

    Under CUDA autocast the cube runs in fp32, as every power does, and what follows it with it.

    >>> gelu_eager(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588,  0.0000,  0.8412])
    """
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_torch(x: Tensor) -> Tensor:
    """The same in one kernel."""
    return F.gelu(x, approximate="tanh")


def silu_eager(x: Tensor) -> Tensor:
    """x · sigmoid(x): two kernels."""
    return x * torch.sigmoid(x)


def silu_torch(x: Tensor) -> Tensor:
    """The same in one kernel."""
    return F.silu(x)


def softmax_eager(x: Tensor) -> Tensor:
    """exp(x − max) / Σ exp(x − max) over the last dimension: five kernels.

    `max` remembers where each row's maximum is; `amax` would keep all of x for its gradient. In the ambient dtype:
    CUDA autocast itself moves the exponential and the sum to fp32, CPU autocast does not.

    >>> softmax_eager(torch.tensor([0.0, 0.0, float("-inf")]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    exponential = torch.exp(x - x.max(-1, keepdim=True).values)
    return exponential / exponential.sum(-1, keepdim=True)


def softmax_torch(x: Tensor) -> Tensor:
    """The same in one kernel."""
    return torch.softmax(x, -1)


# The two forms without a kernel of ours, by name, also for use as single operations.
GELU: dict[str, Pointwise] = {"eager": gelu_eager, "torch": gelu_torch}
SILU: dict[str, Pointwise] = {"eager": silu_eager, "torch": silu_torch}
SOFTMAX: dict[str, Pointwise] = {"eager": softmax_eager, "torch": softmax_torch}


def gelu_function(kind: str) -> Pointwise:
    """The recipe's GeLU."""
    if kind in ("triton", "cuda"):
        with needs_triton(f"activation = '{kind}'"):
            from flopwise.kernels import gelu
        return gelu.GELU[kind]
    return GELU[kind]


def silu_function(kind: str) -> Pointwise:
    """The recipe's SiLU."""
    if kind == "cuda":
        raise Unsupported("activation = 'cuda' is a kernel for GeLU, not for SwiGLU", "use activation = triton")
    return SILU[kind]


def fused_swiglu(kind: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """silu(gate) · up in one kernel, if the recipe's activation is one that fuses them."""
    return own_operation("swiglu", "activation = 'triton'") if kind == "triton" else None


def rope_angles(context: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation, [T, D/2] each: pair i turns by position · theta^(−2i/D)."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)  # [D/2]
    frequencies = 1.0 / theta ** (pairs / head_dim)
    positions = torch.arange(context, dtype=torch.float32, device=device)  # [T]
    angles = positions[:, None] * frequencies  # [T, D/2]: a product, not a matmul, so that autocast leaves it alone
    return angles.cos(), angles.sin()


class RopeTable(nn.Module):
    """The angles of the first `context` positions, kept; of a longer context they are computed at every call.

    Kept, because torch.compile fuses what it sees: angles computed in the step are computed again for every element of
    every query and key (0.7 ms of the small model's 2.4 ms forward pass on an H200). Always fp32: rounded to bf16 with
    the model, positions past 256 would run together.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.context, self.head_dim, self.theta = context, head_dim, theta
        self._fill(torch.get_default_device())

    def _fill(self, device: torch.device) -> None:
        cos, sin = rope_angles(self.context, self.head_dim, self.theta, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RopeTable":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill(self.cos.device)  # `model.to(bfloat16)` has rounded them
        return self

    def forward(self, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if context > self.context:
            return rope_angles(context, self.head_dim, self.theta, device)
        return self.cos[:context], self.sin[:context]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i+D/2}) of x [B, H, T, D] by their position's angle, in fp32, cast back."""
    first, second = x.chunk(2, -1)  # [B, H, T, D/2]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


def rope_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, each turned."""
    return rope(q, cos, sin), rope(k, cos, sin)


Turn = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rope_function(kind: str) -> Turn:
    """The recipe's rotation of queries and keys."""
    if kind == "eager":
        return rope_pair
    with needs_triton("rope = 'triton'"):
        from flopwise.kernels import rope as kernels
    return kernels.rope_pair
