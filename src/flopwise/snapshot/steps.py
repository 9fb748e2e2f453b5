"""Where one step ends and the next begins."""

import re
from dataclasses import dataclass

import numpy as np

from flopwise.snapshot.phases import BACKWARD, FORWARD, LOSS, NONE, OPTIMIZER, Phases
from flopwise.snapshot.snapshot import DeviceHistory, Flags, Ints

_STEP_RANGE = re.compile(r"^(?:ProfilerStep#|flopwise\.step:)")
_OPTIMIZER_RANGE = re.compile(r"^Optimizer\.step#")
_FEWEST = 3  # repetitions that make a period
_COVERED = 0.8  # of the recording, that a period must explain
_EVEN = 0.05  # how much the events between two of them may differ


@dataclass(frozen=True)
class Steps:
    """Step k begins before event `starts[k]` and ends where the next begins; what follows the last start may be a part."""

    starts: Ints
    found_by: str  # '' where there are no steps

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, events: Ints) -> Ints:
        """The step of each event; -1 before the first."""
        return np.asarray(np.searchsorted(self.starts, events, side="right") - 1)


def steps(device: DeviceHistory, phases: Phases) -> Steps:
    """Steps by named ranges, else by the optimizer, else by forward after backward, else by what recurs evenly."""
    starts = _at(device, [m.start_us for m in device.annotations if _STEP_RANGE.search(m.name)])
    if len(starts) > 1:
        return Steps(starts, "named step ranges")
    forward = np.isin(phases.own, (FORWARD, LOSS))
    candidates = [
        Steps(_turns(forward, phases.own == OPTIMIZER), "the optimizer"),
        Steps(_optimizer_ends(device), "the optimizer's ranges"),
        Steps(_turns(forward, phases.own == BACKWARD), "forward after backward"),
    ]
    if (phases.own != NONE).any():  # a period would only find the layers of one step
        several = (one for one in candidates if len(one) > 1)
        return next(several, next((one for one in candidates if len(one)), Steps(np.empty(0, np.int64), "")))
    turns = _recurring(device)
    return Steps(turns, "the period of the allocations" if len(turns) else "")


def _turns(forward: Flags, ending: Flags) -> Ints:
    """The first forward's event, and after each ending that a forward follows, the event after it."""
    marks = np.flatnonzero(forward | ending)
    if not len(marks) or not ending.any() or not forward.any():
        return np.empty(0, np.int64)
    kinds = forward[marks]
    turn = marks[:-1][~kinds[:-1] & kinds[1:]] + 1
    first = marks[kinds][0]
    return np.concatenate(([first], turn[turn > first]))


def _optimizer_ends(device: DeviceHistory) -> Ints:
    ends = _at(device, [m.end_us for m in device.annotations if _OPTIMIZER_RANGE.search(m.name)])
    return np.concatenate(([0], ends[ends < device.events])) if len(ends) else ends


def _at(device: DeviceHistory, times: list[int | None]) -> Ints:
    known = [time for time in times if time is not None]
    if device.time_us is None or not known:
        return np.empty(0, np.int64)
    return np.unique(np.searchsorted(device.time_us, np.array(known, dtype=np.int64)))


def _recurring(device: DeviceHistory) -> Ints:
    """The starts of a stack that comes back evenly; of several, the one with the longest period, then the earliest."""
    table = device.allocations.filter(device.allocations["start"] >= 0)
    starts, stacks = table["start"].to_numpy(), table["stack"].to_numpy()
    order = np.argsort(stacks, kind="stable")
    groups = np.split(starts[order], np.flatnonzero(np.diff(stacks[order])) + 1)
    best, longest = (0, 0), np.empty(0, np.int64)
    for group in groups:
        gaps = np.diff(group)
        if len(group) < _FEWEST or gaps.max() - gaps.min() > _EVEN * gaps.mean():
            continue
        rank = (round(float(gaps.mean())), -int(group[0]))
        covered = (group[-1] - group[0] + gaps.mean()) / device.events
        if gaps.mean() > 1 and covered > _COVERED and rank > best:
            best, longest = rank, group
    return longest
