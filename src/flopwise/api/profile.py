"""Capture a trace of a workload: the untraced step first, then a few steps under the profiler."""

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec

from flopwise.analysis.measured import MeasuredRun
from flopwise.api.bench import outcome
from flopwise.capture.doctor import GOOD, nsys
from flopwise.capture.functions import Target, as_workload
from flopwise.capture.isolate import Worker
from flopwise.capture.nsys import SUFFIX, trace_with_nsys
from flopwise.capture.nsys_program import find_nsys
from flopwise.capture.progress import Progress
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.predict.fit import too_large
from flopwise.records.events import TraceRequest, Tracing
from flopwise.records.run import INTERRUPTED, OK, Point
from flopwise.spec import fields
from flopwise.spec.workload import Sampling, Trial
from flopwise.store import Run, runs_root

KINETO, NSYS = "kineto", "nsys"
PROFILERS = (KINETO, NSYS)


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
        check_nsys(device, stacks, memory)
    progress = progress or Progress()
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(Worker())
        there = worker.look(device)
        if profiler == NSYS:
            check_device(there.device)
        run = stack.enter_context(Run.create(runs_root(runs), "profile", chosen.target, command, [trial]))
        suffix = ".kineto.json.gz" if profiler == KINETO else SUFFIX
        request = TraceRequest(
            path=str(run.trace_path(f"{trial.key()}{suffix}").resolve()),
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
        point = worker.run(
            trial, run.log_path(trial.key()), progress.event, trace=request if profiler == KINETO else None
        )
        if profiler == NSYS and point.status == OK:
            progress.event(Tracing(profiler=NSYS))
            point = _traced_by_nsys(point, request, run.log_path(f"{trial.key()}.nsys"))
        run.append(point)
        progress.point(point)
    if point.status == INTERRUPTED:
        raise Interrupted(MeasuredRun.load(run.path))
    stored = MeasuredRun.load(run.path)
    outcome(stored)
    return stored


def _traced_by_nsys(point: Point, request: TraceRequest, log: Path) -> Point:
    """The point with its trace, or with why there is none; what was measured without a profiler is kept."""
    begun = time.monotonic()
    left_s = max(1.0, point.trial.sampling.timeout_s - point.elapsed_s)
    traced, ended = trace_with_nsys(find_nsys(), point.trial, request, log, left_s)
    return msgspec.structs.replace(
        point,
        status=ended.status,
        reason=ended.reason,
        hint=ended.hint,
        stopped=ended.stopped or point.stopped,
        trace_file=Path(traced.path).name if traced else "",
        traced_step_ns=traced.step_ns if traced else 0,
        elapsed_s=round(point.elapsed_s + time.monotonic() - begun, 3),
    )


def check_nsys(device: str, stacks: bool, memory: bool) -> None:
    """Refuse what cannot be captured by nsys before anything is measured."""
    if device != "auto":
        check_device(device)
    for name, asked in (("stacks", stacks), ("memory", memory)):
        if asked:
            raise FlopwiseError(
                f"--{name} is recorded by PyTorch's profiler only", "leave it out, or use --with kineto"
            )
    check = nsys()
    if check.state != GOOD:
        raise FlopwiseError(
            f"nsys: {check.found}",
            "NVIDIA's nsight-systems-cli package has it; or use --with kineto, which needs nothing",
        )


def check_device(device: str) -> None:
    """nsys sees the GPU and what is launched on it."""
    if not device.startswith("cuda"):
        raise FlopwiseError(f"there is nothing for nsys to see on '{device}': no GPU work", "use --with kineto")
