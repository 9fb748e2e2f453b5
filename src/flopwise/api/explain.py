"""Where the time of a step went and what to change: from a run's own trace, or from a file someone else made."""

from pathlib import Path

from flopwise.advice.explained import explained_trace
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.reading import trace_of
from flopwise.errors import FlopwiseError
from flopwise.records.finding import Finding
from flopwise.store import StoredRun


def explain(
    target: str | Path | StoredRun,
    *,
    timings: str | Path | StoredRun | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
    device: int | None = None,
    capture: str | Path | None = None,
    model: str = "",
) -> Explanation | HostExplanation:
    """Explain a trace: a run that has one (`last`, an id, a tag, a path), or a Kineto or Nsight Systems file.

    `timings` is a run of the same workload without a profiler; a run of `profile` has its own. Which of its points was taken,
    and what of it does not match the trace, is in the answer's `timings`. A run in which several points could be the
    trace's is refused. The answer's `waterfall` leads from the ideal step to this one, by the limits of the trace's GPU
    (`gpu` names it where the trace does not); its `findings` say what to change. Of a trace of several devices the answer is
    the busiest's, or `device`'s; its `devices` has one for each, and `together` what they tell together. A trace without GPU
    work is explained by the host's time: the answer is a HostExplanation.

    `capture`: the trace in which the CUDA graphs that this one replays were captured; it tells their ops and modules. Files
    beside the trace with 'capture' in their name are looked into. `model`: what a server ran (a preset, `hf:PATH`), for the
    bytes of its weights and cache where the trace has no shapes.

    >>> flopwise.explain("trace.json.gz").verdict        # doctest: +SKIP
    'launch-bound: the GPU is idle 73% of the time: …'
    """
    path, point = trace_of(target, runs)
    return explained_trace(
        path, point, timings=timings, gpu=gpu, runs=runs, device=device, capture=capture, model=model
    )


def with_gpu_work(explained: Explanation | HostExplanation) -> Explanation:
    """The explanation, if it is of GPU work; raises where kernels, idle time or a waterfall are asked for and there are none."""
    if isinstance(explained, HostExplanation):
        problem = f"{explained.path} has no GPU work in it: no kernels to list, compare or draw"
        raise FlopwiseError(
            problem, "was it captured on a GPU, with CUDA activity on? Alone, it is explained by the CPU's time"
        )
    return explained


def findings(
    target: str | Path | StoredRun,
    *,
    timings: str | Path | StoredRun | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
) -> tuple[Finding, ...]:
    """The reasons for a step's distance from its limit, in the order to remove them; the arguments are those of `explain`.

    >>> flopwise.findings("last")[0].title        # doctest: +SKIP
    'the GPU waits for the host 61 % of the time'
    """
    return explain(target, timings=timings, gpu=gpu, runs=runs).findings or ()
