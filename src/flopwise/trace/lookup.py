"""Row lookup by a pair of numbers (a process and its correlation id, a process and its thread), for whole arrays at a time."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Pair = tuple[Ints, Ints]

_KEY_LIMIT = 2**62  # keys are int64
_TABLE = 1 << 25  # flags in a table, a byte each


def first_rows(wanted: Pair, known: Pair) -> Ints:
    """The first row of `known` that equals each wanted pair, -1 where none does.

    >>> one = np.array([1, 1, 1])
    >>> first_rows((one, np.array([8, 9, 7])), (one, np.array([7, 8, 8])))
    array([ 1, -1,  0])
    """
    if len(known[0]) == 0 or len(wanted[0]) == 0:
        return np.full(len(wanted[0]), -1, dtype=np.int64)
    asked, keys = _keys(wanted, known)
    order = None
    if (keys[1:] < keys[:-1]).any():
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
    at = np.searchsorted(keys, asked)
    at[at == len(keys)] = 0
    missing = keys[at] != asked
    rows = at if order is None else order[at]
    rows[missing] = -1
    return rows


def among(values: Ints, ids: Ints) -> NDArray[np.bool_]:
    """Whether each value is one of the ids; ids that count from 1, as correlation ids do, are looked up in a table of flags.

    >>> among(np.array([3, 9, -1]), np.array([1, 3]))
    array([ True, False, False])
    """
    high = int(ids.max(initial=0))
    if high > _TABLE or int(ids.min(initial=0)) < 0:
        return np.isin(values, ids)
    flags = np.zeros(high + 2, dtype=bool)
    flags[ids] = True
    flags[high + 1] = False
    return flags[np.where((values < 0) | (values > high), high + 1, values)]


def _keys(wanted: Pair, known: Pair) -> Pair:
    """One integer per pair, equal where the pairs are; most often one process did everything, and is left out."""
    first = known[0][0]
    if (known[0] == first).all() and (wanted[0] == first).all():
        return wanted[1], known[1]
    codes, outer = np.unique(np.concatenate([wanted[0], known[0]]), return_inverse=True)
    inner = np.concatenate([wanted[1], known[1]])
    low, high = int(inner.min()), int(inner.max())
    if len(codes) * (high - low + 1) >= _KEY_LIMIT:
        distinct, inner = np.unique(inner, return_inverse=True)
        low, high = 0, len(distinct) - 1
    keys = outer * (high - low + 1) + (inner - low)
    return keys[: len(wanted[0])], keys[len(wanted[0]) :]
