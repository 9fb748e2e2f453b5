"""Collects the facts about a step: from its trace where there is one, else from its clocks alone."""

from pathlib import Path

import msgspec

from flopwise.advice.facts import Facts
from flopwise.advice.findings import findings
from flopwise.analysis.details import details
from flopwise.analysis.reading import ExplainedTrace, explain_file
from flopwise.errors import FlopwiseError
from flopwise.predict.machine import find_ceilings
from flopwise.predict.recorded.step import RecordedStep
from flopwise.records.finding import Finding
from flopwise.records.run import Point
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step, its facts, and what the rules say; `problem` is why there is no trace to go by."""

    facts: Facts
    findings: tuple[Finding, ...] = ()
    problem: str = ""


def facts_of(read: ExplainedTrace, gpu: str | None = None, recorded: RecordedStep | None = None) -> Facts:
    """Everything that rules may ask about an explained trace."""
    machine = gpu_named(gpu) if gpu else find_gpu(read.explanation.gpu)
    return Facts(
        explanation=read.explanation,
        details=details(read.steps),
        waterfall=read.explanation.waterfall,
        point=read.point,
        ceilings=find_ceilings(machine) if machine is not None else None,
        gpu=machine,
        recorded=recorded,
    )


def inspect(point: Point, trace: Path | None, gpu: Gpu | None, recorded: RecordedStep | None = None) -> Inspection:
    """The facts of a measured step: from its trace where there is a readable one, else from its clocks alone.

    `recorded`: of a user's step, so that its levers can be predicted.
    """
    problem = "no trace could be taken"
    try:
        if trace is not None:
            facts = facts_of(explain_file(trace, point), recorded=recorded)
            return Inspection(facts=facts, findings=findings(facts))
    except FlopwiseError as error:
        problem = f"its trace cannot be explained: {error.message}"
    ceilings = find_ceilings(gpu) if gpu is not None else None
    alone = Facts(point=point, ceilings=ceilings, gpu=gpu, recorded=recorded)
    return Inspection(facts=alone, problem=problem)
