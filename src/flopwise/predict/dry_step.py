"""A step that only torch knows (the user's own, an operation, transformers' code), told by a dry run."""

import msgspec

from flopwise.capture.isolate import Worker
from flopwise.predict.shapes.step import PhaseCost, StepCost
from flopwise.records.dry_run import DryRun
from flopwise.records.run import PhaseMemory
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Workload
from flopwise.work.operation import Footprint

_ARCHITECTURES = {
    "8.0": "ampere",
    "8.6": "ampere",
    "8.9": "ada",
    "9.0": "hopper",
    "10.0": "blackwell",
    "12.0": "blackwell-rtx",
}


def needs_dry_run(workload: Workload) -> bool:
    """Whether arithmetic alone cannot tell the step: it knows flopwise's own model and no other code."""
    return not isinstance(workload.subject, ModelSpec) or workload.implementation == "transformers"


def architecture_of(gpu: Gpu | None) -> str:
    """The dry run's word for a GPU's generation (Hopper, if none is named), or for the CPU.

    >>> from flopwise.spec.gpu import gpu
    >>> architecture_of(gpu("a100")), architecture_of(gpu("cpu")), architecture_of(None)
    ('ampere', 'cpu', 'hopper')
    """
    if gpu is not None and gpu.name == "cpu":
        return "cpu"
    return _ARCHITECTURES.get(gpu.capability if gpu else "", "hopper")


def dry_run(workload: Workload, gpu: Gpu | None = None) -> DryRun:
    """The workload's step on fake tensors, as it would go on this GPU (on Hopper, if none is named)."""
    with Worker() as worker:
        return worker.dry_run(workload, architecture_of(gpu))


def step_cost(run: DryRun) -> StepCost:
    """A dry run in the closed form's words."""
    moments = {moment.moment: moment for moment in run.moments}
    start, after_forward = moments["start of forward"], moments.get("end of forward")
    return StepCost(
        ops=run.ops,
        phases=tuple(_phase(memory, run.peak) for memory in run.memory),
        start=start if after_forward else msgspec.structs.replace(start, moment="start of the step"),
        after_forward=after_forward,
        peak=run.peak,
        after_backward=moments.get("after backward"),
    )


def _phase(memory: PhaseMemory, peak: Footprint) -> PhaseCost:
    return PhaseCost(
        phase=memory.phase,
        start_bytes=memory.start_bytes,
        peak_bytes=memory.peak_bytes,
        end_bytes=memory.end_bytes,
        peak=peak,
    )
