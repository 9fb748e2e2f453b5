"""What a measured point's clocks say: GPU work or host launching, tokens per second, MFU, compile time, clock throttling."""

from collections.abc import Sequence
from functools import lru_cache
from statistics import median

import msgspec

from flopwise.predict.flops import mfu, model_flops
from flopwise.predict.inference import generation_part
from flopwise.records.run import STEP, PhaseTimes, Point, Ran, Telemetry
from flopwise.spec.gpu import find_gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import REPLAYED
from flopwise.spec.workload import Workload
from flopwise.statistics import Estimate, estimates, estimates_of, level, middle

DICTATES = 0.8  # a clock that fills this share of the wall time dictates it
LAUNCH, GPU, MIXED, HOST_SYNC, UNKNOWN = "launch", "gpu", "mixed", "host-sync", ""
CAP = "software power cap"  # NVML's reason; large matmuls reach it on a healthy chip
_MOST_CACHED = 1 << 16  # phases of points
LOWERED = 0.96  # of the clock: above that, the cap was reached for moments only


class PhaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One phase by its three clocks (records.PhaseTimes), in nanoseconds."""

    phase: str
    wall: Estimate
    launch: Estimate | None = None  # None on the CPU
    gpu: Estimate | None = None  # None on the CPU
    gpu_exact: bool = False  # from samples whose work was queued before it began; else `gpu` is an upper bound
    gpu_idle_share: float | None = None  # 1 - gpu / wall, at least 0; a lower bound unless gpu_exact; None on the CPU
    bound: str = UNKNOWN


def summarise(point: Point) -> tuple[PhaseSummary, ...]:
    """Every phase that has samples, in the order recorded; none for a point that failed before its first sample."""
    return tuple(_summary(times) for times in point.phases if times.wall_ns)


def summarise_all(points: Sequence[Point]) -> list[tuple[PhaseSummary, ...]]:
    """`summarise` of each point, all at once."""
    found = iter(_summaries([times for point in points for times in point.phases if times.wall_ns]))
    return [tuple(next(found) for times in point.phases if times.wall_ns) for point in points]


class StepLevel(msgspec.Struct, frozen=True, kw_only=True):
    """The whole step by its clocks' medians alone: a list of thousands of points needs no intervals."""

    wall_ns: float
    gpu_ns: float | None = None
    launch_ns: float | None = None
    gpu_exact: bool = False
    gpu_idle_share: float | None = None
    bound: str = UNKNOWN


def step_level(point: Point) -> StepLevel | None:
    """The first phase that has samples, as `summarise` has it; None for a point that has none."""
    times = next((times for times in point.phases if times.wall_ns), None)
    return _level(times) if times is not None else None


def step_walls(points: Sequence[Point]) -> list[Estimate | None]:
    """The wall clock of each step, with its interval, all at once; None for a point that has no samples."""
    steps = [next((times for times in point.phases if times.wall_ns), None) for point in points]
    found = iter(_walls(tuple(times for times in steps if times is not None)))
    return [next(found) if times is not None else None for times in steps]


@lru_cache(maxsize=4)  # the charts of a run, and then its table
def _walls(steps: tuple[PhaseTimes, ...]) -> list[Estimate]:
    return estimates_of([times.by_process("wall") for times in steps])


def phase_levels(point: Point) -> dict[str, float]:
    """The wall time of every phase after the step."""
    return {times.phase: level(times.by_process("wall")) for times in [one for one in point.phases if one.wall_ns][1:]}


def step_level_ns(point: Point) -> float:
    """The wall time of the step of a point that has samples."""
    step = step_level(point)
    assert step is not None
    return step.wall_ns


def phase_bound(point: Point, phase: str) -> str:
    """What dictates one phase's time; UNKNOWN where it was not measured."""
    times = point.times(phase)
    return _level(times).bound if times is not None and times.wall_ns else UNKNOWN


@lru_cache(maxsize=_MOST_CACHED)
def _level(times: PhaseTimes) -> StepLevel:
    wall = level(times.by_process("wall"))
    if not times.gpu_ns or not times.launch_ns:
        return StepLevel(wall_ns=wall)
    held, exact = _held(times)
    gpu, launch = level([held]), level(times.by_process("launch"))
    shares = (launch / wall, gpu / wall) if wall > 0 else (0.0, 0.0)
    return StepLevel(
        wall_ns=wall,
        gpu_ns=gpu,
        launch_ns=launch,
        gpu_exact=exact,
        gpu_idle_share=max(0.0, 1 - shares[1]),
        bound=_bound(*shares, exact),
    )


@lru_cache(maxsize=_MOST_CACHED)  # views of one run ask again and again
def _summary(times: PhaseTimes) -> PhaseSummary:
    return _summaries([times])[0]


def _summaries(phases: Sequence[PhaseTimes]) -> list[PhaseSummary]:
    walls = estimates_of([times.by_process("wall") for times in phases])
    launches = iter(estimates_of([times.by_process("launch") for times in phases if times.launch_ns]))
    gpus = iter(estimates([_held(times)[0] for times in phases if times.gpu_ns]))
    return [
        _of_clocks(times, wall, next(launches) if times.launch_ns else None, next(gpus) if times.gpu_ns else None)
        for times, wall in zip(phases, walls, strict=True)
    ]


def _of_clocks(times: PhaseTimes, wall: Estimate, launch: Estimate | None, gpu: Estimate | None) -> PhaseSummary:
    exact = gpu is not None and _held(times)[1]
    return PhaseSummary(
        phase=times.phase,
        wall=wall,
        launch=launch,
        gpu=gpu,
        gpu_exact=exact,
        gpu_idle_share=max(0.0, 1 - _share(gpu, wall)) if gpu else None,
        bound=_bound(_share(launch, wall), _share(gpu, wall), exact) if gpu and launch else UNKNOWN,
    )


def _held(times: PhaseTimes) -> tuple[tuple[int, ...], bool]:
    """The GPU's samples whose work was queued before it began, if they are at least half; else all, as an upper bound."""
    held = tuple(ns for ns, was_held in zip(times.gpu_ns, times.gpu_held, strict=False) if was_held)
    exact = 2 * len(held) >= len(times.gpu_ns)
    return held if exact else times.gpu_ns, exact


def _share(clock: Estimate | None, wall: Estimate) -> float:
    return clock.median / wall.median if clock and wall.median > 0 else 0.0


def _bound(launch: float, gpu: float, exact: bool) -> str:
    """What dictates the wall time, from two clocks' medians as shares of it.

    An exact `gpu` is the GPU's own work; one that is not exact holds the gaps between launches too, so a high share
    may be the GPU's work or its waiting, unless the host was free early.

    | gpu exact | gpu share | launch share | bound     | because                                                     |
    |-----------|-----------|--------------|-----------|-------------------------------------------------------------|
    | yes       | >= 0.8    | <= gpu share | gpu       | the GPU's work fills the time                               |
    | yes       | >= 0.8    | > gpu share  | launch    | launching fills more of it                                  |
    | no        | >= 0.8    | < 0.8        | gpu       | the host was free early and the GPU still worked            |
    | no        | >= 0.8    | >= 0.8       | mixed     | work and launch gaps cannot be separated                    |
    | any       | < 0.8     | >= 0.8       | launch    | the host launched all the time, the GPU had less to do      |
    | any       | < 0.8     | < 0.8        | mixed     | if together they do: first one works, then the other        |
    | any       | < 0.8     | < 0.8        | host-sync | if not: the host waits, copies or computes between          |
    """
    if gpu >= DICTATES:
        if exact:
            return GPU if gpu >= launch else LAUNCH
        return GPU if launch < DICTATES else MIXED
    if launch >= DICTATES:
        return LAUNCH
    return MIXED if launch + gpu >= DICTATES else HOST_SYNC


def _step_ns(point: Point) -> float | None:
    """The median wall time of the step; None without samples."""
    times = point.times(STEP)
    return middle(times.wall_ns) if times is not None and times.wall_ns else None


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one step does, whatever it takes: none of it depends on how the step is run, but the dtype."""

    flops: int = 0  # useful: every score counted, nothing computed twice; of one rank; 0: not known
    tokens: int = 0  # 0: the input shows none
    dtype: str = ""  # that most of the FLOPs are done in: its peak is the one to reach
    least_bytes: int = 0  # of a step of generation: weights, cache and logits, each read or written once

    def tokens_per_second(self, step_ns: float) -> float | None:
        return self.tokens * 1e9 / step_ns if self.tokens and step_ns else None

    def peak(self, gpu: str) -> float | None:
        """The datasheet's dense peak of the dtype, in FLOP/s; None where the GPU or its peak is not known.

        >>> StepWork(dtype="bf16").peak("NVIDIA H200") / 1e12
        989.4
        """
        machine = find_gpu(gpu) if gpu else None
        return machine.peaks.get(self.dtype) if machine is not None else None

    def mfu(self, step_ns: float, gpu: str) -> float | None:
        peak = self.peak(gpu)
        return mfu(self.flops, step_ns / 1e9, peak) if self.flops and step_ns and peak else None


def step_work(workload: Workload, ran: Ran | None) -> StepWork:
    """A model's by formula; of any other step what was seen of it."""
    if isinstance(workload.subject, ModelSpec):
        flops = model_flops(workload.subject, workload.batch, workload.context, workload.phase).total
        part = generation_part(workload)
        tokens = part.tokens if part is not None else workload.batch * workload.context
        least = part.read_bytes + part.write_bytes if part is not None else 0
        flops //= workload.recipe.ranks
        return StepWork(flops=flops, tokens=tokens, dtype=workload.recipe.linear, least_bytes=least)
    seen = ran.seen if ran is not None else None
    return StepWork(flops=seen.useful_flops, tokens=seen.tokens, dtype=seen.dtype) if seen is not None else StepWork()


def gpu_name(point: Point) -> str:
    """As the driver says it; '' on the CPU."""
    return point.environment.gpu.name if point.environment and point.environment.gpu else ""


def tokens_per_second(point: Point) -> float | None:
    """The step's tokens over its median wall time; None where it shows no tokens or has no samples."""
    return step_work(point.trial.workload, point.ran).tokens_per_second(_step_ns(point) or 0.0)


def point_mfu(point: Point) -> float | None:
    """The step's useful FLOPs over the datasheet's dense peak of the dtype they are done in.

    None where the FLOPs or the GPU's peak are not known.
    """
    return step_work(point.trial.workload, point.ran).mfu(_step_ns(point) or 0.0, gpu_name(point))


def compile_ns(point: Point) -> int | None:
    """What compiling cost: the first warm-up step beyond a usual step (its median); at least 0.

    A CUDA graph is compiled before it is captured, so there its own warm-up counts; so too of graphs by the compiler. None
    where nothing was compiled, or there is no warm-up or no sample.
    """
    recipe, step_ns = point.trial.workload.recipe, _step_ns(point)
    if recipe.compile != "off" and (recipe.graph == "on" or recipe.compile == REPLAYED):
        return point.captured_first_ns or None
    if recipe.compile == "off" or not point.warmup_ns or step_ns is None:
        return None
    return max(0, round(point.warmup_ns[0] - step_ns))


def held_clock(telemetry: Telemetry | None) -> tuple[float, int] | None:
    """The clock in MHz that the power cap left while the GPU was busiest, and the highest seen; None where it cost nothing.

    >>> held_clock(Telemetry(sm_mhz=(1980, 1980, 1600, 1620), power_mw=(120, 300, 698, 695), throttle=(CAP,)))
    (1600, 1980)
    """
    if telemetry is None or CAP not in telemetry.throttle:
        return None
    by_power = sorted(zip(telemetry.power_mw, telemetry.sm_mhz, strict=False))
    if not by_power:
        return None
    clock, highest = median(mhz for _, mhz in by_power[-max(1, len(by_power) // 4) :]), max(telemetry.sm_mhz)
    return (clock, highest) if clock < LOWERED * highest else None
