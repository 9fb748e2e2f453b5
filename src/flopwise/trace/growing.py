"""Columns while a file is read: they grow, and then become a table."""

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

_FEW = 1000  # rows that are not worth the trouble


class Growing:
    """Values in one piece, so that all of their memory goes back at once; 32 bits wide where that is enough.

    >>> column = Growing()
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

    def values(self) -> NDArray[Any]:
        """All of them, at full width; a copy where they were kept narrow."""
        found: NDArray[Any] = np.frombuffer(self._bytes, self._dtype).astype(self._wide, copy=False)
        return found

    def ordered(self, order: NDArray[np.integer]) -> NDArray[Any]:
        """All of them in another order, at full width."""
        found: NDArray[Any] = np.frombuffer(self._bytes, self._dtype)[order].astype(self._wide, copy=False)
        return found


def compact(columns: dict[str, NDArray[Any]]) -> pl.DataFrame:
    """A table of these columns; a value that is the same in all rows (a process, a device) is held once."""
    if len(next(iter(columns.values()))) < _FEW:
        return pl.DataFrame(columns)
    same = {name: bool((values == values[0]).all()) for name, values in columns.items()}
    literals = [
        pl.lit(values[0].item(), pl.Series(values[:1]).dtype).alias(name)
        for name, values in columns.items()
        if same[name]
    ]
    rest = {name: values for name, values in columns.items() if not same[name]}
    if not rest or not literals:
        return pl.DataFrame(columns)
    return pl.DataFrame(rest).with_columns(literals)[list(columns)]
