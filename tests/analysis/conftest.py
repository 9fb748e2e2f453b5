from collections.abc import Callable
from typing import Any

import pytest

from flopwise.records import PhaseTimes, Point
from flopwise.spec.workload import Sampling, Trial, workload

MakePoint = Callable[..., Point]


@pytest.fixture
def make_point() -> MakePoint:
    """A point of any workload, with the samples of its whole step."""

    def make(
        target: str = "tiny",
        wall: tuple[int, ...] = (100,) * 10,
        *,
        launch: tuple[int, ...] = (),
        gpu: tuple[int, ...] = (),
        held: bool = True,
        samples: int | None = None,
        device: str = "auto",
        options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Point:
        trial = Trial(
            workload=workload(target, **(options or {})), sampling=Sampling(samples=samples), device=device
        )
        step = PhaseTimes(phase="step", wall_ns=wall, launch_ns=launch, gpu_ns=gpu, gpu_held=(held,) * len(gpu))
        return Point(**{"key": trial.key(), "trial": trial, "status": "ok", "phases": (step,) if wall else ()} | fields)

    return make
