"""Which untraced measurement belongs to a trace: the one point of a run that can be of the same work."""

from flopwise.analysis.explanation import Explanation, host_clock
from flopwise.analysis.idle import FITS, clock_fit
from flopwise.errors import FlopwiseError
from flopwise.records.run import STEP, Point
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import REPLAYED
from flopwise.spec.workload import takes
from flopwise.store import StoredRun
from flopwise.trace.phases import BACKWARD, FORWARD, OPTIMIZER
from flopwise.trace.tables import Trace

_COMPILED = ("triton_", "## Call CompiledFxGraph ", "Torch-Compiled Region")  # how names of compiled code begin
_NAMED = 4  # points that a refusal names


def timing_of(
    timed: StoredRun, traced: Point | None, trace: Trace, explanation: Explanation
) -> tuple[Point, tuple[str, ...]]:
    """The point of a run whose clock is compared with a trace, and remarks about the choice.

    It is that of the trace's own workload, where it is known; else the only one that can be. A trace is of a GPU, so a
    CPU's clock does not count.
    """
    points = [point for point in timed.sound().points if point.phases]
    if not points:
        raise FlopwiseError(f"the run {timed.header.id} has no samples", "give --timings a run of flopwise bench")
    on_gpu = [point for point in points if not device_of(point).startswith("cpu")]
    if not on_gpu:
        raise FlopwiseError(
            f"the run {timed.header.id} was measured on a CPU, and the trace is of a GPU",
            "give --timings a run of the same workload on the same GPU",
        )
    wanted = traced.trial.workload if traced else None
    same = next((point for point in on_gpu if point.trial.workload == wanted), None)
    if same is not None:
        return same, ()
    notes = [f"another workload than the trace's {wanted.label()}"] if wanted else []
    if len(on_gpu) == 1:
        return on_gpu[0], tuple(notes)
    notes.append(f"the only one of {len(on_gpu)} points there that can be the trace's")
    return _only_possible(timed.header.id, on_gpu, trace, explanation), tuple(notes)


def host_timing_of(timed: StoredRun) -> Point:
    """The point of a run whose clock is compared with a trace of the CPU: the only one there."""
    points = [point for point in timed.sound().points if point.phases and device_of(point).startswith("cpu")]
    if len(points) != 1:
        raise FlopwiseError(
            f"the run {timed.header.id} has {len(points)} points on the CPU, and the trace is of one",
            "give --timings a run of that one workload on the CPU",
        )
    return points[0]


def _only_possible(run: str, points: list[Point], trace: Trace, explanation: Explanation) -> Point:
    possible = [point for point in points if _fits(point, trace, explanation)]
    if len(possible) == 1:
        return possible[0]
    could = f"{len(possible) or 'none'} of the {len(points)} points"
    labels = [point.trial.workload.label() for point in possible or points]
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    raise FlopwiseError(
        f"{could} of the run {run} can be the workload of {trace.path}",
        f"give --timings a run with that one workload; here are: {', '.join(labels[:_NAMED])}{more}",
    )


def _fits(point: Point, trace: Trace, explanation: Explanation) -> bool:
    """Whether a point can be of the work in a trace: the same GPU, phases and levers, and a step of about its length."""
    gpu, step_ns = gpu_of(point), host_clock(point).get(STEP)
    if (gpu and trace.gpu and gpu != trace.gpu) or step_ns is None:
        return False
    workload, n = point.trial.workload, explanation.steady_steps
    if clock_fit(explanation.idle, round(explanation.window_ns * n), step_ns * n) != FITS:
        return False
    if "phase" in takes(workload.subject) and workload.phase not in _phases(explanation):
        return False
    return not isinstance(workload.subject, ModelSpec) or _levers_fit(point, trace)


def _phases(explanation: Explanation) -> tuple[str, ...]:
    """The phases that a workload of this trace can have; any, where the trace shows none."""
    seen = {phase.name for phase in explanation.phases}
    if OPTIMIZER in seen:
        return ("train",) if seen & {FORWARD, BACKWARD} else ("train", FORWARD)  # an optimizer alone is op:adamw, too
    if BACKWARD in seen:
        return ("backward",)
    return (FORWARD,) if FORWARD in seen else ("train", "backward", FORWARD)


def _levers_fit(point: Point, trace: Trace) -> bool:
    recipe = point.trial.workload.recipe
    compiled = any(name.startswith(_COMPILED) for name in trace.names)
    graphs = trace.graph_launches.height > 0
    if (recipe.compile != "off") != compiled:
        return False
    if recipe.graph == "on" or recipe.compile == REPLAYED:
        return graphs
    return not graphs or recipe.compile == "max-autotune"


def device_of(point: Point) -> str:
    """Where a point ran, 'cpu' or 'cuda:0'; what was asked for, if that is all that is known."""
    return point.ran.device if point.ran else point.trial.device


def gpu_of(point: Point) -> str:
    """The name of the GPU that a point ran on, if it is known."""
    return point.environment.gpu.name if point.environment and point.environment.gpu else ""
