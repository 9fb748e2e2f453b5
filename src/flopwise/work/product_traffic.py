"""Bytes and FLOPs of matrix products and of fused attention in a trace."""

from math import prod

import msgspec

from flopwise.spec.dtypes import HALVES, item_bytes
from flopwise.work import op_rules
from flopwise.work.catalogue import ATTENTION_LAYOUT, flops, operation
from flopwise.work.op_rules import causal_share
from flopwise.work.recorded import Recorded, input_sizes
from flopwise.work.sized import ADDING, factors
from flopwise.work.tensor import TensorMeta, broadcast
from flopwise.work.traffic import ABOUT, Traffic, counted


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


def product(op: str, inputs: Recorded, told: str) -> Traffic | None:
    """A matmul by its inputs: what they are, the result's type, and what is added to it. `told` is what its kernels' names say
    of the precision: that of float32 inputs may be TF32."""
    first = 1 if op in ADDING else 0
    left, right, out = inputs.at(first), inputs.at(first + 1), inputs.tensors(first + 2)
    sizes = [list(tensor.shape) for tensor in inputs.tensors()]
    if left is None or right is None or left.dtype != right.dtype or len(out) > 1 or factors(op, sizes) is None:
        return None
    result = (*left.shape[:-1], right.shape[-1])
    precision = _precision(left.dtype, told)
    written, added = _written(op, inputs, left.dtype), _added(op, inputs, result)
    if precision is None or written is None or added is None or any(tensor.shape != result for tensor in out):
        return None
    args = [*added, left, right]
    found = counted(op, args, [TensorMeta(result, written)], precision)
    return msgspec.structs.replace(found, flops=flops(operation(op), [None, left, right][1 - first :]))


def sized_product(op: str, sizes: str, dtypes: set[str], told: str) -> Traffic | None:
    """A matmul of which only sizes are known: the type by its inputs or the kernel's name, and no word of strides."""
    pair = factors(op, input_sizes(sizes) or [])
    precision = _precision(next(iter(dtypes)), told) if len(dtypes) == 1 else None if dtypes else told
    if pair is None or precision not in ("fp64", "fp32", "tf32", *HALVES):
        return None
    left, right = pair
    elements = prod(left) + prod(right) + prod(left[:-1]) * right[-1]
    return Traffic(elements * item_bytes(precision), 2 * prod(left) * right[-1], precision, ABOUT)


def _precision(dtype: str, told: str) -> str | None:
    if dtype == "fp32":
        return told if told in ("fp32", "tf32") else None
    return dtype if dtype == "fp64" or dtype in HALVES else None


def _written(op: str, inputs: Recorded, dtype: str) -> str | None:
    """The result's type: of the tensor it is written into, or as asked for, or that of the factors."""
    first = 3 if op in ADDING else 2
    if out := inputs.tensors(first):
        return out[0].dtype
    asked = len(_numbers_behind(op, inputs)) == (3 if op in ADDING else 1)
    return inputs.dtype(first) if asked else dtype


def _added(op: str, inputs: Recorded, result: tuple[int, ...]) -> list[TensorMeta] | None:
    """What is read to be added; beta = 0 does not read it."""
    scalars = _numbers_behind(op, inputs)
    if op not in ADDING:
        return [] if len(scalars) < 2 else None
    added = inputs.at(0)
    if added is None or len(scalars) not in (2, 3) or broadcast([added.shape, result]) != result:
        return None
    return [added] if float(scalars[-2]) else []


def _numbers_behind(op: str, inputs: Recorded) -> list[str]:
    behind = range(3 if op in ADDING else 2, len(inputs.types))
    return [inputs.value(place) for place in behind if inputs.types[place] == "Scalar"]


def attention(op: str, inputs: Recorded, _: str) -> Traffic | None:
    """All that is given, and the result with a sum for each row, or the three gradients; of causal scores the triangle.

    Float32 is not placed: its kernels multiply in pieces of TF32, at a rate that no roof here has.
    """
    fused, (backward, by_head) = _FUSED.get(op), ATTENTION_LAYOUT[op.rpartition("::")[2]]
    q, k, v = (inputs.at(at) for at in ((1, 2, 3) if backward else (0, 1, 2)))
    if fused is None or q is None or k is None or v is None or q.dtype not in HALVES:
        return None
    whole, tokens = op_rules.attention(inputs.args, backward, by_head), 2 if by_head else 1
    if whole is None or (share := _share_of_scores(fused, inputs, q.shape[tokens], k.shape[tokens])) is None:
        return None
    rows = TensorMeta(q.shape[:-1], "fp32")
    outputs = [q, k, v] if backward else [TensorMeta((*q.shape[:-1], v.shape[-1]), q.dtype), rows]
    found = counted(op, inputs.tensors(), [TensorMeta(one.shape, one.dtype) for one in outputs], q.dtype)
    return msgspec.structs.replace(found, flops=whole.done * share)


def _share_of_scores(fused: _Fused, inputs: Recorded, queries: int, keys: int) -> float | None:
    """How much of the scores is computed: all, or the causal triangle; None where the inputs do not tell."""
    if any(inputs.at(place) is not None or inputs.value(place) not in ("", "-1") for place in fused.never):
        return None
    flag = inputs.value(fused.causal)
    if flag in fused.yes:
        return causal_share(queries) if queries == keys else None
    return 1.0 if flag == fused.no else None
