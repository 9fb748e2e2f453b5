"""A trace explained, with what to change: by its GPU work, or where it has none by the host's time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from flopwise.advice.findings import changes, findings, host_findings
from flopwise.advice.gather import facts_of
from flopwise.advice.host_facts import HostFacts
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation, explain_host, without_gpu_work
from flopwise.analysis.loop_notes import loop_notes
from flopwise.analysis.reach import reach
from flopwise.analysis.reading import ExplainedTrace, Target, explain_gpu_work, trace_of
from flopwise.analysis.timings import host_timing_of
from flopwise.errors import FlopwiseError
from flopwise.records.finding import Finding
from flopwise.records.run import Point
from flopwise.store import StoredRun, find, runs_root
from flopwise.trace.read import read_trace
from flopwise.trace.tables import Trace

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
    return _with_subject(explain_host_work(trace, untraced), point)


def explained_run(run: StoredRun) -> Explanation | HostExplanation | None:
    """Of a run's trace; None where it has none that can be explained."""
    try:
        return explained_trace(*trace_of(run))
    except FlopwiseError:
        return None


def with_findings(read: ExplainedTrace, gpu: str | None = None) -> Explanation:
    """The explanation of GPU work that was read, with what to change and what that would bring it to."""
    e, found = read.explanation, findings(facts_of(read, gpu))
    reached = reach(e.step_ns, _saved_ns(found), e.waterfall, gpu or e.gpu)
    return msgspec.structs.replace(e, findings=found, reach=reached)


def explain_host_work(trace: Trace, point: Point | None) -> HostExplanation:
    """The same of a trace without GPU work; `point` is the step without a profiler."""
    explanation = explain_host(trace, point)
    found = host_findings(HostFacts(explanation, point.environment if point is not None else None))
    return msgspec.structs.replace(explanation, findings=found, reach=reach(explanation.step_ns, _saved_ns(found)))


def _saved_ns(found: Sequence[Finding]) -> list[float]:
    return [one.counted_ns or 0.0 for one in changes(found)]


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
