"""What is left over from step to step, and who left it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.snapshot.owners import OWNERS
from flopwise.snapshot.snapshot import BEFORE, DeviceHistory
from flopwise.snapshot.steps import Steps

PATIENCE = 2  # steps that an allocation may outlive its own before it counts as left over
_FEWEST = 3  # steps that must leave something, before it is called a leak
_MOST = 10


@dataclass(frozen=True)
class Leak:
    """Allocations of one stack that every step makes and none frees; or, where memory grows without those, some steps."""

    stack: int
    owner: str
    bytes_per_step: int
    allocations_per_step: float
    steps: int  # that left something, of `of_steps` that had the time to free it
    of_steps: int


def leaks(device: DeviceHistory, steps: Steps, owner: npt.NDArray[np.int64], grows: bool = False) -> list[Leak]:
    """Stacks whose allocations outlive their step by more than PATIENCE steps, in two steps of three; the largest first.

    Where there are none and memory `grows`: those that do so in any step but the first, which makes optimizer state.
    """
    of_steps = len(steps) - PATIENCE - 1  # the last step may be a part of one, and is not asked
    if not enough(steps):
        return []
    table = device.allocations
    start, end = table["start"].to_numpy(), table["end"].to_numpy()
    step = steps.of(start)
    left = (start != BEFORE) & (step >= 0) & (step < of_steps)
    left &= (end >= device.events) | (steps.of(end) > step + PATIENCE)
    kept = table.select("stack", "bytes").with_columns(step=step, owner=owner).filter(pl.Series(left))
    by_step = kept.group_by("stack", "step").agg(pl.col("bytes").sum(), pl.len(), pl.col("owner").mode().min())
    by_stack = by_step.group_by("stack").agg(
        pl.col("bytes").median(),
        pl.col("len").mean(),
        pl.col("owner").mode().min(),
        steps=pl.len(),
        latest=pl.col("step").max(),
    )
    found = by_stack.filter(pl.col("steps").map_elements(lambda n: regular(n, of_steps), pl.Boolean))
    if grows and not len(found):
        found = by_stack.filter(pl.col("latest") > 0)
    found = found.drop("latest").sort("bytes", "stack", descending=[True, False])
    return [
        Leak(
            stack=stack,
            owner=OWNERS[whose],
            bytes_per_step=int(size),
            allocations_per_step=count,
            steps=n,
            of_steps=of_steps,
        )
        for stack, size, count, whose, n in found.head(_MOST).iter_rows()
    ]


def regular(steps: int, of_steps: int) -> bool:
    """Whether so many steps leave something that it is called a leak.

    >>> regular(4, 5), regular(2, 5)
    (True, False)
    """
    return steps >= max(_FEWEST, of_steps * 2 // 3)


def enough(steps: Steps) -> bool:
    """Whether there are steps enough to tell a leak from what is freed late."""
    return len(steps) - PATIENCE - 1 >= _FEWEST


def per_step(start_bytes: npt.NDArray[np.int64]) -> int | None:
    """By how much a step begins higher than the one before: the median, the first left out, which makes optimizer state.

    >>> per_step(np.array([10, 30, 31, 32, 33]))
    1
    """
    differences = np.diff(start_bytes)[1:]
    return int(np.median(differences)) if len(differences) else None
