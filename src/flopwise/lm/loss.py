"""Cross entropy three ways: over all logits at once, over one chunk of tokens at a time, and that with our own kernel."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwise.lm.own_kernels import needs_triton

HiddenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]

CHUNK_TOKENS = 1024  # enough rows to keep a matmul busy; 1024 · 128,256 fp32 logits are 0.5 GB


def loss_full(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits [..., V] against targets [...], in fp32.

    >>> loss_full(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long))  # ln 8
    tensor(2.0794)
    """
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def loss_chunked(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """The same from hidden [..., D] and the head's weight [V, D], with only `chunk_tokens` rows of logits at a time.

    Logits are the largest tensor of a step with a large vocabulary, and the loss needs each row of them once: so each
    chunk's gradients are computed with its loss, in the forward pass, and the backward pass only scales them.
    """
    device_type = hidden.device.type
    ambient = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if ambient else hidden.dtype
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    rows, labels = hidden.flatten(0, -2), targets.flatten()
    if needs_grad:
        loss: Tensor = _ChunkedLoss.apply(rows, head_weight, labels, chunk_tokens, dtype)  # type: ignore[no-untyped-call]
        return loss
    weight = head_weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    for chunk in _chunks(labels, chunk_tokens):
        total = total + _chunk_loss(rows[chunk].to(dtype), weight, labels[chunk])[0]
    return total / len(labels)


def hidden_loss(kind: str) -> HiddenLoss:
    """The recipe's loss from hidden states, the head's weight and targets, for the kinds that never hold all logits."""
    if kind == "chunked":
        return loss_chunked
    with needs_triton("loss = 'fused'"):
        from flopwise.kernels.cross_entropy import linear_cross_entropy
    return linear_cross_entropy


def _chunks(labels: Tensor, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, len(labels), size)]


def _chunk_loss(rows: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The chunk's summed loss and its log probabilities [n, V]: the matmul in the inputs' dtype, the rest in fp32."""
    log_probabilities = F.log_softmax((rows @ weight.T).float(), -1)
    return F.nll_loss(log_probabilities, labels, reduction="sum"), log_probabilities


class _ChunkedLoss(torch.autograd.Function):
    """With p the softmax of a row's logits h Wᵀ and y its label's one-hot: ∂h = (p − y) W and ∂W = Σ (p − y)ᵀ h.

    Both are kept for the sum over tokens, not the mean: (p − y) / N would vanish in fp16 before a loss scale, which
    arrives only in the backward pass, could save it. The mean's 1/N is applied there, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, dtype: torch.dtype
    ) -> Tensor:
        narrow = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        grad_rows = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=rows.device)
        for chunk in _chunks(labels, chunk_tokens):
            h, y = rows[chunk].to(dtype), labels[chunk]  # [n, D], [n]
            loss, log_probabilities = _chunk_loss(h, narrow, y)
            total = total + loss
            error = log_probabilities.exp_()  # p, [n, V], in the same memory
            error.scatter_add_(1, y[:, None], -torch.ones_like(y, dtype=torch.float32)[:, None])  # p − y
            error = error.to(dtype)
            grad_rows[chunk] = error @ narrow
            grad_weight += error.T @ h
        ctx.save_for_backward(grad_rows, grad_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        ctx.tokens = len(labels)
        return total / len(labels)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_rows, grad_weight = ctx.saved_tensors
        rows_dtype, weight_dtype = ctx.dtypes
        scale = upstream[0].float() / ctx.tokens
        return (grad_rows.float() * scale).to(rows_dtype), (grad_weight * scale).to(weight_dtype), None, None, None
