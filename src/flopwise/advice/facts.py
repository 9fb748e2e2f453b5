"""Everything known about one step: the input of every rule. What is unknown is None, and a rule that needs it stays silent."""

from collections.abc import Callable, Iterable
from itertools import islice
from statistics import median
from typing import NamedTuple

import msgspec

from flopwise import units
from flopwise.advice.constants import GPU_BOUND, HOST_BOUND, LAUNCH_QUEUE, REPLAYED_SHARE, UPDATES_SHARE
from flopwise.analysis.blame import HostBlame
from flopwise.analysis.details import Details
from flopwise.analysis.explanation import Explanation, Kernel
from flopwise.analysis.serving import Serving
from flopwise.analysis.steps import ITERATIONS
from flopwise.predict.recorded.step import RecordedStep
from flopwise.records.ceilings import Ceilings
from flopwise.records.run import PhaseMemory, PhaseTimes, Point
from flopwise.records.untraced import UntracedStep
from flopwise.records.waterfall import Waterfall
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Workload
from flopwise.trace.iterations import DECODE
from flopwise.trace.phases import BACKWARD, FORWARD, OPTIMIZER

_LONGEST_NAME = 110  # letters of a kernel's name in a line of evidence


class Facts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step from all sides. Compared by identity, so that what is computed from it can be cached by it."""

    explanation: Explanation | None = None  # of its trace
    details: Details = Details(steps=1)  # of the same trace: waits, chains of kernels, sizes of products
    waterfall: Waterfall | None = None
    point: Point | None = None  # the step measured without a profiler: clocks, memory, telemetry, what really ran
    ceilings: Ceilings | None = None
    gpu: Gpu | None = None
    recorded: RecordedStep | None = None  # a user's step as it was dry-run: its levers can be predicted from it

    @property
    def step_ns(self) -> float:
        """One step: untraced where that is measured or estimated, else as traced; 0 where unknown."""
        if self.waterfall is not None:
            return self.waterfall.step_ns
        step = self.untraced_step
        return step.ns if step is not None else (self.explanation.window_ns if self.explanation is not None else 0.0)

    @property
    def untraced_step(self) -> UntracedStep | None:
        """The step without a profiler: measured where it was, else estimated from its trace."""
        traced, times = self.explanation.untraced_step if self.explanation is not None else None, self.times
        if (traced is not None and traced.measured) or times is None or not times.wall_ns:
            return traced
        wall = float(median(times.wall_ns))
        return UntracedStep(ns=wall, low_ns=wall, high_ns=wall, measured=True)

    @property
    def untraced_ns(self) -> float | None:
        """The step without a profiler, where it was timed over the same work."""
        step = self.untraced_step
        return step.ns if step is not None and step.measured else None

    @property
    def gpu_ns(self) -> float | None:
        """The GPU's own work in a step, without the gaps between launches."""
        times = self.times
        if times is not None and times.gpu_ns:
            held = [ns for ns, was_held in zip(times.gpu_ns, times.gpu_held, strict=False) if was_held]
            if 2 * len(held) >= len(times.gpu_ns):
                return float(median(held))
        return self.explanation.busy_ns if self.explanation is not None else None

    @property
    def host_ns(self) -> float | None:
        """The host's own work in a step, at most; None where nothing tells it from waiting for the GPU.

        A launch waits where the queue is full. So the clock of a step that the GPU sets says nothing of the host, nor does one
        of more kernels than the queue takes, unless the host was busy all the time. A trace shows the waiting.
        """
        times, e = self.times, self.explanation
        left = e.untraced_step.host_left if e is not None and e.untraced_step is not None else 1.0
        known = [] if self.details.host_ns is None else [left * self.details.host_ns]
        if times is not None and times.launch_ns and times.wall_ns:
            launching, wall = float(median(times.launch_ns)), float(median(times.wall_ns))
            waited = e is not None and e.launches > LAUNCH_QUEUE and launching < HOST_BOUND * wall
            if (self.gpu_ns or 0.0) < GPU_BOUND * wall and not waited:
                known.append(launching)
        return min(known, default=None)

    @property
    def trains(self) -> bool:
        """Whether the step has a backward pass or an optimizer; a step of which nothing is known is taken to."""
        e = self.explanation
        if e is not None and self.workload is None:
            updates = self.phase_ns(OPTIMIZER) >= UPDATES_SHARE * e.gpu_ns  # servers have foreach kernels, too
            return e.steps_found_by != ITERATIONS and (self.phase_ns(BACKWARD) > 0 or updates)
        return self.workload is None or self.workload.phase != FORWARD

    @property
    def serves(self) -> bool:
        """Whether it is an iteration of a serving engine, whose model is not the user's to compile."""
        return self.explanation is not None and self.explanation.steps_found_by == ITERATIONS

    @property
    def decoding(self) -> Serving | None:
        """What a server's trace shows, where all of its iterations decode: then the step's figures are those of decoding."""
        served = self.explanation.serving if self.explanation is not None else None
        return served if served is not None and {one.kind for one in served.kinds} == {DECODE} else None

    def decodes_by_bandwidth(self, times: int) -> bool:
        """Whether decoding so many times the requests would still wait for the weights, not for the arithmetic on them."""
        found = self.decoding.of(DECODE) if self.decoding is not None else None
        ridge = self.gpu.ridge("fp16") if self.gpu is not None else None
        return found is not None and ridge is not None and times * found.decode_requests < ridge

    @property
    def replays(self) -> bool:
        """Whether most of the GPU's work is that of CUDA graphs already."""
        return self.explanation is not None and self.explanation.graph_share >= REPLAYED_SHARE

    @property
    def times(self) -> PhaseTimes | None:
        """The samples of the whole step."""
        return self.point.times() if self.point is not None else None

    @property
    def memory(self) -> tuple[PhaseMemory, ...]:
        """The measured memory by phase."""
        return self.point.memory if self.point is not None else ()

    @property
    def workload(self) -> Workload | None:
        """What ran; None for a trace of unknown origin."""
        return self.point.trial.workload if self.point is not None else None

    @property
    def recipe(self) -> Recipe | None:
        """The levers of the step; None for a trace of unknown origin."""
        return self.workload.recipe if self.workload is not None else None

    @property
    def model(self) -> ModelSpec | None:
        """The model, where it is flopwise's own, whose steps can be predicted."""
        work = self.workload
        own = work is not None and work.implementation == "flopwise"
        return work.subject if work is not None and own and isinstance(work.subject, ModelSpec) else None

    @property
    def parameters(self) -> int:
        """As counted in the run, else of the model; 0 where unknown."""
        ran = self.point.ran.parameters if self.point is not None and self.point.ran is not None else 0
        return ran or (self.model.parameters() if self.model is not None else 0)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of the GPU's memory."""
        if self.ceilings is not None:
            return self.ceilings.bandwidth_bytes_per_s
        return self.gpu.bandwidth_bytes_s if self.gpu is not None else None

    def rate(self, dtype: str) -> float | None:
        """FLOP/s of a good matmul in one precision: the machine's ceiling, else the datasheet's peak."""
        if self.ceilings is not None and dtype in self.ceilings.matmul:
            return self.ceilings.matmul[dtype].peak_flops
        return self.gpu.peak(dtype) if self.gpu is not None else None

    def part_ns(self, part: str) -> float:
        """One part of the waterfall; 0 where there is none."""
        return self.waterfall.ns(part) if self.waterfall is not None else 0.0

    def idle_ns(self, cause: str) -> float:
        """The GPU's idle time of one cause, per step; without the profiler where that is measured or estimated."""
        e = self.explanation
        return (e.untraced_idle or e.idle).by_cause_ns.get(cause, 0) / e.steady_steps if e is not None else 0.0

    def blamed_ns(self, *blamed: HostBlame) -> float:
        """The GPU's idle time that goes to these, per step; without the profiler where that is measured or estimated."""
        e = self.explanation
        traced = {cause: ns / e.steady_steps for cause, ns in e.idle.by_cause_ns.items()} if e is not None else {}
        return sum(one.idle_ns * self.idle_ns(one.cause) / traced[one.cause] for one in blamed if traced.get(one.cause))

    def sure_idle_ns(self, cause: str) -> float:
        """The same at the optimistic end, where the untraced step is an estimate."""
        e = self.explanation
        return (
            e.optimistic_idle.by_cause_ns.get(cause, 0) / e.steady_steps
            if e and e.optimistic_idle
            else self.idle_ns(cause)
        )

    def class_ns(self, *kinds: str, phase: str = "") -> float:
        """GPU time of some classes of kernels, in all phases or in one."""
        phases = self.explanation.phase_classes if self.explanation is not None else {}
        chosen = [classes for name, classes in phases.items() if phase in ("", name)]
        return sum(ns for classes in chosen for kind, ns in classes.items() if kind in kinds)

    def phase_ns(self, phase: str) -> float:
        """GPU time of a phase."""
        phases = self.explanation.phases if self.explanation is not None else ()
        return sum(share.gpu_ns for share in phases if share.name == phase)

    def kernels(self, wanted: Callable[[Kernel], bool]) -> list[Kernel]:
        """The kernels that a rule asks for, the longest first."""
        return [kernel for kernel in self.explanation.kernels if wanted(kernel)] if self.explanation else []


class Evidence(NamedTuple):
    """A line of evidence, and the kernel that it is about."""

    text: str
    kernel: str = ""


def describe(kernels: Iterable[Kernel], most: int = 3) -> tuple[Evidence, ...]:
    """Kernels as evidence.

    >>> describe([Kernel(name="sgemm", kind="matmul", gpu_ns=2e6, share=0.5, count=4.0, mean_ns=5e5)])[0].text
    '2.00 ms in 4 × sgemm'
    """
    return tuple(
        Evidence(f"{units.duration(k.gpu_ns)} in {k.count:.0f} × {shortened(k.name)}", k.name)
        for k in islice(kernels, most)
    )


def shortened(name: str) -> str:
    """A kernel's name in a line of evidence."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
