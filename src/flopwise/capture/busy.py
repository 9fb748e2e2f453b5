"""Whether other processes use the machine: read from /proc while this process waits."""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
LOOK_S = 0.15  # /proc/stat counts in hundredths of a second
LEAST_CORES, LEAST_SHARE = 0.5, 0.1  # in use by others: less disturbs no one. Judgement
_IDLE, _WAITING, _COUNTED = 3, 4, 8  # columns: idle, waiting for a disk; user to steal, guests are in them already


def busy_machine(look_s: float = LOOK_S) -> str:
    """The line that warns of a busy machine; '' if it is idle, or if that cannot be known. Takes `look_s`; nothing may be
    running for this process meanwhile."""
    before = _busy_s()
    time.sleep(look_s)
    after = _busy_s()
    cores = before.keys() & after.keys()
    spent = [(after[core][0] - before[core][0], after[core][1] - before[core][1]) for core in cores]
    in_use = sum(busy / whole for busy, whole in spent if whole > 0)
    if in_use < max(LEAST_CORES, LEAST_SHARE * len(cores)):
        return ""
    counted = f"{in_use:.1f} of {len(cores)} cores"
    return f"the machine is busy: other processes use {counted}, and times will be longer and vary more"


def _busy_s() -> dict[int, tuple[int, int]]:
    """Of each core that this process may use: the ticks in use so far, and all; none where there is no such file."""
    try:
        lines = STAT.read_text().splitlines()
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
