"""What class of work a kernel's name tells: by the function's own name, then its template arguments, then its namespaces."""

import re

from flopwise.work.kernel_signature import Signature, signature
from flopwise.work.kernel_words import Table, class_of_scope, class_of_word, default_class, first_class
from flopwise.work.operation import (
    ATTENTION,
    COMMUNICATION,
    COPY,
    ELEMENTWISE,
    INDEX,
    LOSS,
    MATMUL,
    MEMORY,
    NORMALISATION,
    OPTIMIZER,
    RANDOM,
    REDUCTION,
    SOFTMAX,
)

_COPIES = re.compile(
    r"memcpy[ \d_]*(dtod|device|\d|d2d)|memcpy|memset|copybuffer|fillbuffer|__amd_rocclr_(copy|fill)", re.I
)
_MOST_WORDS = 10  # of the template arguments that are looked at: what it runs is among the first
# The fifth argument of PyTorch's softmax over a warp, and the epilogue of the one over a block.
_IS_LOG = re.compile(r"LogSoftMax|^(?:[^,<>]+,\s*){3}(?:\(int\))?\d+,\s*(?:true|\(bool\)1)")

# Inductor writes the fused ops into the name: triton_<heuristic>_fused_<ops>_<number>. Ops are joined by '_', which is also
# inside their names, so the parts are searched for, not split. A pointwise kernel that names an attention or a matmul op only
# prepares its operands: those words count in templates (tem, mm) alone.
_INDUCTOR = re.compile(r"^triton_(poi|red|per|tem|mm|bmm|for|spl|unk|user|comb)_(?:fused_?)?(.*?)(?:_?\d+)?$")
_TEMPLATES, _REDUCTIONS = ("tem", "mm", "bmm"), ("red", "per", "spl")
_FUSED_TEMPLATE: Table = ((ATTENTION, "attention flex_decoding"),)
_FUSED: Table = (
    (COMMUNICATION, "all_reduce all_gather reduce_scatter all_to_all"),
    (LOSS, "log_softmax nll_loss cross_entropy _loss"),
    (SOFTMAX, "softmax"),
    (OPTIMIZER, "adam _foreach_ addcdiv"),
    (NORMALISATION, "layer_norm rms_norm group_norm batch_norm var_mean mean.*rsqrt pow.*rsqrt mean.*pow"),
    (INDEX, "embedding index gather scatter sort topk nonzero searchsorted"),
)
_ALL_OF = r"^(_|{})+$"
_FUSED_POINTWISE: Table = (
    (RANDOM, _ALL_OF.format("native|dropout|bernoulli|rand|randn|randint|like|inductor|random|seeds|lookup|seed")),
    (MEMORY, _ALL_OF.format("zeros|ones|full|fill|new|empty|like|zero")),
    (
        COPY,
        _ALL_OF.format(
            "to|copy|clone|t|transpose|permute|view|unsafe|reshape|contiguous|cat|stack|slice|select|split|with|sizes|expand|"
            "squeeze|unsqueeze|unbind|chunk|alias|detach|as|strided|repeat|interleave|tile|flip|roll|pad|constant|nd|backward|"
            "scaled|dot|product|flash|efficient|cudnn|attention|flex|mm|bmm|addmm|linear|convert|element|type|float8|e4m3fn|"
            "moe|forward|scatter"
        ),
    ),
)


def class_of_name(name: str) -> str | None:
    """The class that a name tells; None where it says nothing, or only that it is a generic loop.

    >>> class_of_name("ampere_sgemm_128x64_nn"), class_of_name("triton_red_fused_sum_3"), class_of_name("my_kernel")
    ('matmul', 'reduction', None)
    >>> class_of_name("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)")
    'memory'
    """
    if (copy := _COPIES.match(name)) is not None:
        return COPY if copy[1] else MEMORY
    if name.startswith("triton_") and (inductor := _INDUCTOR.match(name.lower())) is not None:
        return _class_of_fused(*inductor.groups())
    parts = signature(name)
    kind = class_of_word(parts.own) or _class_of_arguments(parts) or class_of_scope(parts.scope)
    return LOSS if kind == SOFTMAX and _IS_LOG.search(parts.arguments) else kind


def class_by_default(name: str) -> str | None:
    """The class of a name that does not tell its own: that of the loop it is, or what a name like it most often does.

    >>> class_by_default("void at::native::elementwise_kernel<128, my_functor>(int)"), class_by_default("my_kernel")
    ('elementwise', None)
    """
    return default_class(signature(name).own)


def _class_of_arguments(parts: Signature) -> str | None:
    """By the first of the template's arguments that tells something."""
    for number, word in enumerate(parts.words()):
        if (kind := class_of_word(word)) is not None or number == _MOST_WORDS:
            return kind
    return None


def _class_of_fused(heuristic: str, fused: str) -> str:
    if heuristic in _TEMPLATES:
        return first_class(_FUSED_TEMPLATE, fused) or MATMUL
    if (kind := first_class(_FUSED, fused)) is not None:
        return kind
    return REDUCTION if heuristic in _REDUCTIONS else first_class(_FUSED_POINTWISE, fused) or ELEMENTWISE
