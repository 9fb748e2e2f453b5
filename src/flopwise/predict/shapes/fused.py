"""Ops that PyTorch has as one: embedding, norms, scaled-dot-product attention by backend, cross entropy."""

from collections.abc import Sequence

from flopwise.predict.shapes.ops import lowered, pointwise, reduced
from flopwise.predict.shapes.tape import Gradients, Node, Shape, Tape, Tensor
from flopwise.work.operation import (
    ATTENTION,
    COPY,
    ELEMENTWISE,
    INDEX,
    LOGITS,
    LOSS,
    MEMORY,
    NORMALISATION,
    PART,
    SOFTMAX,
)


def embedding(t: Tape, weight: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a table. The gradient is a whole table, zeros but for the rows that were read."""
    table = weight.shape
    saved = t.save(tokens) if t.wants(weight) else None
    shape = (*tokens.shape, table[-1])
    out = t.tensor(shape, weight.dtype, op="embedding")
    t.work(
        "embedding", INDEX, (tokens, out), out.n_bytes, weight.dtype, outs=(out,)
    )  # it reads as many rows as it writes

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad_weight = t.run("zeros", MEMORY, (), table, grad.dtype)
        t.work("embedding_backward", INDEX, (grad, saved[0]), grad.n_bytes, grad.dtype, outs=(grad_weight,))
        return (grad_weight,)

    return t.connect(out, (weight,), backward, saved)


def norm(t: Tape, x: Tensor, weights: Sequence[Tensor], op: str, contiguous: bool = True) -> Tensor:
    """F.rms_norm or F.layer_norm: one kernel that keeps its input and one or two numbers a row."""
    rows = (*x.shape[:-1], 1)
    n_stats = len(weights)  # 1/rms; mean and 1/σ
    saved_in = t.wants(x)
    stats = [t.tensor(rows, "fp32", op=op) for _ in range(n_stats)]
    dense = x if contiguous else t.run("copy", COPY, (x,), x.shape, x.dtype)
    out = t.run(op, NORMALISATION, (dense, *weights), x.shape, x.dtype)
    saved = t.save(x, *weights, *stats) if saved_in or t.wants(weights[0]) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        x, weight = saved[0], saved[1]
        grad_x = t.run(f"{op}_backward", NORMALISATION, (grad, x, weight, *saved[-n_stats:]), grad.shape, grad.dtype)
        grads = [t.run(f"{op}_weights", NORMALISATION, (grad, x), weight.shape, weight.dtype)]
        grads += [t.tensor(weight.shape, weight.dtype, op=op) for _ in range(n_stats - 1)]  # the bias's, same kernel
        return grad_x, *grads

    return t.connect(out, (x, *weights), backward, saved)


def own_rms_norm(t: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """Our RMSNorm, in any dtype and memory order: it keeps its input and 1/rms of every row."""
    inverse = t.tensor((x.numel // x.shape[-1],), "fp32", op="flopwise::rms_norm")
    out = t.run("flopwise::rms_norm", NORMALISATION, (x, weight), x.shape, x.dtype)
    saved = t.save(x, weight, inverse) if t.wants(x) or t.wants(weight) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        x, weight, inverse = saved
        grad_x = t.tensor(x.shape, x.dtype, op="flopwise::rms_norm_backward")
        grad_weight = t.tensor(weight.shape, weight.dtype, op="flopwise::rms_norm_backward")
        t.work(
            "flopwise::rms_norm_backward", NORMALISATION, (grad, x, weight, inverse), grad_x.n_bytes + grad_weight.n_bytes,
            x.dtype, kernels=2, outs=(grad_x, grad_weight),
        )  # fmt: skip
        return grad_x, grad_weight

    return t.connect(out, (x, weight), backward, saved)


def own_swiglu(t: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up in one kernel, which keeps its inputs; so is the way back."""
    saved = t.save(gate, up) if t.wants(gate) or t.wants(up) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grads = [t.tensor(x.shape, x.dtype, op="flopwise::swiglu_backward") for x in saved]
        t.work(
            "flopwise::swiglu_backward", ELEMENTWISE, (grad, *saved), 2 * grads[0].n_bytes, grad.dtype, outs=grads
        )  # fmt: skip
        return grads

    return t.connect(pointwise(t, "flopwise::swiglu", gate, up), (gate, up), backward, saved)


def own_rope(t: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned in one kernel, which keeps nothing but the angles; so is the way back."""
    shapes = q.shape, k.shape

    def turned(t: Tape, pair: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        first, second = (t.tensor(x.shape, x.dtype, op="flopwise::rope_pair") for x in pair)
        written = first.n_bytes + second.n_bytes
        t.work("flopwise::rope_pair", ELEMENTWISE, (*pair, cos, sin), written, "fp32", outs=(first, second))
        return first, second

    def backward(t: Tape, grad: Tensor, pieces: Sequence[Tensor]) -> Gradients:
        return turned(t, [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])

    out = turned(t, (q, k))
    if t.grad_enabled and q.node is not None and k.node is not None:
        t.save(cos, sin)
        t.order += 1
        edges = [(x.node, x.slot, x.shape, x.dtype) for x in (q, k) if x.node is not None]
        out[0].node = out[1].node = Node(t.order, t.module, [*edges], backward, None)
        out[1].slot = 1
    return out


def sdpa(t: Tape, q: Tensor, k: Tensor, v: Tensor, backend: str, tf32: bool, by_head: bool) -> Tensor:
    """Fused causal attention of q [B, H, T, K] with k, v [B, Hkv, T, K]; no scores are written.

    FLOPs are counted as for the whole square of scores, as PyTorch's own counter does; a causal kernel does about half
    (see flops.causal_share). The backward pass computes the scores again: five matmuls for the forward pass's two.
    `by_head`: the output lies head by head in memory.
    """
    q, k, v = (lowered(t, x) for x in (q, k, v))
    batch, heads, context, head_dim = q.shape
    flops = 4 * batch * heads * context * context * head_dim
    compute = "tf32" if tf32 and q.dtype == "fp32" else q.dtype
    wants = t.wants(q) or t.wants(k) or t.wants(v)
    rows: Shape = (batch, heads, -(-context // 32) * 32 if backend == "efficient" else context, 1)
    logsumexp = t.tensor(rows, "fp32", op="sdpa") if wants else None
    shapes = (q.shape, k.shape, v.shape)
    out = t.run(f"sdpa_{backend}", ATTENTION, (q, k, v), q.shape, q.dtype, flops=flops, compute=compute, shapes=shapes)
    saved = t.save(q, k, v, out, logsumexp) if logsumexp is not None else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        q, k, v, out = saved[:4]
        scratch = _backward_scratch(t, backend, grad, out, by_head)
        grads = [t.tensor(x.shape, x.dtype, op="sdpa_backward") for x in (q, k, v)]
        written = sum(g.n_bytes for g in grads)
        kernels = {"efficient": 1, "flash": 2, "cudnn": 2, "flex": 1, "triton": 2}[
            backend
        ]  # beside the sum of gradient · output
        t.work(
            f"sdpa_{backend}_backward", ATTENTION, (grad, *saved, *scratch), written, compute,
            flops=flops * 5 // 2, kernels=kernels, shapes=shapes, outs=grads,
        )  # fmt: skip
        return grads

    return t.connect(out, (q, k, v), backward, saved)


def _backward_scratch(t: Tape, backend: str, grad: Tensor, out: Tensor, by_head: bool) -> list[Tensor]:
    """What a backend's backward pass needs beside its results: row sums of gradient · output, and fp32 sums of ∂q."""
    rows = (*grad.shape[:-1], 1)
    if backend == "efficient":
        return [reduced(t, f"{PART}sum", pointwise(t, f"{PART}mul", grad, out), rows)]
    sums = t.run(f"{PART}sum", ATTENTION, (grad, out), rows, "fp32")
    if backend in ("flex", "triton"):
        return [sums]
    # cuDNN wants the gradient in the output's memory order.
    matching = [t.run(f"{PART}copy", COPY, (grad,), grad.shape, grad.dtype)] if backend == "cudnn" and by_head else []
    return [sums, *matching, t.run(f"{PART}zeros", MEMORY, (), grad.shape, "fp32")]


def cross_entropy(t: Tape, logits: Tensor, targets: Tensor) -> Tensor:
    """log_softmax and nll_loss: log probabilities as large as the logits are kept, and the way back makes two more."""
    shape = logits.shape
    log_probabilities = t.run("log_softmax", SOFTMAX, (logits,), shape, logits.dtype, family=LOGITS)

    def softmax_backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return (t.run("log_softmax_backward", SOFTMAX, (grad, saved[0]), shape, grad.dtype, family=LOGITS),)

    log_probabilities = t.connect(
        log_probabilities, (logits,), softmax_backward, t.save(log_probabilities) if t.wants(logits) else None
    )
    weight = t.tensor((), "fp32", op="nll_loss")
    saved = t.save(log_probabilities, targets, weight) if t.wants(log_probabilities) else None
    loss = t.tensor((), "fp32", op="nll_loss")
    t.work("nll_loss", LOSS, (targets, targets), 4, "fp32")  # one log probability a row, as wide as half a target

    def nll_backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad_rows = t.run("zeros", MEMORY, (), shape, "fp32", family=LOGITS)
        t.work("nll_loss_backward", LOSS, (saved[1],), 4 * shape[0], "fp32", outs=(grad_rows,))
        return (grad_rows,)

    return t.connect(loss, (log_probabilities,), nll_backward, saved)


def filled(t: Tape, shape: Shape, dtype: str, op: str = "ones") -> Tensor:
    """A constant tensor."""
    return t.run(op, ELEMENTWISE, (), shape, dtype)
