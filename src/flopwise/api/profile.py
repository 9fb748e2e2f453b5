"""Capture a trace of a workload: the untraced step first, then a few steps under the profiler."""

import contextlib
from pathlib import Path
from typing import Any

from flopwise.analysis.measured import MeasuredRun
from flopwise.api.bench import outcome
from flopwise.capture.functions import Target, as_workload
from flopwise.capture.isolate import Worker
from flopwise.capture.progress import Progress
from flopwise.capture.traced_trial import SUFFIXES, check_device, check_nsys, run_traced
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.predict.fit import too_large
from flopwise.records.events import TraceRequest
from flopwise.records.run import INTERRUPTED
from flopwise.spec import fields
from flopwise.spec.workload import KINETO, NSYS, PROFILERS, Sampling, Trial
from flopwise.store import Run, runs_root


def profile(
    target: Target,
    *,
    profiler: str = KINETO,
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
) -> MeasuredRun:
    """Measure a workload, then trace `steps` steps of it; the run keeps both, which shows the profiler's overhead.

    `profiler` is PyTorch's own (`kineto`) or Nsight Systems (`nsys`), which must be installed. Ctrl-C stores what was
    measured and raises KeyboardInterrupt.

    >>> run = flopwise.profile("tiny", device="cpu")       # doctest: +SKIP
    >>> flopwise.explain(run)                              # doctest: +SKIP
    """
    fields.whole("steps", steps, 1, 1000)
    fields.one_of("profiler", profiler, PROFILERS)
    chosen = as_workload(target, options)
    trial = Trial(
        workload=chosen, sampling=Sampling(seconds=seconds, timeout_s=timeout), device=device, group="profile"
    )
    if profiler == NSYS:
        _check_asked(stacks, memory)
        check_nsys(device)
    progress = progress or Progress()
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(Worker())
        there = worker.look(device)
        if profiler == NSYS:
            check_device(there.device)
        run = stack.enter_context(Run.create(runs_root(runs), "profile", chosen.target, command, [trial]))
        request = TraceRequest(
            path=str(run.trace_path(f"{trial.key()}{SUFFIXES[profiler]}").resolve()),
            steps=steps,
            shapes=shapes,
            stacks=stacks,
            memory=memory,
        )
        stack.callback(progress.end)
        progress.begin(1, 0)
        if warning := too_large(chosen, there):
            progress.note(warning)
        progress.trial(trial)
        point = run_traced(worker, trial, profiler, request, run.log_path, progress)
        run.append(point)
        progress.point(point)
    if point.status == INTERRUPTED:
        raise Interrupted(MeasuredRun.load(run.path))
    stored = MeasuredRun.load(run.path)
    outcome(stored)
    return stored


def _check_asked(stacks: bool, memory: bool) -> None:
    for name, asked in (("stacks", stacks), ("memory", memory)):
        if asked:
            raise FlopwiseError(
                f"--{name} is recorded by PyTorch's profiler only", "leave it out, or use --with kineto"
            )
