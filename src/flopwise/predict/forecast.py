"""What a step's memory should be, told by arithmetic and by a dry run."""

from flopwise.capture.isolate import Worker
from flopwise.errors import FlopwiseError
from flopwise.predict.dry_step import architecture_of, needs_dry_run
from flopwise.predict.shapes.step import StepCost, account_step
from flopwise.records.dry_run import DryRun
from flopwise.records.memory import Forecast, Prediction
from flopwise.records.run import PhaseMemory
from flopwise.spec.gpu import Gpu
from flopwise.spec.workload import Workload
from flopwise.work.operation import WORKSPACE, Footprint

_ON_CPU = "the closed form is a GPU's without its workspace; the CPU's norms and attention save other tensors"


def forecast(worker: Worker, workload: Workload, gpu: Gpu | None) -> Forecast:
    """Both predictions of a workload's memory on a GPU (or the CPU); what cannot be told is a note."""
    found, notes = [], []
    try:
        found.append(as_prediction(worker.dry_run(workload, architecture_of(gpu))))
    except FlopwiseError as error:
        notes.append(f"no dry run: {error.message}")
    closed = closed_form(workload, gpu)
    return Forecast(predictions=(*found, *((closed,) if closed else ())), notes=tuple(notes))


def as_prediction(run: DryRun) -> Prediction:
    """What is kept of a dry run beside a measurement."""
    return Prediction(source="dry run", peak=run.peak, phases=run.memory, notes=run.notes)


def closed_form(workload: Workload, gpu: Gpu | None) -> Prediction | None:
    """The closed form's word; None for a step that it does not know.

    >>> from flopwise.spec.workload import workload
    >>> closed_form(workload("tiny"), None).peak.phase
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
        notes=("the closed form is a GPU's without its workspace; the CPU's norms and attention save other tensors",)
        if on_cpu
        else (),
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
