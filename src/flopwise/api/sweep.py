"""Many workloads, each in its own process; resumes where it stopped; an OOM or a crash is a row."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flopwise.analysis.hosts import elsewhere
from flopwise.analysis.measured import MeasuredRun
from flopwise.capture.progress import Progress
from flopwise.capture.runners import LOCAL, open_runner
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.predict.fit import too_large
from flopwise.records.events import DeviceInfo
from flopwise.records.run import OK
from flopwise.spec.sweep import Sweep, read_sweep
from flopwise.spec.workload import Trial
from flopwise.store import Run, resumable, runs_root


def sweep(
    file: str | Path | Sweep,
    *,
    device: str | None = None,
    on: str = LOCAL,
    fresh: bool = False,
    retry_failed: bool = False,
    mixed: bool = False,
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> MeasuredRun:
    """Run every trial of the sweep that has no row yet; returns the stored run. Trials that name a profiler are traced, too.

    The newest unfinished run of exactly the same trials is continued, unless `fresh`. `retry_failed`: the newest run,
    finished or not, and trials whose row is not 'ok' are measured again. A run of another GPU, driver or torch is continued
    only if `mixed`: its table then says which row is from where. `on` spreads the trials over a
    cluster: 'ray', 'ray://host:port' or 'slurm'; the rows arrive in the same run. Ctrl-C stores what was measured and
    raises KeyboardInterrupt.

    >>> flopwise.sweep("sweeps/cpu-quick.toml").complete       # doctest: +SKIP
    True
    """
    overrides: dict[str, Any] = {"device": device} if device else {}
    plan = file if isinstance(file, Sweep) else read_sweep(file, overrides)
    root, progress = runs_root(runs), progress or Progress()
    if fresh and retry_failed:
        raise FlopwiseError("--fresh begins a new run, --retry-failed continues one", "use one of them")
    unfinished = None if fresh else resumable(root, plan.trials, "sweep", finished=retry_failed)
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(open_runner(on, root))
        there = runner.check(plan.trials)  # no such device: say so before the first row
        if unfinished and not mixed:
            _check_same_machine(MeasuredRun.load(unfinished), retry_failed, there)
        opened = Run.reopen(unfinished) if unfinished else Run.create(root, "sweep", plan.name, command, plan.trials)
        run = stack.enter_context(opened)
        missing = _to_measure(MeasuredRun.load(run.path), retry_failed)
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
            stored = MeasuredRun.load(run.path)
            if not stored.points:  # nothing to keep
                raise
            raise Interrupted(stored) from None
    return MeasuredRun.load(run.path)


def _to_measure(run: MeasuredRun, retry_failed: bool) -> list[Trial]:
    """What has no row, and with `retry_failed` what has one that is not ok; each once, in the plan's order."""
    wanted = {trial.key() for trial in run.missing()}
    wanted |= {point.key for point in run.points if retry_failed and point.status != OK}
    return list({key: trial for trial in run.header.trials if (key := trial.key()) in wanted}.values())


def _check_same_machine(run: MeasuredRun, retry_failed: bool, there: Mapping[str, DeviceInfo]) -> None:
    """Raise if rows that stay in the run were all measured in other environments than the next would be.

    Of a cluster's nodes nothing is known before: `there` is empty.
    """
    missing = _to_measure(run, retry_failed)
    again = {trial.key() for trial in missing}
    for device in dict.fromkeys(trial.device for trial in missing if trial.device in there):
        stay = [point for point in run.points if point.trial.device == device and point.trial.key() not in again]
        if apart := elsewhere(stay, there[device].environment):
            hint = "--mixed measures the rest here, and the table marks those rows; --fresh begins a new run"
            raise FlopwiseError(f"{run.header.id} was measured with {apart[0]}; here is {apart[1]}", hint)
