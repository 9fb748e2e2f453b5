"""What was measured of a step, whoever measured it: the questions that every rule asks."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.analysis.explanation import Kernel
from flopwise.records.run import STEP
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Workload

_LONGEST_NAME = 110
HOPPER = ("9.", "10.")  # capabilities on which cuDNN has attention kernels of its own kind


def step_ns(facts: Facts) -> float:
    """One step: untraced where that is known, else as traced; 0 where nobody knows."""
    if facts.waterfall is not None:
        return facts.waterfall.step_ns
    if (alone := untraced_ns(facts)) is not None:
        return alone
    return facts.explanation.window_ns if facts.explanation is not None else 0.0


def untraced_ns(facts: Facts) -> float | None:
    """The step without a profiler, where its clock is of the same work."""
    e = facts.explanation
    if e is not None and e.untraced_idle is not None and STEP in e.host_ns:
        return e.host_ns[STEP]
    times = facts.point.times() if facts.point is not None else None
    return float(median(times.wall_ns)) if times is not None and times.wall_ns else None


def gpu_ns(facts: Facts) -> float | None:
    """The GPU's own work in a step, without the gaps between launches."""
    times = facts.point.times() if facts.point is not None else None
    if times is not None and times.gpu_ns:
        held = [ns for ns, was_held in zip(times.gpu_ns, times.gpu_held, strict=False) if was_held]
        if 2 * len(held) >= len(times.gpu_ns):
            return float(median(held))
    return facts.explanation.busy_ns if facts.explanation is not None else None


def launch_ns(facts: Facts) -> float | None:
    """How long the host was busy with a step, measured without a profiler."""
    times = facts.point.times() if facts.point is not None else None
    return float(median(times.launch_ns)) if times is not None and times.launch_ns else None


def idle_ns(facts: Facts, cause: str) -> float:
    """The GPU's idle time of one cause, of one step; without the profiler where that is known."""
    e = facts.explanation
    if e is None:
        return 0.0
    return (e.untraced_idle or e.idle).by_cause_ns.get(cause, 0) / e.steps


def class_ns(facts: Facts, *kinds: str, phase: str = "") -> float:
    """GPU time of some classes of kernels, in all phases or in one."""
    e = facts.explanation
    if e is None:
        return 0.0
    return sum(
        ns
        for name, classes in e.phase_classes.items()
        for kind, ns in classes.items()
        if kind in kinds and phase in ("", name)
    )


def phase_ns(facts: Facts, phase: str) -> float:
    """GPU time of a phase."""
    e = facts.explanation
    return sum(share.gpu_ns for share in e.phases if share.name == phase) if e is not None else 0.0


def kernels(facts: Facts, wanted: Callable[[Kernel], bool]) -> list[Kernel]:
    """The kernels that a rule asks for, those that take longest first."""
    return [kernel for kernel in facts.explanation.kernels if wanted(kernel)] if facts.explanation is not None else []


def told(found: Iterable[Kernel], most: int = 3) -> tuple[str, ...]:
    """Kernels as evidence.

    >>> told([Kernel(name="sgemm", kind="matmul", gpu_ns=2e6, share=0.5, count=4.0, mean_ns=5e5)])
    ('2.00 ms in 4 × sgemm',)
    """
    first: Sequence[Kernel] = list(found)[:most]
    return tuple(f"{units.duration(k.gpu_ns)} in {k.count:.0f} × {k.name[:_LONGEST_NAME]}" for k in first)


def workload_of(facts: Facts) -> Workload | None:
    """What was run, if anyone says so."""
    if facts.account is not None:
        return facts.account.workload
    return facts.point.trial.workload if facts.point is not None else None


def recipe_of(facts: Facts) -> Recipe | None:
    """The levers of the step; None for a trace of unknown origin."""
    workload = workload_of(facts)
    return workload.recipe if workload is not None else None


def model_of(facts: Facts) -> ModelSpec | None:
    """The model, where it is one of ours."""
    workload = workload_of(facts)
    return workload.own_model if workload is not None else None


def gpu_of(facts: Facts) -> Gpu | None:
    """The GPU, by the first source that names one we know."""
    if facts.gpu is not None:
        return facts.gpu
    if facts.account is not None and facts.account.gpus:
        return facts.account.gpus[0].gpu
    named = facts.explanation.gpu if facts.explanation is not None else ""
    return find_gpu(named) if named else None


def rate(facts: Facts, dtype: str) -> float | None:
    """FLOP/s of a good matmul in one precision: the machine's ceiling, else the datasheet's peak."""
    if facts.ceilings is not None and dtype in facts.ceilings.matmul:
        return facts.ceilings.matmul[dtype].peak_flops
    gpu = gpu_of(facts)
    return gpu.peak(dtype) if gpu is not None else None


def bandwidth(facts: Facts) -> float | None:
    """Bytes per second of the GPU's memory."""
    if facts.ceilings is not None:
        return facts.ceilings.bandwidth_bytes_per_s
    gpu = gpu_of(facts)
    return gpu.bandwidth_bytes_s if gpu is not None else None
