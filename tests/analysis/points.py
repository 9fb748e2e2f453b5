"""Points made up for tests: any workload, with the samples of its whole step."""

from typing import Any

from flopwise.records.run import PhaseTimes, Point
from flopwise.spec.workload import Sampling, Trial, workload


def make_point(
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
    trial = Trial(workload=workload(target, **(options or {})), sampling=Sampling(samples=samples), device=device)
    step = PhaseTimes(phase="step", wall_ns=wall, launch_ns=launch, gpu_ns=gpu, gpu_held=(held,) * len(gpu))
    return Point(**{"key": trial.key(), "trial": trial, "status": "ok", "phases": (step,) if wall else ()} | fields)
