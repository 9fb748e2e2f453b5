"""Columns out of a snapshot's lists of dicts: nothing in them is trusted before its type was checked."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flopwise.errors import FlopwiseError
from flopwise.snapshot.snapshot import Ints
from flopwise.snapshot.unpickle import HINT

MOST_BYTES = 2**50  # of one allocation: a thousand times what any GPU has
_LONGEST = 1024  # characters of a name that are looked at
_REQUIRED = object()


def invalid(where: str, what: str) -> FlopwiseError:
    """The error for a snapshot that is not one."""
    return FlopwiseError(f"not a memory snapshot: {where} {what}", HINT)


def rows_of(value: Any, where: str) -> list[dict[Any, Any]]:
    """A list of dicts, or the error that it is none.

    >>> rows_of([{"size": 1}], "blocks")
    [{'size': 1}]
    >>> rows_of([3], "blocks")
    Traceback (most recent call last):
    flopwise.errors.FlopwiseError: not a memory snapshot: blocks holds int, not dict
    hint: write snapshots with torch.cuda.memory._dump_snapshot('snapshot.pickle')
    """
    if type(value) is tuple:
        value = list(value)
    if type(value) is not list:
        raise invalid(where, f"is {type(value).__name__}, not a list")
    if others := set(map(type, value)) - {dict}:
        raise invalid(where, f"holds {_names(others)}, not dict")
    rows: list[dict[Any, Any]] = value
    return rows


def once(lists: Sequence[Any], where: str) -> None:
    """Refuse the same list in two places: a pickle refers to it in two bytes, and reading it takes its length again.

    >>> blocks = [{"size": 512}]
    >>> once([blocks, [], blocks], "'blocks'")
    Traceback (most recent call last):
    flopwise.errors.FlopwiseError: not a memory snapshot: 'blocks' holds one list several times
    hint: write snapshots with torch.cuda.memory._dump_snapshot('snapshot.pickle')
    """
    filled = [id(one) for one in lists if one]
    if len(set(filled)) < len(filled):
        raise invalid(where, "holds one list several times")


def cut(name: str) -> str:
    """A name as far as it is looked at: a file may hold one of megabytes, and refer to it a thousand times."""
    return name if len(name) <= _LONGEST else name[:_LONGEST]


def column(rows: Sequence[dict[Any, Any]], key: str, kind: type, where: str, default: Any = _REQUIRED) -> list[Any]:
    """One field of every row, all of one type; a default stands for what is missing, and may be None."""
    if default is _REQUIRED:
        try:
            values = [row[key] for row in rows]
        except KeyError:
            raise invalid(where, f"has no '{key}'") from None
    else:
        values = [row.get(key, default) for row in rows]
    allowed = {kind} if default is not None else {kind, type(None)}
    if others := set(map(type, values)) - allowed:
        raise invalid(f"'{key}' of {where}", f"is {_names(others)}, not {kind.__name__}")
    return values


def integers(rows: Sequence[dict[Any, Any]], key: str, where: str, default: Any = _REQUIRED) -> Ints:
    """A column of whole numbers."""
    return numbers(column(rows, key, int, where, default), f"'{key}' of {where}")


def sizes(rows: Sequence[dict[Any, Any]], key: str, where: str) -> Ints:
    """A column of bytes: none negative, none absurd, and their sum is a number."""
    return checked_sizes(column(rows, key, int, where), f"'{key}' of {where}")


def checked_sizes(values: Sequence[int], where: str) -> Ints:
    """Bytes that can be added up.

    >>> checked_sizes([512, -1], "'size' of blocks")
    Traceback (most recent call last):
    flopwise.errors.FlopwiseError: not a memory snapshot: 'size' of blocks holds -1 bytes
    hint: write snapshots with torch.cuda.memory._dump_snapshot('snapshot.pickle')
    """
    sizes = numbers(values, where)
    if len(sizes) and (sizes.min() < 0 or sizes.max() > MOST_BYTES):
        raise invalid(where, f"holds {sizes.min() if sizes.min() < 0 else sizes.max()} bytes")
    if sizes.sum(dtype=np.float64) > 2.0**61:
        raise invalid(where, "adds up to more than a number can hold")
    return sizes


def numbers(values: Sequence[int], where: str) -> Ints:
    """Python's integers as 64-bit ones."""
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise invalid(where, "holds a number of more than 64 bits") from None


def _names(kinds: set[type]) -> str:
    return " or ".join(sorted(kind.__name__ for kind in kinds))
