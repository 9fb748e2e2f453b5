"""What the samples of two steps say: their medians, their peaks, and whether they leave it open which is the faster."""

from statistics import median

import msgspec

from flopwise.advice.tuning import Attempt
from flopwise.analysis.comparison import INCONCLUSIVE, compare_samples
from flopwise.capture.events import Surroundings
from flopwise.capture.turns import Contestant
from flopwise.records import STEP, PhaseMemory, Point


def peak_bytes(memory: tuple[PhaseMemory, ...]) -> int | None:
    """The step's peak; None where it was not measured."""
    return max((phase.peak_bytes for phase in memory), default=None)


def gpu_name(there: Surroundings) -> str:
    return there.environment.gpu.name if there.environment.gpu else "cpu"


def timed(attempt: Attempt, before: list[int], after: list[int]) -> Attempt:
    return msgspec.structs.replace(attempt, before_ns=float(median(before)), after_ns=float(median(after)))


def walls(point: Point) -> list[int]:
    times = point.times(STEP)
    return list(times.wall_ns) if times else []


def undecided(before: list[int], after: list[int]) -> bool:
    """Whether the samples leave it open which is the faster."""
    return compare_samples(before, after, paired=True).verdict == INCONCLUSIVE


def sampled(one: Contestant) -> list[int]:
    return [sample[STEP].wall_ns for sample in one.gathered.samples]


def step_ns(point: Point) -> float:
    return float(median(walls(point)))
