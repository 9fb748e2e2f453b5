"""How the bytes and FLOPs of an op follow from its inputs, by its name."""

# Fused attention: those whose inputs are [batch, heads, tokens, width], and those with heads and tokens the other way round.
BY_HEAD = frozenset(
    f"aten::_{name}{way}"
    for way in ("", "_backward")
    for name in (
        "scaled_dot_product_flash_attention",
        "scaled_dot_product_efficient_attention",
        "scaled_dot_product_cudnn_attention",
    )
) | {
    "aten::_cudnn_attention_forward",
    "aten::_cudnn_attention_backward",
    "flopwise::flash_forward",
    "flopwise::flash_backward",
}
BY_TOKEN = frozenset(
    f"aten::_{name}_attention_{way}" for name in ("flash", "efficient") for way in ("forward", "backward")
) | {"flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_backward"}
SIZED = frozenset(
    {
        *BY_HEAD,
        *BY_TOKEN,
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::exp",  # of a softmax that is written out
    }
)

BETWEEN = "\x1e"  # the four lists of a text: no JSON holds this character

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
