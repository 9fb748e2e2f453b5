"""The bytes of an op of a trace: its results follow from its inputs by a rule for its name, and the catalogue counts both.

What the profiler does not record are the results. A rule that cannot tell them says None.
"""

import re
from collections.abc import Callable, Sequence
from math import prod

import msgspec

from flopwise.spec.dtypes import from_kineto
from flopwise.work.compiled_traffic import compiled
from flopwise.work.product_traffic import attention
from flopwise.work.recorded import Recorded, numbers
from flopwise.work.sized import ATTENTIONS
from flopwise.work.tensor import TensorMeta, broadcast, promoted
from flopwise.work.traffic import AT_MOST, Traffic, counted

_FLOATS = ("fp64", "fp32", "fp16", "bf16")
_WHOLE = frozenset({"add", "sub", "mul", "maximum", "minimum", "where", "neg", "abs"})  # keep whole numbers whole
# The functor of a kernel over lists: the type, the lists it is given, those it reads, the one it writes.
_FUNCTOR = re.compile(r"(\w+)Functor<([\w:]+(?: \w+)?), (\d)(?:, (\d), (\d)>|, \(at::native::ADAM_MODE\))")
_ADAM = "FusedAdamMath"
_COPIED = re.compile(r"OpaqueType<(\d{1,3})u?>|direct_copy_kernel\w*\(.*?lambda\((c10::\w+|\w+(?: \w+)?)\)#")
LIST_TOO_LONG = "the profiler writes no sizes of lists of more than 30 tensors"

Rule = Callable[[str, Recorded, str], Traffic | None]  # of the op, its inputs, and the kernel it launched


def op_traffic(op: str, inputs: Recorded, kernel: str = "") -> Traffic | None:
    """The bytes of one op, launched as `kernel`; None where its inputs do not tell.

    >>> x, scale = TensorMeta((4, 8), "fp32", (8, 1)), TensorMeta((8,), "bf16", (1,))
    >>> op_traffic("aten::mul", Recorded((x, scale), ("float", "c10::BFloat16"), ("", ""))).n_bytes
    272
    """
    rule = traffic_rule(op)
    return None if rule is None or inputs.uncounted else rule(op, inputs, kernel)


def traffic_rule(op: str) -> Rule | None:
    """How the bytes of an op follow from its inputs; None where they do not, or nobody has looked.

    >>> traffic_rule("aten::add_") is not None, traffic_rule("aten::view")
    (True, None)
    """
    if op.startswith(("triton_poi_", "triton_red_", "triton_per_")):
        return compiled
    if op in ATTENTIONS:
        return attention
    if not op.startswith("aten::"):
        return None
    name = op.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd")):
        return lists
    return _RULES.get(name) or _RULES.get(name.removesuffix("_"))


def _base(op: str) -> str:
    return op.removeprefix("aten::").removesuffix("_")


def _like(tensor: TensorMeta, dtype: str | None = None) -> TensorMeta:
    return TensorMeta(tensor.shape, dtype or tensor.dtype)


def _elementwise(n: int, *, flag: bool = False) -> Rule:
    """The first `n` inputs are read, what they broadcast to is written; `flag`: as truth values."""

    def rule(op: str, inputs: Recorded, _: str) -> Traffic | None:
        operands = [one for one in map(inputs.at, range(n)) if one is not None]
        targets = [*([inputs.at(0)] if op.endswith("_") else []), *inputs.tensors(n)]  # given to write into
        shape = broadcast([tensor.shape for tensor in operands])
        if not operands or shape is None or len(targets) > 1:
            return None
        made = "" if targets else "bool" if flag else _computed_dtype(op, inputs, operands, n)
        written = targets[0] if targets else TensorMeta(shape, made)
        if written is None or written.shape != shape or not written.dtype:
            return None
        return counted(op, operands, [_like(written)], written.dtype)

    return rule


def _computed_dtype(op: str, inputs: Recorded, operands: Sequence[TensorMeta], n: int) -> str:
    """Of an elementwise result; '' where it is not known: most ops turn whole numbers into floats."""
    dtype = promoted(operands) or ""
    stays_whole = "bitwise" in op or (_base(op) in _WHOLE and "Scalar" not in inputs.types[:n])
    return dtype if stays_whole or dtype in _FLOATS else ""


def _of_first(result: Callable[[Recorded, TensorMeta], Sequence[TensorMeta] | None], known: int) -> Rule:
    """Reads its tensors and writes what `result` makes of the first. A tensor behind the `known` inputs is a result given with
    `out=`, perhaps of another type."""

    def rule(op: str, inputs: Recorded, _: str) -> Traffic | None:
        x = inputs.at(0)
        if x is None or inputs.tensors(known):
            return None
        outputs = result(inputs, x)
        args = [inputs.at(place) for place in range(known)]
        return counted(op, args, outputs, outputs[0].dtype) if outputs else None

    return rule


def _running(inputs: Recorded, x: TensorMeta) -> list[TensorMeta] | None:
    """A sum asked for in another type is cast first, by a kernel of another op or not."""
    asked = inputs.value(2)
    return [_like(x)] if x.dtype in _FLOATS and (not asked or inputs.dtype(2) == x.dtype) else None


def _copy(inputs: Recorded, to: TensorMeta) -> list[TensorMeta] | None:
    source = inputs.at(1)
    return [_like(to)] if source is not None and broadcast([to.shape, source.shape]) == to.shape else None


def _softmax(inputs: Recorded, x: TensorMeta) -> list[TensorMeta]:
    return [_like(x, "fp32" if inputs.value(2) == "True" else None)]


def _softmax_backward(inputs: Recorded, gradient: TensorMeta) -> list[TensorMeta] | None:
    result, dtype = inputs.at(1), inputs.dtype(3)
    return [_like(gradient, dtype)] if result is not None and dtype and gradient.shape == result.shape else None


def _layer_norm(n_kept: int) -> Callable[[Recorded, TensorMeta], list[TensorMeta] | None]:
    """Writes what it was given, normalised, and for each row its mean and deviation, an RMS norm the latter alone."""

    def result(inputs: Recorded, x: TensorMeta) -> list[TensorMeta] | None:
        inner = numbers(inputs.value(1))
        if not inner or tuple(inner) != x.shape[-len(inner) :]:
            return None
        rows = TensorMeta((n_kept * x.elements // prod(inner),), "fp64" if x.dtype == "fp64" else "fp32")
        return [_like(x), rows]

    return result


def _layer_norm_backward(weights: tuple[int, ...], mask: int) -> Rule:
    """Writes the gradients that are asked for, of the input and of the weights at these places."""

    def rule(op: str, inputs: Recorded, _: str) -> Traffic | None:
        x, asked = inputs.at(1), re.findall("True|False", inputs.value(mask))
        if x is None or inputs.at(0) is None or len(asked) != 1 + len(weights) or inputs.tensors(mask):
            return None
        of = [x, *map(inputs.at, weights)]
        outputs = [_like(one) for one, yes in zip(of, asked, strict=True) if one is not None and yes == "True"]
        return counted(op, [inputs.at(place) for place in range(mask)], outputs, x.dtype)

    return rule


def _reduction(op: str, inputs: Recorded, along: str, dtype: str | None) -> TensorMeta | None:
    """One number for each place that is left; without dimensions, or with an empty list of them, one for all.

    Another tensor than the first is the one that the result is written into.
    """
    x, out, dims = inputs.at(0), inputs.tensors(1), numbers(along)
    if x is None or len(out) > 1 or dims is None or any(not -len(x.shape) <= dim < len(x.shape) for dim in dims):
        return None
    gone = prod(x.shape[dim] for dim in {dim % len(x.shape) for dim in dims}) if dims else x.elements
    kind = out[0].dtype if out else dtype
    return TensorMeta((x.elements // gone,), kind) if kind else None


def _reduced(op: str, inputs: Recorded, result: TensorMeta | None, *more: TensorMeta) -> Traffic | None:
    return None if result is None else counted(op, [inputs.at(0)], [result, *more], result.dtype)


def _sum(op: str, inputs: Recorded, _: str) -> Traffic | None:
    """sum(x, dtype) adds up all, sum(x, dims, keepdim, dtype) along some."""
    x, short = inputs.at(0), len(inputs.types) == 2
    place = 1 if short else 3
    dtype = inputs.dtype(place) if inputs.value(place) else (x.dtype if x and x.dtype in _FLOATS else None)
    return _reduced(op, inputs, _reduction(op, inputs, "" if short else inputs.value(1), dtype))


def _reduces_to(dtype: str = "", along: int = 1) -> Rule:
    """Along the dimensions at a place, to its own dtype or another."""

    def rule(op: str, inputs: Recorded, _: str) -> Traffic | None:
        x = inputs.at(0)
        own = x.dtype if x and not (along == 2 and inputs.value(4)) else None  # a norm may be asked for in another
        return _reduced(op, inputs, _reduction(op, inputs, inputs.value(along), dtype or own))

    return rule


def _extremes(op: str, inputs: Recorded, _: str) -> Traffic | None:
    """Of all, or along a dimension with their places."""
    x = inputs.at(0)
    result = _reduction(op, inputs, inputs.value(1), x.dtype if x else None)
    if len(inputs.types) == 1 or result is None or x is None:
        return _reduced(op, inputs, result)
    if inputs.tensors(1) or not re.fullmatch(r"-?[0-9]+", inputs.value(1)):
        return None
    return _reduced(op, inputs, result, _like(result, "int64"))


def _picked(op: str, args: Sequence[TensorMeta | None], index: TensorMeta, written: TensorMeta) -> Traffic:
    """The same places may be asked for again, and then move once."""
    found = counted(op, args, [written], written.dtype)
    return msgspec.structs.replace(found, flops=max(index.elements, written.elements), bytes_are=AT_MOST)


def _select(op: str, inputs: Recorded, _: str) -> Traffic | None:
    """Rows count as often as they are asked for, and no more than the table holds."""
    x, dim, index = inputs.at(0), numbers(inputs.value(1)), inputs.at(2)
    if x is None or index is None or not dim or not -len(x.shape) <= dim[0] < len(x.shape) or _other_out(inputs):
        return None
    written = index.elements * x.elements // x.shape[dim[0]]
    return _picked(op, [x, None, index], index, TensorMeta((written,), x.dtype))


def _gather(op: str, inputs: Recorded, _: str) -> Traffic | None:
    x, index = inputs.at(0), inputs.at(2)
    if x is None or index is None or _other_out(inputs):
        return None
    return _picked(op, [x, None, index], index, _like(index, x.dtype))


def _scatter(_: str, inputs: Recorded, __: str) -> Traffic | None:
    """Of the source as much as there are places; with another way than to put it there, what lies there is read as well."""
    x, index, source = inputs.at(0), inputs.at(2), inputs.at(3)
    if x is None or index is None or len(inputs.types) != 4 or (source is None and inputs.types[3] != "Scalar"):
        return None
    written = TensorMeta((min(index.elements, x.stored_elements),), x.dtype)
    return _picked("aten::scatter_", [x, None, index, source], index, written)  # its copy, if any, is another op's


def _other_out(inputs: Recorded) -> bool:
    """Whether the result is written into a tensor of another type than the table's."""
    x = inputs.at(0)
    return any(x is None or out.dtype != x.dtype for out in inputs.tensors(3))


def _join(_: str, inputs: Recorded, kernel: str) -> Traffic | None:
    """Of a list the profiler gives no type: the kernel's name does."""
    named, tensors = _COPIED.search(kernel), inputs.list_at(0)
    if named is None or not tensors or inputs.tensors(1):
        return None
    known = from_kineto(named[2] or "")
    item = int(named[1]) if named[1] else known.n_bytes if known else 0
    dtype = known.name if known else {2: "bf16", 4: "fp32", 8: "fp64"}.get(item, "bool")
    elements, read = sum(tensor.elements for tensor in tensors), sum(tensor.stored_elements for tensor in tensors)
    return Traffic((read + elements) * item, elements, dtype) if item else None


def lists(_: str, inputs: Recorded, kernel: str) -> Traffic | None:
    """An optimizer's kernel over many tensors: its functor names the type, how many lists it reads and which it writes."""
    named, tensors = _FUNCTOR.search(kernel), inputs.list_at(0)
    dtype = from_kineto(named[2]) if named else None
    if named is None or dtype is None or not tensors:
        return None
    several = [one for one in inputs.args if isinstance(one, tuple)]
    moved = _lists_moved(named)
    if moved is None or any(tensor.stored_elements != tensor.elements for some in several for tensor in some):
        return None
    elements = sum(tensor.elements for tensor in tensors)
    may_repeat = named[1] != _ADAM and int(named[4]) > 1 and _has_repeats(several)
    return Traffic(moved * elements * dtype.n_bytes, elements, dtype.name, AT_MOST if may_repeat else "")


def _has_repeats(several: Sequence[object]) -> bool:
    """Whether two lists look the same, and so may be one."""
    return any(some in several[:place] for place, some in enumerate(several))


def _lists_moved(functor: re.Match[str]) -> int | None:
    """How many lists a kernel reads and writes, together; None where its functor does not say."""
    name, _dtype, given, read, _place = functor.groups()
    if name == _ADAM:
        return 2 * int(given) - 1  # all are read, all but the gradient written
    if read is None:
        return None
    return 1 if name == "Zero" else int(read) + 1


_BY_RULE: dict[Rule, str] = {
    _elementwise(1): """
        abs acos asin atan bitwise_not ceil cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardswish hardtanh
        leaky_relu log log10 log1p log2 mish nan_to_num neg reciprocal relu round rsqrt sigmoid sign silu sin sinh
        softplus sqrt square tan tanh threshold trunc
    """,
    _elementwise(2): """
        add atan2 bitwise_and bitwise_or bitwise_xor div fmod gelu_backward maximum minimum mul native_dropout_backward pow
        remainder rsub sigmoid_backward silu_backward sub tanh_backward threshold_backward
    """,
    _elementwise(3): "addcdiv addcmul clamp lerp masked_fill where",
    _elementwise(2, flag=True): "eq ge gt le logical_and logical_or logical_xor lt ne",
    _elementwise(1, flag=True): "isfinite isinf isnan logical_not",
    _of_first(_running, 1): "cumsum",
    _of_first(_copy, 2): "copy_",
    _of_first(lambda _, to: [_like(to)], 2): "fill zero",
    _of_first(lambda _, x: [_like(x), _like(x, "bool")], 1): "native_dropout",
    _of_first(_softmax, 1): "_softmax _log_softmax",
    _of_first(_softmax_backward, 2): "_softmax_backward_data _log_softmax_backward_data",
    _of_first(_layer_norm(2), 4): "native_layer_norm",
    _of_first(_layer_norm(1), 4): "_fused_rms_norm",
    _layer_norm_backward((5, 6), 7): "native_layer_norm_backward",
    _layer_norm_backward((4,), 5): "_fused_rms_norm_backward",
    _sum: "mean prod sum",
    _reduces_to(): "amax amin",
    _extremes: "max min",
    _reduces_to("int64"): "argmax argmin",
    _reduces_to("bool"): "all any",
    _reduces_to(along=2): "linalg_vector_norm norm",
    _select: "index_select",
    _gather: "gather",
    _scatter: "scatter",
    _join: "cat",
}
_RULES = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
TRACED = frozenset(_RULES)
OVER_LISTS = (lists, _join)
