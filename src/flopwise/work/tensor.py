"""One description of a tensor for everything that asks the catalogue: traces, the dry run and the shape simulator."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Protocol

import msgspec

from flopwise.spec.dtypes import item_bytes

Shape = tuple[int, ...]
_WIDEST_FIRST = ("fp64", "fp32", "fp16", "bf16")


class TensorLike(Protocol):
    """What the rules of the catalogue read of a tensor."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> str: ...
    @property
    def elements(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...


class TensorMeta(msgspec.Struct, frozen=True):
    """Shape, dtype and memory order of a tensor, without its numbers.

    >>> TensorMeta((4, 512, 768), "fp32", (512, 1, 0)).n_bytes    # expanded: 768 times the same number
    8192
    """

    shape: Shape
    dtype: str  # a name of spec/dtypes.py; '' where it is not known
    strides: Shape | None = None  # None: contiguous

    @property
    def elements(self) -> int:
        """As many as an op goes through."""
        return prod(self.shape)

    @property
    def stored_elements(self) -> int:
        """As many as lie in memory: along a stride of zero one number stands for all, and windows overlap.

        >>> TensorMeta((1000, 16), "fp32", (1, 1)).stored_elements
        1015
        """
        if self.strides is None or 0 in self.shape:
            return prod(self.shape)
        steps = [(size, stride) for size, stride in zip(self.shape, self.strides, strict=True) if stride]
        return min(prod(size for size, _ in steps), 1 + sum((size - 1) * stride for size, stride in steps))

    @property
    def n_bytes(self) -> int:
        """Of what lies in memory."""
        return item_bytes(self.dtype, 1) * self.stored_elements

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in order, without gaps."""
        if self.strides is None or 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1:
                if stride != expected:
                    return False
                expected *= size
        return True


def tensors_in(values: Iterable[Any], kind: type[Any] = TensorMeta) -> list[Any]:
    """The tensors among arguments or results, lists and tuples opened."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, kind)]
    return found


def broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """What shapes broadcast to; None where they do not.

    >>> broadcast([(4, 1, 3), (2, 1), ()]), broadcast([(2,), (3,)])
    ((4, 2, 3), None)
    """
    rank = max((len(dims) for dims in shapes), default=0)
    padded = [(1,) * (rank - len(dims)) + dims for dims in shapes]
    sizes = [set(column) - {1} for column in zip(*padded, strict=True)]
    return None if any(len(size) > 1 for size in sizes) else tuple(size.pop() if size else 1 for size in sizes)


def promoted(tensors: Sequence[TensorLike]) -> str | None:
    """The dtype that an elementwise op over them computes and writes; None where PyTorch's rules are more than these.

    A tensor of no dimensions does not widen one that has some; floats win over whole numbers.

    >>> promoted([TensorMeta((2,), "bf16"), TensorMeta((), "fp32")])
    'bf16'
    """
    deciding = [tensor for tensor in tensors if tensor.shape] or tensors
    kinds = {tensor.dtype for tensor in deciding}
    floats = kinds.intersection(_WIDEST_FIRST)
    if not floats and any(tensor.dtype in _WIDEST_FIRST for tensor in tensors):
        return None
    if len(kinds) == 1:
        return kinds.pop()
    if floats == {"fp16", "bf16"}:
        return "fp32"
    return min(floats, key=_WIDEST_FIRST.index) if floats else None
