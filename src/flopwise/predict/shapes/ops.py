"""PyTorch's eager ops on shapes: what each launches, reads and writes, keeps for its derivative, and does on the way back.

The derivatives follow torch's derivatives.yaml, temporaries included: a C++ expression keeps its parts until it ends.
"""

from collections.abc import Sequence

from flopwise.predict.shapes.tape import Gradients, Tape, Tensor
from flopwise.spec.dtypes import DTYPES
from flopwise.work.tensor import Shape

_WIDTH = {name: dtype.n_bytes if dtype.floating else 0 for name, dtype in DTYPES.items()}


def _promoted(*tensors: Tensor) -> str:
    return max([t.dtype for t in tensors], key=_WIDTH.__getitem__)


def _broadcast(a: Shape, b: Shape) -> Shape:
    if a == b:
        return a
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    padded = (1,) * (len(longer) - len(shorter)) + shorter
    return tuple(max(x, y) for x, y in zip(longer, padded, strict=True))


def pointwise(t: Tape, op: str, *inputs: Tensor, dtype: str = "") -> Tensor:
    """One elementwise kernel, outside the graph."""
    shape = inputs[0].shape
    for other in inputs[1:]:
        shape = _broadcast(shape, other.shape)
    return t.run(op, inputs, shape, dtype or _promoted(*inputs))


def reduced(t: Tape, op: str, x: Tensor, shape: Shape) -> Tensor:
    """One reduction kernel, outside the graph."""
    return t.run(op, (x,), shape, x.dtype)


# --- views: nothing runs


def view(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """The same memory in another shape; so is its gradient."""
    before = x.shape
    return t.connect(x.view(shape), (x,), lambda t, grad, saved: (grad.view(before),))


def copied(t: Tape, x: Tensor, shape: Shape, back: str = "view") -> Tensor:
    """A reshape that has to copy, because the memory lies in another order; `back`: whether its gradient does too."""
    before = x.shape
    out = t.run("copy", (x,), shape, x.dtype)

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return (t.run("copy", (grad,), before, grad.dtype) if back == "copy" else grad.view(before),)

    return t.connect(out, (x,), backward)


def merged_back(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """A view whose gradient arrives in another memory order and is copied into this one's."""
    before = x.shape
    return t.connect(x.view(shape), (x,), lambda t, grad, saved: (t.run("copy", (grad,), before, grad.dtype),))


# --- casts


def to(t: Tape, x: Tensor, dtype: str) -> Tensor:
    """`x.to(dtype)`: nothing if it has it already."""
    if x.dtype == dtype:
        return x
    before = x.dtype
    out = t.run("to", (x,), x.shape, dtype)
    return t.connect(out, (x,), lambda t, grad, saved: (t.run("to", (grad,), grad.shape, before),))


def lowered(t: Tape, x: Tensor) -> Tensor:
    """What autocast hands to a matmul: half precision; of a weight one copy, kept until autocast ends."""
    if not t.autocast or x.dtype != "fp32":
        return x
    weight = id(x) in t.casts or getattr(x.node, "weight", None) is x
    if not weight:
        return to(t, x, t.autocast)
    if id(x) not in t.casts:
        t.casts[id(x)] = to(t, x, t.autocast)
    return t.casts[id(x)]


def raised(t: Tape, x: Tensor) -> Tensor:
    """What autocast hands to exp, pow, rsqrt, sum and their like: fp32."""
    return to(t, x, "fp32") if t.autocast else x


# --- elementwise


def add(t: Tape, a: Tensor, b: Tensor) -> Tensor:
    return t.connect(pointwise(t, "add", a, b), (a, b), lambda t, grad, saved: (grad, grad))


def sub(t: Tape, a: Tensor, b: Tensor) -> Tensor:
    wants_b = t.wants(b)

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return grad, pointwise(t, "neg", grad) if wants_b else None

    return t.connect(pointwise(t, "sub", a, b), (a, b), backward)


def mul(t: Tape, a: Tensor, b: Tensor) -> Tensor:
    """Each side keeps the other for its gradient."""
    wants_a, wants_b = t.wants(a), t.wants(b)
    saved = t.save(*((b,) if wants_a else ()), *((a,) if wants_b else ())) if wants_a or wants_b else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad_b = pointwise(t, "mul", grad, saved[-1]) if wants_b else None
        grad_a = pointwise(t, "mul", grad, saved[0]) if wants_a else None
        return grad_a, grad_b

    return t.connect(pointwise(t, "mul", a, b), (a, b), backward, saved)


def div(t: Tape, a: Tensor, b: Tensor) -> Tensor:
    """∂a = g / b; ∂b = −g ((a / b) / b), whose three parts live until the product is there."""
    saved = t.save(a, b) if t.wants(a) or t.wants(b) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad_b = _div_other(t, grad, *saved)  # first, as torch does it
        return pointwise(t, "div", grad, saved[1]), grad_b

    return t.connect(pointwise(t, "div", a, b), (a, b), backward, saved)


def _div_other(t: Tape, grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    negated = pointwise(t, "neg", grad)
    once = pointwise(t, "div", a, b)
    twice = pointwise(t, "div", once, b)
    return pointwise(t, "mul", negated, twice)


def scaled(t: Tape, x: Tensor, op: str = "mul") -> Tensor:
    """x times, or divided by, a number."""
    return t.connect(pointwise(t, op, x), (x,), lambda t, grad, saved: (pointwise(t, op, grad),))


def shifted(t: Tape, x: Tensor) -> Tensor:
    """x plus a number: the gradient passes through."""
    return t.connect(pointwise(t, "add", x), (x,), lambda t, grad, saved: (grad,))


def power(t: Tape, x: Tensor) -> Tensor:
    """x to a whole power n: ∂x = g · (n xⁿ⁻¹)."""
    x = raised(t, x)
    saved = t.save(x) if t.wants(x) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        lower = pointwise(t, "pow", saved[0])
        return (pointwise(t, "mul", grad, pointwise(t, "mul", lower)),)

    return t.connect(pointwise(t, "pow", x), (x,), backward, saved)


def rsqrt(t: Tape, x: Tensor) -> Tensor:
    """∂x = −½ g y³."""
    x = raised(t, x)
    out = pointwise(t, "rsqrt", x)

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        half = pointwise(t, "mul", grad)
        return (pointwise(t, "mul", half, pointwise(t, "pow", saved[0])),)

    return t.connect(out, (x,), backward, t.save(out) if t.wants(x) else None)


def from_result(t: Tape, op: str, x: Tensor, upcast: bool = False) -> Tensor:
    """exp, sigmoid, tanh: the derivative needs the result alone, in one kernel."""
    given = raised(t, x) if upcast else x  # x itself, the caller's argument, stays until the op is done
    out = pointwise(t, op, given)

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return (pointwise(t, f"{op}_backward", grad, saved[0]),)

    return t.connect(out, (given,), backward, t.save(out) if t.wants(given) else None)


def from_input(t: Tape, op: str, x: Tensor) -> Tensor:
    """silu, gelu: the derivative needs the input alone, in one kernel."""
    saved = t.save(x) if t.wants(x) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return (pointwise(t, f"{op}_backward", grad, saved[0]),)

    return t.connect(pointwise(t, op, x), (x,), backward, saved)


# --- reductions


def mean(t: Tape, x: Tensor) -> Tensor:
    """Over the last dimension, kept as 1; the gradient is spread out again by a division."""
    shape = x.shape

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return (t.run("div", (grad,), shape, grad.dtype),)

    return t.connect(reduced(t, "mean", x, (*shape[:-1], 1)), (x,), backward)


def total(t: Tape, x: Tensor) -> Tensor:
    """The sum over the last dimension, kept as 1; its gradient is a view, spread without memory."""
    x = raised(t, x)
    shape = x.shape

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        spread = grad.view(shape)
        return (spread,)

    return t.connect(reduced(t, "sum", x, (*shape[:-1], 1)), (x,), backward)


def maximum(t: Tape, x: Tensor) -> Tensor:
    """The largest of the last dimension, with its place: the gradient is scattered there into zeros."""
    small = (*x.shape[:-1], 1)
    shape = x.shape
    places = t.tensor(small, "int64", op="max")
    out = t.run("max", (x,), small, x.dtype, also=(places,))

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        zeros = t.run("zeros", (), shape, grad.dtype)
        args = (zeros, None, saved[0], grad)
        t.work("scatter_", (zeros, grad, saved[0]), (zeros,), grad.dtype, args=args, reads=(grad, saved[0]))
        return (zeros,)

    return t.connect(out, (x,), backward, t.save(places) if t.wants(x) else None)


def masked_fill(t: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """The gradient is masked too."""
    saved = t.save(mask) if t.wants(x) else None

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return (_filled(t, grad, saved[0]),)

    return t.connect(_filled(t, x, mask), (x,), backward, saved)


def _filled(t: Tape, x: Tensor, mask: Tensor) -> Tensor:
    return t.run("masked_fill", (x, mask), x.shape, x.dtype)


# --- matmuls


def matmul(t: Tape, a: Tensor, b: Tensor, shape: Shape, tf32: bool, family: str = "") -> Tensor:
    """Outside the graph: a [.., M, K] times b [.., K, N]; a leading dimension is a batch of them."""
    op = "bmm" if len(a.shape) > 2 else "mm"
    return t.run(op, (a, b), shape, a.dtype, compute=precision(a.dtype, tf32), family=family)


def precision(dtype: str, tf32: bool) -> str:
    """What matmuls of a dtype compute in."""
    return "tf32" if tf32 and dtype == "fp32" else dtype


def linear(t: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool, family: str = "") -> Tensor:
    """x [.., I] times weight [O, I] transposed: 2 · rows · I · O FLOPs forward, and twice that backward."""
    x, weight = lowered(t, x), lowered(t, weight)
    bias = None if bias is None else lowered(t, bias)
    rows, (outs, ins) = x.elements // x.shape[-1], weight.shape
    wants_x, lead, biased = t.wants(x), x.shape[:-1], bias is not None
    saved = t.save(*((weight,) if wants_x else ()), x.view((rows, ins))) if t.wants(weight) or wants_x else None
    flat = matmul(t, x.view((rows, ins)), weight.view((ins, outs)), (rows, outs), tf32, family)
    out = flat.view((*lead, outs))

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad = grad.view((rows, outs))
        grad_bias = (reduced(t, "sum", grad, (outs,)),) if biased else ()
        grad_weight = matmul(t, grad.view((outs, rows)), saved[-1], (outs, ins), tf32)
        grad_x = matmul(t, grad, saved[0].view((outs, ins)), (rows, ins), tf32) if wants_x else None
        return (None if grad_x is None else grad_x.view((*lead, ins)), grad_weight, *grad_bias)

    return t.connect(out, (x, weight) if bias is None else (x, weight, bias), backward, saved)


def bmm(t: Tape, a: Tensor, b: Tensor, tf32: bool, family: str = "") -> Tensor:
    """Batched: a [N, Q, D] times b [N, D, K]."""
    a, b = lowered(t, a), lowered(t, b)
    n, q, d = a.shape
    k = b.shape[-1]
    saved = t.save(b, a) if t.wants(a) or t.wants(b) else None
    out = matmul(t, a, b, (n, q, k), tf32, family)

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        b, a = saved
        grad_b = matmul(t, a.view((n, d, q)), grad, (n, d, k), tf32, b.family)
        grad_a = matmul(t, grad, b.view((n, k, d)), (n, q, d), tf32, a.family)
        return grad_a, grad_b

    return t.connect(out, (a, b), backward, saved)
