"""What one op of a trace must move and do, counted by the catalogue."""

from collections.abc import Sequence

import msgspec

from flopwise.work.catalogue import moved_bytes, operation, read_inputs
from flopwise.work.recorded import LARGEST
from flopwise.work.tensor import TensorMeta

AT_MOST, ABOUT = "at most", "about"
_MATTERS = 0.01  # of the bytes: a bias that may be the weight does not


class Traffic(msgspec.Struct, frozen=True):
    """What one op must move and do."""

    n_bytes: int
    flops: float  # one for every element where no matmul is in it
    dtype: str  # of what is written; of a product, the precision it is multiplied in
    bytes_are: str = ""  # AT_MOST, ABOUT, or exact


def counted(op: str, args: Sequence[TensorMeta | None], outputs: Sequence[TensorMeta], dtype: str) -> Traffic:
    """The traffic of a call, once its results are known."""
    entry, inputs = operation(op), [one for one in args if one is not None]
    n_bytes, read = sum(moved_bytes(entry, args, inputs, outputs)), read_inputs(entry, args, inputs)
    elements = max(tensor.elements for tensor in (*read, *outputs))
    return Traffic(n_bytes, elements, dtype, doubt(read, n_bytes))


def doubt(read: Sequence[object], n_bytes: int) -> str:
    """AT_MOST where two inputs look the same: they may be one tensor (`x * x`), which is read once.

    >>> x, bias = TensorMeta((4, 8), "fp32", (8, 1)), TensorMeta((8,), "fp32", (1,))
    >>> doubt([x, x], 384), doubt([x, bias], 288)
    ('at most', '')
    """
    tensors = [one for one in read if isinstance(one, TensorMeta)]
    twice = sum(tensor.n_bytes for place, tensor in enumerate(tensors) if tensor in tensors[:place])
    return AT_MOST if twice > _MATTERS * n_bytes else ""


def sensible(traffic: Traffic) -> bool:
    """No op moves or does more than this; one that seems to has garbled sizes."""
    return 0 < traffic.n_bytes < 32 * LARGEST and 0 < traffic.flops < float(LARGEST) ** 2
