"""A step's collectives run again with other times between them: what it would take if one rank, or one link, were faster."""

from collections.abc import Mapping

import numpy as np

from flopwise.analysis.ranks.waiting import OWN_PARTS, Waits, excess, team_of

_QUEUED_NS = 20_000  # a collective that begins so soon after the one before it on its group was queued behind that


class Replay:
    """Each rank arrives at a collective when its own work for it is done, and the group's collective before has ended.

    A rank's own work moves with the last collective that it stood still for: one that ended while it computed held up nothing.
    Nothing changed, the replay is the trace.
    """

    def __init__(self, found: Waits) -> None:
        rows = found.rows.sort("last_ns", "collective", "rank", maintain_order=True)
        self._n_ranks = len(found.ranks)
        self._ends = np.array([int(rank.edges[-1, 1]) for rank in found.ranks])
        self._tails = np.array([rank.tail_ns for rank in found.ranks])
        self._collective = rows["collective"].to_numpy()
        self._rank, self._group = rows["rank"].to_numpy(), rows["group"].to_numpy()
        self._team = rows.select(team_of()).to_series().to_numpy()
        self._start, self._end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
        self._last, self._ready = rows["last_ns"].to_numpy(), rows["ready_ns"].to_numpy()
        self._stands = rows["exposed_end"].to_numpy()
        self._own = rows.select("collective", "rank", *OWN_PARTS)
        self._before = self._previous()

    def _previous(self) -> np.ndarray:
        """The row of the same rank and group before each; -1: none."""
        seen: dict[tuple[int, int], int] = {}
        found = np.full(len(self._rank), -1)
        for place in np.argsort(self._start, kind="stable").tolist():
            key = (int(self._rank[place]), int(self._group[place]))
            found[place] = seen.get(key, -1)
            seen[key] = place
        return found

    def _arrival(self, place: int, moved: float, end: np.ndarray) -> float:
        """When a rank comes to a collective, its own work moved by so much; `end`: of the collectives so far."""
        before = int(self._before[place])
        if before < 0:
            return float(self._start[place] + moved)
        gap = self._start[place] - self._end[before]
        if gap > _QUEUED_NS:
            return float(max(self._start[place] + moved, end[before]))
        return float(max(self._ready[place] + moved, end[before] + gap))

    def saving_ns(self, rank: int, faster: Mapping[int, float] | None = None) -> float:
        """Of all steps, if the rank's own time were the median's; `faster`: teams whose transfers were so many times faster."""
        more = excess(self._own, rank).sum_horizontal().to_numpy()
        end, shift = self._end.astype(float), np.zeros(self._n_ranks)
        debt = np.zeros(self._n_ranks)
        stood: list[list[tuple[float, float]]] = [[] for _ in range(self._n_ranks)]  # ends that count, and their shifts
        bounds = np.flatnonzero(np.concatenate(([True], self._collective[1:] != self._collective[:-1], [True])))
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            arrived = -np.inf
            for place in range(low, high):
                who = int(self._rank[place])
                queue = stood[who]
                while queue and queue[0][0] <= self._start[place]:
                    shift[who] = queue.pop(0)[1]
                    debt[who] = 0.0
                if who == rank:
                    debt[who] += more[place]
                arrived = max(arrived, self._arrival(place, shift[who] - debt[who], end))
            for place in range(low, high):
                times = faster.get(int(self._team[place]), 1.0) if faster is not None else 1.0
                end[place] = arrived + (self._end[place] - self._last[place]) / times
                if self._stands[place]:
                    stood[int(self._rank[place])].append((float(self._end[place]), end[place] - self._end[place]))
        for who, queue in enumerate(stood):
            if queue:
                shift[who] = queue[-1][1]
                debt[who] = 0.0
        if rank >= 0:
            debt[rank] += self._tails[rank] - np.median(np.delete(self._tails, rank))
        return float(self._ends.max() - (self._ends + shift - debt).max())
