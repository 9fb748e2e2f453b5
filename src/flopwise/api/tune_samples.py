"""What the samples of two steps say: their medians, their peaks, and whether they leave it open which is the faster."""

from collections.abc import Sequence
from statistics import median

import msgspec

from flopwise.analysis.comparison import compare_samples
from flopwise.capture.turns import Contestant
from flopwise.records.comparison import INCONCLUSIVE
from flopwise.records.events import DeviceInfo
from flopwise.records.run import STEP, PhaseMemory, Point
from flopwise.records.tuning import Attempt


def peak_bytes(memory: tuple[PhaseMemory, ...]) -> int | None:
    """The step's peak; None where it was not measured."""
    return max((phase.peak_bytes for phase in memory), default=None)


def gpu_name(there: DeviceInfo) -> str:
    return there.environment.gpu.name if there.environment.gpu else "cpu"


def timed(attempt: Attempt, before: list[int], after: list[int]) -> Attempt:
    return msgspec.structs.replace(attempt, before_ns=float(median(before)), after_ns=float(median(after)))


def walls(point: Point) -> list[int]:
    times = point.times(STEP)
    return list(times.wall_ns) if times else []


def undecided(before: list[int], after: list[int]) -> bool:
    """Whether the samples leave it open which is the faster."""
    return compare_samples(before, after, paired=True).verdict == INCONCLUSIVE


def slowed(held_back: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Whether the GPU's clock was held down while levers were measured; of every measurement, why.

    >>> slowed([(), ("software power cap",)])
    ('the GPU was slowed (software power cap) in 1 of 2 measurements: less work saves less time then',)
    """
    why = ", ".join(dict.fromkeys(reason for one in held_back for reason in one))
    n = sum(bool(one) for one in held_back)
    told = f"the GPU was slowed ({why}) in {n} of {len(held_back)} measurements: less work saves less time then"
    return (told,) if why else ()


def sampled(one: Contestant) -> list[int]:
    return [sample[STEP].wall_ns for sample in one.gathered.samples]


def step_ns(point: Point) -> float:
    return float(median(walls(point)))
