"""Columns that grow while a file is read, the tables made of them, and row lookup by pairs of ids for whole arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records.note import Note, counted
from flopwise.trace.tables import LONGEST_NS, NO_ID, TABLES

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
NumberType = type[np.int64 | np.uint32 | np.bool_]
Pair = tuple[Ints, Ints]  # a process and its correlation id, a process and its thread

_FEW = 1000  # rows below which compacting is not worth it
_KEY_LIMIT = 2**62  # keys are int64
_LONGEST_SUM_NS = 2.0**62  # 146 years
MOST_BYTES = 1 << 46  # of a copy: 70 TB, more than a machine has
CAPTURE_AGAIN = "capture it again"
_TABLE = 1 << 25  # flags in a table, a byte each


class GrowingColumn:
    """Values in one buffer, so that all of its memory is returned at once; 32 bits wide while that is enough.

    >>> column = GrowingColumn()
    >>> column.append(np.array([1, 2]))
    >>> column.append(np.array([2**40]))
    >>> column.values()
    array([            1,             2, 1099511627776])
    """

    def __init__(self, dtype: NumberType = np.int64) -> None:
        self._bytes = bytearray()
        self._wide: np.dtype[Any] = np.dtype(dtype)
        self._dtype: np.dtype[Any] = np.dtype(np.int32) if dtype is np.int64 else self._wide

    def append(self, values: NDArray[Any]) -> None:
        if self._dtype == np.int32 and len(values) and not -(2**31) <= values.min() <= values.max() < 2**31:
            self._bytes, self._dtype = bytearray(self.values().tobytes()), self._wide
        self._bytes += values.astype(self._dtype, copy=False).tobytes()

    def __len__(self) -> int:
        return len(self._bytes) // self._dtype.itemsize

    def stored(self) -> NDArray[Any]:
        """All values as they are kept."""
        return np.frombuffer(self._bytes, self._dtype)

    def values(self, order: NDArray[np.integer] | slice = slice(None)) -> NDArray[Any]:
        """All values at full width, in another order if one is given; a copy where they were kept narrow."""
        values: NDArray[Any] = self.stored()[order].astype(self._wide, copy=False)
        return values


def compact(columns: dict[str, NDArray[Any]]) -> pl.DataFrame:
    """A table of these columns; a value that is the same in all rows (a process, a device) is held once."""
    if len(next(iter(columns.values()))) < _FEW:
        return pl.DataFrame(columns)
    constant = {name for name, values in columns.items() if (values == values[0]).all()}
    if not constant or len(constant) == len(columns):
        return pl.DataFrame(columns)
    first = {name: pl.Series(values[:1]) for name, values in columns.items() if name in constant}
    table = pl.DataFrame({name: values for name, values in columns.items() if name not in constant})
    literals = [pl.lit(series[0], series.dtype).alias(name) for name, series in first.items()]
    return table.with_columns(literals)[list(columns)]


def shaped_tables(tables: dict[str, pl.DataFrame]) -> dict[str, Any]:
    """The tables of a Trace, each with exactly the columns of its schema; they are taken out of `tables` one by one.

    Refuses what would not add up in 64 bits: no program ran a hundred years.
    """
    for name, table in tables.items():
        if "end_ns" in table.columns:
            length_ns = float(
                table["end_ns"].to_numpy().sum(dtype=float) - table["start_ns"].to_numpy().sum(dtype=float)
            )
            if length_ns > _LONGEST_SUM_NS:
                years = f"{length_ns / 3.156e16:,.0f} years"
                raise FlopwiseError(
                    f"the {name} of this trace take {years} together: its times are damaged", CAPTURE_AGAIN
                )
    return {name: _shaped(tables.pop(name), TABLES[name]) for name in list(tables)}


def near(starts: Sequence[Ints]) -> tuple[int, int] | None:
    """From when to when the events of a trace begin that began at about the same time as most of them; None: all of them.

    >>> near([np.array([5, 6, 7])]), near([np.array([0, 2**60, 2**60 + 9])]) == (2**60 - LONGEST_NS, 2**60 + LONGEST_NS)
    (None, True)
    """
    known = [some for some in starts if len(some)]
    if not known or max(int(some.max()) for some in known) - min(int(some.min()) for some in known) < LONGEST_NS:
        return None
    middle = int(np.partition(whole := np.concatenate(known), len(whole) // 2)[len(whole) // 2])
    return middle - LONGEST_NS, middle + LONGEST_NS


def known_bytes(copies: pl.DataFrame) -> tuple[pl.DataFrame, tuple[Note, ...]]:
    """Copies without sizes that no memory has; a note says how many those were."""
    absurd = copies["bytes"] > MOST_BYTES
    if not (n := int(absurd.sum())):
        return copies, ()
    copies = copies.with_columns(bytes=pl.when(absurd).then(pl.lit(NO_ID, pl.Int64)).otherwise("bytes"))
    return copies, counted(sizes=(n, "copy", f"of more than {units.size(MOST_BYTES)}: its size is not counted"))


def _shaped(table: pl.DataFrame, schema: dict[str, Any]) -> pl.DataFrame:
    """A device number that is too large for its column is unknown."""
    table = table[list(schema)]
    others = [pl.col(name).cast(dtype, strict=False) for name, dtype in schema.items() if table.schema[name] != dtype]
    return table.with_columns(others).with_columns(pl.col(pl.Int32).fill_null(NO_ID)) if others else table


def launching(calls: pl.DataFrame, work: list[pl.DataFrame]) -> pl.DataFrame:
    """The calls with a correlation id that a piece of work carries; of a call within a call under one id, the inner."""
    key = ["process", "correlation"]
    ids = np.concatenate([table["correlation"].to_numpy() for table in work])
    calls = calls[np.flatnonzero(among(calls["correlation"].to_numpy(), ids[ids != NO_ID]))]
    if len({p for table in (calls, *work) for p in np.unique(table["process"].to_numpy())}) > 1:
        correlated = pl.concat([table.select(key) for table in work])  # ids are per process; one needs no pairs
        calls = calls.join(correlated, on=key, how="semi", maintain_order="left")
    return one_call_each(calls)


def one_call_each(calls: pl.DataFrame) -> pl.DataFrame:
    """Of the calls under one correlation id the last to start: the driver's, inside the runtime's."""
    ids = np.sort(calls["correlation"].to_numpy(), kind="stable")
    if not (ids[1:] == ids[:-1]).any() and not (ids == NO_ID).any():
        return calls
    known = calls.filter(pl.col("correlation") != NO_ID).sort("start_ns", maintain_order=True)
    return known.unique(["process", "correlation"], keep="last", maintain_order=True)


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


def among(values: Ints, ids: Ints) -> Flags:
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
