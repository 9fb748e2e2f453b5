"""How long a collective takes: a latency, and the bytes that its kind makes a link carry by the link's bandwidth.

Where it was measured, both numbers are fitted for each kind and number of ranks. Where it was not, they are NCCL's own model
of a ring: three protocols, of which it takes the fastest.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.predict import constants as fitted
from flopwise.predict.constants import NETWORK, NVLINK, PCIE
from flopwise.records.ceilings import MEASURED, SPECIFIED
from flopwise.work.collective import bus_factor, hops

__all__ = ["NETWORK", "NVLINK", "PCIE", "CollectiveRow", "CollectiveTime", "collective_time", "fit", "specified"]


class CollectiveRow(NamedTuple):
    """One measurement. `n_bytes`: of the larger of a rank's two buffers, as NCCL's tests count them."""

    kind: str
    ranks: int
    n_bytes: int
    ns: float


class Line(msgspec.Struct, frozen=True):
    """Nanoseconds by the bytes that a link carries."""

    latency_ns: float
    ns_per_byte: float

    def at(self, link_bytes: float) -> float:
        return self.latency_ns + link_bytes * self.ns_per_byte


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one kind of collective over so many ranks, by its bytes."""

    kind: str
    ranks: int
    lines: tuple[Line, ...]  # the fastest counts
    how: str  # 'measured' or 'specified'
    miss: float = 0.0  # median relative error of the rows that it was fitted to

    def ns(self, n_bytes: float) -> float:
        carried = n_bytes * bus_factor(self.kind, self.ranks)
        return min(line.at(carried) for line in self.lines)

    @property
    def latency_ns(self) -> float:
        return min(line.latency_ns for line in self.lines)

    @property
    def bus_bytes_s(self) -> float | None:
        """Of large messages; None where no size that was measured took longer than another."""
        slope = min(line.ns_per_byte for line in self.lines)
        return 1e9 / slope if slope else None


def fit(rows: Iterable[CollectiveRow]) -> tuple[CollectiveTime, ...]:
    """A latency and a bandwidth for each kind and number of ranks, by least squares of the relative error.

    Relative, because sizes differ by a million: the largest alone would decide otherwise.

    >>> rows = [CollectiveRow("all-reduce", 2, n, 5000 + n / 100) for n in (1_000, 1_000_000, 1_000_000_000)]
    >>> (found,) = fit(rows)
    >>> round(found.latency_ns), round(found.bus_bytes_s / 1e9)
    (5000, 100)
    """
    groups: dict[tuple[str, int], list[CollectiveRow]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.ranks), []).append(row)
    return tuple(_fit(kind, ranks, groups[kind, ranks]) for kind, ranks in sorted(groups))


def _fit(kind: str, ranks: int, rows: Sequence[CollectiveRow]) -> CollectiveTime:
    if any(not (row.ns > 0 and math.isfinite(row.ns) and row.n_bytes > 0) for row in rows):
        raise FlopwiseError(f"a time or a size of {kind} over {ranks} ranks is not above 0", "measure it again")
    if len({row.n_bytes for row in rows}) < 2:
        raise FlopwiseError(f"{kind} over {ranks} ranks was measured for one size", "two sizes or more give a line")
    carried = [row.n_bytes * bus_factor(kind, ranks) for row in rows]
    line = _relative_line(carried, [row.ns for row in rows])
    misses = [abs(line.at(x) / row.ns - 1) for x, row in zip(carried, rows, strict=True)]
    return CollectiveTime(kind=kind, ranks=ranks, lines=(line,), how=MEASURED, miss=median(misses))


def _relative_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line with the least sum of (line / y − 1)², neither of whose numbers is below zero."""
    scale = max(xs)
    starts, slopes = [1 / y for y in ys], [x / scale / y for x, y in zip(xs, ys, strict=True)]
    aa, bb = sum(p * p for p in starts), sum(q * q for q in slopes)
    ab = sum(p * q for p, q in zip(starts, slopes, strict=True))
    a, b = sum(starts), sum(slopes)
    start, slope = (a * bb - b * ab) / (aa * bb - ab**2), (b * aa - a * ab) / (aa * bb - ab**2)
    if start < 0:
        start, slope = 0, b / bb
    elif slope < 0:
        start, slope = a / aa, 0
    return Line(start, slope / scale)


def specified(kind: str, ranks: int, link: str, link_bytes_s: float) -> CollectiveTime:
    """By NCCL's own model of a ring over links of a class ('nvlink', 'pcie', 'network'), without trees or NVLink SHARP.

    `link_bytes_s`: what a rank can send in one direction, by the datasheet. All hops are over the same class of link: for
    ranks of which several share a host, `NETWORK` is an upper bound of the latency.

    >>> a100 = specified("all-reduce", 8, NVLINK, 300e9)
    >>> round(a100.latency_ns), a100.bus_bytes_s / 1e9
    (15000, 240.0)
    """
    reached = link_bytes_s * fitted.LINK_SHARES[link]
    lines = tuple(
        Line(protocol.base_ns + hops(kind, ranks) * protocol.hop_ns[link], 1e9 / (reached * protocol.share))
        for protocol in fitted.RING_PROTOCOLS
        if link in protocol.hop_ns
    )
    return CollectiveTime(kind=kind, ranks=ranks, lines=lines, how=SPECIFIED)


def collective_time(measured: Sequence[CollectiveTime], kind: str, ranks: int) -> CollectiveTime:
    """As measured; for another number of ranks, from the nearest one that was.

    Bus bandwidth is defined so that it does not depend on the ranks; the latency grows with the hops as NCCL's does.

    >>> (found,) = fit(CollectiveRow("all-gather", 2, n, 7200 + n / 100) for n in (1_000, 1_000_000))
    >>> eight = collective_time([found], "all-gather", 8)
    >>> round(eight.latency_ns), eight.bus_bytes_s == found.bus_bytes_s
    (10800, True)
    """
    same = [one for one in measured if one.kind == kind]
    if not same:
        raise FlopwiseError(f"{kind} was not measured on this machine", "fit it to measurements, or name a link")
    nearest = min(same, key=lambda one: (abs(math.log(one.ranks / ranks)), one.ranks))
    if nearest.ranks == ranks:
        return nearest
    protocol = fitted.RING_PROTOCOLS[0]  # that of short messages
    here, there = (protocol.base_ns + hops(kind, n) * protocol.hop_ns[NVLINK] for n in (ranks, nearest.ranks))
    lines = tuple(Line(line.latency_ns * here / there, line.ns_per_byte) for line in nearest.lines)
    return msgspec.structs.replace(nearest, ranks=ranks, lines=lines)
