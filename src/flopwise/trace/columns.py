"""Columns that grow while a file is read, and the tables made of them."""

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise.trace.tables import NO_ID, TABLES

_FEW = 1000  # rows below which compacting is not worth it


class GrowingColumn:
    """Values in one buffer, so that all of its memory is returned at once; 32 bits wide while that is enough.

    >>> column = GrowingColumn()
    >>> column.append(np.array([1, 2]))
    >>> column.append(np.array([2**40]))
    >>> column.values()
    array([            1,             2, 1099511627776])
    """

    def __init__(self, dtype: type[np.int64 | np.uint32 | np.bool_] = np.int64) -> None:
        self._bytes = bytearray()
        self._wide: np.dtype[Any] = np.dtype(dtype)
        self._dtype: np.dtype[Any] = np.dtype(np.int32) if dtype is np.int64 else self._wide

    def append(self, values: NDArray[Any]) -> None:
        if self._dtype == np.int32 and len(values) and not -(2**31) <= values.min() <= values.max() < 2**31:
            self._bytes, self._dtype = bytearray(self.values().tobytes()), self._wide
        self._bytes += values.astype(self._dtype, copy=False).tobytes()

    def __len__(self) -> int:
        return len(self._bytes) // self._dtype.itemsize

    def values(self, order: NDArray[np.integer] | slice = slice(None)) -> NDArray[Any]:
        """All values at full width, in another order if one is given; a copy where they were kept narrow."""
        values: NDArray[Any] = np.frombuffer(self._bytes, self._dtype)[order].astype(self._wide, copy=False)
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
    """The tables of a Trace, each with exactly the columns of its schema; they are taken out of `tables` one by one."""
    return {name: _shaped(tables.pop(name), TABLES[name]) for name in list(tables)}


def _shaped(table: pl.DataFrame, schema: dict[str, Any]) -> pl.DataFrame:
    """A device number that is too large for its column is unknown."""
    table = table[list(schema)]
    others = [pl.col(name).cast(dtype, strict=False) for name, dtype in schema.items() if table.schema[name] != dtype]
    return table.with_columns(others).with_columns(pl.col(pl.Int32).fill_null(NO_ID)) if others else table
