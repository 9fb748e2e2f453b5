"""What a rank did at each instant: one state after the other, from which the time in each is taken between any two instants."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.analysis.intervals import Times, clipped, union

# Communication that nothing hides is divided into waiting and transfer once the other ranks are known.
COMPUTE, TRANSFER, WAITING, COPY, INPUT, IDLE = range(6)
NAMES = ("compute", "transfer", "waiting", "copy", "input", "idle")
KINDS = len(NAMES)
OWN = (COMPUTE, COPY, INPUT, IDLE)  # what a rank does by itself


@dataclass(frozen=True)
class States:
    """`kind[i]` from `edges[i]` to `edges[i + 1]`."""

    edges: Times
    kind: npt.NDArray[np.uint8]

    def shifted(self, ns: int) -> "States":
        return States(self.edges + ns, self.kind)

    def spent(self, times: Times) -> npt.NDArray[np.int64]:
        """Nanoseconds in each state from the first edge to each time: a row per time, a column per state.

        >>> States(np.array([0, 4, 9]), np.array([COMPUTE, IDLE], np.uint8)).spent(np.array([2, 7]))[:, [COMPUTE, IDLE]]
        array([[2, 0],
               [4, 3]])
        """
        lengths = np.zeros((len(self.kind) + 1, KINDS), dtype=np.int64)
        lengths[np.arange(1, len(self.kind) + 1), self.kind] = np.diff(self.edges)
        before = np.cumsum(lengths, axis=0)
        times = np.clip(times, self.edges[0], self.edges[-1])
        at = np.clip(np.searchsorted(self.edges, times, side="right") - 1, 0, len(self.kind) - 1)
        found = before[at]
        found[np.arange(len(at)), self.kind[at]] += times - self.edges[at]
        return found

    def at(self, times: Times) -> npt.NDArray[np.uint8]:
        """The state that holds just before each time."""
        place = np.clip(np.searchsorted(self.edges, times, side="left") - 1, 0, len(self.kind) - 1)
        return self.kind[place]

    def times_of(self, kind: int) -> tuple[Times, Times]:
        """From when to when a state holds."""
        mine = self.kind == kind
        return self.edges[:-1][mine], self.edges[1:][mine]


def layered(low: int, high: int, layers: Sequence[tuple[int, Times, Times]]) -> States:
    """States between `low` and `high`: the first layer that covers an instant counts, IDLE where none does.

    >>> found = layered(0, 10, [(COMPUTE, np.array([2]), np.array([5])), (TRANSFER, np.array([4]), np.array([8]))])
    >>> found.edges.tolist(), [NAMES[kind] for kind in found.kind]
    ([0, 2, 5, 8, 10], ['idle', 'compute', 'transfer', 'idle'])
    """
    merged = [(kind, *union(*clipped(start, end, low, high))) for kind, start, end in layers]
    edges = np.unique(
        np.concatenate([np.array([low, high], np.int64), *(side for _, *both in merged for side in both)])
    )
    kind = np.full(len(edges) - 1, IDLE, np.uint8)
    for number, start, end in reversed(merged):
        opened = np.searchsorted(start, edges[:-1], side="right")
        kind[opened > np.searchsorted(end, edges[:-1], side="right")] = number
    return joined(edges, kind)


def joined(edges: Times, kind: npt.NDArray[np.uint8]) -> States:
    """Neighbours of one kind as one."""
    first = np.concatenate(([True], kind[1:] != kind[:-1])) if len(kind) else np.zeros(0, bool)
    return States(np.concatenate((edges[:-1][first], edges[-1:])), kind[first])


def coarsened(states: States, most: int) -> tuple[States, int]:
    """No more than so many states: idle times and pieces shorter than the second answer count as what is before them."""
    shortest = 0
    while len(states.kind) > most:
        shortest = max(1000, 2 * shortest)
        kept = np.diff(states.edges) >= shortest
        kept[0] = True
        edges = np.concatenate((states.edges[:-1][kept], states.edges[-1:]))
        states = joined(edges, states.kind[kept])
    return states, shortest


def divided(states: States, start: Times, last: Times) -> States:
    """Communication divided: WAITING from each collective's start until the last rank has arrived, else TRANSFER.

    Where several run at once, an instant is transfer if any of them transfers; `start` and `last` are of the collectives
    whose ranks are known.
    """
    waits = last > start
    first, until = union(start[waits], last[waits])
    edges = np.unique(np.concatenate((states.edges, first, until)))
    edges = edges[(edges >= states.edges[0]) & (edges <= states.edges[-1])]
    place = np.searchsorted(states.edges, edges[:-1], side="right") - 1
    kind = states.kind[place].copy()
    waiting = np.searchsorted(first, edges[:-1], side="right") > np.searchsorted(until, edges[:-1], side="right")
    kind[(kind == TRANSFER) & waiting] = WAITING
    return joined(edges, kind)
