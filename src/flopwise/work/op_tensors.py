"""The tensors that an op was given, out of the text that a trace keeps of its inputs."""

from math import prod
from typing import Any

import msgspec

from flopwise.work.op_family import BETWEEN

# As PyTorch spells them; what is not here is no tensor, or none whose bytes are known.
ITEM_BYTES = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1,
    "long int": 8, "long": 8, "int": 4, "short int": 2, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
    "unsigned short": 2, "unsigned int": 4, "unsigned long": 8,
}  # fmt: skip
FLOATS = ("double", "float", "c10::Half", "c10::BFloat16")
NAMES = {"double": "fp64", "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "long int": "int64"}
# c10::ScalarType, as an op's `dtype` argument is written
CODES = {"4": "long int", "5": "c10::Half", "6": "float", "7": "double", "11": "bool", "15": "c10::BFloat16"}
LIST = "TensorList"
NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "GenericList", LIST})
LARGEST = 1 << 48  # elements of a tensor

Dims = tuple[int, ...]


class Tensor(msgspec.Struct, frozen=True):
    """One tensor as an op sees it.

    >>> Tensor((4, 512, 768), (512, 1, 0), "float").n_bytes    # expanded: 768 times the same number
    8192
    """

    dims: Dims
    strides: Dims
    dtype: str

    @property
    def elements(self) -> int:
        """As many as the op goes through."""
        return prod(self.dims)

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def in_memory(self) -> int:
        """As many as lie in memory: along a stride of zero one number stands for all, and windows overlap.

        >>> Tensor((1000, 16), (1, 1), "float").in_memory
        1015
        """
        steps = [(size, stride) for size, stride in zip(self.dims, self.strides, strict=True) if stride]
        return min(prod(size for size, _ in steps), 1 + sum((size - 1) * stride for size, stride in steps))

    @property
    def n_bytes(self) -> int:
        """Of what lies in memory."""
        return self.item * self.in_memory


class Given(msgspec.Struct, frozen=True):
    """An op's inputs by position: a tensor, a list of tensors (of no type), or None; and the numbers among them as text."""

    tensors: tuple[Tensor | None, ...]
    lists: tuple[tuple[Tensor, ...] | None, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]

    def at(self, place: int) -> Tensor | None:
        """The tensor at a place; None where there is none."""
        return self.tensors[place] if place < len(self.tensors) else None

    def value(self, place: int) -> str:
        """The number, flag or list of numbers at a place; '' where there is none."""
        return self.values[place] if place < len(self.values) else ""

    def all(self, first: int = 0) -> list[Tensor]:
        """The tensors alone, from a place on."""
        return [tensor for tensor in self.tensors[first:] if tensor is not None]

    @property
    def strange(self) -> list[str]:
        """Types that are not known: their tensors cannot be counted, and neither can the op."""
        return [kind for kind in self.types if kind not in ITEM_BYTES and kind not in NO_TENSOR]


class _Garbled(Exception):
    pass


def given(text: str) -> Given | None:
    """What an op was given; None for what is not four lists of one length with sizes, types, strides and values in them.

    >>> lists = ("[[2, 3], []]", '["float", "Scalar"]', "[[3, 1], []]", '["", "2"]')
    >>> found = given(BETWEEN.join(lists))
    >>> found.at(0).n_bytes, found.at(1), found.value(1)
    (24, None, '2')
    """
    lists = text.split(BETWEEN)
    if len(lists) != 4:
        return None
    try:
        dims, types, strides, values = (msgspec.json.decode(one, type=list[Any]) for one in lists)
        if len({len(dims), len(types), len(strides), len(values)}) != 1:
            return None
        if not all(isinstance(one, str) for one in (*types, *values)):
            return None
        each = list(zip(dims, types, strides, strict=True))
        tensors = [_tensor(*one) if one[1] in ITEM_BYTES else None for one in each]
        listed = [_list(sizes, steps) if kind == LIST and sizes else None for sizes, kind, steps in each]
    except (msgspec.DecodeError, RecursionError, UnicodeError, _Garbled):
        return None
    return Given(tuple(tensors), tuple(listed), tuple(types), tuple(values))


def types_alone(text: str) -> set[str]:
    """The types of the tensors in a text, where that is all it has beside their sizes; none where there are none."""
    lists = text.split(BETWEEN)
    try:
        types = msgspec.json.decode(lists[1], type=list[str]) if len(lists) > 1 else []
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeError):
        return set()
    return set(types) - NO_TENSOR


def _list(sizes: Any, strides: Any) -> tuple[Tensor, ...]:
    if not isinstance(sizes, list) or not isinstance(strides, list) or len(sizes) != len(strides):
        raise _Garbled
    return tuple(_tensor(size, "", stride) for size, stride in zip(sizes, strides, strict=True))


def _tensor(dims: Any, dtype: str, strides: Any) -> Tensor:
    sizes, steps = _sizes(dims, 1), _sizes(strides, 0)
    if len(sizes) != len(steps) or prod(sizes) >= LARGEST:
        raise _Garbled
    return Tensor(sizes, steps, dtype)


def _sizes(found: Any, least: int) -> Dims:
    """Whole numbers within reason: a tensor of no elements moves nothing, and is nothing to place."""
    if not isinstance(found, list) or not all(type(size) is int and least <= size < LARGEST for size in found):
        raise _Garbled
    return tuple(found)


def broadcast(shapes: list[Dims]) -> Dims | None:
    """What they broadcast to; None where they do not.

    >>> broadcast([(4, 1, 3), (2, 1), ()]), broadcast([(2,), (3,)])
    ((4, 2, 3), None)
    """
    rank = max((len(dims) for dims in shapes), default=0)
    padded = [(1,) * (rank - len(dims)) + dims for dims in shapes]
    sizes = [set(column) - {1} for column in zip(*padded, strict=True)]
    return None if any(len(size) > 1 for size in sizes) else tuple(size.pop() if size else 1 for size in sizes)


def promoted(tensors: list[Tensor]) -> str | None:
    """The type that an elementwise op over them computes and writes; None where PyTorch's rules are more than these.

    A tensor of no dimensions does not widen one that has some; floats win over whole numbers.

    >>> promoted([Tensor((2,), (1,), "c10::BFloat16"), Tensor((), (), "float")])
    'c10::BFloat16'
    """
    telling = [tensor for tensor in tensors if tensor.dims] or tensors
    kinds = {tensor.dtype for tensor in telling}
    floats = kinds & set(FLOATS)
    if not floats and any(tensor.dtype in FLOATS for tensor in tensors):
        return None
    if len(kinds) == 1:
        return kinds.pop()
    if floats == {"c10::Half", "c10::BFloat16"}:
        return "float"
    return min(floats, key=FLOATS.index) if floats else None
