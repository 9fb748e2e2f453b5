"""Many workloads, each in its own process; resumes where it stopped; an OOM or a crash is a row."""

import contextlib
from pathlib import Path
from typing import Any

from flopwise.analysis.measured import MeasuredRun
from flopwise.capture.progress import Progress
from flopwise.capture.runners import LOCAL, open_runner
from flopwise.errors import Interrupted
from flopwise.predict.fit import too_large
from flopwise.spec.sweep import Sweep, read_sweep
from flopwise.spec.workload import Trial
from flopwise.store import Run, resumable, runs_root


def sweep(
    file: str | Path | Sweep,
    *,
    device: str | None = None,
    on: str = LOCAL,
    fresh: bool = False,
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> MeasuredRun:
    """Run every trial of the sweep that has no row yet; returns the stored run. Trials that name a profiler are traced, too.

    The newest unfinished run of exactly the same trials is continued, unless `fresh`. `on` spreads the trials over a
    cluster: 'ray', 'ray://host:port' or 'slurm'; the rows arrive in the same run. Ctrl-C stores what was measured and
    raises KeyboardInterrupt.

    >>> flopwise.sweep("sweeps/cpu-quick.toml").complete       # doctest: +SKIP
    True
    """
    overrides: dict[str, Any] = {"device": device} if device else {}
    plan = file if isinstance(file, Sweep) else read_sweep(file, overrides)
    root, progress = runs_root(runs), progress or Progress()
    unfinished = None if fresh else resumable(root, plan.trials, "sweep")
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(open_runner(on, root))
        there = runner.check(plan.trials)  # no such device: say so before the first row
        opened = Run.reopen(unfinished) if unfinished else Run.create(root, "sweep", plan.name, command, plan.trials)
        run = stack.enter_context(opened)
        missing = MeasuredRun.load(run.path).missing()
        stack.callback(progress.end)
        progress.begin(len(plan.trials), len(plan.trials) - len(missing))

        def begin(trial: Trial) -> None:
            if warning := too_large(trial.workload, there[trial.device]):
                progress.note(warning)
            progress.trial(trial)

        try:
            for point in runner.measure(missing, run, progress, begin):
                run.append(point)
                progress.point(point)
        except KeyboardInterrupt:
            raise Interrupted(MeasuredRun.load(run.path)) from None
    return MeasuredRun.load(run.path)
