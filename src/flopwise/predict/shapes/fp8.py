"""Layers in fp8 on shapes: `kernels/fp8_linear.py`, with all three products in fp8 as `lm/fp8.py` has them.

A cast reads its matrix twice, for the amax and for the numbers, unless the kernel before has found the tensor's one amax.
"""

from collections.abc import Sequence

from flopwise.predict.shapes.ops import reduced
from flopwise.predict.shapes.tape import Gradients, Tape, Tensor

_CAST, _AMAX = "flopwise::fp8_cast", "flopwise::fp8_amax"


def cast(t: Tape, x: Tensor, *, by_rows: bool, both: bool = False, amax_known: bool = False) -> tuple[Tensor, ...]:
    """A matrix in fp8, and transposed too where `both`; with one scale, or (`by_rows`) one for every row and column."""
    rows, columns = x.elements // x.shape[-1], x.shape[-1]
    if not amax_known and (both or not by_rows):
        t.run(_AMAX, (x,), (rows + columns if by_rows else 1,), "fp32")
    scales = t.tensor((rows + columns if by_rows and both else rows if by_rows else 1,), "fp32", op=_CAST)
    second = (t.tensor((columns, rows), "fp8", op=_CAST),) if both else ()
    return t.run(_CAST, (x,), (rows, columns), "fp8", also=(*second, scales)), *second


def prepared(t: Tape, x: Tensor, *, by_rows: bool, known: bool = False) -> tuple[Tensor, ...]:
    """A layer's input: in bf16, and in fp8 in the orders that it is multiplied in. `known`: the kernel that made it found the
    tensor's amax, which is of no use to scales of rows and columns.
    """
    return x, *cast(t, x, by_rows=by_rows, both=t.grad_enabled, amax_known=known and not by_rows)


def linear(
    t: Tape, inputs: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None, *, by_rows: bool, gated: bool = False
) -> Tensor:
    """y, dx and dW from fp8: the transposed input and weight are kept, neither of them in bf16. `gated`: with SwiGLU's pointwise
    half, whose backward pass finds the amax of its result.
    """
    x, x8, *across = inputs
    rows, (outs, ins) = x.elements // x.shape[-1], weight.shape
    w8 = cast(t, weight, by_rows=by_rows, both=t.grad_enabled)
    wants_x, lead, biased = t.wants(x), x.shape[:-1], bias is not None
    out = _product(t, x8, w8[0].view((ins, outs)), (rows, outs)).view((*lead, outs))
    gate_up = (out.view((rows, outs)),) if gated else ()
    saved = t.save(w8[-1], *across, *gate_up) if t.wants(weight) or wants_x else None
    del w8, across

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        grad_x = None
        if gated:
            grad = t.run("flopwise::joined_swiglu_gradient", (grad, saved[2]), (rows, outs), "bf16")
        grad = grad.view((rows, outs))
        narrow = cast(t, grad, by_rows=by_rows, both=True, amax_known=gated and not by_rows)
        if wants_x:
            grad_x = _product(t, narrow[0], saved[0].view((outs, ins)), (rows, ins)).view((*lead, ins))
        grad_weight = _product(t, narrow[1], saved[1].view((rows, ins)), (outs, ins))
        grad_bias = (reduced(t, "sum", grad, (outs,)),) if biased else ()
        return grad_x, grad_weight, *grad_bias

    if gated:
        out = t.run("flopwise::swiglu", (out,), (*lead, outs // 2), "bf16")
    return t.connect(out, (x, weight) if bias is None else (x, weight, bias), backward, saved)


def _product(t: Tape, a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
    return t.run("_scaled_mm", (a, b), shape, "bf16", compute="fp8")
