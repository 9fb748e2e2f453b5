"""What is wrong with a step and what to do about it, from all that is known of it."""

from pathlib import Path

from flopwise.advice.facts import Facts
from flopwise.advice.finding import Finding
from flopwise.advice.findings import findings as found_in
from flopwise.analysis.details import details_of
from flopwise.cost.account import Account
from flopwise.errors import FlopwiseError
from flopwise.records import Point
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.model import ModelSpec
from flopwise.store import StoredRun
from flopwise.verbs.account import account, find_ceilings
from flopwise.verbs.dry_step import needs_dry_run
from flopwise.verbs.explain import Read, explain_all, read_and_explain


def findings(
    target: str | Path | StoredRun,
    *,
    timings: str | Path | StoredRun | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
) -> tuple[Finding, ...]:
    """The reasons for a step's distance from its limit, the largest saving first; the arguments are those of `explain`.

    >>> flopwise.findings("last")[0].title        # doctest: +SKIP
    'the GPU waits for the host 61 % of the time'
    """
    return found_in(facts_of(explain_all(target, timings=timings, gpu=gpu, runs=runs), gpu))


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
    """The workload's account, where it is a model of ours on a GPU we know."""
    if point is None or machine is None:
        return None
    workload = point.trial.workload
    if not isinstance(workload.subject, ModelSpec) or needs_dry_run(workload):
        return None
    try:
        return account(workload, gpu=machine.name)
    except FlopwiseError:  # too deep to account for op by op
        return None
