"""Where one step ends and the next begins."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.snapshot.phases import NAMES, NONE, B, F, L, O, Phases
from flopwise.snapshot.snapshot import DeviceHistory

_STEP_RANGE = re.compile(r"^(?:ProfilerStep#|flopwise\.step:)")
_OPTIMIZER_RANGE = re.compile(r"^Optimizer\.step#")
_FEWEST = 3  # repetitions that make a period
_COVERED = 0.8  # of the recording, that a period must explain
_EVEN = 0.05  # how much the events between two of them may differ


@dataclass(frozen=True)
class Steps:
    """Step k begins before event `starts[k]` and ends where the next begins; what follows the last start may be a part."""

    starts: npt.NDArray[np.int64]
    found_by: str  # '' where no steps were found

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The step of each event; -1 before the first."""
        return np.asarray(np.searchsorted(self.starts, events, side="right") - 1)


def steps(device: DeviceHistory, phases: Phases) -> Steps:
    """Steps by named ranges, else by the optimizer, else by forward after backward, else by what recurs evenly."""
    starts = _range_starts(device)
    if len(starts) > 1:
        return Steps(starts, "named step ranges")
    forward = np.isin(phases.own, (F, L))
    by_optimizer, by_backward = _turns(forward, phases.own == O), _turns(forward, phases.own == B)
    found = [
        Steps(by_optimizer, "the optimizer"),
        Steps(_optimizer_ends(device), "the optimizer's ranges"),
        Steps(by_backward, "forward after backward"),
    ]
    if (phases.own != NONE).any():  # a period would only find the layers of one step
        several = (one for one in found if len(one) > 1)
        return next(several, next((one for one in found if len(one)), Steps(np.empty(0, np.int64), "")))
    turns = _recurring(device)
    return Steps(turns, "the period of the allocations" if len(turns) else "")


def _turns(forward: npt.NDArray[np.bool_], ending: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The first forward's event, and after each ending that a forward follows, the event after it."""
    marks = np.flatnonzero(forward | ending)
    if not len(marks) or not ending.any() or not forward.any():
        return np.empty(0, np.int64)
    kinds = forward[marks]
    turn = marks[:-1][~kinds[:-1] & kinds[1:]] + 1
    first = marks[kinds][0]
    return np.concatenate(([first], turn[turn > first]))


def _range_starts(device: DeviceHistory) -> npt.NDArray[np.int64]:
    times = [m.start_us for m in device.annotations if m.start_us is not None and _STEP_RANGE.search(m.name)]
    return _at(device, times)


def _optimizer_ends(device: DeviceHistory) -> npt.NDArray[np.int64]:
    times = [m.end_us for m in device.annotations if m.end_us is not None and _OPTIMIZER_RANGE.search(m.name)]
    found = _at(device, times)
    return np.concatenate(([0], found[found < device.events])) if len(found) else found


def _at(device: DeviceHistory, times: list[int]) -> npt.NDArray[np.int64]:
    if device.time_us is None or not times:
        return np.empty(0, np.int64)
    return np.unique(np.searchsorted(device.time_us, np.array(times, dtype=np.int64)))


def _recurring(device: DeviceHistory) -> npt.NDArray[np.int64]:
    """The starts of a stack that comes back evenly; of several, the one with the longest period, then the earliest."""
    table = device.allocations.filter(device.allocations["start"] >= 0)
    starts, stacks = table["start"].to_numpy(), table["stack"].to_numpy()
    order = np.argsort(stacks, kind="stable")
    groups = np.split(starts[order], np.flatnonzero(np.diff(stacks[order])) + 1)
    best: tuple[float, int] = (0.0, 0)
    found = np.empty(0, np.int64)
    for group in groups:
        gaps = np.diff(group)
        if len(group) < _FEWEST or gaps.max() - gaps.min() > _EVEN * gaps.mean():
            continue
        rank = (round(float(gaps.mean())), -int(group[0]))
        covered = (group[-1] - group[0] + gaps.mean()) / device.events
        if gaps.mean() > 1 and covered > _COVERED and rank > best:
            best, found = rank, group
    return found


def phase_name(code: int) -> str:
    """A phase's name; '' for none.

    >>> phase_name(4), phase_name(-1)
    ('optimizer', '')
    """
    return NAMES[code] if code >= 0 else ""
