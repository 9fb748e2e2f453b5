"""Many workloads, each in its own process; resumes where it stopped; an OOM or a crash is a row."""

import contextlib
from pathlib import Path
from typing import Any

from flopwise.analysis.measured import MeasuredRun
from flopwise.capture.isolate import Worker
from flopwise.capture.processes import run_processes
from flopwise.capture.progress import Progress
from flopwise.errors import Interrupted
from flopwise.predict.fit import too_large
from flopwise.records.run import INTERRUPTED
from flopwise.spec.sweep import Sweep, read_sweep
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
    """Run every trial of the sweep that has no row yet; returns the stored run.

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
        opened = Run.reopen(unfinished) if unfinished else Run.create(root, "sweep", plan.name, command, plan.trials)
        run = stack.enter_context(opened)
        missing = MeasuredRun.load(run.path).missing()
        stack.callback(progress.end)
        progress.begin(len(plan.trials), len(plan.trials) - len(missing))
        for trial in missing:
            if warning := too_large(trial.workload, there[trial.device]):
                progress.note(warning)
            progress.trial(trial)
            point = run_processes(worker, trial, run.log_path(trial.key()), progress.event)
            run.append(point)
            progress.point(point)
            if point.status == INTERRUPTED:
                raise Interrupted(MeasuredRun.load(run.path))
    return MeasuredRun.load(run.path)
