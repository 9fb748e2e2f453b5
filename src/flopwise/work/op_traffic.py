"""The bytes that an op must move, by the sizes and types of its inputs: every input read once, every result written once.

What a cache saves and what a kernel reads twice is not in it: these are the bytes of a roofline. Where no matmul is in an
op, an element counts as one FLOP. There is one rule per family of ops (`trace.op_inputs`); a rule that cannot tell says None.
"""

import re
from collections.abc import Callable
from math import prod

from flopwise.work import op_family as family
from flopwise.work.compiled_traffic import compiled
from flopwise.work.op_tensors import CODES, FLOATS, ITEM_BYTES, Given, Tensor, broadcast, promoted
from flopwise.work.product_traffic import attention
from flopwise.work.traffic import AT_MOST, Traffic, moved, numbers

_WHOLE = frozenset({"add", "sub", "mul", "maximum", "minimum", "where", "neg", "abs"})  # keep whole numbers whole
_OPERANDS = {family.UNARY: 1, family.BINARY: 2, family.TERNARY: 3, family.COMPARE: 2, family.TEST: 1}
# How many inputs a rule knows: a tensor behind them is a result given with `out=`, perhaps of another type.
_KNOWN = {
    family.COPY: 2, family.FILL: 2, family.DROPOUT: 1, family.SOFTMAX: 1, family.SOFTMAX_BACKWARD: 2, family.RUNNING: 1,
    family.EXTREMES: 1, family.LAYER_NORM: 4, family.LAYER_NORM_BACKWARD: 7, family.RMS_NORM: 4,
    family.RMS_NORM_BACKWARD: 5, family.SCATTER: 4, family.JOIN: 1,
}  # fmt: skip
# The functor of a kernel over lists: the type, the lists it is given, those it reads, the one it writes.
_FUNCTOR = re.compile(r"(\w+)Functor<([\w:]+(?: \w+)?), (\d)(?:, (\d), (\d)>|, \(at::native::ADAM_MODE\))")
_COPIED = re.compile(r"OpaqueType<(\d{1,3})u?>|direct_copy_kernel\w*\(.*?lambda\((c10::\w+|\w+(?: \w+)?)\)#")
LIST_TOO_LONG = "the profiler writes no sizes of lists of more than 30 tensors"


Rule = Callable[[str, Given, str], Traffic | None]


def op_traffic(op: str, inputs: Given, kernel: str = "") -> Traffic | None:
    """The bytes of one op, launched as `kernel`; None where its inputs do not tell.

    >>> from flopwise.work.op_tensors import Tensor
    >>> x, scale = Tensor((4, 8), (8, 1), "float"), Tensor((8,), (1,), "c10::BFloat16")
    >>> op_traffic("aten::mul", Given((x, scale), (None, None), ("float", "c10::BFloat16"), ("", ""))).n_bytes
    272
    """
    kind = family.family(op)
    rule = _RULES.get(kind)
    if rule is None or inputs.strange or (kind in _KNOWN and inputs.all(_KNOWN[kind])):
        return None
    return rule(op, inputs, kernel)


def _elementwise(op: str, inputs: Given, _: str) -> Traffic | None:
    kind = family.family(op)
    n = _OPERANDS[kind]
    operands, out = [tensor for tensor in inputs.tensors[:n] if tensor is not None], inputs.all(n)
    dims = broadcast([tensor.dims for tensor in operands])
    if not operands or dims is None or len(out) > 1 or any(tensor.dims != dims for tensor in out):
        return None
    if op.endswith("_"):
        dtype: str | None = operands[0].dtype
        if inputs.at(0) is None or dims != operands[0].dims or out:
            return None
    elif out:
        dtype = out[0].dtype
    elif kind in (family.COMPARE, family.TEST):
        dtype = "bool"
    else:
        dtype = promoted(operands)
        if dtype not in FLOATS and (_base(op) not in _WHOLE or "Scalar" in inputs.types[:n]) and "bitwise" not in op:
            return None
    return moved(operands, prod(dims), dtype)


def _running(_: str, inputs: Given, __: str) -> Traffic | None:
    """A sum asked for in another type is cast first, by a kernel of another op or not."""
    x, code = inputs.at(0), inputs.value(2)
    if x is None or x.dtype not in FLOATS or (code and CODES.get(code) != x.dtype):
        return None
    return moved([x], x.elements, x.dtype)


def _copy(_: str, inputs: Given, __: str) -> Traffic | None:
    to, source = inputs.at(0), inputs.at(1)
    if to is None or source is None or broadcast([to.dims, source.dims]) != to.dims:
        return None
    return moved([source], to.elements, to.dtype)


def _fill(_: str, inputs: Given, __: str) -> Traffic | None:
    to = inputs.at(0)
    return moved([], to.elements, to.dtype) if to else None


def _dropout(_: str, inputs: Given, __: str) -> Traffic | None:
    x = inputs.at(0)
    return moved([x], x.elements, x.dtype, more=x.elements) if x else None  # with its mask, a byte an element


def _softmax(_: str, inputs: Given, __: str) -> Traffic | None:
    x = inputs.at(0)
    return moved([x], x.elements, "float" if inputs.value(2) == "True" else x.dtype) if x else None


def _softmax_backward(_: str, inputs: Given, __: str) -> Traffic | None:
    gradient, result = inputs.at(0), inputs.at(1)
    if gradient is None or result is None or gradient.dims != result.dims:
        return None
    return moved([gradient, result], gradient.elements, CODES.get(inputs.value(3)))


def _sum(_: str, inputs: Given, __: str) -> Traffic | None:
    """sum(x, dtype) adds up all, sum(x, dims, keepdim, dtype) along some."""
    short = len(inputs.types) == 2
    code = inputs.value(1 if short else 3)
    x = inputs.at(0)
    dtype = CODES.get(code) if code else (x.dtype if x and x.dtype in FLOATS else None)
    return _reduced(inputs, "" if short else inputs.value(1), dtype)


def _extreme(_: str, inputs: Given, __: str) -> Traffic | None:
    x = inputs.at(0)
    return _reduced(inputs, inputs.value(1), x.dtype if x else None)


def _extremes(op: str, inputs: Given, kernel: str) -> Traffic | None:
    """Of all, or along a dimension with their places."""
    found, x = _extreme(op, inputs, kernel), inputs.at(0)
    if len(inputs.types) == 1 or found is None or x is None:
        return found
    if not re.fullmatch(r"-?[0-9]+", inputs.value(1)):
        return None
    written = (found.n_bytes - x.n_bytes) // x.item
    return moved([x], written, x.dtype, more=8 * written)


def _argument(_: str, inputs: Given, __: str) -> Traffic | None:
    return _reduced(inputs, inputs.value(1), "long int")


def _flag(_: str, inputs: Given, __: str) -> Traffic | None:
    return _reduced(inputs, inputs.value(1), "bool")


def _norm(_: str, inputs: Given, __: str) -> Traffic | None:
    x = inputs.at(0)
    return _reduced(inputs, inputs.value(2), x.dtype if x and not inputs.value(4) else None)


def _reduced(inputs: Given, along: str, dtype: str | None) -> Traffic | None:
    """One number for each place that is left; without dimensions, or with an empty list of them, one for all.

    Another tensor than the first is the one that the result is written into.
    """
    x, out, dims = inputs.at(0), inputs.all(1), numbers(along)
    if x is None or len(out) > 1 or dims is None or any(not -len(x.dims) <= dim < len(x.dims) for dim in dims):
        return None
    gone = prod(x.dims[dim] for dim in {dim % len(x.dims) for dim in dims}) if dims else x.elements
    return moved([x], x.elements // gone, out[0].dtype if out else dtype)


def _layer_norm(op: str, inputs: Given, _: str) -> Traffic | None:
    """Writes what it was given, normalised, and for each row its mean and deviation, an RMS norm the latter alone."""
    x, inner = inputs.at(0), numbers(inputs.value(1))
    if x is None or not inner or tuple(inner) != x.dims[-len(inner) :]:
        return None
    weights = [tensor for place in (2, 3) if (tensor := inputs.at(place)) is not None]
    kept = (1 if "rms" in op else 2) * (x.elements // prod(inner)) * (8 if x.dtype == "double" else 4)
    return moved([x, *weights], x.elements, x.dtype, more=kept)


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
    return moved([tensor for tensor in read if tensor is not None], written, x.dtype, more)


def _select(_: str, inputs: Given, __: str) -> Traffic | None:
    """Rows count as often as they are asked for, and no more than the table holds; the same ones may be asked for again."""
    x, dim, index = inputs.at(0), numbers(inputs.value(1)), inputs.at(2)
    if x is None or index is None or not dim or not -len(x.dims) <= dim[0] < len(x.dims) or _other_out(inputs):
        return None
    written = index.elements * x.elements // x.dims[dim[0]]
    return _picked(index, min(written, x.in_memory) * x.item, written, x.dtype)


def _gather(_: str, inputs: Given, __: str) -> Traffic | None:
    x, index = inputs.at(0), inputs.at(2)
    if x is None or index is None or _other_out(inputs):
        return None
    return _picked(index, min(index.elements, x.in_memory) * x.item, index.elements, x.dtype)


def _scatter(_: str, inputs: Given, __: str) -> Traffic | None:
    """Of the source as much as there are places; with another way than to put it there, what lies there is read as well."""
    x, index, source = inputs.at(0), inputs.at(2), inputs.at(3)
    if x is None or index is None or len(inputs.types) != 4 or (source is None and inputs.types[3] != "Scalar"):
        return None
    read = min(index.elements, source.in_memory) * source.item if source else 0
    return _picked(index, read, min(index.elements, x.in_memory), x.dtype)


def _other_out(inputs: Given) -> bool:
    """Whether the result is written into a tensor of another type than the table's."""
    return any(out.dtype != inputs.types[0] for out in inputs.all(3))


def _picked(index: Tensor, read: int, written: int, dtype: str) -> Traffic:
    n_bytes = index.n_bytes + read + written * ITEM_BYTES[dtype]
    return Traffic(n_bytes, max(index.elements, written), dtype, AT_MOST)


def _join(_: str, inputs: Given, kernel: str) -> Traffic | None:
    """Of a list the profiler gives no type: the kernel's name does."""
    found, tensors = _COPIED.search(kernel), inputs.lists[0] if inputs.lists else None
    if found is None or tensors is None:
        return None
    item = int(found.group(1)) if found.group(1) else ITEM_BYTES.get(found.group(2), 0)
    dtype = found.group(2) or {2: "c10::BFloat16", 4: "float", 8: "double"}.get(item, "bool")
    elements, read = sum(tensor.elements for tensor in tensors), sum(tensor.in_memory for tensor in tensors)
    return Traffic((read + elements) * item, elements, dtype) if item else None


def _lists(_: str, inputs: Given, kernel: str) -> Traffic | None:
    """An optimizer's kernel over many tensors: its functor names the type, how many lists it reads and which it writes."""
    found, tensors = _FUNCTOR.search(kernel), inputs.lists[0] if inputs.lists else None
    if found is None or tensors is None or found.group(2) not in ITEM_BYTES:
        return None
    if any(tensor.in_memory != tensor.elements for some in inputs.lists for tensor in some or ()):
        return None
    name, dtype, given, read, _place = found.groups()
    twice = False
    if name == "FusedAdamMath":
        n_lists = 2 * int(given) - 1  # all are read, all but the gradient written
    elif read is not None:
        n_lists = (0 if name == "Zero" else int(read)) + 1
        several = [some for some in inputs.lists if some]
        twice = int(read) > 1 and any(some in several[:place] for place, some in enumerate(several))
    else:
        return None
    elements = sum(tensor.elements for tensor in tensors)
    return Traffic(n_lists * elements * ITEM_BYTES[dtype], elements, dtype, AT_MOST if twice else "")


def _base(op: str) -> str:
    return op.removeprefix("aten::").removesuffix("_")


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_OPERANDS, _elementwise),
    family.RUNNING: _running,
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
    family.ATTENTION: attention,
    family.COMPILED: compiled,
}
