"""A trace explained, with what to change: by its GPU work, or where it has none by the host's time."""

from pathlib import Path
from typing import TypeVar

import msgspec

from flopwise.advice.findings import findings, host_findings
from flopwise.advice.gather import facts_of
from flopwise.advice.host_facts import HostFacts
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation, explain_host, without_gpu_work
from flopwise.analysis.loop_notes import loop_notes
from flopwise.analysis.reading import ExplainedTrace, Target, explain_gpu_work, trace_of
from flopwise.analysis.timings import host_timing_of
from flopwise.errors import FlopwiseError
from flopwise.records.run import Point
from flopwise.store import StoredRun, find, runs_root
from flopwise.trace.read import read_trace

LOOP = "loop"  # the key of notes about a watched loop
_Explained = TypeVar("_Explained", Explanation, HostExplanation)


def explained_trace(
    path: Path,
    point: Point | None,
    *,
    timings: Target | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
) -> Explanation | HostExplanation:
    """Of a file; `point` is the step that it is a trace of, where that is known."""
    trace = read_trace(path)
    if not without_gpu_work(trace):
        read = explain_gpu_work(trace, point, timings=timings, gpu=gpu, runs=runs)
        return _with_subject(with_findings(read, gpu), point)
    untraced = point
    if timings is not None:
        timed = timings if isinstance(timings, StoredRun) else StoredRun.load(find(timings, runs_root(runs)))
        untraced = host_timing_of(timed)
    explanation = explain_host(trace, untraced)
    facts = HostFacts(explanation, untraced.environment if untraced is not None else None)
    return _with_subject(msgspec.structs.replace(explanation, findings=host_findings(facts)), point)


def explained_run(run: StoredRun) -> Explanation | HostExplanation | None:
    """Of a run's trace; None where it has none that can be explained."""
    try:
        return explained_trace(*trace_of(run))
    except FlopwiseError:
        return None


def with_findings(read: ExplainedTrace, gpu: str | None = None) -> Explanation:
    """The explanation of GPU work that was read, with what to change."""
    return msgspec.structs.replace(read.explanation, findings=findings(facts_of(read, gpu)))


def _with_subject(explanation: _Explained, point: Point | None) -> _Explained:
    """What was traced, and what its loop did besides."""
    if point is None:
        return explanation
    told: list[str] = loop_notes(point)
    return msgspec.structs.replace(
        explanation,
        subject=point.trial.workload.label(),
        notes=(*told, *explanation.notes),
        note_keys=(*[LOOP] * len(told), *explanation.note_keys),
    )
