"""Allocated bytes over time, by owner.

Moment j lies after event j - 1; moment 0 before the first. An allocation that starts with event s and ends with event e is
there from moment s + 1 up to moment e.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from flopwise.errors import FlopwiseError
from flopwise.snapshot.snapshot import Flags, Ints


@dataclass(frozen=True)
class Timeline:
    """`by_owner_bytes[i, j]` are owner i's bytes at moment j; their sum over i is `allocated_bytes[j]`: the law."""

    owners: tuple[str, ...]
    by_owner_bytes: Ints
    allocated_bytes: Ints
    reserved_bytes: Ints

    @property
    def peak(self) -> int:
        """The first moment at which most is allocated."""
        return int(self.allocated_bytes.argmax())

    def at(self, moment: int) -> dict[str, int]:
        """What each owner has at a moment, the largest first, without those that have nothing."""
        pairs = zip(self.owners, self.by_owner_bytes[:, moment].tolist(), strict=True)
        return dict(sorted(((owner, size) for owner, size in pairs if size), key=lambda pair: -pair[1]))


def timeline(allocations: pl.DataFrame, owner: Ints, owners: Sequence[str], reserved: Ints) -> Timeline:
    """Sum over time; `owner` holds an index into `owners` for each allocation, `reserved` the bytes in segments at each moment.

    >>> table = pl.DataFrame({"start": [-1, 0], "end": [2, 1], "bytes": [512, 1024]})
    >>> line = timeline(table, np.array([0, 1]), ("parameters", "temporary"), np.array([2048, 2048, 2048]))
    >>> line.allocated_bytes.tolist(), line.peak, line.at(1)
    ([512, 1536, 512], 1, {'temporary': 1024, 'parameters': 512})
    """
    moments = len(reserved)
    by_owner = np.stack([allocated_bytes(allocations, moments, owner == i) for i in range(len(owners))])
    line = Timeline(tuple(owners), by_owner, allocated_bytes(allocations, moments), reserved)
    check(line)
    return line


def allocated_bytes(allocations: pl.DataFrame, moments: int, chosen: Flags | slice = slice(None)) -> Ints:
    """What is allocated at each moment, by all allocations or those `chosen`."""
    start, end, size = (allocations[name].to_numpy()[chosen] for name in ("start", "end", "bytes"))
    deltas = np.zeros(
        moments + 1, dtype=np.int64
    )  # integers: np.bincount adds in floats, which lose bytes from 8 PiB on
    np.add.at(deltas, start + 1, size)
    np.subtract.at(deltas, end + 1, size)
    return np.asarray(np.cumsum(deltas[:-1]), dtype=np.int64)


def check(line: Timeline) -> None:
    """The law: at every moment the owners add up to what is allocated, and none has less than nothing."""
    if (line.by_owner_bytes.sum(axis=0) != line.allocated_bytes).any() or (line.by_owner_bytes < 0).any():
        raise FlopwiseError("the owners do not add up to the allocated bytes: a bug in flopwise", "please report it")


def alive(allocations: pl.DataFrame, moment: int) -> Flags:
    """Which allocations are there at a moment."""
    start, end = allocations["start"].to_numpy(), allocations["end"].to_numpy()
    return np.asarray((start < moment) & (moment <= end), dtype=np.bool_)


def thinned(values: Ints, most: int, phases: Ints | None = None) -> Ints:
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
