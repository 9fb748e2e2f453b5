"""What is left over from step to step, and who left it."""

import msgspec
import numpy as np
import numpy.typing as npt

from flopwise.memory.owners import OWNERS
from flopwise.memory.snapshot import BEFORE, DeviceHistory
from flopwise.memory.steps import Steps
from flopwise.memory.timeline import Timeline

PATIENCE = 2  # steps that an allocation may outlive its own before it counts as left over
_FEWEST = 3  # steps that must leave something, before it is called a leak
_MOST = 10


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """Allocations of one stack that every step makes and none frees."""

    bytes_per_step: int
    allocations_per_step: float
    steps: int  # that left something, of `of_steps` that had the time to free it
    of_steps: int
    owner: str
    stack: int


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How much more is allocated when a step begins than when the one before it began."""

    steps: int
    found_by: str
    start_bytes: tuple[int, ...]
    bytes_per_step: int | None  # the median of the differences, the first left out: it makes the optimizer's state
    leaks: tuple[Leak, ...]


def growth(device: DeviceHistory, steps: Steps, line: Timeline, owner: npt.NDArray[np.int64]) -> Growth:
    """Bytes at every step's start, and the stacks behind what stays."""
    at_start = line.allocated_bytes[steps.starts]
    differences = np.diff(at_start)[1:]
    return Growth(
        steps=len(steps),
        found_by=steps.found_by,
        start_bytes=tuple(at_start.tolist()),
        bytes_per_step=int(np.median(differences)) if len(differences) else None,
        leaks=_leaks(device, steps, owner),
    )


def _leaks(device: DeviceHistory, steps: Steps, owner: npt.NDArray[np.int64]) -> tuple[Leak, ...]:
    of_steps = len(steps) - PATIENCE - 1  # the last step may be a part of one, and is not asked
    if of_steps < _FEWEST:
        return ()
    table = device.allocations
    start, end, stack, size = (table[name].to_numpy() for name in ("start", "end", "stack", "bytes"))
    step = steps.of(start)
    left = (start != BEFORE) & (step >= 0) & (step < of_steps)
    left &= (end >= device.events) | (steps.of(end) > step + PATIENCE)
    found = []
    for number in np.unique(stack[left]):
        mine = left & (stack == number)
        per_step = np.bincount(step[mine], weights=size[mine], minlength=of_steps)
        leaving = int(np.count_nonzero(per_step))
        if leaving < max(_FEWEST, of_steps * 2 // 3):
            continue
        found.append(
            Leak(
                bytes_per_step=int(np.median(per_step[per_step > 0])),
                allocations_per_step=round(float(mine.sum()) / leaving, 2),
                steps=leaving,
                of_steps=of_steps,
                owner=OWNERS[int(np.bincount(owner[mine]).argmax())],
                stack=int(number),
            )
        )
    return tuple(sorted(found, key=lambda leak: -leak.bytes_per_step)[:_MOST])
