"""Allocated bytes over time, by owner.

Moment j lies after event j - 1; moment 0 before the first. An allocation that starts with event s and ends with event e is
there from moment s + 1 up to moment e.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.errors import FlopwiseError


@dataclass(frozen=True)
class Timeline:
    """`by_owner_bytes[i, j]` are owner i's bytes at moment j; their sum over i is `allocated_bytes[j]`: the law."""

    owners: tuple[str, ...]
    by_owner_bytes: npt.NDArray[np.int64]
    allocated_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]

    @property
    def peak(self) -> int:
        """The first moment at which most is allocated."""
        return int(self.allocated_bytes.argmax())

    def at(self, moment: int) -> dict[str, int]:
        """What each owner has at a moment, the largest first, without those that have nothing."""
        found = zip(self.owners, self.by_owner_bytes[:, moment].tolist(), strict=True)
        return dict(sorted(((o, b) for o, b in found if b), key=lambda pair: -pair[1]))


def timeline(
    allocations: pl.DataFrame, owner: npt.NDArray[np.int64], owners: Sequence[str], reserved: npt.NDArray[np.int64]
) -> Timeline:
    """Add up; `owner` holds an index into `owners` for each allocation, `reserved` the bytes in segments at each moment.

    >>> table = pl.DataFrame({"start": [-1, 0], "end": [2, 1], "bytes": [512, 1024]})
    >>> found = timeline(table, np.array([0, 1]), ("parameters", "temporary"), np.array([2048, 2048, 2048]))
    >>> found.allocated_bytes.tolist(), found.peak, found.at(1)
    ([512, 1536, 512], 1, {'temporary': 1024, 'parameters': 512})
    """
    moments = len(reserved)
    start, end, size = (allocations[name].to_numpy() for name in ("start", "end", "bytes"))
    by_owner = np.empty((len(owners), moments), dtype=np.int64)
    for i in range(len(owners)):
        mine = owner == i
        deltas = _added(start[mine] + 1, size[mine], moments + 1) - _added(end[mine] + 1, size[mine], moments + 1)
        by_owner[i] = np.cumsum(deltas[:-1])
    line = Timeline(tuple(owners), by_owner, allocated_bytes(allocations, moments), reserved)
    check(line)
    return line


def allocated_bytes(allocations: pl.DataFrame, moments: int) -> npt.NDArray[np.int64]:
    """What is allocated at each moment, whoever owns it."""
    start, end, size = (allocations[name].to_numpy() for name in ("start", "end", "bytes"))
    deltas = _added(start + 1, size, moments + 1) - _added(end + 1, size, moments + 1)
    return np.asarray(np.cumsum(deltas[:-1]), dtype=np.int64)


def check(line: Timeline) -> None:
    """The law: at every moment the owners add up to what is allocated, and none has less than nothing."""
    if (line.by_owner_bytes.sum(axis=0) != line.allocated_bytes).any() or (line.by_owner_bytes < 0).any():
        raise FlopwiseError("the owners do not add up to the allocated bytes: a fault of flopwise", "please report it")


def _added(moments: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Bytes per moment; in integers, because np.bincount adds in floats, which lose bytes from 8 PiB on."""
    total = np.zeros(length, dtype=np.int64)
    np.add.at(total, moments, sizes)
    return total


def alive(allocations: pl.DataFrame, moment: int) -> npt.NDArray[np.bool_]:
    """Which allocations are there at a moment."""
    return np.asarray(
        (allocations["start"].to_numpy() < moment) & (moment <= allocations["end"].to_numpy()), dtype=np.bool_
    )


def thinned(
    values: npt.NDArray[np.int64], most: int, phases: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """About `most` positions that keep the shape: of each equal stretch the smallest and the largest, the ends, the peak.

    With `phases`, a number for each position, the peak of every stretch of one phase is kept too, up to `most` of them.

    >>> thinned(np.array([5, 0, 9, 1, 1, 1, 1, 2]), 6).tolist()
    [0, 1, 2, 4, 7]
    >>> thinned(np.array([5, 0, 9, 1, 1, 3, 1, 2]), 6, np.array([0, 0, 0, 0, 1, 1, 2, 2])).tolist()
    [0, 1, 2, 4, 5, 7]
    """
    n = len(values)
    if n <= most:
        return np.arange(n)
    edges = np.linspace(0, n, max(1, (most - 2) // 2) + 1).astype(np.int64)
    kept = {0, n - 1}
    for low, high in pairwise(edges.tolist()):
        if low < high:
            part = values[low:high]
            kept |= {low + int(part.argmin()), low + int(part.argmax())}
    if phases is not None:
        starts = [0, *(np.flatnonzero(np.diff(phases)) + 1).tolist(), n]
        kept |= {low + int(values[low:high].argmax()) for low, high in list(pairwise(starts))[-most:]}
    return np.array(sorted(kept))
