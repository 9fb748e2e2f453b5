"""The rank that the others wait for, with its cause, and what the step would save if it were as fast as the median rank.

A collective's last rank is late by as much as it arrives after the median rank. What it did since the group's collective
before, which ended for all at once, is compared part by part with what the median of the others did: the part that is longer
by most is the cause. Waiting in another group is no cause: the blame goes to the rank that was last there. Transfers are compared
with those of groups that move as much: one that is slower has a slow link.

The saving is by replay: the collectives are run again with every rank's own time between them, and the straggler's as long as the
median of its group's ranks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from flopwise import units
from flopwise.analysis.ranks.matching import Matched
from flopwise.analysis.ranks.reading import RankTrace
from flopwise.analysis.ranks.replay import Replay
from flopwise.analysis.ranks.waiting import PAIRS, PARTS, Waits, excess, team_of
from flopwise.records.ranks import BEGAN_LATE, HOST_LATE, INPUT, LINK, MORE_COMPUTE, SLOWER_CLOCK, Straggler

_SLOW_LINK = 1.25  # times what other groups take for as many bytes
_PEERS = 3  # groups from which on one can be called slow
_CANDIDATES = 3  # ranks whose saving is computed
_SAME_WORK = 0.02  # relative difference in the number of kernels
_SLOWER, _SLOWEST = 1.02, 2.5  # times the median rank's time, for the same kernels: a clock does not slow down further
STRAGGLER_SHARE = 0.01  # of the step. Judgement
_RESIDUALS = 2.0  # times what the clocks are uncertain by
_COMPUTE, _TRANSFER, _WAITING, _COPY, _INPUT, _IDLE = PARTS


@dataclass(frozen=True)
class Blame:
    """Why a collective waited: for whom, and what they did."""

    rank: int  # place among the traces; -1: of a group
    cause: str
    team: int = -1  # whose link is slow
    late_ns: int = 0
    excess_ns: int = 0  # of the part that is the cause


def blamed(found: Waits, residual_ns: float) -> dict[int, Blame]:
    """For each collective that ranks waited in: who came last, and why."""
    rows = found.rows.filter("matched").sort("collective", "start_ns", maintain_order=True)
    parts = [_COMPUTE, _COPY, _INPUT, _IDLE, _TRANSFER, _WAITING, "began_ns"]
    others = [pl.col(part).slice(0, pl.len() - 1).median().alias(f"{part}_others") for part in parts]
    last = rows.group_by("collective", maintain_order=True).agg(
        pl.col("rank").last(),
        pl.col("start_ns").last().alias("arrived_ns"),
        (pl.col("start_ns").last() - pl.col("start_ns").slice(0, pl.len() - 1).median()).alias("late_ns"),
        *(pl.col(part).last() for part in parts),
        *others,
    )
    of_rank = {rank: part for (rank,), part in rows.sort("start_ns").group_by("rank")}
    blames: dict[int, Blame] = {}
    for row in last.sort("arrived_ns").iter_rows(named=True):
        late = int(row["late_ns"])
        if late <= _RESIDUALS * residual_ns:
            continue
        longer = {part: row[part] - (row[f"{part}_others"] or 0.0) for part in parts}
        causes = {
            MORE_COMPUTE: longer[_COMPUTE],
            INPUT: longer[_COPY] + longer[_INPUT],
            HOST_LATE: longer[_IDLE],
            BEGAN_LATE: longer["began_ns"],
            LINK: longer[_TRANSFER],
            "": longer[_WAITING],
        }
        cause = max(causes, key=lambda one: causes[one])
        blame = Blame(int(row["rank"]), cause, -1, late, int(causes[cause]))
        if cause in ("", LINK):
            blame = _passed_on(blame, of_rank[row["rank"]], row["arrived_ns"], late, blames)
        blames[int(row["collective"])] = blame
    return blames


def _passed_on(blame: Blame, rows: pl.DataFrame, until: int, late: int, blames: dict[int, Blame]) -> Blame:
    """Of a rank that came last because it had waited, or moved data, elsewhere: for whom, or in which group."""
    column = "transfer_ns" if blame.cause == LINK else "waiting_ns"
    near = rows.filter(pl.col("start_ns") < until).tail(64)
    near = near.filter(pl.col("end_ns") > until - 4 * late)
    if not near.height:
        return Blame(blame.rank, HOST_LATE, -1, late, blame.excess_ns)
    before = near.sort(column).tail(1).row(0, named=True)
    if blame.cause == LINK:
        return Blame(-1, LINK, int(before["group"]), late, blame.excess_ns)
    root = blames.get(int(before["collective"]))
    return Blame(root.rank, root.cause, root.team, late, root.excess_ns) if root is not None else blame


def slow_teams(found: Waits) -> dict[int, float]:
    """Groups, or pairs of ranks, that take longer than others for as many bytes: how many times as long."""
    rows = found.rows.filter("matched")
    each = (
        rows.with_columns(team=team_of())
        .group_by("collective")
        .agg(
            pl.col("team").first(),
            pl.col("kind").first(),
            pl.col("bytes").max(),
            pl.len().alias("n"),
            pl.col("transfer_ns").min(),
        )
    )
    alike = ["kind", "bytes", "n"]
    teams = each.group_by(*alike, "team").agg(pl.col("transfer_ns").median())
    teams = teams.with_columns(usual=pl.col("transfer_ns").median().over(alike), peers=pl.len().over(alike)).filter(
        (pl.col("peers") >= _PEERS) & (pl.col("usual") > 0)
    )
    slow = teams.with_columns(ratio=pl.col("transfer_ns") / pl.col("usual")).group_by("team").agg(pl.col("ratio").min())
    return {int(one): float(ratio) for one, ratio in slow.iter_rows() if ratio >= _SLOW_LINK}


def stragglers(
    ranks: Sequence[RankTrace], found: Waits, matched: Matched, blames: dict[int, Blame], residual_ns: float
) -> tuple[Straggler, ...]:
    """Those that cost the step most, the first one first."""
    replay = Replay(found)
    slow = slow_teams(found)
    scores: defaultdict[int, int] = defaultdict(int)
    for blame in blames.values():
        if blame.rank >= 0:
            scores[blame.rank] += blame.late_ns
    worth = STRAGGLER_SHARE * found.step_ns
    candidates = sorted(scores, key=lambda rank: -scores[rank])[:_CANDIDATES]
    result = [_of_rank(ranks, place, found, replay) for place in candidates]
    if slow:
        result.append(_of_link(ranks, found, matched, slow, replay))
    kept = [one for one in result if one.saving_ns >= max(worth, _RESIDUALS * residual_ns)]
    return tuple(sorted(kept, key=lambda one: -one.saving_ns))


def _of_rank(ranks: Sequence[RankTrace], place: int, found: Waits, replay: Replay) -> Straggler:
    steps = max(1, len(found.steps))
    more = [float(ns) / steps for ns in excess(found.rows, place).sum().row(0)]
    longer = dict(zip((MORE_COMPUTE, INPUT, HOST_LATE, BEGAN_LATE), more, strict=True))
    within = {one: ns for one, ns in longer.items() if one != BEGAN_LATE}
    cause = max(longer, key=lambda one: longer[one])
    if cause == BEGAN_LATE and 4 * max(within.values()) >= longer[cause]:  # what it does in the step says more
        cause = max(within, key=lambda one: within[one])
    cause, because = (
        _computing(ranks, place) if cause == MORE_COMPUTE else (cause, _because(cause, longer[cause], ranks[place].gpu))
    )
    whole = found.rows.filter("matched")
    last = whole.filter(pl.col("start_ns") == pl.col("start_ns").max().over("collective"), pl.col("rank") == place)
    return Straggler(
        rank=ranks[place].rank,
        cause=cause,
        because=because,
        late_ns=sum(more),
        began_late_ns=max(0.0, longer[BEGAN_LATE]),
        last=last.height,
        collectives=whole.filter(pl.col("rank") == place).height,
        saving_ns=max(0.0, replay.saving_ns(place) / steps),
    )


def _because(cause: str, late_ns: float, gpu: str) -> str:
    late = units.duration(late_ns)
    host = f"its host launches late (by {late} in all, compared with the median rank)"
    return {
        HOST_LATE: host if gpu else f"between ops it does nothing for {late} longer than the median rank",
        INPUT: f"it waits {late} longer for its input",
        BEGAN_LATE: f"it began the first traced step {late} after the median rank",
        LINK: f"its transfers take {late} longer",
    }.get(cause, f"it computes for {late} longer")


@dataclass(frozen=True)
class _SharedKernels:
    """Kernels that a rank shares with most others: times that each takes, of the median rank's; how often it runs; its time."""

    names: list[str]
    slower: list[float]
    more: list[float]
    ns: list[int]

    def quantile(self, values: list[float], share: float) -> float:
        """By time."""
        return _quantile(values, self.ns, share)


def _shared_kernels(ranks: Sequence[RankTrace], place: int) -> _SharedKernels:
    found = _SharedKernels([], [], [], [])
    for name, (n, ns) in ranks[place].kernels.items():
        others = [one.kernels[name] for i, one in enumerate(ranks) if i != place and name in one.kernels]
        if 2 * len(others) < len(ranks) - 1 or not n or not ns:
            continue
        usual = float(np.median([taken / max(1, times) for times, taken in others]))
        found.names.append(name)
        found.slower.append(ns / n / max(usual, 1.0))
        found.more.append(n / float(np.median([times for times, _ in others])))
        found.ns.append(ns)
    return found


def _computing(ranks: Sequence[RankTrace], place: int) -> tuple[str, str]:
    """More work, or the same work more slowly: by the kernels that it shares with the other ranks."""
    shared = _shared_kernels(ranks, place)
    if not shared.names:
        return MORE_COMPUTE, "it runs kernels that the others do not"
    slower, least = (shared.quantile(shared.slower, share) for share in (0.5, 0.25))
    more = shared.quantile(shared.more, 0.5)
    longer = f"the same kernels take {slower:.2f} times as long as on the median rank"
    larger = _larger(ranks, place)
    if larger > 1 + _SAME_WORK:
        return MORE_COMPUTE, f"its tensors are {larger:.2f} times as large as the median rank's"
    if more > 1 + _SAME_WORK:
        return MORE_COMPUTE, f"it launches {more:.2f} times as many kernels as the median rank"
    if _SLOWER <= slower <= _SLOWEST and least >= 1 + (slower - 1) / 2:
        return SLOWER_CLOCK, longer + (", on tensors of the same size" if larger else "")
    if slower > _SLOWEST:
        return MORE_COMPUTE, longer
    lost = [ns * (1 - 1 / max(times, 1.0)) for ns, times in zip(shared.ns, shared.slower, strict=True)]
    most = max(range(len(lost)), key=lambda i: lost[i])
    return (
        MORE_COMPUTE,
        f"some kernels take longer, most of all {shared.names[most][:60]} ({shared.slower[most]:.2f} times)",
    )


def _larger(ranks: Sequence[RankTrace], place: int) -> float:
    """How large its tensors are, of the median rank's; 0: not known."""
    sizes = [one.elements for i, one in enumerate(ranks) if i != place and one.elements]
    return ranks[place].elements / float(np.median(sizes)) if sizes else 0.0


def _quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """By weight.

    >>> _quantile([1.0, 2.0, 3.0], [1, 1, 8], 0.5)
    3.0
    """
    order = np.argsort(values)
    passed = np.cumsum(np.array(weights, float)[order])
    return float(np.array(values)[order][np.searchsorted(passed, share * passed[-1])])


def _of_link(
    ranks: Sequence[RankTrace], found: Waits, matched: Matched, slow: dict[int, float], replay: Replay
) -> Straggler:
    """The rank that all slow groups, or pairs, have in common; else the slowest group."""
    rows = found.rows.filter("matched").with_columns(team=team_of())
    over = rows.filter(pl.col("team").is_in(list(slow)))
    members = {int(one): set(some) for one, some in over.group_by("team").agg(pl.col("rank").unique()).iter_rows()}
    common = set.intersection(*members.values())
    place = next(iter(common)) if len(common) == 1 and len(slow) > 1 else -1
    each = over.group_by("team", "collective").agg(pl.col("transfer_ns").min())
    late = sum(float(ns) * (1 - 1 / slow[int(one)]) for one, _, ns in each.iter_rows())
    times, steps = float(np.median(list(slow.values()))), max(1, len(found.steps))
    worst = max(slow, key=lambda one: slow[one])
    who = _ranks_text(sorted(ranks[one].rank for one in members[worst]))
    name = matched.groups[worst].name if worst < PAIRS else ""
    whose = (
        "transfers of its groups take" if place >= 0 else f"transfers of {f'group {name}, ' if name else ''}{who} take"
    )
    return Straggler(
        rank=ranks[place].rank if place >= 0 else -1,
        group="" if place >= 0 else (name or who),
        cause=LINK,
        because=f"{whose} {times:.2f} times as long as those of others for as many bytes",
        late_ns=late / steps,
        last=over["collective"].n_unique(),
        collectives=rows["collective"].n_unique(),
        saving_ns=max(0.0, replay.saving_ns(-1, slow) / steps),
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    """
    >>> _ranks_text([0, 1, 2, 3]), _ranks_text([0, 8]), _ranks_text(list(range(0, 90, 9)))
    ('ranks 0 to 3', 'ranks 0, 8', 'ranks 0, 9, 18, … 81')
    """
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    some = [str(rank) for rank in (ranks if len(ranks) <= 6 else ranks[:3])]
    return f"ranks {', '.join(some)}" + ("" if len(ranks) <= 6 else f", … {ranks[-1]}")
