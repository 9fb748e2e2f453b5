"""One trial from start to end: build, warm up until steady, sample until precise, read the memory; every part is an event."""

import bdb
import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from flopwise.capture.agreement import check_running_step
from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.clock import Clock, clock_for, empty_step_ns
from flopwise.capture.compared_steps import StepFollower
from flopwise.capture.environment import device_info
from flopwise.capture.kineto import trace_steps
from flopwise.capture.pipes import Emit
from flopwise.capture.raised import describe_error
from flopwise.capture.seen_step import watch_step
from flopwise.capture.step import Step
from flopwise.capture.stopping import StoppingRule, WarmupRule
from flopwise.errors import FlopwiseError, Unsupported, WrongResult
from flopwise.lm.ranks import ALONE, Ranks
from flopwise.records.events import (
    Done,
    MemoryMeasured,
    Request,
    Sampled,
    StepBuilt,
    TraceWritten,
    WarmedUp,
    WarmupStep,
)
from flopwise.records.run import ERROR, INTERRUPTED, OK, OOM, STEP, UNSUPPORTED, WRONG, PhaseMemory, Ran
from flopwise.records.written import with_seen
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Sampling, Trial, Workload

UNCOUNTED = 2  # steps before the first round of those that are interleaved: after a wait they are not like the others
MIN_GPU_WARMUP_NS = 200_000_000  # a GPU raises its clocks within that
# What an exception's text says where its class does not.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc", "not enough memory")
_NOT_SUPPORTED = ("No available kernel", "not supported", "not implemented for", "No viable backend")


def run_trial(
    trial: Trial, emit: Emit, may_go_on: Callable[[], bool], request: Request | None = None, ranks: Ranks = ALONE
) -> None:
    """Run the trial and emit what happens. `may_go_on` is asked before every step; in turns it alone ends the sampling.

    Of several `ranks` all run this at the same time, and the first decides for all when to stop.
    """
    request = request or Request()
    turns = request.turns
    try:
        device = resolve_device(trial.device)
        emit(device_info(device))
        begun = time.perf_counter_ns()
        follower = StepFollower() if request.compare is not None else None
        step = build_step(trial.workload, device, follower)
        emit(StepBuilt(setup_ns=time.perf_counter_ns() - begun, captured_first_ns=step.captured_first_ns))
        details = 0 if ranks.world > 1 else request.details  # as many passes on every rank
        clock = clock_for(step.phases, device, step.single_op, details, step.one_callable, step.align)
        compared_ns: list[int] = []  # steps that were compared with a reference warm the step up as well
        if (compare := request.compare) is not None and follower is not None:
            once = lambda: compared_ns.append(clock.once())  # noqa: E731
            emit(check_running_step(step, follower, trial.workload, compare, once))
        gc.collect()
        gc.disable()  # a collection in the middle of a step is the interpreter's, not the workload's
        try:
            go_on = warm_up(clock, trial.sampling, device, emit, may_go_on, turns, compared_ns, ranks)
            if turns and go_on:  # in turns the end may come at any round: the memory is read before
                emit(MemoryMeasured(memory=phase_memory(step, device)))
            stopped = _sample(clock, trial.sampling, emit, may_go_on, request, ranks) if go_on else "interrupted"
        finally:
            gc.enable()
        if stopped != "interrupted":
            if not turns:
                emit(MemoryMeasured(memory=phase_memory(step, device)))
            if (trace := request.trace) is not None:
                emit(TraceWritten(path=trace.path, step_ns=trace_steps(step, device, trace)))
        status = INTERRUPTED if stopped == "interrupted" else OK
        done = Done(status=status, stopped=stopped, ran=_with_loss(step.ran(), step), peak_rss_bytes=peak_rss_bytes())
        emit(done)
        emit(_watched(done, step, device, trial.workload, request.watch))
    except BaseException as error:
        emit(failure(error))
        if not isinstance(error, FlopwiseError):
            raise  # the log keeps the traceback


def _with_loss(ran: Ran, step: Step) -> Ran:
    """JSON has no word for a loss that is not finite: it is told in a field of its own."""
    last = step.loss() if ran.loss is None else None
    loss = ran.loss if last is None else float(last)
    if loss is None or math.isfinite(loss):
        return ran
    return msgspec.structs.replace(ran, loss=None, bad_loss=str(loss))


def _watched(done: Done, step: Step, device: torch.device, workload: Workload, watch: bool) -> Done:
    """With what one more step shows of itself. A model's work is known by formula, and ranks only exchange."""
    if not watch or done.status != OK or done.ran is None or workload.many or isinstance(workload.subject, ModelSpec):
        return done
    return msgspec.structs.replace(done, ran=with_seen(done.ran, watch_step(step, device), workload))


def warm_up(
    clock: Clock,
    sampling: Sampling,
    device: torch.device,
    emit: Emit,
    may_go_on: Callable[[], bool] = lambda: True,
    turns: bool = False,
    done_ns: Sequence[int] = (),
    ranks: Ranks = ALONE,
) -> bool:
    """Until steady, or exactly `sampling.warmup` steps. False: it was interrupted. `done_ns`: steps that were run already."""
    walls_ns = list(done_ns)
    for wall_ns in walls_ns:
        emit(WarmupStep(wall_ns=wall_ns))
    rule = WarmupRule(sampling, MIN_GPU_WARMUP_NS if device.type == "cuda" else 0)
    over = "forced" if rule.forced(walls_ns) else ""
    busy_s, began_s = time.process_time(), time.perf_counter()
    while not over:
        if not turns and not may_go_on():
            return False
        walls_ns.append(clock.once())
        emit(WarmupStep(wall_ns=walls_ns[-1]))
        over = ranks.told(rule.after(walls_ns))
        if len(walls_ns) == 1:  # which compiles and loads libraries, in many threads
            busy_s, began_s = time.process_time(), time.perf_counter()
    lasted_s = time.perf_counter() - began_s
    cores = (time.process_time() - busy_s) / lasted_s if len(walls_ns) > 1 else 0.0
    emit(WarmedUp(rule=over, clock_ns=empty_step_ns(device), cores=cores))
    return True


def _sample(
    clock: Clock, sampling: Sampling, emit: Emit, may_go_on: Callable[[], bool], request: Request, ranks: Ranks
) -> str:
    """Sample until the rule says why to stop."""
    rule = StoppingRule(sampling)
    begun, taken = time.perf_counter(), 0
    while may_go_on():
        for _ in range(UNCOUNTED if request.turns and not taken else 0):
            emit(WarmupStep(wall_ns=clock.once()))
        phases = clock.sample()
        emit(Sampled(phases=phases))
        taken += 1
        stopped = ranks.told(rule.after(phases[STEP].wall_ns, time.perf_counter() - begun))
        if stopped and not request.turns and taken >= request.fewest:
            return stopped
    return "turns" if request.turns else "interrupted"


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
        end, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        readings.append(
            PhaseMemory(phase=phase, start_bytes=start, peak_bytes=peak, end_bytes=end, reserved_bytes=reserved)
        )
    return tuple(readings)


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def failure(error: BaseException) -> Done:
    """The event that an exception becomes: out of memory, not supported here, or an error with its text and the user's frame."""
    if isinstance(error, FlopwiseError):
        status = UNSUPPORTED if isinstance(error, Unsupported) else WRONG if isinstance(error, WrongResult) else ERROR
        levers = error.levers if isinstance(error, Unsupported) else ()
        return Done(status=status, reason=error.message, hint=error.hint, levers=levers)
    if isinstance(error, bdb.BdbQuit):
        reason = "breakpoint() was called: a step that is measured has no terminal"
        return Done(status=ERROR, reason=reason, hint="remove it, or run the script without flopwise")
    text = describe_error(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY):
        hint = "a smaller batch or context, checkpointing, bf16, fused attention or chunked loss needs less"
        return Done(status=OOM, reason=text, hint=hint)
    if isinstance(error, NotImplementedError) or any(sign in text for sign in _NOT_SUPPORTED):
        return Done(status=UNSUPPORTED, reason=text)
    return Done(status=ERROR, reason=text, hint="the run's logs/ folder has the traceback")
