"""One trial from beginning to end: build, warm up until steady, sample until precise, look at the memory; say all of it."""

import gc
import resource
import sys
import time
from collections.abc import Callable, Sequence

import torch

from flopwise.capture.agreement import agreement_of
from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.clock import Clock, clock_for
from flopwise.capture.environment import environment, gpu_uuid
from flopwise.capture.kineto import trace_steps
from flopwise.capture.step import Step
from flopwise.capture.stopping import StoppingRule, steady
from flopwise.errors import FlopwiseError, Unsupported, WrongResult, one_line
from flopwise.records.events import (
    AgreeRequest,
    Done,
    Event,
    MemoryMeasured,
    Ready,
    Sampled,
    Surroundings,
    Traced,
    TraceRequest,
    WarmedUp,
    WarmupStep,
)
from flopwise.records.run import ERROR, INTERRUPTED, OK, OOM, STEP, UNSUPPORTED, WRONG, PhaseMemory
from flopwise.spec.workload import Sampling, Trial

GPU_WARMUP_NS = 200_000_000  # of running at the least: a GPU raises its clocks within that
MOST_WARMUP_STEPS = 20_000

Emit = Callable[[Event], None]


def run_trial(
    trial: Trial,
    emit: Emit,
    may_go_on: Callable[[], bool],
    turns: bool = False,
    trace: TraceRequest | None = None,
    compare: AgreeRequest | None = None,
    fewest: int = 0,
    details: int = 0,
) -> None:
    """Run the trial and emit what happens. `may_go_on` is asked before every step; in `turns` it alone ends the sampling.

    `compare`: the first steps' losses and gradients are set beside a reference's; they warm the step up as well.
    `fewest`: samples to be taken whatever the budget says. `details`: samples with phases and the GPU's clock; 0: all.
    """
    try:
        device = resolve_device(trial.device)
        emit(Surroundings(environment=environment(device), device=str(device), gpu_uuid=gpu_uuid(device)))
        begun = time.perf_counter_ns()
        step = build_step(trial.workload, device)
        emit(Ready(setup_ns=time.perf_counter_ns() - begun, captured_first_ns=step.captured_first_ns))
        clock = clock_for(step.phases, device, step.single_op, details)
        compared_ns: list[int] = []
        if compare is not None:
            emit(agreement_of(step, trial.workload, compare, lambda: compared_ns.append(clock.once())))
        gc.collect()
        gc.disable()  # a collection in the middle of a step is the interpreter's, not the workload's
        try:
            go_on = warm_up(clock, trial.sampling, device, emit, may_go_on, turns, compared_ns)
            if turns and go_on:  # who takes turns is asked for more rounds, but not for its memory
                emit(MemoryMeasured(memory=phase_memory(step, device)))
            stopped = _sample(clock, trial.sampling, emit, may_go_on, turns, fewest) if go_on else "interrupted"
        finally:
            gc.enable()
        if stopped != "interrupted":
            if not turns:
                emit(MemoryMeasured(memory=phase_memory(step, device)))
            if trace is not None:
                emit(Traced(path=trace.path, step_ns=trace_steps(step, device, trace)))
        status = INTERRUPTED if stopped == "interrupted" else OK
        emit(Done(status=status, stopped=stopped, ran=step.ran(), peak_rss_bytes=peak_rss_bytes()))
    except BaseException as error:
        emit(why(error))
        if not isinstance(error, FlopwiseError):
            raise  # the log keeps the traceback


def warm_up(
    clock: Clock,
    sampling: Sampling,
    device: torch.device,
    emit: Emit,
    may_go_on: Callable[[], bool] = lambda: True,
    turns: bool = False,
    done_ns: Sequence[int] = (),
) -> bool:
    """Until steady, or exactly `sampling.warmup` steps. False: it was interrupted. `done_ns`: steps that were run already."""
    least_ns = GPU_WARMUP_NS if device.type == "cuda" else 0
    walls = list(done_ns)
    for wall_ns in walls:
        emit(WarmupStep(wall_ns=wall_ns))
    rule = "steady" if sampling.warmup is None else "forced"
    deadline, next_look = time.perf_counter() + sampling.seconds, 0
    while sampling.warmup is None or len(walls) < sampling.warmup:
        if not turns and not may_go_on():
            return False
        walls.append(clock.once())
        emit(WarmupStep(wall_ns=walls[-1]))
        if sampling.warmup is None and len(walls) >= next_look:
            next_look = len(walls) + max(1, len(walls) // 10)  # looking at every tenth keeps the rule cheap
            # The first step holds compilation and lazy initialisation: it is never evidence of a steady state.
            if steady(walls[1:], least_ns):
                break
            if len(walls) >= 2 and (time.perf_counter() > deadline or len(walls) >= MOST_WARMUP_STEPS):
                rule = "budget"
                break
        deadline = time.perf_counter() + sampling.seconds if len(walls) == 1 else deadline
    emit(WarmedUp(rule=rule))
    return True


def _sample(
    clock: Clock, sampling: Sampling, emit: Emit, may_go_on: Callable[[], bool], turns: bool, fewest: int
) -> str:
    """Sample until the rule says why to stop."""
    rule = StoppingRule(sampling)
    begun, taken = time.perf_counter(), 0
    while may_go_on():
        phases = clock.sample()
        emit(Sampled(phases=phases))
        taken += 1
        stopped = rule.after(phases[STEP].wall_ns, time.perf_counter() - begun)
        if stopped and not turns and taken >= fewest:
            return stopped
    return "turns" if turns else "interrupted"


def phase_memory(step: Step, device: torch.device) -> tuple[PhaseMemory, ...]:
    """The allocator's figures per phase, from one step that is not timed; nothing on the CPU."""
    if device.type != "cuda":
        return ()
    readings = []
    torch.cuda.synchronize(device)
    for phase, run in step.phases.items():
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        peak = max(torch.cuda.max_memory_allocated(device), step.captured_peak_bytes)
        readings.append(
            PhaseMemory(
                phase=phase,
                start_bytes=start,
                peak_bytes=peak,
                end_bytes=torch.cuda.memory_allocated(device),
                reserved_bytes=torch.cuda.memory_reserved(device),
            )
        )
    return tuple(readings)


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def why(error: BaseException) -> Done:
    """The row that an exception becomes: out of memory, not supported here, or an error with its text."""
    text = one_line(f"{type(error).__name__}: {error}")
    if isinstance(error, Unsupported):
        return Done(status=UNSUPPORTED, reason=error.message, hint=error.hint)
    if isinstance(error, WrongResult):
        return Done(status=WRONG, reason=error.message, hint=error.hint)
    if isinstance(error, FlopwiseError):
        return Done(status=ERROR, reason=error.message, hint=error.hint)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        sign in text
        for sign in ("out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc", "not enough memory")
    ):
        return Done(
            status=OOM,
            reason=text,
            hint="a smaller batch or context, checkpointing, bf16, fused attention or chunked loss needs less",
        )
    if isinstance(error, NotImplementedError) or any(
        sign in text for sign in ("No available kernel", "not supported", "not implemented for", "No viable backend")
    ):
        return Done(status=UNSUPPORTED, reason=text)
    return Done(status=ERROR, reason=text, hint="the run's logs/ folder has the traceback")
