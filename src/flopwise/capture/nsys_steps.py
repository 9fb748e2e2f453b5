"""The steps that nsys traces: the measured step again, warmed up by the same rule, then a few inside the captured range.

Each step, phase and module is a range, and so is every op, with the sequence number that links a gradient to its forward op.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.clock import clock_for
from flopwise.capture.memory_limit import limit_memory
from flopwise.capture.pipes import Emit
from flopwise.capture.ranges import NUMBERED_STEP, named_modules, run_phases
from flopwise.capture.step import Step, synchronise
from flopwise.capture.trials import failure, warm_up
from flopwise.errors import FlopwiseError
from flopwise.records.events import Done, NsysJob, TraceRequest, TraceWritten
from flopwise.records.run import OK


def run_job(job: NsysJob, emit: Emit) -> None:
    """Build, warm up, run the steps to be traced, report the result. nsys writes its report when this process ends."""
    try:
        device = resolve_device(job.trial.device)
        if device.type == "cpu":
            limit_memory()
        step = build_step(job.trial.workload, device)
        warm_up(clock_for(step.phases, device, step.single_op), job.trial.sampling, device, emit=lambda event: None)
        emit(TraceWritten(path=job.trace.path, step_ns=trace_steps(step, device, job.trace)))
        emit(Done(status=OK))
    except BaseException as error:
        emit(failure(error))
        if not isinstance(error, FlopwiseError):
            raise  # the log keeps the traceback


def trace_steps(step: Step, device: torch.device, request: TraceRequest) -> int:
    """Run the steps inside the captured range; nanoseconds per step, on the host's clock.

    One more step runs first with its ranges on and nothing captured: the first ranges cost more.
    """
    gc.collect()
    gc.disable()  # as while the untraced step was measured
    try:
        with named_modules(step.model if request.modules else None), op_ranges(device, request.shapes):
            run_phases(step.phases)
            synchronise(device)
            with captured_range(device):
                begun = time.perf_counter_ns()
                for n in range(request.steps):
                    with torch.profiler.record_function(f"{NUMBERED_STEP}{n}"):
                        run_phases(step.phases)
                synchronise(device)
                return (time.perf_counter_ns() - begun) // request.steps
    finally:
        gc.enable()


def op_ranges(device: torch.device, shapes: bool) -> AbstractContextManager[object]:
    """Every op, and every `record_function`, as an NVTX range, on autograd's threads as well; off CUDA there is no NVTX."""
    if device.type != "cuda":
        return nullcontext()
    return torch.autograd.profiler.emit_nvtx(record_shapes=shapes)


@contextmanager
def captured_range(device: torch.device) -> Iterator[None]:
    """What `nsys profile --capture-range=cudaProfilerApi` records; nothing off CUDA."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()
