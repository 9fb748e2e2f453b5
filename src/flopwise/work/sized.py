"""FLOPs of one op where only the sizes of its inputs are known, as both profilers write them: `[[48, 512, 64], [48, 64, 512]]`.

A softmax counts five for each element going forward (maximum, subtraction, exponential, sum, division) and four going back
(product, sum, subtraction, product), whatever the kernel really does: on a GPU an exponential costs more than a sum, and
an online softmax rescales. One that is written out is counted by its `exp`.
"""

import re
from math import prod

from flopwise.work import op_rules
from flopwise.work.catalogue import ATTENTION_LAYOUT, operation
from flopwise.work.op_rules import AttentionFlops
from flopwise.work.recorded import Sizes, input_sizes
from flopwise.work.tensor import TensorMeta

MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"})
ADDING = frozenset({"aten::addmm", "aten::baddbmm"})  # what is added comes first
_SOFTMAX_FLOPS = {"aten::_softmax": 5, "aten::exp": 5, "aten::_softmax_backward_data": 4}  # of an element
SOFTMAXES = frozenset(_SOFTMAX_FLOPS)
_NAMESPACES = {"flash_": "flopwise", "_flash_attn_": "flash_attn"}
ATTENTIONS = frozenset(
    f"{next((space for start, space in _NAMESPACES.items() if name.startswith(start)), 'aten')}::{name}"
    for name in ATTENTION_LAYOUT
    if not name.startswith("sdpa_")
)
SIZED = MATMULS | SOFTMAXES | ATTENTIONS
_WRITES_CACHE = re.compile(
    r"::(?:store_cache|reshape_and_cache\w*|concat_and_cache_mla|append_paged_kv_cache|unified_kv_cache_update|"
    r"fused_rope_kv_cache\w*)$"
)


def writes_cache(op: str) -> bool:
    """Whether an op writes keys and values, its first two inputs, into a server's cache, the third.

    >>> [writes_cache(op) for op in ("sglang::store_cache", "_C_cache_ops::reshape_and_cache_flash", "aten::copy_")]
    [True, True, False]
    """
    return _WRITES_CACHE.search(op) is not None


def op_flops(op: str, sizes: str) -> int | None:
    """FLOPs of a matmul or a softmax; None where its sizes do not tell.

    >>> op_flops("aten::bmm", "[[48, 512, 64], [48, 64, 512]]") == 2 * 48 * 512 * 64 * 512
    True
    >>> op_flops("aten::_softmax", "[[4, 12, 512, 512], [], []]") == 5 * 4 * 12 * 512 * 512
    True
    """
    inputs = input_sizes(sizes)
    if not inputs:
        return None
    if op in SOFTMAXES:
        return _SOFTMAX_FLOPS[op] * prod(inputs[0])
    rule = operation(op).flops if op in MATMULS else None
    return rule(_shaped(inputs)) if rule is not None and factors(op, inputs) else None


def factors(op: str, inputs: Sizes) -> tuple[list[int], list[int]] | None:
    """The sizes of a product's two factors: `addmm` has what is added before them, `mm(out=…)` its result behind.

    >>> factors("aten::mm", [[2048, 768], [768, 3072], [2048, 3072]])
    ([2048, 768], [768, 3072])
    """
    pair = op_rules.factors(_shaped(inputs), 1 if op in ADDING else 0)
    return (list(pair[0]), list(pair[1])) if pair and len(pair[0]) == len(pair[1]) else None


def attention_flops(op: str, sizes: str) -> AttentionFlops | None:
    """FLOPs of fused attention; None where its sizes do not tell, as for sequences of several lengths.

    >>> attention_flops("aten::_cudnn_attention_backward", "[[4, 12, 512, 64], [4, 12, 512, 64], [4, 12, 512, 64]]").done
    8053063680
    """
    if op not in ATTENTIONS:
        return None
    backward, by_head = ATTENTION_LAYOUT[op.rpartition("::")[2]]
    inputs = input_sizes(sizes) or []
    if backward and len(inputs) == 3:
        inputs = [[], *inputs]  # the gradient, which comes first, has no sizes
    return op_rules.attention(_shaped(inputs), backward, by_head)


def _shaped(sizes: Sizes) -> list[TensorMeta]:
    return [TensorMeta(tuple(size), "") for size in sizes]
