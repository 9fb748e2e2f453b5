"""Whether other processes use the machine: read from /proc."""

import os
import time
from pathlib import Path

PROC = Path("/proc")
LOOK_S = 0.15  # /proc/stat counts in hundredths of a second
LEAST_CORES, LEAST_SHARE = 0.5, 0.1  # in use by others: less disturbs no one. Judgement
_IDLE, _WAITING, _COUNTED = 3, 4, 8  # columns: idle, waiting for a disk; user to steal, guests are in them already
_PARENT, _SPENT = 1, slice(11, 15)  # columns of a process after its name: parent; user, system, those of dead children


def busy_cores(look_s: float = LOOK_S) -> float:
    """How many cores other processes use; 0.0 if too few to matter, or if that cannot be known. Takes `look_s`; nothing may
    be running for this process meanwhile."""
    before = _cores()
    time.sleep(look_s)
    return _in_use(before, _cores(), 0)


def busy_machine(cores: float) -> str:
    """The line that warns of a machine with so many cores in use by others; '' if it is idle."""
    if not cores:
        return ""
    return (
        f"the machine is busy: other processes use {cores:.1f} of {len(_cores())} cores, times will be longer and vary"
    )


class OthersUse:
    """From its making on, how many cores other processes than this one and its children use; `ranks`: than its siblings."""

    def __init__(self, ranks: int = 1) -> None:
        self._root = os.getpid() if ranks == 1 else os.getppid()
        self._began, self._before, self._own = time.monotonic(), _cores(), self._spent()

    def cores(self) -> float | None:
        """0.0 if too few to matter; None after too short a time to tell."""
        if time.monotonic() - self._began < LOOK_S:
            return None
        return _in_use(self._before, _cores(), self._spent() - self._own)

    def _spent(self) -> int:
        """Ticks of all processes below the root, those that ended included."""
        parents, spent = {}, {}
        for path in PROC.glob("[0-9]*/stat"):
            try:
                words = path.read_text().rpartition(")")[2].split()
                parents[int(path.parent.name)] = int(words[_PARENT])
                spent[int(path.parent.name)] = sum(map(int, words[_SPENT]))
            except (OSError, ValueError, IndexError):  # it has ended, or has another form
                continue
        mine, added = {self._root}, {self._root}
        while added:
            added = {process for process, parent in parents.items() if parent in added} - mine
            mine |= added
        return sum(spent.get(process, 0) for process in mine)


def _in_use(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]], own: int) -> float:
    """Cores in use, less the ticks of one's own; 0.0 where it does not matter."""
    cores = before.keys() & after.keys()
    spent = [(after[core][0] - before[core][0], after[core][1] - before[core][1]) for core in cores]
    ticks = max((whole for _, whole in spent), default=0)
    if ticks <= 0:
        return 0.0
    in_use = (sum(busy for busy, _ in spent) - own) / ticks
    return in_use if in_use >= max(LEAST_CORES, LEAST_SHARE * len(cores)) else 0.0


def _cores() -> dict[int, tuple[int, int]]:
    """Of each core that this process may use: the ticks in use so far, and all; none where there is no such file."""
    try:
        lines = (PROC / "stat").read_text().splitlines()
        allowed = os.sched_getaffinity(0)
        found = {}
        for line in lines:
            name, *words = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in allowed:
                ticks = [int(word) for word in words[:_COUNTED]]
                found[int(name[3:])] = sum(ticks) - ticks[_IDLE] - ticks[_WAITING], sum(ticks)
    except (OSError, ValueError, IndexError, AttributeError):  # another system, another form
        return {}
    return found
