"""Capture a trace of a workload: the untraced step first, then a few steps under the profiler."""

import contextlib
from pathlib import Path
from typing import Any

from flopwise.capture.events import TraceRequest
from flopwise.capture.isolate import Worker
from flopwise.spec import fields
from flopwise.spec.workload import Sampling, Trial, Workload, workload
from flopwise.store import Run, StoredRun, runs_root
from flopwise.verbs.progress import Progress, Silent

PROFILERS = ("kineto",)


def profile(
    target: str | Workload,
    *,
    steps: int = 2,
    shapes: bool = True,
    stacks: bool = False,
    memory: bool = False,
    device: str = "auto",
    seconds: float = 5.0,
    timeout: float = 900.0,
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
    **options: Any,
) -> StoredRun:
    """Measure a workload, then trace `steps` steps of it; the run keeps both, and so tells the profiler's overhead.

    >>> run = flopwise.profile("tiny", device="cpu")       # doctest: +SKIP
    >>> flopwise.explain(run)                              # doctest: +SKIP
    """
    fields.whole("steps", steps, 1, 1000)
    chosen = target if isinstance(target, Workload) else workload(target, **options)
    trial = Trial(
        workload=chosen, sampling=Sampling(seconds=seconds, timeout_s=timeout), device=device, group="profile"
    )
    watcher = progress or Silent()
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(Worker())
        worker.surroundings(device)
        run = stack.enter_context(Run.create(runs_root(runs), "profile", chosen.target, command, [trial]))
        request = TraceRequest(
            path=str(run.trace_path(f"{trial.key()}.kineto.json.gz").resolve()),
            steps=steps,
            shapes=shapes,
            stacks=stacks,
            memory=memory,
        )
        stack.callback(watcher.end)
        watcher.begin(1, 0)
        watcher.trial(trial)
        point = worker.run(trial, run.log_path(trial.key()), watcher.event, request)
        run.append(point)
        watcher.point(point)
    return StoredRun.load(run.path)
