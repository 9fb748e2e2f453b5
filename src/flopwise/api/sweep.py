"""Many workloads, each in its own process; resumes where it stopped; an OOM or a crash is a row."""

import contextlib
from pathlib import Path
from typing import Any

from flopwise.analysis.measured import MeasuredRun
from flopwise.capture.isolate import Worker
from flopwise.capture.processes import run_processes
from flopwise.capture.progress import Progress
from flopwise.capture.traced_trial import SUFFIXES, check_device, check_nsys, run_traced
from flopwise.errors import Interrupted
from flopwise.predict.fit import too_large
from flopwise.records.events import TraceRequest
from flopwise.records.run import INTERRUPTED, Point
from flopwise.spec.sweep import Sweep, read_sweep
from flopwise.spec.workload import NSYS, Trial
from flopwise.store import Run, resumable, runs_root


def sweep(
    file: str | Path | Sweep,
    *,
    device: str | None = None,
    fresh: bool = False,
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> MeasuredRun:
    """Run every trial of the sweep that has no row yet; returns the stored run. Trials that name a profiler are traced, too.

    The newest unfinished run of exactly the same trials is continued, unless `fresh`. Ctrl-C stores what was measured and
    raises KeyboardInterrupt.

    >>> flopwise.sweep("sweeps/cpu-quick.toml").complete       # doctest: +SKIP
    True
    """
    overrides: dict[str, Any] = {"device": device} if device else {}
    plan = file if isinstance(file, Sweep) else read_sweep(file, overrides)
    root, progress = runs_root(runs), progress or Progress()
    unfinished = None if fresh else resumable(root, plan.trials, "sweep")
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(Worker(any(t.workload.recipe.compile != "off" for t in plan.trials)))
        # No such device: say so before the first row.
        there = {name: worker.look(name) for name in dict.fromkeys(trial.device for trial in plan.trials)}
        for device in dict.fromkeys(trial.device for trial in plan.trials if trial.trace == NSYS):
            check_nsys(device)
            check_device(there[device].device)
        opened = Run.reopen(unfinished) if unfinished else Run.create(root, "sweep", plan.name, command, plan.trials)
        run = stack.enter_context(opened)
        missing = MeasuredRun.load(run.path).missing()
        stack.callback(progress.end)
        progress.begin(len(plan.trials), len(plan.trials) - len(missing))
        for trial in missing:
            if warning := too_large(trial.workload, there[trial.device]):
                progress.note(warning)
            progress.trial(trial)
            point = _measured(worker, trial, run, progress)
            run.append(point)
            progress.point(point)
            if point.status == INTERRUPTED:
                raise Interrupted(MeasuredRun.load(run.path))
    return MeasuredRun.load(run.path)


def _measured(worker: Worker, trial: Trial, run: Run, progress: Progress) -> Point:
    if not trial.trace:
        return run_processes(worker, trial, run.log_path(trial.key()), progress.event)
    path = run.trace_path(f"{trial.key()}{SUFFIXES[trial.trace]}").resolve()
    return run_traced(worker, trial, trial.trace, TraceRequest(path=str(path)), run.log_path, progress)
