"""What a step's memory should be, told beforehand: by arithmetic, by a dry run, and whether it will fit."""

from flopwise import units
from flopwise.capture.events import Surroundings
from flopwise.capture.isolate import Worker
from flopwise.capture.memory_record import Forecast, Prediction
from flopwise.cost.fit import peak_of
from flopwise.cost.step import StepCost, account_step, workspace_bytes
from flopwise.errors import FlopwiseError
from flopwise.memory.predicted import as_prediction
from flopwise.records import Environment, PhaseMemory
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.workload import Workload
from flopwise.verbs.dry_step import architecture_of, needs_dry_run
from flopwise.work import WORKSPACE, Footprint

_THREADS = {"forward": 1}  # with a cuBLAS workspace each; two where there is a backward pass


def gpu_of(environment: Environment | None) -> Gpu | None:
    """The GPU that a point ran on, if it is one we know; the CPU, if there is none; None: nobody knows."""
    if environment is None:
        return None
    return gpu_named("cpu") if environment.gpu is None else find_gpu(environment.gpu.name)


def forecast(worker: Worker, workload: Workload, gpu: Gpu | None) -> Forecast:
    """Both predictions of a workload's memory on a GPU (or the CPU); what cannot be told is a note."""
    found, notes = [], []
    try:
        found.append(as_prediction(worker.dry_run(workload, architecture_of(gpu))))
    except FlopwiseError as error:
        notes.append(f"no dry run: {error.message}")
    closed = closed_form(workload, gpu)
    return Forecast(predictions=(*found, *((closed,) if closed else ())), notes=tuple(notes))




def closed_form(workload: Workload, gpu: Gpu | None) -> Prediction | None:
    """The closed form's word; None for a step that it does not know.

    >>> from flopwise.spec.workload import workload
    >>> closed_form(workload("tiny"), gpu_named("h200")).peak.phase
    'backward'
    """
    if needs_dry_run(workload):
        return None
    on_cpu = gpu is not None and gpu.name == "cpu"
    step = account_step(workload, None if on_cpu else gpu)
    return Prediction(
        source="closed form",
        peak=_on_cpu(step.peak) if on_cpu else step.peak,
        phases=_phases(step, on_cpu),
        notes=("the closed form is a GPU's, without the workspace",) if on_cpu else (),
    )


def _on_cpu(peak: Footprint) -> Footprint:
    owners = {owner: n for owner, n in peak.owners.items() if owner != WORKSPACE}
    return Footprint(moment=peak.moment, phase=peak.phase, owners=owners)


def _phases(step: StepCost, on_cpu: bool) -> tuple[PhaseMemory, ...]:
    less = step.peak.owners.get(WORKSPACE, 0) if on_cpu else 0
    return tuple(
        PhaseMemory(
            phase=p.phase,
            start_bytes=p.start_bytes - less,
            peak_bytes=p.peak_bytes - less,
            end_bytes=p.end_bytes - less,
            reserved_bytes=0,
        )
        for p in step.phases
    )


def too_large(workload: Workload, there: Surroundings) -> str:
    """The line that warns of a workload that will not fit; '' if it will, or if that cannot be told in a moment.

    The peak is the closed form's, which errs by a few per cent: a note, not a refusal.
    """
    if needs_dry_run(workload) or there.free_bytes is None:
        return ""
    on_cpu = there.environment.gpu is None
    needed = peak_of(workload, None if on_cpu else gpu_of(there.environment))
    if on_cpu:
        needed -= _THREADS.get(workload.phase, 2) * workspace_bytes(None)
    if needed <= there.free_bytes:
        return ""
    return (
        f"{workload.label()}: predicted peak {units.size(needed)} of {units.size(there.free_bytes)} free: "
        "it will probably run out of memory"
    )
