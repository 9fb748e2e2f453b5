"""Ops that PyTorch has as one: embedding, norms, scaled-dot-product attention by backend, cross entropy; and our own kernels."""

from collections.abc import Sequence

from flopwise.predict.shapes.ops import lowered, pointwise, precision
from flopwise.predict.shapes.tape import Gradients, Node, Tape, Tensor
from flopwise.work.op_rules import one_pass_scratch
from flopwise.work.operation import LOGITS, PART
from flopwise.work.tensor import Shape


def embedding(t: Tape, weight: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a table. The gradient is a whole table, zeros but for the rows that were read."""
    table = weight.shape
    saved = t.save(tokens) if t.wants(weight) else None
    out = t.tensor((*tokens.shape, table[-1]), weight.dtype, op="embedding")
    t.work("embedding", (weight, tokens), (out,), weight.dtype, reads=(tokens, out))  # as many rows as it writes

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad_weight = t.run("zeros", (), table, grad.dtype)
        t.work("embedding_backward", (grad, saved[0]), (grad_weight,), grad.dtype, done=1, touched=grad.n_bytes)
        return (grad_weight,)

    return t.connect(out, (weight,), backward, saved)


def norm(t: Tape, x: Tensor, weights: Sequence[Tensor], op: str, contiguous: bool = True) -> Tensor:
    """F.rms_norm or F.layer_norm: one kernel that keeps its input and one or two numbers a row; two on the way back."""
    rows = (*x.shape[:-1], 1)
    n_stats = len(weights)  # 1/rms; mean and 1/σ
    saved_in = t.wants(x)
    stats = [t.tensor(rows, "fp32", op=op) for _ in range(n_stats)]
    dense = x if contiguous else t.run("copy", (x,), x.shape, x.dtype)
    out = t.run(op, (dense, *weights), x.shape, x.dtype, also=stats)
    saved = t.save(x, *weights, *stats) if saved_in or t.wants(weights[0]) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        x, weight = saved[0], saved[1]
        grad_x = t.tensor(grad.shape, grad.dtype, op=f"{op}_backward")
        t.work(f"{op}_backward", (grad, x, weight, *saved[-n_stats:]), (grad_x,), grad.dtype, done=1)
        grad_weight = t.tensor(weight.shape, weight.dtype, op=f"{op}_weights")
        grad_bias = [t.tensor(weight.shape, weight.dtype, op=op) for _ in range(n_stats - 1)]
        t.work(f"{op}_weights", (grad, x), (grad_weight, *grad_bias), weight.dtype)
        return grad_x, grad_weight, *grad_bias

    return t.connect(out, (x, *weights), backward, saved)


def _own(t: Tape, op: str, inputs: Sequence[Tensor], like: Sequence[Tensor], dtype: str) -> list[Tensor]:
    """A kernel of ours outside the graph, with results like these tensors."""
    outs = [t.tensor(x.shape, x.dtype, op=op) for x in like]
    t.work(op, inputs, outs, dtype)
    return outs


def own_rms_norm(t: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """Our RMSNorm, in any dtype and memory order: it keeps its input and 1/rms of every row."""
    inverse = t.tensor((x.elements // x.shape[-1],), "fp32", op="flopwise::rms_norm")
    out = t.run("flopwise::rms_norm", (x, weight), x.shape, x.dtype, also=(inverse,))
    saved = t.save(x, weight, inverse) if t.wants(x) or t.wants(weight) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return _own(t, "flopwise::rms_norm_backward", (grad, *saved), saved[:2], saved[0].dtype)

    return t.connect(out, (x, weight), backward, saved)


def own_swiglu(t: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up in one kernel, which keeps its inputs; so is the way back."""
    saved = t.save(gate, up) if t.wants(gate) or t.wants(up) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return _own(t, "flopwise::swiglu_backward", (grad, *saved), saved, grad.dtype)

    return t.connect(pointwise(t, "flopwise::swiglu", gate, up), (gate, up), backward, saved)


def own_rope(t: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned in one kernel, which keeps nothing but the angles; so is the way back."""
    shapes = q.shape, k.shape

    def turned(t: Tape, pair: Sequence[Tensor]) -> list[Tensor]:
        return _own(t, "flopwise::rope_pair", (*pair, cos, sin), pair, "fp32")

    def backward(t: Tape, grad: Tensor, pieces: Sequence[Tensor]) -> Gradients:
        return turned(t, [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])

    first, second = turned(t, (q, k))
    if t.grad_enabled and q.node is not None and k.node is not None:
        t.save(cos, sin)
        t.order += 1
        edges = [(x.node, x.slot, x.shape, x.dtype) for x in (q, k) if x.node is not None]
        first.node = second.node = Node(t.order, t.module, [*edges], backward, None)
        second.slot = 1
    return first, second


def sdpa(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, backend: str, tf32: bool, by_head: bool, hopper: bool = False
) -> Tensor:
    """Fused attention: no scores are written. The backward pass computes them again: five matmuls for the forward pass's two.

    FLOPs are those of the whole square of scores; a causal kernel does about half (see op_rules.causal_share).
    `by_head`: the output lies head by head in memory. `hopper`: our kernels for sm_90 are those that run.
    """
    q, k, v = (lowered(t, x) for x in (q, k, v))
    batch, heads, context, _ = q.shape
    compute = precision(q.dtype, tf32)
    wants = t.wants(q) or t.wants(k) or t.wants(v)
    rows: Shape = (batch, heads, -(-context // 32) * 32 if backend == "efficient" else context, 1)
    logsumexp = [t.tensor(rows, "fp32", op="sdpa")] if wants else []
    out = t.run(f"sdpa_{backend}", (q, k, v), q.shape, q.dtype, compute=compute, also=logsumexp)
    saved = t.save(q, k, v, out, *logsumexp) if wants else None
    shapes = (q.shape, k.shape, v.shape)

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        before = len(t.ops)
        once = one_pass_scratch(*shapes[:2], saved[0].dtype) if hopper and backend == "triton" else None
        scratch = _backward_scratch(t, backend, grad, saved[3], by_head, once)
        parts = sum(op.op != f"{PART}copy" for op in t.ops[before:])
        grads = [t.tensor(x.shape, x.dtype, op="sdpa_backward") for x in saved[:3]]
        inputs = (grad, *saved, *scratch)
        t.work(f"sdpa_{backend}_backward", inputs, grads, compute, shapes=shapes, done=parts)
        return grads

    return t.connect(out, (q, k, v), backward, saved)


def _backward_scratch(
    t: Tape, backend: str, grad: Tensor, out: Tensor, by_head: bool, once: tuple[Shape, Shape] | None
) -> list[Tensor]:
    """What a backend's backward pass needs beside its results: row sums of gradient · output, and fp32 sums of ∂q."""
    if once:
        lines = t.run(f"{PART}sum", (grad, out), once[0], "fp32", like="sdpa")
        return [lines, t.tensor(once[1], "fp32", op="sdpa_backward")]
    rows = (*grad.shape[:-1], 1)
    if backend == "efficient":
        product = t.run(f"{PART}mul", (grad, out), grad.shape, grad.dtype, like="mul")
        return [t.run(f"{PART}sum", (product,), rows, grad.dtype, like="sum")]
    sums = t.run(f"{PART}sum", (grad, out), rows, "fp32", like="sdpa")
    if backend in ("flex", "triton"):
        return [sums]
    if backend == "flash":
        return [sums, t.tensor(grad.shape, "fp32", op="sdpa_backward")]
    # cuDNN wants the gradient in the output's memory order.
    matching = [t.run(f"{PART}copy", (grad,), grad.shape, grad.dtype, like="copy")] if by_head else []
    return [sums, *matching, t.run(f"{PART}zeros", (), grad.shape, "fp32", like="zeros")]


def cross_entropy(t: Tape, logits: Tensor, targets: Tensor) -> Tensor:
    """log_softmax and nll_loss: log probabilities as large as the logits are kept, and the way back makes two more."""
    shape = logits.shape
    log_probabilities = t.run("log_softmax", (logits,), shape, logits.dtype, family=LOGITS)

    def softmax_backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return (t.run("log_softmax_backward", (grad, saved[0]), shape, grad.dtype, family=LOGITS),)

    saved = t.save(log_probabilities) if t.wants(logits) else None
    log_probabilities = t.connect(log_probabilities, (logits,), softmax_backward, saved)
    weight = t.tensor((), "fp32", op="nll_loss")
    saved = t.save(log_probabilities, targets, weight) if t.wants(log_probabilities) else None
    loss = nll_loss(t, log_probabilities, targets, weight)

    def nll_backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad_rows = t.run("zeros", (), shape, "fp32", family=LOGITS)
        targets, weight = saved[1:]
        inputs, args = (grad, targets, weight), (grad, None, targets, None, None, None, weight)
        touched = 4 * shape[0]
        t.work("nll_loss_backward", inputs, (grad_rows,), "fp32", args=args, done=1, touched=touched, reads=(targets,))
        return (grad_rows,)

    return t.connect(loss, (log_probabilities,), nll_backward, saved)


def nll_loss(t: Tape, log_probabilities: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """The mean of one log probability a row, and their total weight; outside the graph."""
    loss = t.tensor((), "fp32", op="nll_loss")
    t.work("nll_loss", (log_probabilities, targets), (loss, weight), "fp32", reads=(targets,))
    return loss


def filled(t: Tape, shape: Shape, dtype: str, op: str = "ones") -> Tensor:
    """A constant tensor."""
    return t.run(op, (), shape, dtype)
