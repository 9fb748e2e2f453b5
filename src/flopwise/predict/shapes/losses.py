"""Cross entropy over all logits and over chunks of them, on shapes: `lm/loss.py` and our own kernel line by line."""

import math
from collections.abc import Sequence

from flopwise.predict.shapes import fused, ops
from flopwise.predict.shapes.tape import Gradients, Tape, Tensor
from flopwise.spec.dtypes import item_bytes
from flopwise.work.operation import LOGITS, LOSS

CHUNK_TOKENS = 1024  # lm/loss.py's; a test holds them equal
FUSED_BYTES, FUSED_NARROW = 512 * 2**20, 8  # and kernels/cross_entropy.py's


def loss_full(t: Tape, logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32."""
    rows = (math.prod(logits.shape[:-1]), logits.shape[-1])
    return fused.cross_entropy(t, ops.view(t, ops.to(t, logits, "fp32"), rows), targets)


def loss_chunked(t: Tape, hidden: Tensor, weight: Tensor, targets: Tensor, tf32: bool) -> Tensor:
    """The same with one chunk of logits at a time; its gradients are made with it, before the backward pass."""
    dtype = t.autocast or hidden.dtype
    rows = ops.view(t, hidden, (math.prod(hidden.shape[:-1]), hidden.shape[-1]))
    wide, narrow_weight = rows.dtype, weight.dtype
    with t.no_grad():
        loss, grad_rows, grad_weight = _chunked_forward(t, rows, weight, targets, dtype, tf32)

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad_rows, grad_weight = saved
        scale = ops.pointwise(t, "div", grad)
        scaled = ops.pointwise(t, "mul", _cast(t, grad_rows, "fp32"), scale)
        first = _cast(t, scaled, wide)
        del scaled
        return first, _cast(t, ops.pointwise(t, "mul", grad_weight, scale), narrow_weight)

    saved = t.save(grad_rows, grad_weight)
    del grad_rows, grad_weight
    return t.connect(loss, (rows, weight), backward, saved)


def loss_fused(t: Tape, hidden: Tensor, weight: Tensor, targets: Tensor, tf32: bool) -> Tensor:
    """kernels/cross_entropy.py: a chunk's logits are overwritten by their gradients, the two products are summed in place."""
    dtype = t.autocast or hidden.dtype
    rows = ops.view(t, hidden, (math.prod(hidden.shape[:-1]), hidden.shape[-1]))
    with t.no_grad():
        loss, grad_rows, grad_weight = _fused_forward(t, rows, weight, targets, dtype, tf32)

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        ops.pointwise(t, "mul", grad)
        for gradient in saved:
            t.work("flopwise::scale_", (gradient,), (gradient,), "fp32", reads=())
        return saved[0], saved[1]

    saved = t.save(grad_rows, grad_weight)
    del grad_rows, grad_weight
    return t.connect(loss, (rows, weight), backward, saved)


def fused_chunk(tokens: int, vocab: int, item: int, narrow_sum: bool) -> int:
    """Tokens whose logits are held at a time.

    >>> fused_chunk(8192, 128_256, 2, narrow_sum=True)
    2048
    """
    fitting = FUSED_BYTES // (vocab * item) // 128 * 128
    return max(fitting, -(-tokens // (FUSED_NARROW * 128)) * 128 if narrow_sum else 128, 128)


def _fused_forward(
    t: Tape, rows: Tensor, weight: Tensor, targets: Tensor, dtype: str, tf32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (n_rows, width), vocab = rows.shape, weight.shape[0]
    grad_rows = t.tensor(rows.shape, rows.dtype, op="grad_rows")
    grad_weight = t.tensor(weight.shape, weight.dtype, op="grad_weight")
    t.work_of("share", LOSS, targets.n_bytes, 4, "fp32", 5)
    narrow = _cast(t, weight, dtype)
    chunk = fused_chunk(n_rows, vocab, item_bytes(dtype), weight.dtype == "bf16")
    space = t.tensor((min(chunk, n_rows), -(-vocab // 16) * 16), dtype, LOGITS, "mm")
    compute = ops.precision(dtype, tf32)
    for start in range(0, n_rows, chunk):
        n = min(chunk, n_rows - start)
        h, logits, labels = _cast(t, rows.view((n, width)), dtype), space.view((n, vocab)), targets.view((n,))
        t.work("mm", (h, narrow.view((width, vocab))), (logits,), compute)
        written = logits.n_bytes + 4 * n  # a loss for each row
        t.work("flopwise::cross_entropy_rows", (logits, labels), (logits,), dtype, reads=(logits,), touched=written)
        if rows.dtype == dtype:
            t.work("mm", (logits, narrow), (grad_rows.view((n, width)),), compute)
        else:
            _copy_rows(t, grad_rows, ops.matmul(t, logits, narrow, (n, width), tf32))
        added, factors = (grad_weight,) if start else (), (logits.view((vocab, n)), h)
        t.work("addmm", (*added, *factors), (grad_weight,), compute, args=(None, *factors))
    loss = t.tensor((), "fp32", op="mean")
    t.work_of("mean", LOSS, 4 * n_rows, 4, "fp32", 2)
    return loss, grad_rows, grad_weight


def _cast(t: Tape, x: Tensor, dtype: str) -> Tensor:
    return x if x.dtype == dtype else t.run("to", (x,), x.shape, dtype)


def _copy_rows(t: Tape, to: Tensor, rows: Tensor) -> None:
    place = to.view(rows.shape)
    t.work("copy_", (place, rows), (place,), to.dtype, reads=(rows,))


def _chunked_forward(
    t: Tape, rows: Tensor, weight: Tensor, targets: Tensor, dtype: str, tf32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    n_rows, width = rows.shape
    vocab = weight.shape[0]
    narrow = _cast(t, weight, dtype)
    total = fused.filled(t, (), "fp32", "zeros")
    grad_rows = t.tensor(rows.shape, dtype, op="grad_rows")
    grad_weight = fused.filled(t, weight.shape, "fp32", "zeros")
    for start in range(0, n_rows, CHUNK_TOKENS):
        n = min(CHUNK_TOKENS, n_rows - start)
        h, labels = _cast(t, rows.view((n, width)), dtype), targets.view((n, 1))
        loss, log_probabilities = _chunk_loss(t, h, narrow, labels, tf32)
        total = ops.pointwise(t, "add", total, loss)
        error = log_probabilities
        t.work("exp_", (error,), (error,), "fp32")
        signs = ops.pointwise(t, "neg", fused.filled(t, (n, 1), "fp32", "ones_like"))
        t.work("scatter_add_", (error, labels, signs), (error,), "fp32", args=(error, None, labels, signs))
        del signs
        error = _cast(t, error, dtype)
        _copy_rows(t, grad_rows, ops.matmul(t, error, narrow, (n, width), tf32))
        product = ops.matmul(t, error.view((vocab, n)), h, (vocab, width), tf32)
        t.work("add_", (grad_weight, product), (grad_weight,), "fp32")
        del product
    return ops.pointwise(t, "div", total), grad_rows, grad_weight


def _chunk_loss(t: Tape, h: Tensor, narrow: Tensor, labels: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    vocab, width = narrow.shape
    logits = _cast(t, ops.matmul(t, h, narrow.view((width, vocab)), (h.shape[0], vocab), tf32, LOGITS), "fp32")
    log_probabilities = t.run("log_softmax", (logits,), logits.shape, "fp32", family=LOGITS)
    del logits
    return fused.nll_loss(t, log_probabilities, labels, t.tensor((), "fp32", op="nll_loss")), log_probabilities
