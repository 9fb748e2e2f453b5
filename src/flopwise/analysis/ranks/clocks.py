"""The clocks of ranks, aligned by the collectives themselves: one that all take part in ends at nearly the same moment for all.

Within a group, a rank's clock is ahead by the median, over the group's collectives, of how much later than its group's median it
sees them end. Groups that share ranks are joined, the largest first; ranks that no group joins keep the clocks they have. A link
that makes one rank always end later than the others by the same time cannot be told from a clock.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from flopwise.analysis.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from flopwise.analysis.intervals import Times
from flopwise.analysis.ranks.matching import Matched
from flopwise.trace.tables import NO_ID

_TOGETHER = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)  # nobody is done before all have given
_POLISHED = 2  # rounds over all collectives at once


@dataclass(frozen=True)
class Clocks:
    """How far each rank's clock is ahead of the first one's, in nanoseconds."""

    ahead_ns: Times
    residual_ns: float  # median over the collectives of how far apart they end once aligned
    joined: bool  # whether collectives join all ranks


def aligned_clocks(found: Matched, ranks: int) -> Clocks:
    """By the collectives that all members end together; by any others where there are none."""
    rows = found.rows.filter(pl.col("collective") != NO_ID).select("rank", "group", "kind", "collective", "end_ns")
    together = [place for place, kind in enumerate(found.kinds) if kind in _TOGETHER]
    surely = rows.filter(pl.col("kind").is_in(together))
    rest = rows.filter(~pl.col("group").is_in(surely["group"].unique().to_list()))
    ahead, known = _joined(surely, ranks)
    if not known.all() and rest.height:
        ahead, known = _joined(pl.concat([surely, rest]), ranks)
        surely = pl.concat([surely, rest])
    for _ in range(_POLISHED):
        ahead = _polished(surely, ahead, known)
    ahead = np.rint(ahead - ahead[0]).astype(np.int64)
    left = surely.with_columns(off=pl.col("end_ns") - pl.Series(ahead).gather(surely["rank"]))
    apart = left.group_by("collective").agg((pl.col("off").max() - pl.col("off").min()).alias("apart"))["apart"]
    return Clocks(ahead, float(apart.median() or 0.0), bool(known.all()))  # type: ignore[arg-type]


def _joined(rows: pl.DataFrame, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Clocks of ranks that are joined with the most others, and which these are; the rest have 0."""
    within = rows.with_columns(off=pl.col("end_ns") - pl.col("end_ns").median().over("collective"))
    offsets = within.group_by("group", "rank").agg(pl.col("off").median(), pl.len().alias("n")).sort("group", "rank")
    groups = [
        (number, part["rank"].to_numpy(), part["off"].to_numpy())
        for (number,), part in offsets.group_by("group", maintain_order=True)
    ]
    waiting = sorted(groups, key=lambda group: (-len(group[1]), group[0]))
    ahead, known = np.zeros(ranks), np.zeros(ranks, dtype=bool)
    if waiting:
        _, members, off = waiting.pop(0)
        ahead[members], known[members] = off, True
    while waiting:
        place = next((i for i, group in enumerate(waiting) if known[group[1]].any()), None)
        if place is None:
            break
        _, members, off = waiting.pop(place)
        shared = known[members]
        moved = off + np.median(ahead[members[shared]] - off[shared])
        ahead[members[~shared]], known[members[~shared]] = moved[~shared], True
    return ahead, known


def _polished(rows: pl.DataFrame, ahead: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Each clock by all of its rank's collectives at once."""
    if not rows.height:
        return ahead
    now = rows.with_columns(off=pl.col("end_ns") - pl.Series(ahead).gather(rows["rank"]))
    now = now.with_columns(off=pl.col("off") - pl.col("off").median().over("collective"))
    moved = now.group_by("rank").agg(pl.col("off").median())
    better = ahead.copy()
    better[moved["rank"].to_numpy()] += moved["off"].to_numpy()
    return np.where(known, better, ahead)
