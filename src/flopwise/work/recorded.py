"""What the profiler recorded of an op's inputs, read from the text that a trace keeps of it."""

import re
from math import prod
from typing import Any

import msgspec

from flopwise.spec.dtypes import from_code, from_kineto
from flopwise.work.tensor import Shape, TensorMeta

BETWEEN = "\x1e"  # the four lists of a text: no JSON holds this character
_LIST = "TensorList"
_NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "GenericList", _LIST})
LARGEST = 1 << 48  # elements of a tensor
_LARGEST_SIZE = 1 << 40

Sizes = list[list[int]]


class Recorded(msgspec.Struct, frozen=True):
    """An op's inputs by position: a tensor, a list of tensors (of unknown dtype) or None; and the numbers as text."""

    args: tuple[TensorMeta | tuple[TensorMeta, ...] | None, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]

    def at(self, place: int) -> TensorMeta | None:
        """The tensor at a place; None where there is none."""
        found = self.args[place] if place < len(self.args) else None
        return found if isinstance(found, TensorMeta) else None

    def list_at(self, place: int) -> tuple[TensorMeta, ...]:
        """The list of tensors at a place; empty where there is none."""
        found = self.args[place] if place < len(self.args) else None
        return found if isinstance(found, tuple) else ()

    def value(self, place: int) -> str:
        """The number, flag or list of numbers at a place; '' where there is none."""
        return self.values[place] if place < len(self.values) else ""

    def dtype(self, place: int) -> str | None:
        """The dtype that the code at a place names."""
        found = from_code(self.value(place))
        return found.name if found else None

    def tensors(self, first: int = 0) -> list[TensorMeta]:
        """The tensors alone, from a place on."""
        return [one for one in self.args[first:] if isinstance(one, TensorMeta)]

    @property
    def has_lists(self) -> bool:
        """Whether the sizes of a list of tensors are there."""
        return any(isinstance(one, tuple) for one in self.args)

    @property
    def uncounted(self) -> bool:
        """Whether a tensor has a type that is not known: then the op's bytes cannot be counted."""
        return any(from_kineto(kind) is None and kind not in _NO_TENSOR for kind in self.types)


class _Garbled(Exception):
    pass


def recorded(text: str) -> Recorded | None:
    """What an op was given; None for what is not four lists of one length with sizes, types, strides and values in them.

    >>> lists = ("[[2, 3], []]", '["float", "Scalar"]', "[[3, 1], []]", '["", "2"]')
    >>> found = recorded(BETWEEN.join(lists))
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
        args = [_argument(*one) for one in zip(dims, types, strides, strict=True)]
    except (msgspec.DecodeError, RecursionError, UnicodeError, _Garbled):
        return None
    return Recorded(tuple(args), tuple(types), tuple(values))


def recorded_dtypes(text: str) -> set[str]:
    """The dtypes of the tensors in a text, where that is all it has beside their sizes; '' of one that is not known."""
    lists = text.split(BETWEEN)
    try:
        types = msgspec.json.decode(lists[1], type=list[str]) if len(lists) > 1 else []
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeError):
        return set()
    return {dtype.name if (dtype := from_kineto(kind)) else "" for kind in types if kind not in _NO_TENSOR}


def _argument(dims: Any, kind: str, strides: Any) -> TensorMeta | tuple[TensorMeta, ...] | None:
    if (dtype := from_kineto(kind)) is not None:
        return _tensor(dims, dtype.name, strides)
    if kind != _LIST or not dims:
        return None
    if not isinstance(dims, list) or not isinstance(strides, list) or len(dims) != len(strides):
        raise _Garbled
    return tuple(_tensor(size, "", stride) for size, stride in zip(dims, strides, strict=True))


def _tensor(dims: Any, dtype: str, strides: Any) -> TensorMeta:
    shape, steps = _sizes(dims, 1), _sizes(strides, 0)
    if len(shape) != len(steps) or prod(shape) >= LARGEST:
        raise _Garbled
    return TensorMeta(shape, dtype, steps)


def _sizes(found: Any, least: int) -> Shape:
    """Whole numbers within reason: a tensor of no elements moves nothing, and has no place on a roofline."""
    if not isinstance(found, list) or not all(type(size) is int and least <= size < LARGEST for size in found):
        raise _Garbled
    return tuple(found)


def input_sizes(text: str) -> Sizes | None:
    """The sizes of the inputs that have any; None for what is no such text, or beyond all reason."""
    try:
        given = msgspec.json.decode(text, type=list[Any])
        inputs = msgspec.convert([size for size in given if size], type=Sizes)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    sound = all(0 < size < _LARGEST_SIZE for dims in inputs for size in dims)
    return inputs if sound and all(prod(dims) < LARGEST for dims in inputs) else None


def numbers(text: str) -> list[int] | None:
    """`1` or `[0, 1]`; none in '' and '[]'; None for anything else.

    >>> numbers("[0, -1]"), numbers("2"), numbers(""), numbers("[0"), numbers("0.5")
    ([0, -1], [2], [], None, None)
    """
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not re.fullmatch(r"(?:-?[0-9]{1,15}(?:, ?-?[0-9]{1,15})*)?", inner):
        return None
    return [int(number) for number in re.findall(r"-?[0-9]+", inner)]
