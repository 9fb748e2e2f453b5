"""Operations under a machine's roofs: of a traced step as measured, of a workload as predicted."""

from pathlib import Path
from typing import Any

from flopwise import units
from flopwise.analysis.reading import run_named, trace_of
from flopwise.analysis.roofline import MatmulTiles, Roofline, matmul_tiles, predicted_points
from flopwise.analysis.traced_points import NO_SIZES, traced_points
from flopwise.capture.functions import Target, as_workload
from flopwise.errors import FlopwiseError
from flopwise.predict.machine import Machine, find_ceilings
from flopwise.predict.op_time import matmul_shape, op_times, unaligned_share
from flopwise.predict.prediction import predict
from flopwise.records.ceilings import Ceilings
from flopwise.spec.dtypes import item_bytes
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.user_step import is_user_step
from flopwise.spec.workload import Workload, workload
from flopwise.store import StoredRun
from flopwise.trace.read import is_trace_file, read_trace
from flopwise.trace.tables import Trace
from flopwise.work.operation import MATMUL, OpWork

_WHOLE = 16  # bytes that a row should be a multiple of
ONE_FLOP = "where no matmul is in an operation, every element counts as one FLOP"


def roofline(
    target: Target | Path, *, gpu: str | None = None, runs: str | Path | None = None, **options: Any
) -> Roofline:
    """Set every operation under the roofs of its GPU.

    `target` is a run or a trace file (every op with known input sizes, as measured), or a workload (all its
    operations, as predicted). `gpu` names the machine; a trace says its own, a workload needs one.

    >>> import flopwise
    >>> flopwise.roofline("small", gpu="h200").points[0].kind
    'matmul'
    """
    if not isinstance(target, str | Path):
        return _of_workload(as_workload(target, options), gpu)
    named = str(target).startswith(("hf:", "op:")) or is_user_step(str(target))
    if not named and is_trace_file(Path(target).expanduser()):
        path = Path(target).expanduser()
        return traced_roofline(read_trace(path), path, gpu)
    run = _run(target, runs)
    if run is None:
        return _of_workload(workload(str(target), **options), gpu)
    if any(point.trace_file and point.environment and point.environment.gpu for point in run.points):
        path = trace_of(run)[0]
        return traced_roofline(read_trace(path), path, gpu)
    if not run.points:
        raise FlopwiseError(f"the run {run.header.id} has no points", "run flopwise bench or profile first")
    point = run.sound().points[0]
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
    kernels = predict(asked, Machine(gpu=machine, ceilings=limits)).kernels
    points = tuple(predicted_points(kernels, op_times(kernels, limits), limits))
    title, tiles = f"{asked.label()} on {machine.title}", tuple[MatmulTiles, ...]()
    notes: tuple[str, ...] = (ONE_FLOP,)
    if asked.target == "op:matmul" and asked.phase == "forward":
        product = next(op for op in kernels if op.kind == MATMUL)
        tiles = matmul_tiles(product, limits)
        notes = (*_alignment(product, machine), ONE_FLOP)
    return Roofline(title=title, how="predicted", ceilings=limits, points=points, notes=notes, tiles=tiles)


def _alignment(product: OpWork, machine: Gpu) -> tuple[str, ...]:
    """What rows that are not aligned cost a product."""
    left = unaligned_share(product)
    if left == 1:
        return ()
    _, _, n, k = matmul_shape(product)
    measured = "" if machine.capability.startswith("9.") else " (as measured on an H200: this GPU may lose less)"
    return (
        f"rows of {k} and {n} numbers are no whole multiples of 16 bytes: {units.percent(left)} of the rate is left{measured}; "
        f"pad K and N to multiples of {_WHOLE // item_bytes(product.dtype)}",
    )


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
        how = "--device cpu" if machine.name == "cpu" else "on it"
        raise FlopwiseError(
            f"the ceilings of {machine.title} are not known", f"measure them: flopwise doctor --calibrate {how}"
        )
    return limits
