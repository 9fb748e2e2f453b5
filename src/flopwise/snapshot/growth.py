"""Memory that grows from step to step, and the stacks it comes from."""

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

from flopwise.snapshot.answers import GrowthSource
from flopwise.snapshot.owners import OWNERS
from flopwise.snapshot.snapshot import BEFORE, DeviceHistory, Ints
from flopwise.snapshot.steps import Steps

PATIENCE = 2  # steps that an allocation may outlive its own before it counts as left over
_FEWEST = 3  # steps that must leave something, before it is called a leak
_MOST = 10


def leaks(
    device: DeviceHistory, steps: Steps, owner: Ints, grows: bool, stack_text: Callable[[int], dict[str, Any]]
) -> tuple[GrowthSource, ...]:
    """Stacks with allocations that outlive their step by more than PATIENCE steps, in two steps of three; the largest first.

    Where there are none and memory `grows`: those that do so in any step but the first, which makes optimizer state.
    """
    of_steps = len(steps) - PATIENCE - 1  # the last step may be a part of one, and is not asked
    if not enough(steps):
        return ()
    table = device.allocations
    start, end = table["start"].to_numpy(), table["end"].to_numpy()
    step = steps.of(start)
    left = (start != BEFORE) & (step >= 0) & (step < of_steps)
    left &= (end >= device.events) | (steps.of(end) > step + PATIENCE)
    kept = table.select("stack", "bytes").with_columns(step=step, owner=owner).filter(pl.Series(left))
    usual_owner = pl.col("owner").mode().min()
    by_step = kept.group_by("stack", "step").agg(pl.col("bytes").sum(), usual_owner, count=pl.len())
    by_stack = by_step.group_by("stack").agg(
        pl.col("bytes").median(), pl.col("count").mean(), usual_owner, steps=pl.len(), latest=pl.col("step").max()
    )
    sources = by_stack.filter(pl.col("steps") >= _fewest(of_steps))
    if grows and not len(sources):
        sources = by_stack.filter(pl.col("latest") > 0)
    largest = sources.sort("bytes", "stack", descending=[True, False]).head(_MOST)
    return tuple(
        GrowthSource(
            bytes_per_step=int(row["bytes"]),
            allocations_per_step=round(row["count"], 2),
            steps=row["steps"],
            of_steps=of_steps,
            owner=OWNERS[row["owner"]],
            **stack_text(row["stack"]),
        )
        for row in largest.iter_rows(named=True)
    )


def regular(steps: int, of_steps: int) -> bool:
    """Whether so many steps leave something that it is called a leak.

    >>> regular(4, 5), regular(2, 5)
    (True, False)
    """
    return steps >= _fewest(of_steps)


def _fewest(of_steps: int) -> int:
    return max(_FEWEST, of_steps * 2 // 3)


def enough(steps: Steps) -> bool:
    """Whether there are steps enough to tell a leak from what is freed late."""
    return len(steps) - PATIENCE - 1 >= _FEWEST


def per_step(start_bytes: Ints) -> int | None:
    """By how much a step begins higher than the one before: the median, the first left out, which makes optimizer state.

    >>> per_step(np.array([10, 30, 31, 32, 33]))
    1
    """
    differences = np.diff(start_bytes)[1:]
    return int(np.median(differences)) if len(differences) else None
