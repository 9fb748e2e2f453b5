"""What a training says about itself: what was learnt, how fast, and what its steps waited for."""

from collections import Counter
from itertools import pairwise
from statistics import median

import msgspec

from flopwise.analysis.hosts import differing
from flopwise.records.training import Begun, Steps, Training

SMOOTHED = 20  # steps: a loss is the mean of so many, as one batch's says little


class Progressed(msgspec.Struct, frozen=True, kw_only=True):
    """A training in a few numbers. Times are of the steady rows: the first step after a start compiles."""

    first_loss: float | None
    last_loss: float | None  # mean of the last steps
    evaluation: float | None
    step_ns: float | None  # median
    tokens_per_s: float | None
    mfu: float | None
    limit_ns: float | None  # the step's FLOPs at the peak
    waited: float  # share of the steps' time
    limited_by: str  # most of the time: the loader, launching, the GPU; '' on the CPU
    memory_bytes: int | None


def progressed(training: Training) -> Progressed:
    """All of a training."""
    begun, rows = training.begun, training.steps
    steady = steady_rows(tuple(row for row in rows if row.step > begun.step) or rows)  # of this machine
    first, last = _ends(rows)
    step_ns = median(row.wall_ns / len(row.losses) for row in steady) if steady else 0.0
    return Progressed(
        first_loss=first,
        last_loss=last,
        evaluation=next((row.evaluation for row in reversed(rows) if row.evaluation is not None), None),
        step_ns=step_ns or None,
        tokens_per_s=training.tokens_per_step / step_ns * 1e9 if step_ns else None,
        mfu=mfu(begun, step_ns),
        limit_ns=begun.flops_per_step / begun.peak_flops_s * 1e9 if begun.peak_flops_s else None,
        waited=_waited(steady),
        limited_by=_most_limited(steady),
        memory_bytes=max((row.memory_bytes or 0 for row in rows), default=0) or None,
    )


def moves(*begun: Begun) -> list[str]:
    """Where a training went on in another environment: its losses may, its speeds are of one."""
    both = [(a.environment, b.environment, b.step) for a, b in pairwise(begun)]
    found = [(differing(a, b), step) for a, b, step in both if a is not None and b is not None]
    return [
        f"from step {step + 1:,} on with {apart[1]}, before with {apart[0]}; the speed is that of the last part"
        for apart, step in found
        if apart is not None
    ]


def _waited(rows: list[Steps]) -> float:
    """The share of their time."""
    return sum(row.waited_ns for row in rows) / max(1, sum(row.wall_ns for row in rows))


def _ends(rows: tuple[Steps, ...]) -> tuple[float | None, float | None]:
    """The first loss, and the mean of the last."""
    losses = [loss for row in rows for loss in row.losses if loss is not None]
    last = losses[-SMOOTHED:]
    return (losses[0], sum(last) / len(last)) if losses else (None, None)


def _most_limited(rows: list[Steps]) -> str:
    times = Counter[str]()
    for row in rows:
        times[row.limited_by] += row.wall_ns
    return times.most_common(1)[0][0] if times else ""


def steady_rows(rows: tuple[Steps, ...]) -> list[Steps]:
    """Those of more than one step; the first after a start stands alone, as it compiles. All, where there are no others."""
    return [row for row in rows if len(row.losses) > 1] or [row for row in rows[1:] or rows if row.losses]


def mfu(begun: Begun, step_ns: float) -> float | None:
    """Of one step that took so long; None where the peak is unknown."""
    return begun.flops_per_step / (step_ns / 1e9) / begun.peak_flops_s if begun.peak_flops_s and step_ns else None
