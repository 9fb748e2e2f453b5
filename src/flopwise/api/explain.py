"""Where the time of a step went and what to change: from a run's own trace, or from a file someone else made."""

from collections.abc import Sequence
from pathlib import Path

from flopwise.advice.explained import explained_trace
from flopwise.advice.explained_ranks import explained_ranks
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.ranks.files import files_of, rank_files
from flopwise.analysis.reading import trace_of
from flopwise.capture.runners import LOCAL
from flopwise.errors import FlopwiseError
from flopwise.records.finding import Finding
from flopwise.records.plan import Plan, read_plan
from flopwise.records.ranks import RanksExplanation
from flopwise.store import StoredRun


def explain(
    target: str | Path | StoredRun | Sequence[str | Path],
    *,
    timings: str | Path | StoredRun | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
    device: int | None = None,
    capture: str | Path | None = None,
    model: str = "",
    link: str = "",
    on: str = LOCAL,
    plan: str | Path | Plan | None = None,
) -> Explanation | HostExplanation | RanksExplanation:
    """Explain a trace, or the traces of a job's ranks together.

    One target is explained by `explain_one`, which says what the other arguments are; they are for one trace.
    Several files, or a folder with several, are ranks of one job: the answer is a RanksExplanation, which says what each rank
    did, where they waited for each other and for whom, and why. `link` is what connects them (`nvlink4`, `ib400`, `25GB/s`;
    `nvlink4,ib400`: within a host and between hosts), by default the GPU's own link within a host. `on`: where the files are
    read, 'local', 'ray' or 'ray://HOST:PORT'; a cluster's nodes must see them at the same paths. `plan`: what `flopwise.plan`
    predicted for the job, or its file; it is set beside the ranks' step.

    >>> flopwise.explain("trace.json.gz").verdict        # doctest: +SKIP
    'launch-bound: the GPU is idle 73% of the time: …'
    >>> flopwise.explain("traces/").straggler.rank        # doctest: +SKIP
    7
    """
    targets = [target] if isinstance(target, str | Path | StoredRun) else list(target)
    files = rank_files(targets, runs)
    if files:
        name = Path(str(targets[0])).name if len(targets) == 1 else ""
        asked = plan if isinstance(plan, Plan) or plan is None else read_plan(plan)
        return explained_ranks(files, name=name, link=link, gpu=gpu or "", on=on, plan=asked)
    if link or on != LOCAL or plan is not None:
        what = "a plan" if plan is not None else "a link" if link else f"on = {on}"
        hint = "omit it, or name the other ranks' files"
        raise FlopwiseError(f"{what} is of several ranks, and this is one trace", hint)
    if len(targets) != 1:
        hint = "name the files of one job after their ranks, or explain each alone"
        raise FlopwiseError(f"{len(targets)} targets are not ranks of one job", hint)
    only = targets[0]
    if not isinstance(only, StoredRun):
        only = files_of(Path(only).expanduser())[0]
    return explain_one(only, timings=timings, gpu=gpu, runs=runs, device=device, capture=capture, model=model)


def explain_one(
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
    """
    path, point = trace_of(target, runs)
    return explained_trace(
        path, point, timings=timings, gpu=gpu, runs=runs, device=device, capture=capture, model=model
    )


def with_gpu_work(explained: Explanation | HostExplanation | RanksExplanation) -> Explanation:
    """The explanation, if it is of GPU work; raises where kernels, idle time or a waterfall are asked for and there are none."""
    if isinstance(explained, RanksExplanation):
        raise FlopwiseError(
            f"{explained.name} is of several ranks, and one trace is asked for", "name one of its files"
        )
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
    return explain_one(target, timings=timings, gpu=gpu, runs=runs).findings or ()
