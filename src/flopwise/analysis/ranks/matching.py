"""The same collective on every rank: by process group and sequence number, or by group, step and order where there is none."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from flopwise.analysis.collectives import SEND_RECEIVE
from flopwise.analysis.ranks.reading import EVENTS, Group, RankTrace
from flopwise.trace.tables import NO_ID

_PAIR = 1 << 24  # more than there are ranks
_FEW_ODD = 0.1  # of the collectives of a group in another order: its order tells which is which


@dataclass(frozen=True)
class Matched:
    """All collectives of all ranks, a row for each on each rank.

    `rows`: rank (which of the traces), row (in its events), EVENTS with `group`, `kind` and `step` numbered over all ranks,
    `collective` (NO_ID: found on no other rank). Times count from the same instant for all, by each rank's own clock.
    """

    rows: pl.DataFrame
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    steps: tuple[str, ...]  # by name, in order
    origin_ns: int  # that the times count from
    odd: int  # collectives whose kind differs from rank to rank: not matched


def step_keys(rank: RankTrace) -> list[str]:
    """A name for each step that the other ranks' traces have, too.

    >>> from types import SimpleNamespace
    >>> step_keys(SimpleNamespace(step_names=("ProfilerStep#3", "ProfilerStep#4")))
    ['ProfilerStep#3', 'ProfilerStep#4']
    >>> step_keys(SimpleNamespace(step_names=("step", "step")))
    ['step, 1', 'step, 2']
    """
    names = rank.step_names
    alike = len(set(names)) < len(names)
    return [f"{name}, {place}" if alike else name for place, name in enumerate(names, 1)]


def matched(ranks: Sequence[RankTrace]) -> Matched:
    """Find which rows are one collective."""
    origin = min(rank.begin_ns for rank in ranks)
    groups: dict[tuple[object, ...], int] = {}
    named: list[Group] = []
    kinds: dict[str, int] = {}
    steps = {key: place for place, key in enumerate(dict.fromkeys(key for one in ranks for key in step_keys(one)))}
    tables = []
    for place, rank in enumerate(ranks):
        for group in rank.groups:
            key = _key(group)
            if key not in groups:
                groups[key] = len(named)
                named.append(group)
        for kind in rank.kinds:
            kinds.setdefault(kind, len(kinds))
        tables.append(_rows(place, rank, origin, groups, kinds, steps))
    rows = pl.concat(tables)
    rows, odd = _numbered(rows, kinds.get(SEND_RECEIVE, NO_ID))
    return Matched(rows, tuple(named), tuple(kinds), tuple(steps), origin, odd)


def _key(group: Group) -> tuple[object, ...]:
    return (group.name, group.ranks if group.ranks is not None else group.size) if group.name else (group.stream,)


def _rows(
    place: int,
    rank: RankTrace,
    origin: int,
    groups: dict[tuple[object, ...], int],
    kinds: dict[str, int],
    steps: dict[str, int],
) -> pl.DataFrame:
    shift = rank.begin_ns - origin
    found = {name: rank.events[name] for name in EVENTS}
    for name in ("start_ns", "end_ns", "ready_ns"):
        found[name] = found[name] + shift
    found["group"] = _renumbered(found["group"], [groups[_key(group)] for group in rank.groups])
    found["kind"] = _renumbered(found["kind"], [kinds[kind] for kind in rank.kinds])
    found["step"] = _renumbered(found["step"], [steps[key] for key in step_keys(rank)])
    found["pair"] = _pairs(rank, found["group"], groups)
    n = len(found["group"])
    table = pl.DataFrame({"rank": np.full(n, place, np.int32), "row": np.arange(n, dtype=np.int32), **found})
    return table.with_columns(pl.col("group", "kind", "phase", "step").cast(pl.Int32)).drop("source", "target")


def _renumbered(values: np.ndarray, to: list[int]) -> np.ndarray:
    return np.append(np.array(to, dtype=np.int64), NO_ID)[np.where(values < 0, len(to), values)]


def _pairs(rank: RankTrace, group: np.ndarray, groups: dict[tuple[object, ...], int]) -> np.ndarray:
    """From whom to whom, of point-to-point calls that say so; the ranks in them are places within the group."""
    source, target = rank.events["source"], rank.events["target"]
    if (source < 0).all() and (target < 0).all():
        return np.full(len(source), NO_ID, np.int64)
    pairs = np.full(len(source), NO_ID, np.int64)
    members = {groups[_key(one)]: one.ranks for one in rank.groups}
    for i in np.flatnonzero((source >= 0) | (target >= 0)).tolist():
        ranks = members.get(int(group[i]))
        ends = [_global(int(end), ranks) if end >= 0 else rank.rank for end in (source[i], target[i])]
        if ends[0] != ends[1] and min(ends) >= 0 and max(ends) < _PAIR:
            pairs[i] = ends[0] * _PAIR + ends[1]
    return pairs


def _global(place: int, ranks: tuple[int, ...] | None) -> int:
    return ranks[place] if ranks is not None and place < len(ranks) else place


def _numbered(rows: pl.DataFrame, point_to_point: int) -> tuple[pl.DataFrame, int]:
    """`collective` for every row, and how many there are whose ranks do not agree on what it is."""
    direct = pl.col("kind") == point_to_point
    rows = rows.sort("rank", "start_ns", "end_ns", maintain_order=True).with_columns(direct=direct)
    numbered = pl.col("sequence") >= 0
    where = ["rank", "group", "pair", "direct", "step"]
    nth = pl.int_range(pl.len()).over(where)
    within = pl.int_range(pl.len()).over([*where, "kind"])
    again = pl.int_range(pl.len()).over(["rank", "group", "pair", "direct", "sequence"])
    rows = rows.with_columns(nth=pl.when(numbered).then(again).otherwise(nth), within=within)
    rows = rows.with_columns(in_step=pl.when(numbered).then(NO_ID).otherwise(pl.col("step")))
    key = ["group", "pair", "direct", "in_step", "sequence"]
    odd_here = pl.col("kind").n_unique().over([*key, "nth"]) > 1
    odd = rows.with_columns(odd=odd_here).group_by("group").agg(pl.col("odd").mean())
    mixed = odd.filter(pl.col("odd") > _FEW_ODD)["group"].to_list()
    by_kind = pl.col("group").is_in(mixed) & ~numbered
    rows = rows.with_columns(
        nth=pl.when(by_kind).then("within").otherwise("nth"), only=pl.when(by_kind).then("kind").otherwise(NO_ID)
    )
    key = [*key, "only", "nth"]
    rows = rows.with_columns(
        collective=pl.struct(key).rank("dense").cast(pl.Int64) - 1,
        kinds=pl.col("kind").n_unique().over(key),
        ranks=pl.col("rank").n_unique().over(key),
        times=pl.len().over(key),
    )
    clash = (pl.col("kinds") > 1) | (pl.col("times") > pl.col("ranks"))
    n_odd = rows.filter(clash)["collective"].n_unique()
    alone = clash | (pl.col("ranks") < 2)
    rows = rows.with_columns(collective=pl.when(alone).then(NO_ID).otherwise("collective"))
    return rows.drop("direct", "nth", "within", "in_step", "only", "kinds", "ranks", "times"), n_odd
