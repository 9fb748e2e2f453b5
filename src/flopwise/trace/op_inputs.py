"""What ops were given: sizes, types, strides and numbers of their inputs, kept for those whose bytes follow from them.

Kineto writes four lists for an op of a trace captured with shapes, one entry per input: `Input Dims`, `Input type`, `Input
Strides` and `Concrete Inputs` (numbers and flags; empty for a tensor). Together they are one text; a trace repeats a few
hundred of these a million times, so each is kept once and an op holds its number. The family of an op says how its bytes
follow: `analysis.op_traffic` has a rule for each.
"""

import numpy as np
import polars as pl

from flopwise.trace.op_shapes import BY_HEAD, BY_TOKEN, SIZED, Shapes
from flopwise.trace.tables import OP_INPUTS

# Elementwise by the number of operands at the front: each is read, what they broadcast to is written.
UNARY, BINARY, TERNARY, COMPARE, TEST = "unary", "binary", "ternary", "compare", "test"
RUNNING = "running"
COPY, FILL, DROPOUT, SOFTMAX, SOFTMAX_BACKWARD = "copy", "fill", "dropout", "softmax", "softmax backward"
SUM, EXTREME, EXTREMES, ARGUMENT, FLAG, NORM = "sum", "extreme", "extremes", "argument", "flag", "norm"
LAYER_NORM, LAYER_NORM_BACKWARD = "layer norm", "layer norm backward"
RMS_NORM, RMS_NORM_BACKWARD = "rms norm", "rms norm backward"
SELECT, GATHER, SCATTER, JOIN, LISTS = "select", "gather", "scatter", "join", "lists"
ATTENTION, COMPILED = "attention", "compiled"

_ATEN = {
    UNARY: "abs acos asin atan bitwise_not ceil cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardswish "
    "hardtanh leaky_relu log log10 log1p log2 mish nan_to_num neg reciprocal relu round rsqrt sigmoid sign silu sin sinh "
    "softplus sqrt square tan tanh threshold trunc",
    BINARY: "add atan2 bitwise_and bitwise_or bitwise_xor div fmod gelu_backward maximum minimum mul "
    "native_dropout_backward pow remainder rsub sigmoid_backward silu_backward sub tanh_backward threshold_backward",
    TERNARY: "addcdiv addcmul clamp lerp masked_fill where",
    COMPARE: "eq ge gt le logical_and logical_or logical_xor lt ne",
    TEST: "isfinite isinf isnan logical_not",
    RUNNING: "cumsum",
    COPY: "copy_",
    FILL: "fill zero",
    DROPOUT: "native_dropout",
    SOFTMAX: "_softmax _log_softmax",
    SOFTMAX_BACKWARD: "_softmax_backward_data _log_softmax_backward_data",
    SUM: "mean prod sum",
    EXTREME: "amax amin",
    EXTREMES: "max min",
    ARGUMENT: "argmax argmin",
    FLAG: "all any",
    NORM: "linalg_vector_norm norm",
    LAYER_NORM: "native_layer_norm",
    LAYER_NORM_BACKWARD: "native_layer_norm_backward",
    RMS_NORM: "_fused_rms_norm",
    RMS_NORM_BACKWARD: "_fused_rms_norm_backward",
    SELECT: "index_select",
    GATHER: "gather",
    SCATTER: "scatter",
    JOIN: "cat",
}
_FAMILY = {name: family for family, names in _ATEN.items() for name in names.split()}
_LISTS = ("_foreach_", "_fused_adam", "_fused_sgd")
_COMPILED = ("triton_poi_", "triton_red_", "triton_per_")

NO_INPUTS = 0
BETWEEN = "\x1e"  # the four lists of a text: no JSON holds this character
MAX_INPUTS = 100_000  # distinct; a model has hundreds
MAX_INPUTS_BYTES = 32_000  # an optimizer gives six lists of up to thirty tensors


def family(op: str) -> str:
    """How the bytes of an op follow from its inputs; '' where they do not, or nobody has looked.

    >>> family("aten::add_"), family("aten::_foreach_mul_"), family("aten::view")
    ('binary', 'lists', '')
    """
    if op.startswith(_COMPILED):
        return COMPILED
    if op in BY_HEAD or op in BY_TOKEN:
        return ATTENTION
    if not op.startswith("aten::"):
        return ""
    name = op.removeprefix("aten::")
    if name.startswith(_LISTS):
        return LISTS
    return _FAMILY.get(name) or _FAMILY.get(name.removesuffix("_"), "")


class _Kept(dict[str, bool]):
    """Whether the inputs of an op are kept, asked once per name."""

    def __missing__(self, op: str) -> bool:
        self[op] = kept = op in SIZED or bool(family(op))
        return kept


class Inputs(dict[bytes, int]):
    """Every text of inputs once, in the order of its first use; number 0 is 'not given', or beyond all reason.

    >>> inputs = Inputs()
    >>> [inputs[text] for text in (b"[[2, 3]]", b"[[2], [2]]", b"[[2, 3]]")]
    [1, 2, 1]
    """

    def __init__(self) -> None:
        super().__init__({b"": NO_INPUTS})
        self.kept = _Kept()

    def __missing__(self, text: bytes) -> int:
        if len(text) > MAX_INPUTS_BYTES or len(self) >= MAX_INPUTS:
            return NO_INPUTS
        self[text] = number = len(self)
        return number

    def texts(self) -> tuple[str, ...]:
        """By their numbers."""
        return tuple(text.decode("utf-8", "replace") for text in self)


def op_inputs(numbers: pl.Series) -> pl.DataFrame:
    """The rows of the ops whose inputs are kept, of a column with a number for each op."""
    found = numbers.to_numpy()
    rows = np.flatnonzero(found != NO_INPUTS)
    return pl.DataFrame({"op": rows.astype(np.uint32), "inputs": found[rows]}, schema=OP_INPUTS)


def sizes_of_inputs(
    ops: pl.DataFrame, names: tuple[str, ...], inputs: tuple[str, ...]
) -> tuple[pl.Series, tuple[str, ...]]:
    """The number of the sizes alone, for the ops in SIZED, and the texts these numbers stand for."""
    shapes = Shapes()
    of_inputs = np.array([shapes.id(text.partition(BETWEEN)[0].encode()) for text in inputs], dtype=np.uint32)
    sized = np.array([name in SIZED for name in names])
    return pl.Series(np.where(sized[ops["name"].to_numpy()], of_inputs[ops["inputs"].to_numpy()], 0)), tuple(shapes.ids)
