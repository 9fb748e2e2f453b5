"""Cross entropy of logits, and of hidden states through the head's matmul, without ever holding all logits.

With z = h Wᵀ a row's logits, t its target and p = softmax(z):

    loss = log Σ exp(z) − z_t        ∂loss/∂z = p − onehot(t) = e        ∂h = e W        ∂W = Σ eᵀ h

The mean runs over the rows whose target is not `IGNORED`. Logits are the largest tensor of a step with a large
vocabulary (8192 tokens × 128,256 words: 2.1 GB in bf16, 4.2 GB for each fp32 copy that the loss makes of them), and each
row is needed once. So `linear_cross_entropy` takes a chunk of tokens at a time: one matmul for its logits, one kernel
that reads them, writes the losses and overwrites them with e, and one matmul for each gradient, all in the forward pass;
the backward pass scales the gradients by what arrives from above, and moves no byte if that is 1.

Precision, against full logits in the same dtype. e is rounded once to the logits' dtype, as autograd does. ∂h is one
matmul either way. ∂W is summed over chunks into a tensor of the weight's dtype: exactly what is wanted of fp32 weights
(under autocast the matmuls then write fp32). Of bf16 weights each chunk rounds the running sum again. An fp32 sum would
cost V · D · 4 bytes more (2.1 GB in the example, more than all else together), so instead there are at most
`NARROW_CHUNKS` chunks: n roundings of a sum that grows like √n add up to √(n/2) times one rounding, twice for 8, beside
that of e. fp16 weights are summed in fp32, since a sum over tokens may leave fp16's range.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flopwise.errors import Unsupported
from flopwise.kernels.cross_entropy_rows import (
    IGNORED,
    SCALE_BLOCK,
    SCALE_PROGRAMS,
    _cross_entropy_error_kernel,
    _loss_scale_kernel,
    losses_and_errors,
    row_reference,
)
from flopwise.kernels.dispatch import autocast_dtype, require, require_float, runs_triton, wide
from flopwise.torch_private import keeps_graph

CHUNK_BYTES = 512 * 2**20  # of logits: 2048 rows of a vocabulary of 128k in bf16; 1024 took 3 to 4 % longer on an H200
ALIGNED = 16  # rows that start on 32 bytes: cuBLAS and the kernel want them so
NARROW_CHUNKS = 8


def cross_entropy_reference(logits: Tensor, targets: Tensor) -> Tensor:
    """The definition: mean of log Σ exp(z) − z_t over rows that are not ignored, in fp32 at least.

    >>> cross_entropy_reference(torch.zeros(3, 8), torch.tensor([0, 5, -100]))  # ln 8
    tensor(2.0794)
    """
    return F.cross_entropy(logits.to(wide(logits.dtype)).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


@torch.library.custom_op("flopwise::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, V], targets [N] -> the mean loss, each row's normalizers, and 1 / (rows that count)."""
    exact = wide(logits.dtype)
    losses = torch.empty(len(logits), dtype=exact, device=logits.device)
    normalizers = torch.empty(len(logits), 2, dtype=exact, device=logits.device)
    if len(logits):
        losses_and_errors(logits, targets, losses, None, normalizers)
    share = (targets != IGNORED).sum().to(exact).reciprocal()
    return losses.sum() * share, normalizers, share


@_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        logits.new_empty((), dtype=wide(logits.dtype)),
        logits.new_empty((len(logits), 2), dtype=wide(logits.dtype)),
        logits.new_empty((), dtype=wide(logits.dtype)),
    )


@torch.library.custom_op("flopwise::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(logits: Tensor, targets: Tensor, normalizers: Tensor, factor: Tensor) -> Tensor:
    if not runs_triton(logits):
        return row_reference(logits, targets, factor)[1]
    errors = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if errors.numel():
        vocabulary = logits.shape[1]
        block = min(SCALE_BLOCK, triton.next_power_of_2(vocabulary))
        tensors, warps = (logits, targets, normalizers, factor, errors), 8 if block > 1024 else 4
        _cross_entropy_error_kernel[(len(logits), triton.cdiv(vocabulary, block))](
            *tensors, logits.stride(0), vocabulary, IGNORED=IGNORED, BLOCK=block, num_warps=warps
        )
    return errors


@_cross_entropy_backward.register_fake
def _(logits: Tensor, targets: Tensor, normalizers: Tensor, factor: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _cross_entropy_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, *output[1:])


def _cross_entropy_gradient(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, None]:
    if upstream is None:
        return None, None
    logits, targets, normalizers, share = ctx.saved_tensors
    return _cross_entropy_backward(logits, targets, normalizers, upstream.to(share.dtype) * share), None


_cross_entropy.register_autograd(_cross_entropy_gradient, setup_context=_cross_entropy_context)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits [..., V] against targets [...] in fp32: no fp32 copy of the logits is made.

    Rows whose target is −100 do not count. Any other target that is no word raises on the CPU; on a GPU, which nothing
    is read back from, the loss and the row's gradient are NaN. float64, on the CPU, is computed in float64.
    """
    _check(logits, targets)
    require_float("cross entropy", logits, beside=(targets,))
    rows = logits.flatten(0, -2)
    loss: Tensor = _cross_entropy(rows if rows.stride(-1) == 1 else rows.contiguous(), targets.flatten())[0]
    return loss


@torch.library.custom_op("flopwise::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    dtype: torch.dtype,
    row_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rows [N, D], weight [V, D], targets [N] -> the mean loss, the two gradients (empty if not asked for), and what
    they still have to be multiplied by: 1, or for fp16 1 / (rows that count). Divided by a large N, e would vanish in
    fp16 before a loss scale, which arrives only in the backward pass, could save it.
    """
    device, tokens = rows.device, len(rows)
    vocabulary, (whole, narrow) = len(weight), _aligned(weight, dtype)
    grad_rows = torch.empty(rows.shape if row_gradient else (0,), dtype=rows.dtype, device=device)
    shape = (whole, weight.shape[1]) if weight_gradient else (0,)
    grad_weight = torch.empty(shape, dtype=_sum_dtype(weight.dtype), device=device)
    counted = (targets != IGNORED).sum().to(wide(dtype))
    share = counted.reciprocal()
    # Where no row counts the gradients are 0, which times 1 / 0 would be NaN.
    rest = counted.clamp(min=1).reciprocal() if dtype == torch.float16 else torch.ones_like(share)
    factor = torch.ones_like(share) if dtype == torch.float16 else share
    with torch.autocast(device.type, enabled=False):
        losses = torch.empty(tokens, dtype=wide(dtype), device=device)
        space = torch.empty(min(chunk, tokens), -(-whole // ALIGNED) * ALIGNED, dtype=dtype, device=device)
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            h, logits = rows[part].to(dtype), space[: part.stop - start, :whole]
            torch.mm(h, narrow.T, out=logits)
            asked = factor if row_gradient or weight_gradient else None
            losses_and_errors(logits[:, :vocabulary], targets[part], losses[part], asked)
            if row_gradient and rows.dtype == dtype:
                torch.mm(logits, narrow, out=grad_rows[part])
            elif row_gradient:
                grad_rows[part] = logits @ narrow
            if weight_gradient:
                _add_product(grad_weight, logits.T, h, first=start == 0)
        if not tokens:
            grad_weight.zero_()
    return losses.sum() * share, grad_rows, grad_weight[:vocabulary], rest


def _aligned(weight: Tensor, dtype: torch.dtype) -> tuple[int, Tensor]:
    """How many rows, and the weight in a dtype, in a half precision with rows of zeros up to a number that cuBLAS likes.

    Without them its products of 50,257 words are slow and sum in half precision: gradients of GPT-2 were 9 % off. A row of
    zeros has a logit of 0, which is no part of the loss and so is its error, too.
    """
    rows = -(-len(weight) // ALIGNED) * ALIGNED
    if rows == len(weight) or dtype.itemsize != 2:
        return len(weight), weight.to(dtype)
    padded = torch.empty(rows, weight.shape[1], dtype=dtype, device=weight.device)
    padded[: len(weight)] = weight
    padded[len(weight) :].zero_()
    return rows, padded


def _sum_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if weight_dtype == torch.float16 else weight_dtype


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total ← a b, or total + a b: summed in fp32 within a product whatever the inputs' dtype, rounded to total's."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif total.is_cuda and total.dtype == torch.float32:  # half-precision factors, fp32 product
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, beta=0 if first else 1, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=0 if first else 1, out=total)


@_linear_cross_entropy.register_fake
def _(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    dtype: torch.dtype,
    row_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        rows.new_empty((), dtype=wide(dtype)),
        rows.new_empty(rows.shape if row_gradient else (0,)),
        weight.new_empty(weight.shape if weight_gradient else (0,), dtype=_sum_dtype(weight.dtype)),
        rows.new_empty((), dtype=wide(dtype)),
    )


@torch.library.custom_op("flopwise::scale_", mutates_args=("x",))
def _scale(x: Tensor, factor: Tensor) -> None:
    """x ← x · factor, in fp32 and in place; the factor is a 0-dim tensor."""
    if not runs_triton(x):
        x.copy_(x.to(wide(x.dtype)) * factor)
    elif x.numel():
        blocks = triton.cdiv(x.numel(), SCALE_BLOCK)
        _loss_scale_kernel[(min(blocks, SCALE_PROGRAMS),)](x, factor, x.numel(), BLOCK=SCALE_BLOCK, num_warps=8)


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros as large as the weight come with the loss's gradient
    ctx.wanted = inputs[5], inputs[6]
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.save_for_backward(*output[1:])


def _linear_gradient(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """In place, so that there is never a second copy of ∂W; but where another backward pass may follow (retain_graph=True).

    A graph of this one is refused: the gradients were made in the forward pass, and nothing here leads back to what they are of.
    """
    if torch.is_grad_enabled():
        raise Unsupported(
            "linear_cross_entropy has no second derivative: for create_graph=True take F.cross_entropy of full logits"
        )
    if upstream is None:
        return (None,) * 7
    *gradients, rest = ctx.saved_tensors
    factor = upstream.to(rest.dtype) * rest
    found: list[Tensor | None] = []
    for made, wanted, dtype in zip(gradients, ctx.wanted, ctx.dtypes, strict=True):
        gradient = made.clone() if wanted and keeps_graph() else made
        if wanted:
            _scale(gradient, factor)
        found.append(gradient.to(dtype) if wanted else None)
    return *found, None, None, None, None, None


_linear_cross_entropy.register_autograd(_linear_gradient, setup_context=_linear_context)


@register_flop_formula(torch.ops.flopwise.linear_cross_entropy)
def _linear_flops(
    rows: Any, weight: Any, targets: Any, chunk: int, dtype: Any, row_gradient: bool, weight_gradient: bool, **_: Any
) -> int:
    """Three matmuls of 2 N V D: the logits and the two gradients, all in the forward pass."""
    return int(2 * rows[0] * rows[1] * weight[0] * (1 + row_gradient + weight_gradient))


def chunk_rows(tokens: int, vocabulary: int, dtype: torch.dtype, narrow_sum: bool) -> int:
    """How many tokens' logits to hold at a time: `CHUNK_BYTES` of them, or more where a sum of chunks is rounded.

    >>> chunk_rows(8192, 128_256, torch.bfloat16, narrow_sum=True)
    2048
    >>> chunk_rows(65_536, 128_256, torch.bfloat16, narrow_sum=True)
    8192
    """
    fitting = CHUNK_BYTES // (vocabulary * dtype.itemsize) // 128 * 128
    least = -(-tokens // (NARROW_CHUNKS * 128)) * 128 if narrow_sum else 128
    return max(fitting, least, 128)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Mean cross entropy of hidden [..., D] through the head's weight [V, D] against targets [...], in fp32.

    Only `chunk_tokens` rows of logits exist at a time. Under autocast the matmuls run in its dtype, as F.linear's would;
    float64, on the CPU, is computed in float64.

    >>> linear_cross_entropy(torch.ones(2, 3, 4), torch.zeros(8, 4), torch.zeros(2, 3, dtype=torch.long))  # ln 8
    tensor(2.0794)
    """
    narrow = autocast_dtype(hidden)
    dtype = hidden.dtype if narrow is None else narrow
    if dtype != weight.dtype and narrow is None:
        raise Unsupported(f"hidden is {hidden.dtype} and weight {weight.dtype}: without autocast they must be the same")
    _check(hidden, targets)
    require_float("cross entropy", hidden, weight, beside=(targets,))
    fits = weight.dim() == 2 and len(weight) > 0 and weight.shape[1] == hidden.shape[-1]
    told = f"{list(weight.shape)} for {list(hidden.shape)}"
    require(fits, f"the head's weight does not fit the hidden states, {told}: it is [V, D] with a V from 1")
    whole = chunk_tokens is None or (isinstance(chunk_tokens, int) and chunk_tokens >= 1)
    require(whole, f"chunk_tokens is a whole number from 1, not {chunk_tokens}")
    grad = torch.is_grad_enabled()
    of_weight = grad and weight.requires_grad
    narrow_sum = of_weight and weight.dtype == torch.bfloat16
    rows = hidden.flatten(0, -2)
    chunk = chunk_tokens or chunk_rows(len(rows), len(weight), dtype, narrow_sum)
    loss: Tensor = _linear_cross_entropy(
        rows, weight, targets.flatten(), chunk, dtype, grad and hidden.requires_grad, of_weight
    )[0]
    return loss


def _check(rows: Tensor, targets: Tensor) -> None:
    require(rows.dim() > 1 and rows.shape[-1] > 0, f"cross entropy takes rows of at least one, not {list(rows.shape)}")
    require(
        targets.dtype in (torch.int64, torch.int32), f"targets are whole numbers, int64 or int32, not {targets.dtype}"
    )
    if rows.shape[:-1] != targets.shape:
        raise ValueError(
            f"one target for each row: got {tuple(rows.shape[:-1])} rows and {tuple(targets.shape)} targets"
        )
