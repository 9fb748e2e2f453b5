"""Bytes of the kernels that Inductor writes: they are given their tensors and the sizes of their iteration, and no more."""

import re
from itertools import combinations
from math import prod

from flopwise.work.kernel_class import classify
from flopwise.work.operation import COPY
from flopwise.work.recorded import Recorded
from flopwise.work.tensor import Shape, TensorMeta
from flopwise.work.traffic import ABOUT, Traffic

_INDICES = re.compile(r"embedding|index|gather|scatter|sort|nonzero|searchsorted|topk")
_PARTS = re.compile(r"select|slice|split|expand|repeat|unbind|narrow|strided|unfold|roll|cat|stack|pad")
_NUMELS = {"poi": (1, 2, 3), "red": (2,), "per": (2,)}  # how many sizes of its iteration a kernel is given
MOST_DIMS = 8


def compiled(op: str, inputs: Recorded, _: str) -> Traffic | None:
    """Each tensor once. What an index reaches is not known, nor how much is read of a tensor whose sizes are not those of the
    iteration, such as a table for the longest context: no number. Of the rest, the trace does not say what is updated in
    place (it moves twice) or read in part, so that the bytes are exact for a plain copy alone."""
    tensors, numels = inputs.tensors(), _iteration_sizes(inputs)
    if _INDICES.search(op) or len(numels) not in _NUMELS[op.removeprefix("triton_")[:3]] or not tensors:
        return None
    most = max(tensor.elements for tensor in tensors)
    if len(tensors) + len(numels) != len(inputs.types) or most != prod(numels):
        return None
    if not all(_fits(tensor, tensors, numels) for tensor in tensors):
        return None
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    return Traffic(n_bytes, most, tensors[-1].dtype, "" if _is_plain_copy(op, tensors) else ABOUT)


def _iteration_sizes(inputs: Recorded) -> list[int]:
    scalars = [inputs.value(place) for place, kind in enumerate(inputs.types) if kind == "Scalar"]
    return [int(value) for value in scalars if re.fullmatch(r"[0-9]{1,15}", value)]


def _is_plain_copy(op: str, tensors: list[TensorMeta]) -> bool:
    """Whether all of one tensor is written to another."""
    sizes = [tensor.elements for tensor in tensors]
    return classify(op) == COPY and len(sizes) == 2 and sizes[0] == sizes[1] and not _PARTS.search(op)


def _fits(tensor: TensorMeta, tensors: list[TensorMeta], numels: list[int]) -> bool:
    """Whether a tensor's sizes are those of the iteration: of a whole one, the same as another's, put together or taken apart;
    of a smaller one, sizes of whole ones, neighbours together or a half (a rotation has two), or what a reduction leaves."""
    whole = [other.shape for other in tensors if other.elements == prod(numels)]
    if tensor.elements == prod(numels):
        return _regrouped(tensor.shape, whole[-1]) or _regrouped(whole[-1], tensor.shape)
    if len(numels) == 2 and tensor.elements in numels:
        return True
    known = {size for dims in whole for size in _neighbours(dims)} | {1}
    return all(size in known or 2 * size in known for size in tensor.shape)


def _regrouped(dims: Shape, of: Shape) -> bool:
    """Whether each size is a product of some others.

    >>> _regrouped((2048, 768), (4, 12, 512, 64)), _regrouped((131072, 64), (4, 512, 4096))
    (True, False)
    """
    some = (chosen for n in range(len(of) + 1) for chosen in combinations(of, n)) if len(of) <= MOST_DIMS else ()
    return set(dims) <= {prod(chosen) for chosen in some}


def _neighbours(dims: Shape) -> set[int]:
    """Every size, and neighbours multiplied.

    >>> sorted(_neighbours((4, 512, 12)))
    [4, 12, 512, 2048, 6144, 24576]
    """
    ends = combinations(range(min(len(dims), MOST_DIMS) + 1), 2)
    return {prod(dims[first:last]) for first, last in ends}
