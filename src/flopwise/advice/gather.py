"""All that is known of a step, gathered for the rules."""

from pathlib import Path

from flopwise.advice.facts import Facts
from flopwise.analysis.details import details_of
from flopwise.analysis.reading import Read, read_and_explain
from flopwise.predict.account import Account, account_of
from flopwise.predict.machine import find_ceilings, machine_with
from flopwise.predict.prediction import predict_quickly
from flopwise.records.run import Point
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named


def facts_of(read: Read, gpu: str | None = None) -> Facts:
    """Everything that rules may ask about a trace that was explained."""
    machine = gpu_named(gpu) if gpu else find_gpu(read.explanation.gpu)
    return Facts(
        explanation=read.explanation,
        details=details_of(read.part.trace, read.part.steps, read.part.work),
        waterfall=read.explanation.waterfall,
        point=read.point,
        account=_account(read.point, machine),
        ceilings=find_ceilings(machine) if machine is not None else None,
        gpu=machine,
    )


def facts_of_file(path: Path, point: Point) -> Facts:
    """The same for a trace's file and the step it is of."""
    return facts_of(read_and_explain(path, point))


def _account(point: Point | None, machine: Gpu | None) -> Account | None:
    """The workload's account on a GPU we know, where it can be predicted at once."""
    if point is None or machine is None:
        return None
    predicted = predict_quickly(point.trial.workload, machine_with(machine))
    return account_of([predicted]) if predicted is not None else None
