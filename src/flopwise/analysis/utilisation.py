"""How much of the chip a measured step uses."""

import numpy as np

from flopwise.predict.flops import mfu, model_flops
from flopwise.records.run import Point
from flopwise.spec.gpu import find_gpu
from flopwise.spec.model import ModelSpec


def point_mfu(point: Point) -> float | None:
    """The step's model FLOPs, every score counted, over the datasheet's dense peak of the precision asked for.

    None where the model's FLOPs or the GPU's peak are not known.
    """
    workload, times = point.trial.workload, point.times()
    machine = find_gpu(point.environment.gpu.name) if point.environment and point.environment.gpu else None
    if machine is None or times is None or not times.wall_ns or not isinstance(workload.subject, ModelSpec):
        return None
    peak = machine.peaks.get(workload.recipe.precision.removesuffix("-pure"))
    if not peak:
        return None
    flops = model_flops(workload.subject, workload.batch, workload.context, workload.phase).total
    return mfu(flops, float(np.median(times.wall_ns)) / 1e9, peak)
