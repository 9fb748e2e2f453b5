"""Watches a training loop from inside its process: finds its steps, times some, traces some, then lets go of it.

A step ends with the optimizer's update: torch tells of each through its global hooks. Updates without a backward pass between
them are one (several optimizers); a backward pass without an update is a micro-step (gradients are accumulated). The look has
stages, each begun at the end of a step:

warm-up   until steps take as long as those before them
timing    nothing waits for the GPU: an event at each boundary tells its time, read when all are over
waiting   a few steps, synchronised before and after: until when the host was busy, and the peak of memory
tracing   a few steps under PyTorch's profiler

An evaluation or a checkpoint between two steps is part of neither: it is taken out of their times, and the trace begins anew
after it.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from flopwise.capture.boundaries import BACKWARD, FORWARD, OPTIMIZER, Boundaries
from flopwise.capture.busy import OthersUse
from flopwise.capture.loop.models import before_forward, trained_models
from flopwise.capture.loop.tracer import Tracer
from flopwise.capture.loop.waits import APART, DATA, EVALUATION, Waits
from flopwise.capture.step import synchronise
from flopwise.capture.stopping import WarmupRule
from flopwise.records.run import STEP, Loop, PhaseMemory, PhaseTimes
from flopwise.spec.workload import Sampling

WARM_UP, TIMING, WAITING, TRACING, OVER = "warm-up", "timing", "waiting", "tracing", "over"
WAITING_STEPS = 3
FEWEST, MOST, MOST_SECONDS = 5, 50, 10.0  # steps to time, unless their number is given
OF_RANKS = 10  # warm-up and timing, where several ranks must do the same: each a fixed number of steps
LEAST_WARM_UP_NS = 200_000_000
BETWEEN = "between steps"  # a phase: from the optimizer's update to the next forward pass, but for data loading
KEPT_EVERY_S = 5.0  # while steps are timed
_MOST_OPTIMIZERS = 64
_MOST_TRACES = 8  # that are begun: a loop that evaluates all the time is traced with what it does


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at."""

    steps: int | None = None  # to time; None: until there are enough
    traced: int = 2
    seconds: float = 20.0  # the longest warm-up
    shapes: bool = True


class Looked(msgspec.Struct, kw_only=True):
    """What was seen, as far as the look came."""

    phases: tuple[PhaseTimes, ...] = ()
    warmup_ns: tuple[int, ...] = ()
    warmup_rule: str = ""
    memory: tuple[PhaseMemory, ...] = ()
    traced_step_ns: int = 0
    traced: bool = False
    loop: Loop = Loop()
    parameters: int = 0
    device: str = "cpu"
    busy_cores: float | None = None  # in use by others while steps were timed; None: not known
    problem: str = ""  # why there is no trace


class LoopWatcher:
    """One look at one loop. `over` is called at the end of the last step that was needed, `timed` of the last that was timed, and
    now and then before it."""

    def __init__(
        self,
        look: Look,
        trace_path: Callable[[], Path],
        over: Callable[[], None],
        timed: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda text: None,
        ranks: int = 1,
    ) -> None:
        self.look, self.trace_path, self.over, self.timed, self.note = look, trace_path, over, timed, note
        self.ranks, self._process = ranks, os.getpid()
        self.looked, self.device = Looked(), torch.device("cpu")
        self.stage, self.steps = WARM_UP, 0
        self._hooks = ExitStack()
        self._waits = Waits(self._interrupted)
        self._boundaries = Boundaries(self._tell)
        self._by_hand = False
        self._since: list[str] = []  # what ended since the last step's end
        self._order: list[int] = []  # the optimizers, as they were first seen to update
        self._updates = 1  # in a step
        self._updated_inside = False  # of the backward pass that runs
        self._walls: list[int] = []
        self._last_ns = time.perf_counter_ns()
        self._warm = WarmupRule(
            Sampling(seconds=look.seconds, warmup=OF_RANKS if ranks > 1 else None), LEAST_WARM_UP_NS
        )
        self._marks: list[list[tuple[str, Any, int]]] = []  # of each timed step: what ended, an event, the host's clock
        self._waited: list[dict[str, int]] = []
        self._launches: list[int] = []
        self._weights: list[torch.Tensor] = []  # of the first optimizer
        self._roots: list[nn.Module] = []
        self._in_forward = False  # a forward pass has begun since the last step's end
        self._apart_from = 0  # the place of the mark at which an evaluation or a checkpoint began
        self._tracer: Tracer | None = None
        self._traces = 0  # begun
        self._still_to_trace = 0  # steps, of several ranks: all end with the same

    # --- from outside

    def open(self) -> None:
        hook = optimizers.register_optimizer_step_post_hook(self._updated)
        self._hooks.callback(hook.remove)
        self._hooks.enter_context(self._waits.open())
        self._hooks.enter_context(self._boundaries.open())

    def close(self) -> None:
        """Let go of the loop, wherever it is; what was timed is kept."""
        if self.stage == OVER:
            return
        self._stop_tracing()
        self._read_timed()
        if self.stage == WARM_UP and len(self._walls) > FEWEST:  # the script was short: better these than none
            later = tuple(self._walls[2:])
            self.looked.phases, self.looked.warmup_ns = (PhaseTimes(phase=STEP, wall_ns=later),), tuple(self._walls[:2])
            self.looked.warmup_rule, self.looked.device = "budget", str(self.device)
        self.stage = OVER
        self._hooks.close()

    def step(self) -> None:
        """A step ends here, by the user's own word: from now on the optimizer's updates do not count."""
        self._by_hand = True
        self._step_ended()

    # --- what torch tells

    def _tell(self, phase: str, begins: bool) -> None:
        with self._safely():
            if self.stage == TIMING and self._marks:
                between = OPTIMIZER if phase == OPTIMIZER and self._since else FORWARD
                self._mark(between if begins else phase)
            if begins:
                return
            self._since.append(phase)
            if phase == BACKWARD and self._updated_inside:  # each weight is updated as soon as its gradient is there
                self._updated_inside = False
                self._since.append(OPTIMIZER)
            if self._since[-1] == OPTIMIZER and not self._by_hand and self._since.count(OPTIMIZER) >= self._updates:
                self._step_ended()

    def _forward_begins(self) -> None:
        """Of a model that is trained; one that is not differentiated is none of a step."""
        if not torch.is_grad_enabled() or self._boundaries.running:
            return
        with self._safely():
            self._waits.training_begins()
            if not self._since and not self._in_forward:
                self._in_forward = True
                if self.stage == TIMING:
                    self._mark(BETWEEN)

    def _interrupted(self, cause: str, begins: bool) -> None:
        """Data loading, an evaluation or a checkpoint begins or ends."""
        with self._safely():
            between_steps = not self._since and not self._in_forward
            if self.stage == TIMING:
                self._mark_interruption(cause, begins, BETWEEN if between_steps else FORWARD)
            elif cause == DATA or not between_steps or self._by_hand:  # by hand nobody knows where a step is
                return
            elif self.stage == WAITING and not begins:
                self._begin_waiting()
            elif self.stage == TRACING and begins and (cause != EVALUATION or self._waits.evaluated in self._roots):
                self._stop_tracing()  # what is evaluated may be long
            elif self.stage == TRACING and not begins:
                self._trace(1)

    def _mark_interruption(self, cause: str, begins: bool, before: str) -> None:
        if begins:
            self._mark(before)
            self._apart_from = len(self._marks[-1])
        else:
            del self._marks[-1][self._apart_from :]  # what an evaluation did is no phase of the step
            self._mark(cause)

    def _updated(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Runs before `_tell` is told of the update's end."""
        with self._safely():
            *around, _ = self._boundaries.running or (OPTIMIZER,)
            if around:  # of a backward pass, or of an optimizer that wraps this one
                self._updated_inside = self._updated_inside or BACKWARD in around
                return
            if not self._weights:
                self._weights = [p for group in optimizer.param_groups for p in group["params"]]
                self.device = next((p.device for p in self._weights if p.device.type == "cuda"), self.device)
            if len(self._order) < _MOST_OPTIMIZERS and self.stage == WARM_UP:
                self._order.append(id(optimizer))
                self._learn_order()

    def _learn_order(self) -> None:
        """Where the first optimizer's turn comes again, a step has as many updates as came before it."""
        first, *others = self._order
        if others and others[-1] == first and others.index(first) == len(others) - 1 and len(others) > 1:
            self._updates, self._since, self._walls, self.steps = len(others), [], [], 0

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """What fails here must not end the user's loop: it goes on unwatched."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.looked.problem = f"the look failed: {type(error).__name__}: {error}"
            self.note(self.looked.problem)
            with suppress(Exception):
                self.close()
            self.stage = OVER
            self._hooks.close()

    # --- the end of a step

    def _step_ended(self) -> None:
        if os.getpid() != self._process:  # forked by the loop: its steps are its own
            self.stage = OVER
            self._hooks.close()
            return
        now = time.perf_counter_ns()
        wall_ns, self._last_ns = now - self._last_ns, now
        ended, self._since = self._since, []
        waited = self._waits.take()
        wall_ns -= sum(waited.get(cause, 0) for cause in APART)
        self._in_forward = False
        self.steps += 1
        stage = self.stage
        if stage == WARM_UP:
            self._warm_up_step(wall_ns, ended)
        elif stage == TIMING:
            self._timed_step(waited, ended)
        elif stage == WAITING:
            self._waiting_step(now)
        elif stage == TRACING:
            self._traced_step()
        self._last_ns = time.perf_counter_ns() if self.stage != stage else self._last_ns

    def _warm_up_step(self, wall_ns: int, ended: list[str]) -> None:
        if self.steps > 1:  # what came before the first end is no step
            self._walls.append(wall_ns)
        rule = self._warm.after(self._walls) if self._walls else ""
        if not rule:
            return
        self.looked.warmup_ns, self.looked.warmup_rule = tuple(self._walls), rule
        micro = max(1, ended.count(BACKWARD))
        self.looked.loop = Loop(micro_steps=micro, updates=self._updates, steps_before=self.steps)
        self.looked.device = str(self.device)
        self._roots = trained_models(self._weights)
        self.looked.parameters = sum({id(p): p.numel() for one in self._roots for p in one.parameters()}.values())
        self.note(f"{self.steps} steps of warm-up ({rule}); timing")
        self._hooks.enter_context(before_forward(self._roots, self._forward_begins))
        self._others = OthersUse(self.ranks)
        synchronise(self.device)
        self.stage, self._begun = TIMING, time.perf_counter()
        self._kept = self._begun
        self._marks.append([])
        self._mark(STEP)

    def _timed_step(self, waited: dict[str, int], ended: list[str]) -> None:
        self._mark(STEP)
        self._waited.append(waited)
        n, took = len(self._marks), time.perf_counter() - self._begun
        wanted = self.look.steps or (OF_RANKS if self.ranks > 1 else None)
        enough = n >= wanted if wanted else (n >= FEWEST and took >= MOST_SECONDS) or (n >= 2 * FEWEST and took >= 2.0)
        if not enough and n < (wanted or MOST):
            kept = time.perf_counter() - self._kept >= KEPT_EVERY_S and self._keep()
            self._marks.append([] if kept else [self._marks[-1][-1]])
            if kept:
                self._mark(STEP)
            return
        self._read_timed()
        self.looked.busy_cores = self._others.cores()
        self.timed()
        if self.device.type == "cuda":
            self.stage = WAITING
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start_bytes = torch.cuda.memory_allocated(self.device)
            self._begin_waiting()
        else:
            self._begin_tracing()

    def _keep(self) -> bool:
        """Store what was timed until now: a kill may come without a warning. The GPU is not waited for."""
        self._read_marks([one for one in self._marks if one[-1][1] is None or one[-1][1].query()])
        self.timed()
        self._kept = time.perf_counter()
        return True

    def _mark(self, ended: str) -> None:
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks[-1].append((ended, event, time.perf_counter_ns()))

    def _begin_waiting(self) -> None:
        synchronise(self.device)
        self._began_ns = time.perf_counter_ns()

    def _waiting_step(self, free_ns: int) -> None:
        synchronise(self.device)
        self._launches.append(free_ns - self._began_ns)
        if len(self._launches) < WAITING_STEPS:
            self._begin_waiting()
            return
        stats = (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated, torch.cuda.max_memory_reserved)
        peak, end, reserved = (read(self.device) for read in stats)
        memory = PhaseMemory(
            phase=STEP, start_bytes=self._start_bytes, peak_bytes=peak, end_bytes=end, reserved_bytes=reserved
        )
        self.looked.memory = (memory,)
        step, *others = self.looked.phases
        self.looked.phases = (msgspec.structs.replace(step, launch_ns=tuple(self._launches)), *others)
        self._begin_tracing()

    # --- the trace

    def _begin_tracing(self) -> None:
        if not self.look.traced:
            self._finish()
            return
        self.stage = TRACING
        self.note(f"tracing {self.look.traced} steps")
        self._still_to_trace = 1 + self.look.traced
        self._trace(self.look.traced, warm_up=True)

    def _trace(self, steps: int, *, warm_up: bool = False) -> None:
        """From here on; what was traced before is forgotten."""
        if self.looked.traced or self._traces >= _MOST_TRACES:
            return
        self._stop_tracing()
        self._traces += 1
        try:
            self._tracer = Tracer(
                self.trace_path(), self.device, self._roots, steps, warm_up=warm_up, shapes=self.look.shapes
            )
        except RuntimeError as error:  # the script's own profiler is on
            self.looked.problem = f"no trace: {error}"
            if self.ranks == 1:
                self._finish()

    def _traced_step(self) -> None:
        self._still_to_trace -= 1
        if self._tracer is not None and self._tracer.step():
            self.looked.traced, self.looked.traced_step_ns = True, self._tracer.step_ns
            self._stop_tracing()
        elif self._tracer is None and self.ranks == 1:  # an evaluation that never ended: the model stays as it is
            self._trace(self.look.traced)
        if self.looked.traced if self.ranks == 1 else self._still_to_trace <= 0:
            self._finish()

    def _stop_tracing(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None

    def _finish(self) -> None:
        self.close()
        self.over()

    # --- what was seen

    def _read_timed(self) -> None:
        """From marks to samples; a step that did not end is left out."""
        steps, self._marks = [one for one in self._marks if len(one) > 1 and one[-1][0] == STEP], []
        if steps:
            synchronise(self.device)
            self._read_marks(steps)

    def _read_marks(self, steps: list[list[tuple[str, Any, int]]]) -> None:
        phases = [_phases(one) for one in steps]
        apart = [{cause: one.pop(cause) for cause in APART if cause in one} for one in phases]
        inside = [{cause: ns for cause, ns in one.items() if cause not in APART} for one in self._waited[: len(steps)]]
        self.looked.phases = _times(phases)
        self.looked.loop = msgspec.structs.replace(
            self.looked.loop, waits_ns=_by_cause(inside), apart_ns=_by_cause(apart), loader_workers=self._waits.workers
        )


def _between(begin: tuple[str, Any, int], end: tuple[str, Any, int]) -> int:
    if begin[1] is not None and end[1] is not None:
        return round(float(begin[1].elapsed_time(end[1])) * 1e6)
    return end[2] - begin[2]


def _by_cause(waited: list[dict[str, int]]) -> dict[str, tuple[int, ...]]:
    """
    >>> _by_cause([{"data loading": 3}, {}])
    {'data loading': (3, 0)}
    """
    causes = sorted({cause for one in waited for cause in one})
    return {cause: tuple(one.get(cause, 0) for one in waited) for cause in causes}


def _phases(marks: list[tuple[str, Any, int]]) -> dict[str, int]:
    """The time of each phase of a step, over its micro-steps; what follows the last update belongs to the optimizer."""
    found: dict[str, int] = {}
    for before, after in itertools.pairwise(marks):
        name = OPTIMIZER if after[0] == STEP else after[0]
        found[name] = found.get(name, 0) + _between(before, after)
    return found


def _times(steps: list[dict[str, int]]) -> tuple[PhaseTimes, ...]:
    """The step and its phases, which add up to it; none where the steps differ in what they are made of."""
    always = [name for name in (FORWARD, BACKWARD, OPTIMIZER) if all(name in one for one in steps)]
    names = [name for name in (DATA, *always, BETWEEN) if always and any(name in one for one in steps)]
    walls = {STEP: tuple(sum(one.values()) for one in steps)}
    walls |= {name: tuple(one.get(name, 0) for one in steps) for name in names}
    return tuple(PhaseTimes(phase=name, wall_ns=wall_ns) for name, wall_ns in walls.items())
