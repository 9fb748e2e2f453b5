"""The bytes that an op must move, by the sizes and types of its inputs: every input read once, every result written once.

What a cache saves and what a kernel reads twice is not in it: these are the bytes of a roofline. Where no matmul is in an
op, an element counts as one FLOP. There is one rule per family of ops (`trace.op_inputs`); a rule that cannot tell says None.
"""

import re
from collections.abc import Callable
from math import prod

import msgspec

from flopwise.analysis.op_flops import attention_flops
from flopwise.analysis.op_tensors import CODES, FLOATS, ITEM_BYTES, Given, Tensor, broadcast, promoted
from flopwise.cost.flops import causal_share
from flopwise.trace import op_inputs as family
from flopwise.trace.kernel_class import classify
from flopwise.trace.op_shapes import BY_HEAD
from flopwise.work import COPY

_WHOLE = frozenset({"add", "sub", "mul", "maximum", "minimum", "where", "neg", "abs"})  # keep whole numbers whole
_OPERANDS = {family.UNARY: 1, family.BINARY: 2, family.TERNARY: 3, family.COMPARE: 2}
_INDICES = re.compile(r"embedding|index|gather|scatter|sort|nonzero|searchsorted|topk")
_NUMELS = {"poi": (1, 2, 3), "red": (2,), "per": (2,)}  # how many sizes of its iteration a compiled kernel is given
# The functor of a kernel over lists: the type, the lists it is given, those it reads, the one it writes.
_FUNCTOR = re.compile(r"(\w+)Functor<([\w:]+(?: \w+)?), (\d)(?:, (\d), (\d)>|, \(at::native::ADAM_MODE\))")
_COPIED = re.compile(r"OpaqueType<(\d+)u?>|direct_copy_kernel\w*\(.*?lambda\((c10::\w+|\w+(?: \w+)?)\)#")
# Where an op of fused attention says whether it is causal, and what it writes if so.
_CAUSAL = {
    "aten::_cudnn_attention_forward": (10, "True"),
    "aten::_cudnn_attention_backward": (14, "True"),
    "aten::_scaled_dot_product_cudnn_attention": (6, "True"),
    "aten::_scaled_dot_product_cudnn_attention_backward": (14, "True"),
    "aten::_flash_attention_forward": (8, "True"),
    "aten::_flash_attention_backward": (11, "True"),
    "aten::_scaled_dot_product_flash_attention": (4, "True"),
    "aten::_scaled_dot_product_flash_attention_backward": (11, "True"),
    "aten::_efficient_attention_forward": (9, "1"),
    "aten::_efficient_attention_backward": (14, "1"),
}
LIST_TOO_LONG = "the profiler writes no sizes of lists of more than 30 tensors"


class Traffic(msgspec.Struct, frozen=True):
    """What one op must move and do."""

    n_bytes: int
    flops: float
    dtype: str  # as PyTorch spells it: of what is written
    at_least: bool = False  # a tensor that is updated in place is counted once


Rule = Callable[[str, Given, str], Traffic | None]


def op_traffic(op: str, inputs: Given, kernel: str = "") -> Traffic | None:
    """The bytes of one op, launched as `kernel`; None where its inputs do not tell.

    >>> from flopwise.analysis.op_tensors import Tensor
    >>> x, scale = Tensor((4, 8), (8, 1), "float"), Tensor((8,), (1,), "c10::BFloat16")
    >>> op_traffic("aten::mul", Given((x, scale), (None, None), ("float", "c10::BFloat16"), ("", ""))).n_bytes
    272
    """
    rule = _RULES.get(family.family(op))
    return rule(op, inputs, kernel) if rule else None


def _elementwise(op: str, inputs: Given, _: str) -> Traffic | None:
    kind = family.family(op)
    n = _OPERANDS[kind]
    operands = [tensor for tensor in inputs.tensors[:n] if tensor is not None]
    dims = broadcast([tensor.dims for tensor in operands])
    if not operands or dims is None:
        return None
    if op.endswith("_"):
        dtype: str | None = operands[0].dtype
        if inputs.at(0) is None or dims != operands[0].dims:
            return None
    elif kind == family.COMPARE:
        dtype = "bool"
    else:
        dtype = promoted(operands)
        if dtype not in FLOATS and (_base(op) not in _WHOLE or "Scalar" in inputs.types[:n]) and "bitwise" not in op:
            return None
    return _moved(operands, prod(dims), dtype)


def _moved(read: list[Tensor], written: int, dtype: str | None, more: int = 0) -> Traffic | None:
    """These are read, so many elements of this type are written, and some bytes on top."""
    if dtype is None:
        return None
    n_bytes = sum(tensor.n_bytes for tensor in read) + written * ITEM_BYTES[dtype] + more
    return Traffic(n_bytes, max([written, *(tensor.elements for tensor in read)]), dtype)


def _copy(_: str, inputs: Given, __: str) -> Traffic | None:
    to, source = inputs.at(0), inputs.at(1)
    if to is None or source is None or broadcast([to.dims, source.dims]) != to.dims:
        return None
    return _moved([source], to.elements, to.dtype)


def _fill(_: str, inputs: Given, __: str) -> Traffic | None:
    to = inputs.at(0)
    return _moved([], to.elements, to.dtype) if to else None


def _dropout(_: str, inputs: Given, __: str) -> Traffic | None:
    x = inputs.at(0)
    return _moved([x], x.elements, x.dtype, more=x.elements) if x else None  # with its mask, a byte an element


def _softmax(_: str, inputs: Given, __: str) -> Traffic | None:
    x = inputs.at(0)
    return _moved([x], x.elements, "float" if inputs.value(2) == "True" else x.dtype) if x else None


def _softmax_backward(_: str, inputs: Given, __: str) -> Traffic | None:
    gradient, result = inputs.at(0), inputs.at(1)
    if gradient is None or result is None or gradient.dims != result.dims:
        return None
    return _moved([gradient, result], gradient.elements, CODES.get(inputs.value(3)))


def _sum(_: str, inputs: Given, __: str) -> Traffic | None:
    """sum(x, dtype) adds up all, sum(x, dims, keepdim, dtype) along some."""
    short = len(inputs.types) == 2
    code = inputs.value(1 if short else 3)
    x = inputs.at(0)
    dtype = CODES.get(code) if code else (x.dtype if x and x.dtype in FLOATS else None)
    return _reduced(x, "" if short else inputs.value(1), dtype)


def _extreme(_: str, inputs: Given, __: str) -> Traffic | None:
    x = inputs.at(0)
    return _reduced(x, inputs.value(1), x.dtype if x else None)


def _extremes(op: str, inputs: Given, kernel: str) -> Traffic | None:
    """Of all, along a dimension with their places, or of two tensors."""
    if inputs.at(1) is not None:
        return None
    if len(inputs.types) == 1:
        return _extreme(op, inputs, kernel)
    found = _extreme(op, inputs, kernel)
    x = inputs.at(0)
    if found is None or x is None or not re.fullmatch(r"-?\d+", inputs.value(1)):
        return None
    written = (found.n_bytes - x.n_bytes) // x.item
    return _moved([x], written, x.dtype, more=8 * written)


def _argument(_: str, inputs: Given, __: str) -> Traffic | None:
    return _reduced(inputs.at(0), inputs.value(1), "long int")


def _flag(_: str, inputs: Given, __: str) -> Traffic | None:
    return _reduced(inputs.at(0), inputs.value(1), "bool")


def _norm(_: str, inputs: Given, __: str) -> Traffic | None:
    x = inputs.at(0)
    return _reduced(x, inputs.value(2), x.dtype if x and not inputs.value(4) else None)


def _reduced(x: Tensor | None, along: str, dtype: str | None) -> Traffic | None:
    """One number for each place that is left; without dimensions, or with an empty list of them, one for all."""
    dims = _numbers(along)
    if x is None or dims is None or any(not -len(x.dims) <= dim < len(x.dims) for dim in dims):
        return None
    gone = prod(x.dims[dim] for dim in {dim % len(x.dims) for dim in dims}) if dims else x.elements
    return _moved([x], x.elements // gone, dtype)


def _layer_norm(op: str, inputs: Given, _: str) -> Traffic | None:
    """Writes what it was given, normalised, and for each row its mean and deviation, an RMS norm the latter alone."""
    x, inner = inputs.at(0), _numbers(inputs.value(1))
    if x is None or not inner or x.elements % prod(inner):
        return None
    weights = [tensor for place in (2, 3) if (tensor := inputs.at(place)) is not None]
    kept = (1 if "rms" in op else 2) * (x.elements // prod(inner)) * (8 if x.dtype == "double" else 4)
    return _moved([x, *weights], x.elements, x.dtype, more=kept)


def _layer_norm_backward(op: str, inputs: Given, _: str) -> Traffic | None:
    """Reads all but the bias; writes the gradients that are asked for, of the input, the weight and the bias."""
    rms = "rms" in op
    x, read = inputs.at(1), [inputs.at(place) for place in ((0, 1, 3, 4) if rms else (0, 1, 3, 4, 5))]
    asked = re.findall("True|False", inputs.value(5 if rms else 7))
    of = (x, inputs.at(4)) if rms else (x, inputs.at(5), inputs.at(6))
    if x is None or inputs.at(0) is None or len(asked) != len(of):
        return None
    more = sum(tensor.n_bytes for tensor, yes in zip(of[1:], asked[1:], strict=True) if tensor and yes == "True")
    written = x.elements if asked[0] == "True" else 0
    return _moved([tensor for tensor in read if tensor is not None], written, x.dtype, more)


def _select(_: str, inputs: Given, __: str) -> Traffic | None:
    """Rows count as often as they are asked for."""
    x, dim, index = inputs.at(0), _numbers(inputs.value(1)), inputs.at(2)
    if x is None or index is None or not dim or not -len(x.dims) <= dim[0] < len(x.dims):
        return None
    elements = index.elements * x.elements // x.dims[dim[0]]
    return Traffic(index.n_bytes + 2 * elements * x.item, elements, x.dtype)


def _gather(_: str, inputs: Given, __: str) -> Traffic | None:
    x, index = inputs.at(0), inputs.at(2)
    if x is None or index is None:
        return None
    return Traffic(index.n_bytes + 2 * index.elements * x.item, index.elements, x.dtype)


def _scatter(_: str, inputs: Given, __: str) -> Traffic | None:
    x, index, source = inputs.at(0), inputs.at(2), inputs.at(3)
    if x is None or index is None:
        return None
    return _moved([index, *([source] if source else [])], index.elements, x.dtype)


def _join(_: str, inputs: Given, kernel: str) -> Traffic | None:
    """Of a list the profiler gives no type: the kernel's name does."""
    found, lists = _COPIED.search(kernel), inputs.lists[0] if inputs.lists else None
    if found is None or lists is None:
        return None
    item = int(found.group(1)) if found.group(1) else ITEM_BYTES.get(found.group(2), 0)
    dtype = found.group(2) or {2: "c10::BFloat16", 4: "float", 8: "double"}.get(item, "bool")
    elements = sum(prod(dims) for dims in lists)
    return Traffic(2 * elements * item, elements, dtype) if item else None


def _lists(_: str, inputs: Given, kernel: str) -> Traffic | None:
    """An optimizer's kernel over many tensors: its functor names the type, how many lists it reads and which it writes."""
    found, lists = _FUNCTOR.search(kernel), inputs.lists[0] if inputs.lists else None
    if found is None or lists is None or found.group(2) not in ITEM_BYTES:
        return None
    name, dtype, given, read, _place = found.groups()
    if name == "FusedAdamMath":
        moved = 2 * int(given) - 1  # all are read, all but the gradient written
    elif read is not None:
        moved = (0 if name == "Zero" else int(read)) + 1
    else:
        return None
    elements = sum(prod(dims) for dims in lists)
    return Traffic(moved * elements * ITEM_BYTES[dtype], elements, dtype)


def _attention(op: str, inputs: Given, _: str) -> Traffic | None:
    """All that is given, and the result with a sum for each row, or the three gradients; of causal scores the triangle."""
    place, causal = _CAUSAL.get(op, (0, ""))
    backward = op.endswith("backward")
    q, k, v = (inputs.at(at) for at in ((1, 2, 3) if backward else (0, 1, 2)))
    sizes = msgspec.json.encode([tensor.dims if tensor else () for tensor in inputs.tensors]).decode()
    flops = attention_flops(op, sizes)
    if not causal or not inputs.value(place) or flops is None or q is None or k is None or v is None:
        return None
    square = 1.0
    if inputs.value(place) == causal:
        tokens = 2 if op in BY_HEAD else 1
        if q.dims[tokens] != k.dims[tokens]:
            return None
        square = causal_share(q.dims[tokens])
    if backward:
        written = q.elements + k.elements + v.elements
        more = 0
    else:
        written = q.elements // q.dims[-1] * v.dims[-1]
        more = 4 * q.elements // q.dims[-1]
    moved = _moved(inputs.all(), written, q.dtype, more)
    return Traffic(moved.n_bytes, flops.done * square, q.dtype) if moved else None


def _compiled(op: str, inputs: Given, _: str) -> Traffic | None:
    """A fused kernel is given its tensors and the sizes of its iteration. One that is larger than the iteration is not read as
    a whole, and what an index reaches is not known: no number. A tensor updated in place moves twice and is counted once."""
    numels = [int(v) for v, t in zip(inputs.values, inputs.types, strict=True) if t == "Scalar" and v.isdecimal()]
    tensors = inputs.all()
    sizes = [tensor.elements for tensor in tensors]
    if _INDICES.search(op) or len(numels) not in _NUMELS[op.removeprefix("triton_")[:3]] or not tensors:
        return None
    if len(tensors) + len(numels) != len(inputs.types) or max(sizes) != prod(numels):
        return None
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    return Traffic(n_bytes, max(sizes), tensors[-1].dtype, at_least=classify(op) != COPY)


def _numbers(text: str) -> list[int] | None:
    """`1` or `[0, 1]`; none in '' and '[]'; None for anything else."""
    if not re.fullmatch(r"\[?(?:-?\d{1,15}(?:, ?-?\d{1,15})*)?\]?", text):
        return None
    return [int(number) for number in re.findall(r"-?\d+", text)]


def _base(op: str) -> str:
    return op.removeprefix("aten::").removesuffix("_")


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_OPERANDS, _elementwise),
    family.COPY: _copy,
    family.FILL: _fill,
    family.DROPOUT: _dropout,
    family.SOFTMAX: _softmax,
    family.SOFTMAX_BACKWARD: _softmax_backward,
    family.SUM: _sum,
    family.EXTREME: _extreme,
    family.EXTREMES: _extremes,
    family.ARGUMENT: _argument,
    family.FLAG: _flag,
    family.NORM: _norm,
    family.LAYER_NORM: _layer_norm,
    family.RMS_NORM: _layer_norm,
    family.LAYER_NORM_BACKWARD: _layer_norm_backward,
    family.RMS_NORM_BACKWARD: _layer_norm_backward,
    family.SELECT: _select,
    family.GATHER: _gather,
    family.SCATTER: _scatter,
    family.JOIN: _join,
    family.LISTS: _lists,
    family.ATTENTION: _attention,
    family.COMPILED: _compiled,
}
