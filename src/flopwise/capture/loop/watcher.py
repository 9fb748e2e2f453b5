"""Watches a training loop from inside its process: finds its steps, times some, traces some, then lets go of it.

A step ends with the optimizer's update: torch tells of each through its global hooks. Updates without a backward pass between
them are one (several optimizers); a backward pass without an update is a micro-step (gradients are accumulated). The look has
stages, each begun at the end of a step:

warm-up   until steps take as long as those before them
timing    nothing waits for the GPU: an event at each boundary tells its time, read when all are over
waiting   a few steps, synchronised before and after: until when the host was busy, and the peak of memory
tracing   a few steps under PyTorch's profiler
"""

import gc
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

from flopwise import torch_private
from flopwise.capture.boundaries import BACKWARD, FORWARD, OPTIMIZER, Boundaries
from flopwise.capture.loop.waits import Waits
from flopwise.capture.ranges import named_modules
from flopwise.capture.step import synchronise
from flopwise.capture.stopping import WarmupRule
from flopwise.records.run import STEP, Loop, PhaseMemory, PhaseTimes
from flopwise.spec.workload import Sampling

WARM_UP, TIMING, WAITING, TRACING, OVER = "warm-up", "timing", "waiting", "tracing", "over"
WAITING_STEPS = 3
FEWEST, MOST, MOST_SECONDS = 5, 50, 10.0  # steps to time, unless their number is given
OF_RANKS = 10  # warm-up and timing, where several ranks must do the same: each a fixed number of steps
LEAST_WARM_UP_NS = 200_000_000
_MOST_OPTIMIZERS = 64


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
    problem: str = ""  # why there is no trace


class LoopWatcher:
    """One look at one loop. `over` is called at the end of the last step that was needed, `timed` of the last that was timed."""

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
        self.ranks = ranks
        self.looked, self.device = Looked(), torch.device("cpu")
        self.stage, self.steps = WARM_UP, 0
        self._hooks = ExitStack()
        self._waits = Waits()
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
        self._tracer: _Tracer | None = None

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
        now = time.perf_counter_ns()
        wall_ns, self._last_ns = now - self._last_ns, now
        ended, self._since = self._since, []
        waited = self._waits.take()
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
        synchronise(self.device)
        self.stage, self._begun = TIMING, time.perf_counter()
        self._marks.append([])
        self._mark(STEP)

    def _timed_step(self, waited: dict[str, int], ended: list[str]) -> None:
        self._mark(STEP)
        self._waited.append(waited)
        n, took = len(self._marks), time.perf_counter() - self._begun
        wanted = self.look.steps or (OF_RANKS if self.ranks > 1 else None)
        enough = n >= wanted if wanted else (n >= FEWEST and took >= MOST_SECONDS) or (n >= 2 * FEWEST and took >= 2.0)
        if not enough and n < (wanted or MOST):
            self._marks.append([self._marks[-1][-1]])
            return
        self._read_timed()
        self.timed()
        if self.device.type == "cuda":
            self.stage = WAITING
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start_bytes = torch.cuda.memory_allocated(self.device)
            self._begin_waiting()
        else:
            self._begin_tracing()

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
        try:
            self._tracer = _Tracer(self.look, self.device, self.trace_path(), self._roots)
        except RuntimeError as error:  # the script's own profiler is on
            self.looked.problem = f"no trace: {error}"
            self._finish()

    def _traced_step(self) -> None:
        assert self._tracer is not None
        if self._tracer.step():
            self.looked.traced, self.looked.traced_step_ns = True, self._tracer.step_ns
            self._stop_tracing()
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
        if not steps:
            return
        synchronise(self.device)
        phases = [_phases(one) for one in steps]
        names = [name for name in (FORWARD, BACKWARD, OPTIMIZER) if all(name in one for one in phases)]
        of_phases = [PhaseTimes(phase=name, wall_ns=tuple(one[name] for one in phases)) for name in names]
        walls = tuple(_between(one[0], one[-1]) for one in steps)
        self.looked.phases = (PhaseTimes(phase=STEP, wall_ns=walls), *of_phases)
        waits = _by_cause(self._waited[: len(steps)])
        self.looked.loop = msgspec.structs.replace(self.looked.loop, waits_ns=waits)


_LOG_LEVEL = "KINETO_LOG_LEVEL"


class _Tracer:
    """PyTorch's profiler around some steps of a loop; one more runs first under it without being recorded."""

    def __init__(self, look: Look, device: torch.device, path: Path, roots: list[nn.Module]) -> None:
        self.look, self.device, self.path, self.done, self.step_ns = look, device, path, 0, 0
        self._begun = 0
        self._partial = path.with_name(f"partial-{path.name}")
        self._open = ExitStack()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profiler = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=look.traced, repeat=1),
            record_shapes=look.shapes,
            on_trace_ready=lambda done: done.export_chrome_trace(str(self._partial)),
        )
        for root in _namable(roots):
            self._open.enter_context(named_modules(root))
        if _LOG_LEVEL not in os.environ:  # the profiler's own log would stand between the script's lines
            os.environ[_LOG_LEVEL] = "99"
            self._open.callback(os.environ.pop, _LOG_LEVEL, None)
        self._profiler.start()
        self._open.callback(self._profiler.stop)

    def step(self) -> bool:
        """At the end of a step; whether it was the last."""
        last = self.done == self.look.traced
        if last or not self.done:
            synchronise(self.device)
            now = time.perf_counter_ns()
            self.step_ns = (now - self._begun) // self.look.traced if last else 0
            self._begun = now
        self._profiler.step()
        self.done += 1
        if last:
            self._partial.replace(self.path)  # whole or not at all
        return last

    def close(self) -> None:
        self._open.close()
        self._partial.unlink(missing_ok=True)


def _namable(roots: list[nn.Module]) -> list[nn.Module]:
    """Modules whose names a trace can have: a hook inside of what is compiled as a function would compile it again."""
    known = [one for one in roots if next(one.children(), None) is not None]
    compiled = torch_private.compiled_graphs() > 0
    seen = any(torch_private.compiled_call(module) is not None for root in known for module in root.modules())
    return known if seen or not compiled else []


def trained_models(weights: list[torch.Tensor]) -> list[nn.Module]:
    """The outermost modules of this process that hold one of these weights.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> trained_models([model[0].weight]) == [model]
    True
    """
    wanted = {id(weight) for weight in weights}
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]  # no property of a stranger is read
    holding = [one for one in modules if any(id(weight) in wanted for weight in one.parameters())]
    inside = {id(part) for one in holding for part in one.modules() if part is not one}
    return [one for one in holding if id(one) not in inside]


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
