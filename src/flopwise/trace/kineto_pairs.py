"""Events written as a beginning (`ph: "B"`) and an end (`ph: "E"`), joined into whole ones.

As in Chrome: an end closes the last beginning that is still open on its (pid, tid), whatever the end is called. PyTorch writes
whole events; other writers of the format, and tools that cut or merge traces, do not.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from flopwise.trace.kineto_stream import NO_ARGS, Event
from flopwise.trace.kineto_times import NO_TIME, start_times

BEGIN, END = "B", "E"
MOST_OPEN = 100_000  # beginnings held at a time: real ones nest tens deep


class Pairs:
    """Beginnings that wait for their end, thread by thread, while chunks of events pass by."""

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._open: defaultdict[tuple[int | str, int | str], list[Event[Any]]] = defaultdict(list)
        self._n_open = 0
        self._unpaired = 0

    def close(self, halves: list[Event[Any]]) -> list[Event[Any]]:
        """The events that end among these halves, which come in the file's order, as whole ones."""
        met: list[tuple[Event[Any], Event[Any]]] = []
        for half in halves:
            waiting = self._open[half.pid, half.tid]
            if half.ph == BEGIN and self._n_open < MOST_OPEN:
                waiting.append(half)
                self._n_open += 1
            elif half.ph == END and waiting:
                met.append((waiting.pop(), half))
                self._n_open -= 1
            else:
                self._unpaired += 1
            if not waiting:
                del self._open[half.pid, half.tid]
        return self._joined(met) if met else []

    @property
    def unpaired(self) -> int:
        """Ends without a beginning, and beginnings without an end so far."""
        return self._unpaired + self._n_open

    def _joined(self, met: list[tuple[Event[Any], Event[Any]]]) -> list[Event[Any]]:
        """Durations are taken between whole nanoseconds: those of two floats of microseconds can be one off."""
        starts = start_times([begin for begin, _ in met], self._exact)
        ends = start_times([end for _, end in met], self._exact)
        known = (starts != NO_TIME) & (ends != NO_TIME)
        durations = np.where(known, np.where(known, ends, 0) - np.where(known, starts, 0), -1) / 1000
        for (begin, end), duration in zip(met, durations.tolist(), strict=True):
            begin.ph, begin.dur = "X", duration
            if begin.args is NO_ARGS:  # which half carries them is the writer's choice
                begin.args = end.args
        return [begin for begin, _ in met]
