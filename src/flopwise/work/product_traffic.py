"""Bytes and FLOPs of matrix products and of fused attention."""

from math import prod

import msgspec

from flopwise.work.op_family import BY_HEAD
from flopwise.work.op_flops import attention_flops, causal_share, factors, input_sizes
from flopwise.work.op_tensors import CODES, ITEM_BYTES, NAMES, Given, Tensor, broadcast
from flopwise.work.traffic import ABOUT, Traffic, doubt, moved

_ADDING = frozenset({"aten::addmm", "aten::baddbmm"})
_HALVES = ("c10::Half", "c10::BFloat16")
_NAMED_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


class _Fused(msgspec.Struct, frozen=True):
    """Where an op of fused attention says whether it is causal, what it writes if so and if not, and what must not be given:
    windows and sequences of several lengths, whose scores no size tells."""

    causal: int
    never: tuple[int, ...] = ()
    yes: tuple[str, ...] = ("True",)
    no: str = "False"


_FUSED = {
    "aten::_cudnn_attention_forward": _Fused(10, (4, 5)),
    "aten::_cudnn_attention_backward": _Fused(14, (9, 10)),
    "aten::_scaled_dot_product_cudnn_attention": _Fused(6),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Fused(14, (9, 10)),
    "aten::_flash_attention_forward": _Fused(8, (3, 4, 11, 12, 13, 14)),
    "aten::_flash_attention_backward": _Fused(11, (6, 7, 15, 16)),
    "aten::_scaled_dot_product_flash_attention": _Fused(4),
    "aten::_scaled_dot_product_flash_attention_backward": _Fused(11, (6, 7)),
    # 2: the triangle begins at the last key instead of the first; with as many keys as queries it is the same one
    "aten::_efficient_attention_forward": _Fused(9, (4, 5, 12, 13), ("1", "2"), "0"),
    "aten::_efficient_attention_backward": _Fused(14, (6, 7, 18), ("1", "2"), "0"),
}


def product(op: str, inputs: Given, told: str) -> Traffic | None:
    """A matmul by its inputs: what they are, the result's type, and what is added to it. `told` is what its kernels' names say
    of the precision: that of float32 inputs may be TF32."""
    first = 1 if op in _ADDING else 0
    left, right, out = inputs.at(first), inputs.at(first + 1), inputs.all(first + 2)
    sizes = [list(tensor.dims) for tensor in inputs.all()]
    if left is None or right is None or left.dtype != right.dtype or len(out) > 1 or factors(op, sizes) is None:
        return None
    result = (*left.dims[:-1], right.dims[-1])
    precision = _precision(left.dtype, told)
    written, added = _written(op, inputs, left.dtype), _added(op, inputs, result)
    if precision is None or written is None or added is None or any(tensor.dims != result for tensor in out):
        return None
    read = [*added, left, right]
    n_bytes = sum(tensor.n_bytes for tensor in read) + prod(result) * ITEM_BYTES[written]
    return Traffic(n_bytes, 2 * prod(left.dims) * right.dims[-1], precision, doubt(read, n_bytes))


def sized_product(op: str, sizes: str, types: set[str], told: str) -> Traffic | None:
    """A matmul of which only sizes are known: the type by its inputs or the kernel's name, and no word of strides."""
    pair = factors(op, input_sizes(sizes) or [])
    precision = _precision(next(iter(types)), told) if len(types) == 1 else None if types else told
    if pair is None or precision not in _NAMED_BYTES:
        return None
    left, right = pair
    elements = prod(left) + prod(right) + prod(left[:-1]) * right[-1]
    return Traffic(elements * _NAMED_BYTES[precision], 2 * prod(left) * right[-1], precision, ABOUT)


def _precision(dtype: str, told: str) -> str | None:
    if dtype == "float":
        return told if told in ("fp32", "tf32") else None
    return NAMES[dtype] if dtype == "double" or dtype in _HALVES else None


def _written(op: str, inputs: Given, dtype: str) -> str | None:
    """The result's type: of the tensor it is written into, or as asked for, or that of the factors."""
    first = 3 if op in _ADDING else 2
    if out := inputs.all(first):
        return out[0].dtype
    asked = len(_numbers_behind(op, inputs)) == (3 if op in _ADDING else 1)
    return CODES.get(inputs.value(first)) if asked else dtype


def _added(op: str, inputs: Given, result: tuple[int, ...]) -> list[Tensor] | None:
    """What is read to be added; beta = 0 does not read it."""
    scalars = _numbers_behind(op, inputs)
    if op not in _ADDING:
        return [] if len(scalars) < 2 else None
    added = inputs.at(0)
    if added is None or len(scalars) not in (2, 3) or broadcast([added.dims, result]) != result:
        return None
    return [added] if float(scalars[-2]) else []


def _numbers_behind(op: str, inputs: Given) -> list[str]:
    behind = range(3 if op in _ADDING else 2, len(inputs.types))
    return [inputs.value(place) for place in behind if inputs.types[place] == "Scalar"]


def attention(op: str, inputs: Given, _: str) -> Traffic | None:
    """All that is given, and the result with a sum for each row, or the three gradients; of causal scores the triangle.

    Float32 is not placed: its kernels multiply in pieces of TF32, at a rate that no roof here has.
    """
    fused, backward = _FUSED.get(op), op.endswith("backward")
    q, k, v = (inputs.at(at) for at in ((1, 2, 3) if backward else (0, 1, 2)))
    if fused is None or q is None or k is None or v is None or q.dtype not in _HALVES:
        return None
    if any(inputs.at(place) is not None or inputs.value(place) not in ("", "-1") for place in fused.never):
        return None
    sizes = msgspec.json.encode([tensor.dims if tensor else () for tensor in inputs.tensors]).decode()
    flops, flag = attention_flops(op, sizes), inputs.value(fused.causal)
    if flops is None or {len(tensor.dims) for tensor in (q, k, v)} != {4} or flag not in (*fused.yes, fused.no):
        return None
    square = 1.0
    if flag in fused.yes:
        tokens = 2 if op in BY_HEAD else 1
        if q.dims[tokens] != k.dims[tokens]:
            return None
        square = causal_share(q.dims[tokens])
    rows = q.elements // q.dims[-1]
    written = q.elements + k.elements + v.elements if backward else rows * v.dims[-1]
    found = moved(inputs.all(), written, q.dtype, 0 if backward else 4 * rows)
    return msgspec.structs.replace(found, flops=flops.done * square) if found else None
