"""What class of work a kernel does: by its own name; where that does not say, by the op above it, then by what is around."""

import re
from functools import lru_cache

from flopwise.work.catalogue import kind_of_node, operation
from flopwise.work.kernel_names import class_by_default, class_of_name
from flopwise.work.kernel_spelling import LONGEST_MATCHED
from flopwise.work.kernel_words import class_of_module
from flopwise.work.operation import OPTIMIZER, OTHER

_NODE = re.compile(r"^(?:autograd::engine::evaluate_function: )?(?:\w+::)*(\w+?)Backward\d*$")
_MANY_TENSORS = re.compile(r"multi_?tensor_?apply|foreach", re.IGNORECASE)


@lru_cache(maxsize=1 << 16)
def classify(name: str, op: str = "", phase: str = "") -> str:
    """The class of a kernel: its name decides; else the op above it; else what a generic kernel of that name does; else that
    it ran in the optimizer.

    A kernel over many tensors (`_foreach_*`) is the optimizer's when it ran in that phase, whatever its arithmetic.

    >>> classify("nvjet_sm90_tst_96x128_64x6_2x1_v_bz_NNN")
    'matmul'
    >>> classify("my_kernel", "aten::mm"), classify("my_kernel", "NativeLayerNormBackward0")
    ('matmul', 'normalisation')
    >>> classify("triton_poi_fused__to_copy_t_5")
    'copy/cast'
    """
    name = name[:LONGEST_MATCHED]
    if phase == OPTIMIZER and _MANY_TENSORS.search(name):
        return OPTIMIZER
    kind = class_of_name(name) or _by_op(op[:LONGEST_MATCHED])
    if kind != OTHER:
        return kind
    return OPTIMIZER if phase == OPTIMIZER else class_by_default(name) or OTHER


def class_around(ops: tuple[str, ...], module: str) -> str:
    """The class of a kernel that neither its name nor its op tells: by the ops further out, then by its module.

    >>> class_around(("my::op", "aten::linear"), ""), class_around((), "LlamaRMSNorm_3"), class_around((), "Model_0")
    ('matmul', 'normalisation', 'other')
    """
    outer = (_by_op(op[:LONGEST_MATCHED]) for op in ops)
    known = next((kind for kind in outer if kind != OTHER), None)
    return known or class_of_module(module[-LONGEST_MATCHED:]) or OTHER


def _by_op(op: str) -> str:
    if not op:
        return OTHER
    node = _NODE.match(op)
    return (kind_of_node(node[1]) if node else None) or operation(op).kind
