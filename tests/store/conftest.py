"""Small points with made-up samples, and roots to put them in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flopwise.records.run import OK, PhaseTimes, Point
from flopwise.spec.workload import Sampling, Trial, workload

MakePoint = Callable[..., Point]


def make_trials(count: int) -> tuple[Trial, ...]:
    return tuple(Trial(workload=workload("tiny", batch=n + 1), sampling=Sampling(samples=3)) for n in range(count))


def make_point(trial: Trial, status: str = OK, reason: str = "") -> Point:
    """A point whose samples follow from its trial, so that two processes make the same one."""
    base = 1_000_000 * trial.workload.batch
    phases = tuple(
        PhaseTimes(phase=p, wall_ns=(base + i, base + 7, base - 3)) for i, p in enumerate(("step", "forward"))
    )
    return Point(key=trial.key(), trial=trial, status=status, reason=reason, phases=phases, elapsed_s=0.25)


@pytest.fixture
def trials() -> tuple[Trial, ...]:
    return make_trials(4)


@pytest.fixture
def points(trials: tuple[Trial, ...]) -> tuple[Point, ...]:
    # Non-ASCII text: a cut may fall inside a character.
    return tuple(make_point(trial, reason=f"µ{n} – “é”") for n, trial in enumerate(trials))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture(name="make_point")
def _make_point() -> MakePoint:
    return make_point


@pytest.fixture(name="make_trials")
def _make_trials() -> Callable[[int], tuple[Trial, ...]]:
    return make_trials
