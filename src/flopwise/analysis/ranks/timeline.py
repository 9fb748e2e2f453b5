"""One step of several ranks as a picture needs it: what each did when, in as many pieces as a screen can show."""

from collections.abc import Sequence

import numpy as np

from flopwise.analysis.ranks.reading import RankTrace
from flopwise.analysis.ranks.states import COMPUTE, COPY, IDLE, INPUT, NAMES, TRANSFER, WAITING
from flopwise.analysis.ranks.waiting import Waits
from flopwise.records.ranks import RankSpan, RanksTimeline

PIXELS = 700  # of the step: each shows what took most of it
MOST_LANES = 16
_SHOWN = {COMPUTE: "compute", TRANSFER: "transfer", WAITING: "waiting", COPY: "input", INPUT: "input", IDLE: "idle"}
STATES = ("compute", "transfer", "waiting", "input", "idle")
assert set(_SHOWN) == set(range(len(NAMES)))


def ranks_timeline(ranks: Sequence[RankTrace], found: Waits, straggler: int) -> RanksTimeline | None:
    """The step in the middle; of many ranks the straggler, and others evenly spread."""
    if not found.steps:
        return None
    step = len(found.steps) // 2
    low = min(int(rank.edges[step, 0]) for rank in found.ranks)
    high = max(int(rank.edges[step, 1]) for rank in found.ranks)
    grid = np.linspace(low, high, PIXELS + 1).astype(np.int64)
    lanes = _lanes(ranks, straggler)
    spans: list[RankSpan] = []
    for place in lanes:
        begin, end = found.ranks[place].edges[step].tolist()
        times = np.clip(grid, begin, end)
        cells = np.diff(found.ranks[place].states.spent(times), axis=0)
        state = np.argmax(cells, axis=1)
        there = np.diff(times) > 0
        spans += _joined(ranks[place].rank, times - low, [_SHOWN[int(one)] for one in state], there)
    return RanksTimeline(
        step=found.steps[step],
        duration_ns=high - low,
        ranks=tuple(ranks[place].rank for place in lanes),
        spans=tuple(spans),
        left_out=len(ranks) - len(lanes),
    )


def _lanes(ranks: Sequence[RankTrace], straggler: int) -> list[int]:
    if len(ranks) <= MOST_LANES:
        return list(range(len(ranks)))
    some = set(np.linspace(0, len(ranks) - 1, MOST_LANES - 1).astype(int).tolist())
    return sorted(some | {place for place, one in enumerate(ranks) if one.rank == straggler})


def _joined(rank: int, times: np.ndarray, states: list[str], there: np.ndarray) -> list[RankSpan]:
    spans: list[RankSpan] = []
    for place, state in enumerate(states):
        if not there[place]:
            continue
        if spans and spans[-1].state == state and spans[-1].end_ns == times[place]:
            spans[-1] = RankSpan(rank=rank, state=state, start_ns=spans[-1].start_ns, end_ns=int(times[place + 1]))
        else:
            spans.append(RankSpan(rank=rank, state=state, start_ns=int(times[place]), end_ns=int(times[place + 1])))
    return spans
