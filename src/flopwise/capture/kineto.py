"""A trace by PyTorch's profiler: only the measured steps inside, phases and modules named."""

import time
from pathlib import Path

import torch

from flopwise.capture.ranges import named_modules, run_phases
from flopwise.capture.step import Step, synchronise
from flopwise.records.events import TraceRequest


def trace_steps(step: Step, device: torch.device, request: TraceRequest) -> int:
    """Write a Kineto trace of some steps to `request.path`; nanoseconds per traced step, on the host's clock.

    One more step runs first under the profiler without being recorded: the profiler's own start-up is not the workload's.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=request.steps, repeat=1)
    partial = Path(request.path).with_name(f"partial-{Path(request.path).name}")
    begun = 0
    with (
        named_modules(step.model if request.modules else None),
        torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            record_shapes=request.shapes,
            with_stack=request.stacks,
            profile_memory=request.memory,
            on_trace_ready=lambda done: done.export_chrome_trace(str(partial)),
        ) as profiler,
    ):
        for n in range(1 + request.steps):
            begun = time.perf_counter_ns() if n == 1 else begun
            run_phases(step.phases)
            if n in (0, request.steps):
                synchronise(device)
                took_ns = (time.perf_counter_ns() - begun) // request.steps
            profiler.step()
    partial.replace(request.path)  # whole or not at all
    return took_ns
