"""Tables that grow while a file is read, and whose rows go to a temporary file once there are too many to hold.

A row is written once and read back once: column by column where all of them are wanted, or a few thousand rows at a time where
some are chosen.
"""

import errno
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from flopwise.errors import FlopwiseError
from flopwise.trace.columns import GrowingColumn, NumberType

PIECE_ROWS = 1 << 18  # that are written, or read back, at a time
ROOM = "free some space, or name a temporary folder with more room: TMPDIR=/path"

Rows = dict[str, NDArray[Any]]


class TooManyRows(Exception):
    """More rows were chosen than may be held."""


class GrowingTable:
    """Columns of the same length; `spill` moves what is held to the file.

    >>> table = GrowingTable({"start_ns": np.int64, "name": np.uint32})
    >>> table.append({"start_ns": np.array([5, 6]), "name": np.array([0, 1])})
    >>> table.spill()
    >>> table.append({"start_ns": np.array([2**40]), "name": np.array([0])})
    >>> table.keep(lambda rows: {name: values[rows["name"] == 0] for name, values in rows.items()}, most=2)
    >>> table.pop("start_ns")
    array([            5, 1099511627776])
    """

    def __init__(self, types: Mapping[str, NumberType]) -> None:
        self._types = dict(types)
        self._held = self._empty()
        self._file: IO[bytes] | None = None
        self._written: list[tuple[int, dict[str, tuple[int, np.dtype[Any]]]]] = []  # rows; where each column's begin
        self._spilled = 0

    def _empty(self) -> dict[str, GrowingColumn]:
        return {name: GrowingColumn(dtype) for name, dtype in self._types.items()}

    @property
    def held(self) -> int:
        """Rows in memory."""
        return len(next(iter(self._held.values())))

    def __len__(self) -> int:
        return self._spilled + self.held

    def append(self, rows: Mapping[str, NDArray[Any]]) -> None:
        for name, column in self._held.items():
            column.append(rows[name])

    def spill(self) -> None:
        """Write what is held to the file."""
        if not self.held:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="flopwise-")  # noqa: SIM115 (closed by _close)
            at = self._file.seek(0, 2)
            places = {}
            for name, column in self._held.items():
                values = column.stored()
                places[name] = (at, values.dtype)
                at += self._file.write(values.data)
            self._file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            folder = tempfile.gettempdir()
            raise FlopwiseError(f"no room for the rows of this trace in the temporary folder {folder}", ROOM) from error
        self._written.append((self.held, places))
        self._spilled += self.held
        self._held = self._empty()

    def pieces(self, *names: str) -> Iterator[Rows]:
        """These columns (all, if none is named), a few rows at a time, in the order in which they came."""
        names = names or tuple(self._types)
        for count, places in self._written:
            for first in range(0, count, PIECE_ROWS):
                n = min(PIECE_ROWS, count - first)
                yield {name: self._read(*places[name], name, first, n) for name in names}
        for first in range(0, self.held, PIECE_ROWS):
            yield {name: self._held[name].values(slice(first, first + PIECE_ROWS)) for name in names}

    def _read(self, at: int, dtype: np.dtype[Any], name: str, first: int, count: int) -> NDArray[Any]:
        assert self._file is not None
        self._file.seek(at + first * dtype.itemsize)
        values: NDArray[Any] = np.frombuffer(self._file.read(count * dtype.itemsize), dtype)
        return values.astype(self._types[name], copy=False)

    def keep(self, chosen: Callable[[Rows], Rows], most: int) -> None:
        """Replace the rows by what is chosen of them, which is then held; at most `most` rows."""
        kept = GrowingTable(self._types)
        for rows in self.pieces():
            kept.append(chosen(rows))
            if len(kept) > most:
                raise TooManyRows
        self._close()
        self._held = kept._held

    def pop(self, name: str, order: NDArray[np.integer] | slice = slice(None)) -> NDArray[Any]:
        """A whole column, in another order if one is given; its memory is no longer held here."""
        if not self._written:
            return self._held.pop(name).values(order)
        whole = np.concatenate([rows[name] for rows in self.pieces(name)])
        del self._held[name]
        if not self._held:
            self._close()
        return whole[order]

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._written, self._spilled = None, [], 0
