"""Where the time of a step went and what to change: from a run's own trace, or from a file someone else made."""

from pathlib import Path

import msgspec

from flopwise.advice.findings import findings as findings_of
from flopwise.advice.gather import facts_of
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.reading import ExplainedTrace, explain_target
from flopwise.records.finding import Finding
from flopwise.store import StoredRun


def explain(
    target: str | Path | StoredRun,
    *,
    timings: str | Path | StoredRun | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
) -> Explanation:
    """Explain a trace: a run that has one (`last`, an id, a tag, a path), or a Kineto or Nsight Systems file.

    `timings` is a run of the same workload without a profiler; a run of `profile` has its own. Which of its points was taken,
    and what of it does not match the trace, is in the answer's `timings`. A run in which several points could be the
    trace's is refused. The answer's `waterfall` leads from the ideal step to this one, by the limits of the trace's GPU
    (`gpu` names it where the trace does not); its `findings` say what to change.

    >>> flopwise.explain("trace.json.gz").verdict        # doctest: +SKIP
    'launch-bound: the GPU is idle 73% of the time: …'
    """
    return with_findings(explain_target(target, timings=timings, gpu=gpu, runs=runs), gpu)


def with_findings(read: ExplainedTrace, gpu: str | None = None) -> Explanation:
    """The explanation of a trace that was read, with what to change."""
    return msgspec.structs.replace(read.explanation, findings=findings_of(facts_of(read, gpu)))


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
    return explain(target, timings=timings, gpu=gpu, runs=runs).findings or ()
