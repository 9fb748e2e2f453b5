"""Three clocks for every phase of a step.

wall    from a synchronised start to a synchronised end, on the host: what a user waits for
launch  until the host is free again: what the host needs to queue the work
gpu     between two CUDA events around work that was queued whole before it could begin: what the GPU needs

Launch-bound work shows as launch ≈ wall, gpu well below. Events alone would not show it: between events the GPU's waiting
for the host counts too. So the GPU is first given a kernel that spins until the host has queued the phase; `held` says
that this worked. It cannot where the host must wait for the GPU inside the phase, or where a phase has more launches than
the driver's queue holds; then `gpu` is an upper bound.

The whole step is timed with no synchronisation inside; phases are timed in a pass of their own, since a synchronisation
between them would make the step slower. So are the phases of a step that is one callable, at the boundaries that are found
while it runs (`boundaries`), in the first few samples.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Protocol

import torch

from flopwise.capture.boundaries import REST, MarkedStep
from flopwise.capture.ranges import named
from flopwise.records.events import PhaseSample
from flopwise.records.run import STEP
from flopwise.torch_private import spin

Phases = Mapping[str, Callable[[], object]]
Align = Callable[[], object] | None  # called before each timing: ranks begin together

_SPIN_CYCLES_PER_NS = 2.0  # no GPU of today clocks higher than 2-3 GHz; too long a spin costs only time
_SHORTEST_HOLD_NS, _LONGEST_HOLD_NS = 300_000, 2_000_000_000
_GIVE_UP_AFTER = 3
_LONGEST_LAUNCH_NS = 250_000_000  # a queue of launches that takes longer to fill holds more of them than the driver's
_MARKED_SAMPLES = 10  # of a step whose phases are found while it runs
_EMPTY_STEPS = 101
_LOOKED_AT = 2  # the run that shows whether it has phases
_LEAST_REST = 0.01  # of the step: what comes after its last phase is shown from there on


class Clock(Protocol):
    """Runs the step's phases and reads the time."""

    def once(self) -> int:
        """Run the whole step once; wall nanoseconds."""

    def sample(self) -> dict[str, PhaseSample]:
        """One round: every phase once, the whole step first. After `details` rounds the whole step alone."""


class CpuClock:
    """On the CPU the host does the work: one pass tells all, and only the wall clock has a meaning."""

    def __init__(self, phases: Phases, found: "FoundPhases | None" = None, align: Align = None) -> None:
        self.phases, self._found, self._align = phases, found, align

    def once(self) -> int:
        with self._found.looking() if self._found is not None else nullcontext():
            return self._whole()[STEP].wall_ns

    def sample(self) -> dict[str, PhaseSample]:
        return self._whole() | (self._found.sample() if self._found is not None else {})

    def _whole(self) -> dict[str, PhaseSample]:
        if self._align is not None:
            self._align()
        ticks = [time.perf_counter_ns()]
        for phase, run in self.phases.items():
            with named(phase):
                run()
            ticks.append(time.perf_counter_ns())
        samples = {STEP: PhaseSample(wall_ns=ticks[-1] - ticks[0])}
        if len(self.phases) > 1:
            samples |= {p: PhaseSample(wall_ns=ticks[i + 1] - ticks[i]) for i, p in enumerate(self.phases)}
        return samples


_LONG_NS = 400_000_000


class CudaClock:
    """On the GPU three passes make one sample: the step as it is, each phase synchronised, each phase held and then released.

    `details`: so many samples have all three, those after them the first alone; of a long step one has. 0: all have.
    """

    def __init__(
        self,
        phases: Phases,
        device: torch.device,
        flush_l2: bool,
        details: int = 0,
        found: "FoundPhases | None" = None,
        align: Align = None,
    ) -> None:
        self.phases, self.device, self._found, self._align = phases, device, found, align
        self._left = details or math.inf
        self._hold: dict[str, _Hold] = {phase: _Hold() for phase in phases}
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.uint8, device=device) if flush_l2 else None

    def once(self) -> int:
        with self._found.looking() if self._found is not None else nullcontext():
            return self._timed(*self.phases).wall_ns

    def sample(self) -> dict[str, PhaseSample]:
        step = self._timed(*self.phases)
        self._left -= 1
        if self._left < 0:
            return {STEP: step}
        if step.wall_ns > _LONG_NS and math.isfinite(self._left):
            self._left = 0  # of a long step one says as much as three of a short one
        each = {p: self._timed(p) for p in self.phases} if len(self.phases) > 1 else dict.fromkeys(self.phases, step)
        each = {p: self._with_gpu(p, s) for p, s in each.items()}
        gpu_ns = sum(s.gpu_ns or 0 for s in each.values())
        held = all(s.held for s in each.values())
        step = PhaseSample(wall_ns=step.wall_ns, launch_ns=step.launch_ns, gpu_ns=gpu_ns, held=held)
        if self._found is not None:
            each = self._found.sample(self.device, self._hold[STEP].length_ns(step.launch_ns or 0))
        return {STEP: step} | (each if len(each) > 1 else {})

    def _timed(self, *phases: str) -> PhaseSample:
        self._settle()
        start = time.perf_counter_ns()
        for phase in phases:
            with named(phase):
                self.phases[phase]()
        free = time.perf_counter_ns()
        torch.cuda.synchronize(self.device)
        return PhaseSample(wall_ns=time.perf_counter_ns() - start, launch_ns=free - start)

    def _with_gpu(self, phase: str, timed: PhaseSample) -> PhaseSample:
        hold = self._hold[phase]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._settle()
        hold_ns = hold.length_ns(timed.launch_ns or 0) if self._align is None else 0  # other ranks would wait for it
        if hold_ns:
            spin(int(hold_ns * _SPIN_CYCLES_PER_NS))
        begin.record()
        self.phases[phase]()
        held = self._align is None and not begin.query()  # it still span when the last launch had been queued
        end.record()
        torch.cuda.synchronize(self.device)
        hold.learn(held)
        return PhaseSample(
            wall_ns=timed.wall_ns, launch_ns=timed.launch_ns, gpu_ns=round(begin.elapsed_time(end) * 1e6), held=held
        )

    def _settle(self) -> None:
        if self._align is not None:
            self._align()
        if self._flush is not None:
            self._flush.zero_()  # between samples of a single operation: its inputs must not lie in the L2 cache
        torch.cuda.synchronize(self.device)


class _Hold:
    """How long to hold the GPU so that the host can queue a phase whole: longer after a failure, given up after three."""

    def __init__(self) -> None:
        self.factor, self.failures = 2.0, 0

    def length_ns(self, launch_ns: int) -> int:
        if self.failures >= _GIVE_UP_AFTER or launch_ns > _LONGEST_LAUNCH_NS:
            return 0
        return min(int(self.factor * launch_ns) + _SHORTEST_HOLD_NS, _LONGEST_HOLD_NS)

    def learn(self, held: bool) -> None:
        self.failures = 0 if held else self.failures + 1
        if not held:
            self.factor = min(self.factor * 2, 16.0)


class FoundPhases:
    """Times the phases of a step that is one callable, in runs of their own, for the first few samples.

    Whether it has any is seen in its second run, a step of the warm-up: the first may compile, and must not meet the marks.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._marked, self._runs, self._left = MarkedStep(step), 0, 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around each step of the warm-up."""
        self._runs += 1
        if self._runs != _LOOKED_AT:
            yield
            return
        with self._marked.looking():
            yield
        self._left = _MARKED_SAMPLES if self._marked.has_backward else 0

    def sample(self, device: torch.device | None = None, hold_ns: int = 0) -> dict[str, PhaseSample]:
        """Each phase once; none where no backward pass was found. With a GPU also its time, held for `hold_ns`."""
        if not self._left:
            return {}
        self._left -= 1
        walls = self._timed(device)
        if device is None:
            return {phase: PhaseSample(wall_ns=wall_ns) for phase, (wall_ns, _) in walls.items()}
        gpu_ns, held = self._on_gpu(device, hold_ns)
        return {
            phase: PhaseSample(wall_ns=wall_ns, launch_ns=launch_ns, gpu_ns=gpu_ns.get(phase, 0), held=held)
            for phase, (wall_ns, launch_ns) in walls.items()
        }

    def _timed(self, device: torch.device | None) -> dict[str, tuple[int, int]]:
        """Wall and launch time of each phase: the host waits for the GPU at every boundary."""

        def read() -> tuple[int, int]:
            free = time.perf_counter_ns()
            if device is not None:
                torch.cuda.synchronize(device)
            return free, time.perf_counter_ns()

        read()
        walls: dict[str, tuple[int, int]] = {}
        for phase, (_, begin), (free, end) in self._marked.run(read):
            wall_ns, launch_ns = walls.get(phase, (0, 0))
            walls[phase] = wall_ns + end - begin, launch_ns + free - begin
        total_ns = sum(wall_ns for wall_ns, _ in walls.values())
        if REST in walls and walls[REST][0] < _LEAST_REST * total_ns:
            del walls[REST]
        return walls

    def _on_gpu(self, device: torch.device, hold_ns: int) -> tuple[dict[str, int], bool]:
        def read() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        torch.cuda.synchronize(device)
        if hold_ns:
            spin(int(hold_ns * _SPIN_CYCLES_PER_NS))
        parts = self._marked.run(read)
        held = bool(parts) and not parts[0][1].query()
        torch.cuda.synchronize(device)
        gpu_ns: dict[str, int] = {}
        for phase, begin, end in parts:
            gpu_ns[phase] = gpu_ns.get(phase, 0) + round(begin.elapsed_time(end) * 1e6)
        return gpu_ns, held


def clock_for(
    phases: Phases,
    device: torch.device,
    single_op: bool,
    details: int = 0,
    find_phases: bool = False,
    align: Align = None,
) -> Clock:
    """The clock that fits the device. `find_phases`: those of a step that is one callable."""
    found = FoundPhases(phases[STEP]) if find_phases else None
    if device.type == "cuda":
        return CudaClock(phases, device, single_op, details, found, align)
    return CpuClock(phases, found, align)


def empty_step_ns(device: torch.device) -> int:
    """What the host's clock reads of a step that does nothing; 0 on a GPU, which has clocks of its own."""
    if device.type == "cuda":
        return 0
    clock = CpuClock({STEP: lambda: None})
    return int(median(clock.once() for _ in range(_EMPTY_STEPS)))
