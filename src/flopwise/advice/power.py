"""A step that the GPU's power cap slows: less work bound by memory then leaves less power for the matmuls.

Tensor cores draw more than the cap allows, so the driver lowers their clock until the whole step's mean is the cap. Work
bound by memory draws less and takes as long at a lower clock. With the clock at a share f of what the ceilings were
measured at, matmuls and attention take a / f and draw `strength` · f² of the cap, the other b draw `m` of it, and the mean
is the cap: strength · f · a + m · b = a / f + b. `strength` follows from a measured step; with other a and b, the same
equation says how far the clock moves. `m` is MEMORY_POWER_SHARE.
"""

import math

import msgspec

from flopwise.advice.constants import LEAST_CAPPED_RATE, MEMORY_POWER_SHARE
from flopwise.predict.step_time import StepTime
from flopwise.work.operation import ATTENTION, MATMUL

_CLOCKED = (MATMUL, ATTENTION)


def strength(time: StepTime, measured_ns: float) -> float | None:
    """What matmuls would draw at the ceilings' clock, over the cap; None where the cap does not explain the measurement."""
    clocked, others = _parts(time)
    left = measured_ns - others
    if left <= clocked or clocked <= LEAST_CAPPED_RATE * left:
        return None
    f = clocked / left
    return (1 / f + (1 - MEMORY_POWER_SHARE) * others / clocked) / f


def slowed(time: StepTime, strength: float | None) -> StepTime:
    """The step at the clock that the cap leaves it; unchanged where there is none.

    >>> time = StepTime(how="", wall_ns=1e8, gpu_ns=1e8, host_ns=0.0, bound="", phases=(), gpu_ns_by_kind={"matmul": 8e7},
    ...     gpu_ns_by_bound={})
    >>> round(slowed(time, strength(time, 1.1e8)).wall_ns / 1e6)
    110
    """
    clocked, others = _parts(time)
    if strength is None or clocked <= 0:
        return time
    spare = (1 - MEMORY_POWER_SHARE) * others / clocked
    f = min(1.0, (spare + math.sqrt(spare**2 + 4 * strength)) / (2 * strength))
    more = clocked / f - clocked
    kinds = {kind: ns / f if kind in _CLOCKED else ns for kind, ns in time.gpu_ns_by_kind.items()}
    return msgspec.structs.replace(time, wall_ns=time.wall_ns + more, gpu_ns=time.gpu_ns + more, gpu_ns_by_kind=kinds)


def _parts(time: StepTime) -> tuple[float, float]:
    """What follows the clock, and the rest of the step."""
    clocked = sum(time.gpu_ns_by_kind.get(kind, 0.0) for kind in _CLOCKED)
    return clocked, time.wall_ns - clocked
