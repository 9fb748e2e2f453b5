"""What class of work a kernel does: by its own name; where that does not say, by the op above it."""

import re
from functools import lru_cache

from flopwise.work.catalogue import kind_of_node, operation
from flopwise.work.kernel_names import class_of_name
from flopwise.work.kernel_spelling import LONGEST_MATCHED
from flopwise.work.operation import OPTIMIZER, OTHER

_NODE = re.compile(r"^(?:autograd::engine::evaluate_function: )?(?:\w+::)*(\w+?)Backward\d*$")
_MANY_TENSORS = re.compile(r"multi_?tensor_?apply|foreach")


@lru_cache(maxsize=1 << 16)
def classify(name: str, op: str = "", phase: str = "") -> str:
    """The class of a kernel: its name decides; else the op above it; else that it ran in the optimizer.

    A kernel over many tensors (`_foreach_*`) is the optimizer's when it ran in that phase, whatever its arithmetic.

    >>> classify("nvjet_sm90_tst_96x128_64x6_2x1_v_bz_NNN")
    'matmul'
    >>> classify("my_kernel", "aten::mm"), classify("my_kernel", "NativeLayerNormBackward0")
    ('matmul', 'normalisation')
    >>> classify("triton_poi_fused__to_copy_t_5")
    'copy/cast'
    """
    text = name[:LONGEST_MATCHED].lower()
    if phase == OPTIMIZER and _MANY_TENSORS.search(text):
        return OPTIMIZER
    kind = class_of_name(text) or (_by_op(op[:LONGEST_MATCHED]) if op else OTHER)
    return OPTIMIZER if kind == OTHER and phase == OPTIMIZER else kind


def _by_op(op: str) -> str:
    node = _NODE.match(op)
    return (kind_of_node(node[1]) if node else None) or operation(op).kind
