"""A trial measured without a profiler, then traced for a few steps by the profiler that it names."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from flopwise.capture.doctor import GOOD, nsys
from flopwise.capture.isolate import Worker
from flopwise.capture.nsys import SUFFIX, trace_with_nsys
from flopwise.capture.nsys_program import find_nsys
from flopwise.capture.progress import Progress
from flopwise.errors import FlopwiseError
from flopwise.records.events import TraceRequest, Tracing
from flopwise.records.run import OK, Point
from flopwise.spec.workload import KINETO, NSYS, Trial

SUFFIXES = {KINETO: ".kineto.json.gz", NSYS: SUFFIX}


def run_traced(
    worker: Worker,
    trial: Trial,
    profiler: str,
    request: TraceRequest,
    log_path: Callable[[str], Path],
    progress: Progress,
) -> Point:
    """The point with its trace, or with why there is none; what was measured without a profiler is kept."""
    by_kineto = request if profiler == KINETO else None
    point = worker.run(trial, log_path(trial.key()), progress.event, trace=by_kineto)
    if profiler == KINETO or point.status != OK:
        return point
    progress.event(Tracing(profiler=NSYS))
    begun = time.monotonic()
    left_s = max(1.0, trial.sampling.timeout_s - point.elapsed_s)
    traced, ended = trace_with_nsys(find_nsys(), trial, request, log_path(f"{trial.key()}.nsys"), left_s)
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


def check_nsys(device: str) -> None:
    """Refuse what cannot be captured by nsys before anything is measured."""
    if device != "auto":
        check_device(device)
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
