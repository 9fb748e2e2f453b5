"""Operations under a machine's roofs: of a traced step as measured, of a workload as predicted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwise.analysis.reading import run_named, trace_of
from flopwise.analysis.roofline import Roofline, predicted_points
from flopwise.analysis.traced_points import NO_SIZES, traced_points
from flopwise.errors import FlopwiseError
from flopwise.predict.dry_step import dry_run, needs_dry_run
from flopwise.predict.fusion import fuse, graph_of
from flopwise.predict.machine import find_ceilings
from flopwise.predict.roofline import op_times
from flopwise.predict.shapes.step import account_step
from flopwise.records.ceilings import Ceilings
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.workload import Workload, workload
from flopwise.store import StoredRun
from flopwise.trace.read import is_trace_file, read_trace
from flopwise.trace.tables import Trace
from flopwise.work.operation import OpWork

ONE_FLOP = "where no matmul is in an operation, every element counts as one FLOP"


def roofline(
    target: str | Path | Workload, *, gpu: str | None = None, runs: str | Path | None = None, **options: Any
) -> Roofline:
    """Set every operation under the roofs of its GPU.

    `target` is a run or a trace file (every op whose bytes its inputs tell, as measured), or a workload (all its
    operations, as predicted). `gpu`
    names the machine; a trace says its own, a workload needs one.

    >>> import flopwise
    >>> flopwise.roofline("small", gpu="h200").points[0].kind
    'matmul'
    """
    if isinstance(target, Workload):
        return _of_workload(target, gpu)
    named = isinstance(target, str) and target.startswith(("hf:", "py:", "op:"))
    if not named and is_trace_file(Path(target).expanduser()):
        return _of_trace(Path(target).expanduser(), gpu)
    run = _run(target, runs)
    if run is None:
        return _of_workload(workload(str(target), **options), gpu)
    if any(point.trace_file and point.environment and point.environment.gpu for point in run.points):
        return _of_trace(trace_of(run)[0], gpu)
    if not run.points:
        raise FlopwiseError(f"the run {run.header.id} has no points", "run flopwise bench or profile first")
    point = run.points[0]
    there = point.environment.gpu.name if point.environment and point.environment.gpu else "cpu"
    return _of_workload(point.trial.workload, gpu or there)


def _run(target: str | Path, runs: str | Path | None) -> StoredRun | None:
    """The run that a target means; None if there is none of that name."""
    try:
        return run_named(target, runs)
    except FlopwiseError:
        if str(target) == "last" or Path(target).expanduser().exists():
            raise
        return None


def _of_workload(asked: Workload, gpu: str | None) -> Roofline:
    if gpu is None:
        raise FlopwiseError(f"{asked.target} is not run: for which GPU?", "add --gpu h200, or give a run or a trace")
    machine = gpu_named(gpu)
    limits = _limits(machine)
    ops: Sequence[OpWork] = dry_run(asked, machine).ops if needs_dry_run(asked) else account_step(asked, machine).ops
    ops = fuse(ops, graph_of(asked.recipe.compile)) if asked.recipe.compile != "off" else ops
    points = predicted_points(ops, op_times(ops, limits), limits)
    title = f"{asked.label()} on {machine.title}"
    notes = (ONE_FLOP,)
    return Roofline(title=title, how="predicted", ceilings=limits, points=tuple(points), notes=notes)


def _of_trace(path: Path, gpu: str | None) -> Roofline:
    return traced_roofline(read_trace(path), path, gpu)


def traced_roofline(trace: Trace, path: Path, gpu: str | None = None) -> Roofline:
    """The operations of a trace that was read from `path`."""
    machine = gpu_named(gpu) if gpu else find_gpu(trace.gpu)
    if machine is None:
        named = f"'{trace.gpu}', which is not known" if trace.gpu else "no GPU"
        raise FlopwiseError(f"{path} names {named}", "say which it was with --gpu")
    limits = _limits(machine)
    points, unplaced = traced_points(trace, limits)
    if not points and (not unplaced or (len(trace.inputs) == 1 and NO_SIZES in {one.why for one in unplaced})):
        raise FlopwiseError(
            f"{path} holds no op with the sizes and types of its inputs",
            "capture with shapes: flopwise profile does, torch.profiler with record_shapes=True",
        )
    return Roofline(
        title=f"operations of {path.name} on {machine.title}",
        how="measured",
        ceilings=limits,
        points=tuple(points),
        notes=(
            "times and counts: of the whole trace, all its steps",
            "bytes: every input read once, every result written once, by the sizes and types in the trace",
            ONE_FLOP,
        ),
        unplaced=tuple(unplaced),
        cache_bytes=machine.l2_bytes or 0,
    )


def _limits(machine: Gpu) -> Ceilings:
    limits = find_ceilings(machine)
    if limits is None:
        how = (
            "flopwise doctor --calibrate --device cpu" if machine.name == "cpu" else "flopwise doctor --calibrate on it"
        )
        raise FlopwiseError(f"the ceilings of {machine.title} are not known", f"measure them: {how}")
    return limits
