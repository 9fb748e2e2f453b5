"""FLOPs of one op from the sizes of its inputs, as a profiler writes them.

A multiply-add counts as two. A softmax counts five for each element going forward (maximum, subtraction, exponential, sum,
division) and four going back (product, sum, subtraction, product), whatever the kernel really does: on a GPU an
exponential costs more than a sum, and an online softmax rescales. One that is written out is counted by its `exp`.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import msgspec

from flopwise.work.op_family import BY_HEAD, BY_TOKEN

SOFTMAX_FORWARD = 5
SOFTMAX_BACKWARD = 4
LARGEST_SIZE = 1 << 40
LARGEST_TENSOR = 1 << 48  # elements
MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
_ADDING = frozenset({"aten::addmm", "aten::baddbmm"})

Sizes = list[list[int]]


def op_flops(op: str, sizes: str) -> int | None:
    """FLOPs of an op; None where its sizes do not tell.

    >>> op_flops("aten::bmm", "[[48, 512, 64], [48, 64, 512]]") == 2 * 48 * 512 * 64 * 512
    True
    >>> op_flops("aten::_softmax", "[[4, 12, 512, 512], [], []]") == 5 * 4 * 12 * 512 * 512
    True
    """
    count, inputs = _FLOPS.get(op), input_sizes(sizes)
    return None if count is None or inputs is None else count(inputs)


def input_sizes(text: str) -> Sizes | None:
    """The sizes of the inputs that have any; None for what is no such text, or beyond all reason."""
    try:
        given = msgspec.json.decode(text, type=list[Any])
        inputs = msgspec.convert([size for size in given if size], type=Sizes)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    sound = all(0 < size < LARGEST_SIZE for dims in inputs for size in dims)
    return inputs if sound and all(prod(dims) < LARGEST_TENSOR for dims in inputs) else None


def factors(op: str, inputs: Sizes) -> tuple[list[int], list[int]] | None:
    """The sizes of a product's two factors: `addmm` has what is added before them, `mm(out=…)` its result behind.

    >>> factors("aten::mm", [[2048, 768], [768, 3072], [2048, 3072]])
    ([2048, 768], [768, 3072])
    """
    first = 1 if op in _ADDING else 0
    if len(inputs) < first + 2:
        return None
    left, right = inputs[first : first + 2]
    if len(left) < 2 or len(left) != len(right) or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return None
    return left, right


def _matmul(op: str) -> Callable[[Sizes], int | None]:
    def count(inputs: Sizes) -> int | None:
        found = factors(op, inputs)
        return 2 * prod(found[0]) * found[1][-1] if found else None

    return count


def _softmax(per_element: int) -> Callable[[Sizes], int | None]:
    return lambda inputs: per_element * prod(inputs[0]) if inputs else None


_FLOPS: dict[str, Callable[[Sizes], int | None]] = {
    **{op: _matmul(op) for op in sorted(MATMULS)},
    "aten::_softmax": _softmax(SOFTMAX_FORWARD),
    "aten::exp": _softmax(SOFTMAX_FORWARD),
    "aten::_softmax_backward_data": _softmax(SOFTMAX_BACKWARD),
}
SOFTMAXES = frozenset(_FLOPS) - MATMULS
ATTENTIONS = BY_HEAD | BY_TOKEN


class AttentionFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Of one op of fused attention, the whole square of scores counted: whether it skips a part, the sizes do not tell."""

    useful: int  # two products forward, four backward
    done: int  # and the scores once more in the backward pass, which did not keep them


def attention_flops(op: str, sizes: str) -> AttentionFlops | None:
    """FLOPs of fused attention; None where its sizes do not tell, as for sequences of several lengths.

    >>> attention_flops("aten::_cudnn_attention_backward", "[[4, 12, 512, 64], [4, 12, 512, 64], [4, 12, 512, 64]]").done
    8053063680
    """
    if op not in ATTENTIONS:
        return None
    backward, inputs = op.endswith("backward"), input_sizes(sizes) or []
    factors = inputs[1:4] if backward and len(inputs) > 3 else inputs[:3]  # the gradient comes first
    if len(factors) < 3 or any(len(dims) != 4 for dims in factors):
        return None
    q, k, v = factors if op in BY_HEAD else ([b, h, t, d] for b, t, h, d in factors)
    square = q[0] * q[1] * q[2] * k[2]
    scores, values = 2 * square * q[3], 2 * square * v[3]
    if not backward:
        return AttentionFlops(useful=scores + values, done=scores + values)
    return AttentionFlops(useful=2 * (scores + values), done=3 * scores + 2 * values)


def causal_share(context: int) -> float:
    """The part of the square of scores that a causal mask leaves: the triangle with its diagonal.

    >>> causal_share(1), causal_share(1024)
    (1.0, 0.50048828125)
    """
    return (context + 1) / (2 * context)
