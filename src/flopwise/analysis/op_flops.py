"""FLOPs of one op from the sizes of its inputs, as a profiler writes them.

A multiply-add counts as two. A softmax counts five for each element going forward (maximum, subtraction, exponential, sum,
division) and four going back (product, sum, subtraction, product), whatever the kernel really does: on a GPU an
exponential costs more than a sum, and an online softmax rescales. One that is written out is counted by its `exp`.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import msgspec

SOFTMAX_FORWARD = 5
SOFTMAX_BACKWARD = 4
LARGEST_SIZE = 1 << 40

Sizes = list[list[int]]


def op_flops(op: str, sizes: str) -> int | None:
    """FLOPs of an op; None where its sizes do not tell.

    >>> op_flops("aten::bmm", "[[48, 512, 64], [48, 64, 512]]") == 2 * 48 * 512 * 64 * 512
    True
    >>> op_flops("aten::_softmax", "[[4, 12, 512, 512], [], []]") == 5 * 4 * 12 * 512 * 512
    True
    """
    count = _FLOPS.get(op)
    if count is None:
        return None
    try:
        given = msgspec.json.decode(sizes, type=list[Any])
        inputs = msgspec.convert([size for size in given if size], type=Sizes)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    if not all(0 < size < LARGEST_SIZE for dims in inputs for size in dims):
        return None
    return count(inputs)


def _matmul(inputs: Sizes) -> int | None:
    """The last two inputs are the factors: before them may stand what is added."""
    if len(inputs) < 2:
        return None
    left, right = inputs[-2:]
    if len(left) < 2 or len(left) != len(right) or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return None
    return 2 * prod(left) * right[-1]


def _softmax(per_element: int) -> Callable[[Sizes], int | None]:
    return lambda inputs: per_element * prod(inputs[0]) if inputs else None


_FLOPS: dict[str, Callable[[Sizes], int | None]] = {
    "aten::mm": _matmul,
    "aten::addmm": _matmul,
    "aten::bmm": _matmul,
    "aten::baddbmm": _matmul,
    "aten::_softmax": _softmax(SOFTMAX_FORWARD),
    "aten::exp": _softmax(SOFTMAX_FORWARD),
    "aten::_softmax_backward_data": _softmax(SOFTMAX_BACKWARD),
}
MATMULS = frozenset(op for op, count in _FLOPS.items() if count is _matmul)
SOFTMAXES = frozenset(_FLOPS) - MATMULS
