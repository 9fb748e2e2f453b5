"""All that is known of a step, gathered for the rules."""

from pathlib import Path

from flopwise.advice.facts import Facts
from flopwise.analysis.details import details
from flopwise.analysis.reading import ExplainedTrace, explain_file
from flopwise.errors import FlopwiseError
from flopwise.predict.account import Account, Questions, account_for
from flopwise.predict.dry_step import needs_dry_run
from flopwise.predict.machine import find_ceilings
from flopwise.records.run import Point
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.model import ModelSpec


def facts_of(read: ExplainedTrace, gpu: str | None = None) -> Facts:
    """Everything that rules may ask about a trace that was explained."""
    machine = gpu_named(gpu) if gpu else find_gpu(read.explanation.gpu)
    return Facts(
        explanation=read.explanation,
        details=details(read.steps),
        waterfall=read.explanation.waterfall,
        point=read.point,
        account=_account(read.point, machine),
        ceilings=find_ceilings(machine) if machine is not None else None,
        gpu=machine,
    )


def facts_of_file(path: Path, point: Point) -> Facts:
    """The same for a trace's file and the step it is of."""
    return facts_of(explain_file(path, point))


def _account(point: Point | None, machine: Gpu | None) -> Account | None:
    """The workload's account, where it is a model of ours on a GPU we know."""
    if point is None or machine is None:
        return None
    workload = point.trial.workload
    if not isinstance(workload.subject, ModelSpec) or needs_dry_run(workload):
        return None
    try:
        known = find_ceilings(machine)
        return account_for(workload, (machine,), Questions(), {machine.name: known} if known else {})
    except FlopwiseError:  # too deep to account for op by op
        return None
