"""Time a step and its phases; of two workloads, one against the other; or of several implementations."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flopwise.analysis.measured import MeasuredRun
from flopwise.api.sweep import sweep
from flopwise.capture.busy import busy_cores, busy_machine
from flopwise.capture.functions import Target, as_workload
from flopwise.capture.interleave import Contest
from flopwise.capture.isolate import Worker
from flopwise.capture.processes import run_processes
from flopwise.capture.progress import Progress
from flopwise.capture.stopping import PairsRule
from flopwise.errors import Failed, FlopwiseError, Interrupted
from flopwise.predict.fit import too_large
from flopwise.records.run import INTERRUPTED, OK, Point
from flopwise.spec.fields import did_you_mean
from flopwise.spec.recipe import LEVERS
from flopwise.spec.sweep import Sweep
from flopwise.spec.workload import Sampling, Trial, UserStep, Workload, takes, varied, workload
from flopwise.store import Run, runs_root


def bench(
    target: Target,
    *,
    device: str = "auto",
    warmup: int | None = None,
    samples: int | None = None,
    processes: int | None = None,
    seconds: float = 10.0,
    timeout: float = 900.0,
    versus: Mapping[str, Any] | None = None,
    impls: Sequence[str] = (),
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
    **options: Any,
) -> MeasuredRun:
    """Measure a workload in processes of its own and keep every sample; returns the stored run.

    `target` is a name, or a function: a factory of a step, or the step itself (docs/reference/own-step.md).
    `options` are the workload's size, phase and levers (`batch`, `context`, `phase`, `precision`, …; `set` for fields of
    the model or arguments of the factory).
    `processes`: exactly so many; by default three, or one where starting takes long or `samples` is given.
    With `versus={"precision": "bf16"}` a second workload, so changed, is measured beside the first, in pairs of processes
    until it is known which is faster.
    With `impls` an operation is measured in each of these implementations; one that cannot run is a row.
    A step that fails raises Failed; Ctrl-C stores what was measured and raises KeyboardInterrupt. The `result` of both is the
    stored run.

    >>> run = flopwise.bench("tiny", device="cpu", batch=2)        # doctest: +SKIP
    >>> run.points[0].times().wall_ns                              # doctest: +SKIP
    (1432211, 1429120, …)
    >>> flopwise.bench(make_step, set={"n_layers": 2}).median_ms   # doctest: +SKIP
    1.431
    """
    sampling = Sampling(warmup=warmup, samples=samples, processes=processes, seconds=seconds, timeout_s=timeout)
    if impls and versus is not None:
        raise FlopwiseError("--versus and several implementations do not go together", "give one of the two")
    if impls:
        made = [workload(str(target), impl=impl, **options) for impl in dict.fromkeys(impls)]
        trials = [Trial(workload=one, sampling=sampling, device=device) for one in made]
        plan = Sweep(name=f"{target} by implementation", trials=tuple(trials))
        return sweep(plan, fresh=True, runs=runs, command=command, progress=progress)
    first = as_workload(target, options)
    trials = [Trial(workload=first, sampling=sampling, device=device)]
    if versus is not None:
        trials.append(Trial(workload=_varied(first, versus), sampling=sampling, device=device, group="versus"))
    return _measure(trials, first.target, runs_root(runs), command, progress or Progress())


def _measure(trials: list[Trial], name: str, root: Path, command: str, progress: Progress) -> MeasuredRun:
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(Worker())
        there = worker.look(trials[0].device)  # no such device: say so before there is a run
        run = stack.enter_context(Run.create(root, "bench", name, command, trials))
        stack.callback(progress.end)
        progress.begin(len(trials), 0)
        busy = busy_cores() if there.device == "cpu" else 0.0
        for warning in filter(None, (busy_machine(busy), *(too_large(trial.workload, there) for trial in trials))):
            progress.note(warning)
        progress.trial(trials[0])
        if len(trials) == 1:
            log = run.log_path(trials[0].key())
            points: tuple[Point, ...] = (run_processes(worker, trials[0], log, progress.event, several=True),)
        else:
            worker.close()
            contest = Contest(run.log_path, progress.event, watch=True)
            stack.callback(contest.close)
            points = contest.run((trials[0], trials[1]), PairsRule(trials[0].sampling)).points
        points = tuple(msgspec.structs.replace(point, busy_cores=busy) for point in points)
        for point in points:
            run.append(point)
            progress.point(point)
    stored, statuses = MeasuredRun.load(run.path), {point.status for point in points}
    if INTERRUPTED in statuses <= {OK, INTERRUPTED}:  # of a pair, one is also cut short when the other fails
        raise Interrupted(stored)
    outcome(stored)
    return stored


def _varied(first: Workload, versus: Mapping[str, Any]) -> Workload:
    """The first workload with some of its size, phase, levers or fields changed."""
    own = ("implementation", *takes(first.subject), *LEVERS)
    known = own if isinstance(first.subject, UserStep) else ("batch", "context", "phase", "impl", *own)
    fields = {name: value for name, value in versus.items() if name not in known}
    try:
        return varied(first, set=fields, **{name: value for name, value in versus.items() if name in known})
    except FlopwiseError as error:
        close = [] if error.hint.startswith("did you mean") else [did_you_mean(name, known) for name in fields]
        raise FlopwiseError(error.message, "".join(close[:1]) + error.hint) from None


def interrupted(run: MeasuredRun) -> bool:
    """Whether some point was cut short."""
    return any(point.status == INTERRUPTED for point in run.points)


def outcome(run: MeasuredRun) -> int:
    """The exit code of a bench: 0 measured, 130 stopped by the user; raises what stood in the way of measuring."""
    for point in run.points:
        if point.status not in (OK, INTERRUPTED):
            raise Failed(f"{point.trial.workload.label()}: {point.status}: {point.reason}", point.hint, run)
    return 130 if interrupted(run) else 0
