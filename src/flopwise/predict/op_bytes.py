"""The fewest bytes that a memory-bound operation moves: every input read once, every result written once."""

import math

from flopwise.spec.dtypes import named
from flopwise.spec.operations import OpSpec
from flopwise.spec.workload import Workload

# Tensors of the operation's size that go forward, and that come on top going back.
_TENSORS = {"gelu": (2, 3), "softmax": (2, 3), "rms_norm": (2, 3), "swiglu": (3, 5), "rope": (2, 2)}


def op_bytes(workload: Workload) -> int | None:
    """None: of matmuls, attention and losses, which bytes do not limit.

    >>> from flopwise.spec.workload import workload
    >>> op_bytes(workload("op:gelu", impl="triton")) == 2 * 4096 * 4096 * 4
    True
    """
    op = workload.subject
    if not isinstance(op, OpSpec):
        return None
    item = named(workload.recipe.precision).n_bytes
    if op.name == "adamw":  # weight, gradient and moments are read, all but the gradient written
        moments = {"flopwise": 8, "flopwise-bf16": 4}.get(op.impl, 2 * item)
        master = 2 if workload.recipe.precision == "bf16-master" else 0
        return math.prod(op.dims.values()) * (3 * item + 2 * (moments + master))
    if op.name not in _TENSORS:
        return None
    elements = math.prod(op.dims.values()) * (workload.batch * workload.context if op.name == "rope" else 1)
    forward, back = _TENSORS[op.name]
    return elements * item * (forward + (back if workload.phase == "backward" else 0))
