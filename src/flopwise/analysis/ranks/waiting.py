"""Waiting apart from transfer, on every rank: a collective waits until its last rank has arrived, and moves data from then on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times, covered_within, overlaps
from flopwise.analysis.ranks.clocks import Clocks
from flopwise.analysis.ranks.matching import Matched, step_keys
from flopwise.analysis.ranks.reading import RankTrace
from flopwise.analysis.ranks.states import (
    COMPUTE,
    COPY,
    IDLE,
    INPUT,
    KINDS,
    NAMES,
    OWN,
    TRANSFER,
    WAITING,
    States,
    divided,
)
from flopwise.trace.tables import NO_ID

PARTS = [f"{name}_part" for name in NAMES]  # what a rank did since the end of the group's collective before
OWN_PARTS = ("own_compute_ns", "own_input_ns", "own_idle_ns", "own_late_ns")  # the last: it began its first step later
PAIRS = 1 << 32  # what the numbers of pairs of ranks begin with, among teams
# Collectives without a name whose ends are further apart are not the same: what clocks are uncertain by, at least and at most.
_ENDS_NS, _RESIDUALS, _MOST_ENDS_NS = 20_000, 4.0, 1_000_000
_COLD = 3  # steps from which on the first is left out: profilers and caches are cold in it


@dataclass(frozen=True)
class AlignedRank:
    """A rank's states with waiting and transfer apart, on the common clock."""

    states: States
    edges: Times  # of the steps that the figures are of: begin and end of each, a row each
    begun_ns: int  # when the first of them began
    tail_ns: int = 0  # what it did by itself from its last collective to the end


@dataclass(frozen=True)
class Waits:
    """`rows`: Matched.rows of the steps that the figures are of, on the common clock, with

    last_ns (when the last rank arrived), waiting_ns, transfer_ns, exposed_ns, hidden_ns, exposed_end (the rank computed
    nothing when it ended), OWN_PARTS (what the rank did by itself since its collective before), PARTS and began_ns.
    """

    rows: pl.DataFrame
    ranks: tuple[AlignedRank, ...]
    steps: tuple[str, ...]

    @property
    def step_ns(self) -> float:
        """From the first rank's beginning to the last one's end, per step."""
        first = min(rank.begun_ns for rank in self.ranks)
        return (max(int(rank.edges[-1, 1]) for rank in self.ranks) - first) / max(1, len(self.steps))


def team_of() -> pl.Expr:
    """Those who move data together: the group, or of point-to-point calls the pair."""
    return pl.when(pl.col("pair") >= 0).then(pl.col("pair") + PAIRS).otherwise(pl.col("group").cast(pl.Int64))


def excess(rows: pl.DataFrame, rank: int) -> pl.DataFrame:
    """By how much what a rank did by itself before each row is more than what the median of the collective's others did; 0 for
    rows of other ranks, and where there are no others. In the order of `rows`."""
    own = rows.select("collective", "rank", *OWN_PARTS)
    usual = (
        own.filter(pl.col("rank") != rank)
        .group_by("collective")
        .agg(pl.col(part).median().alias(f"{part}_usual") for part in OWN_PARTS)
    )
    joined = own.join(usual, on="collective", how="left", maintain_order="left")
    mine = pl.col("rank") == rank
    return joined.select(
        pl.when(mine).then(pl.col(part) - pl.col(f"{part}_usual")).otherwise(0).fill_null(0).alias(part)
        for part in OWN_PARTS
    )


def analysed_steps(ranks: Sequence[RankTrace]) -> tuple[str, ...]:
    """The steps that every rank has, in order; without the first, which is cold, where there are several."""
    keys = [step_keys(rank) for rank in ranks]
    common = set.intersection(*map(set, keys))
    found = [key for key in keys[0] if key in common]
    return tuple(found[1:] if len(found) >= _COLD else found)


def waits(ranks: Sequence[RankTrace], found: Matched, clocks: Clocks, steps: Sequence[str]) -> Waits:
    """Everything that is known of each collective on each rank."""
    ahead = pl.Series(clocks.ahead_ns)
    times = ("start_ns", "end_ns", "ready_ns")
    rows = found.rows.with_columns(pl.col(name) - ahead.gather(found.rows["rank"]) for name in times)
    rows = _apart(rows, [place for place, group in enumerate(found.groups) if not group.name], clocks.residual_ns)
    alone = pl.col("collective") == NO_ID  # of one rank only: it waits for nobody that is known
    single = pl.int_range(pl.len()) + pl.col("collective").max() + 1
    rows = rows.with_columns(matched=~alone, collective=pl.when(alone).then(single).otherwise("collective"))
    rows = rows.with_columns(last_ns=pl.col("start_ns").max().over("collective"))
    rows = rows.with_columns(last_ns=pl.min_horizontal("last_ns", "end_ns"))
    rows = rows.with_columns(waiting_ns=pl.col("last_ns") - pl.col("start_ns"))
    rows = rows.with_columns(transfer_ns=pl.col("end_ns") - pl.col("start_ns") - pl.col("waiting_ns"))
    numbers = [found.steps.index(step) for step in steps]
    aligned, tables = [], []
    parts = rows.partition_by("rank", as_dict=True, maintain_order=True)
    first = min(
        _edges(rank, rank.begin_ns - found.origin_ns - int(clocks.ahead_ns[place]), steps)[0, 0]
        for place, rank in enumerate(ranks)
    )
    for place, rank in enumerate(ranks):
        shift = rank.begin_ns - found.origin_ns - int(clocks.ahead_ns[place])
        own = parts.get((place,), rows.clear())
        states = divided(rank.states.shifted(shift), own["start_ns"].to_numpy(), own["last_ns"].to_numpy())
        edges = _edges(rank, shift, steps)
        late = overlaps((rank.late[0] + shift, rank.late[1] + shift), states.times_of(TRANSFER))
        table = _measured(own, states, late, int(edges[0, 0]), int(first), numbers)
        since = int(table["ready_ns"].max() or edges[0, 0])  # type: ignore[arg-type]
        spent = np.diff(states.spent(np.array([since, edges[-1, 1]])), axis=0)[0]
        aligned.append(AlignedRank(states, edges, int(edges[0, 0]), int(spent[list(OWN)].sum())))
        tables.append(table)
    return Waits(pl.concat(tables), tuple(aligned), tuple(steps))


def _apart(rows: pl.DataFrame, nameless: Sequence[int], residual_ns: float) -> pl.DataFrame:
    """Without names, collectives of several groups may have been taken for one: those that end at different times are others."""
    least = min(max(_ENDS_NS, _RESIDUALS * residual_ns), _MOST_ENDS_NS)
    doubtful = pl.col("group").is_in(list(nameless)) & (pl.col("collective") != NO_ID)
    rows = rows.sort("collective", "end_ns", maintain_order=True)
    begins = (pl.col("end_ns").diff() > least).fill_null(False)  # within a collective
    rows = rows.with_columns(
        part=pl.when(doubtful).then(begins.cast(pl.Int64).cum_sum().over("collective")).otherwise(0)
    )
    key = ["collective", "part"]
    single = doubtful & (pl.len().over(key) < 2)
    number = pl.struct(key).rank("dense").cast(pl.Int64) - 1
    return rows.with_columns(
        collective=pl.when(single | (pl.col("collective") == NO_ID)).then(NO_ID).otherwise(number)
    ).drop("part")


def _edges(rank: RankTrace, shift: int, steps: Sequence[str]) -> Times:
    keys = step_keys(rank)
    places = [keys.index(step) for step in steps]
    return np.stack([rank.step_edges[places], rank.step_edges[np.array(places) + 1]], axis=1) + shift


def _measured(
    own: pl.DataFrame, states: States, late: tuple[Times, Times], begun: int, first: int, steps: Sequence[int]
) -> pl.DataFrame:
    """What the rank did before, during and at the end of each of its collectives."""
    own = own.sort("ready_ns", "start_ns", "end_ns", maintain_order=True)
    start, end, ready = (own[name].to_numpy() for name in ("start_ns", "end_ns", "ready_ns"))
    inside = states.spent(end) - states.spent(start)
    before, began = _before(own["group"].to_numpy(), end, begun, first)
    since = _between(states, late, np.minimum(before, start), start)
    shared = own[
        "matched"
    ].to_numpy()  # what is done before a collective that no other rank has counts for the next one
    alone, late_ns = np.zeros((len(start), KINDS), np.int64), np.zeros(len(start), np.int64)
    alone[shared] = _between(states, late, np.concatenate(([begun], ready[shared]))[:-1], ready[shared])
    late_ns[np.flatnonzero(shared)[:1]] = begun - first
    own = own.with_columns(
        pl.Series("exposed_ns", inside[:, TRANSFER] + inside[:, WAITING]),
        pl.Series("hidden_ns", inside[:, COMPUTE]),
        pl.Series("exposed_end", states.at(end) != COMPUTE),
        pl.Series(OWN_PARTS[0], alone[:, COMPUTE]),
        pl.Series(OWN_PARTS[1], alone[:, COPY] + alone[:, INPUT]),
        pl.Series(OWN_PARTS[2], alone[:, IDLE]),
        pl.Series(OWN_PARTS[3], late_ns),
        pl.Series("began_ns", began),
        *(pl.Series(PARTS[kind], since[:, kind]) for kind in range(KINDS)),
    )
    return own.filter(pl.col("step").is_in(steps))


def _before(group: np.ndarray, end: Times, begun: int, first: int) -> tuple[Times, Times]:
    """When the group's collective before each had ended; of the first, when the rank began, and how late that was."""
    before, began = np.full(len(end), begun), np.zeros(len(end), np.int64)
    seen: dict[int, int] = {}
    for place, number in enumerate(group.tolist()):
        if number in seen:
            before[place] = end[seen[number]]
        else:
            began[place] = begun - first
        seen[number] = place
    return before, began


def _between(states: States, late: tuple[Times, Times], low: Times, high: Times) -> np.ndarray:
    """Nanoseconds in each state; a transfer during which the host was late with what comes next counts as idle."""
    found: np.ndarray = np.maximum(0, states.spent(high) - states.spent(low))
    behind = covered_within(low, np.maximum(low, high), *late)
    found[:, TRANSFER] -= behind
    found[:, IDLE] += behind
    return found


def parts_of_steps(rank: AlignedRank) -> np.ndarray:
    """Nanoseconds in each state, per step; they add up to the step."""
    begin, end = rank.states.spent(rank.edges[:, 0]), rank.states.spent(rank.edges[:, 1])
    parts = (end - begin).sum(axis=0)
    parts[IDLE] += int((rank.edges[:, 1] - rank.edges[:, 0]).sum()) - int(parts.sum())
    mean: np.ndarray = parts / len(rank.edges)
    return mean
