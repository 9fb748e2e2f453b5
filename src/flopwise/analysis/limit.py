"""A step against the power-capped roofline: what its work must take, and what each kind of work took beyond.

Under a power cap the driver lowers the clock, and the peak of the tensor cores with it. The limit has the step's FLOPs at
the datasheet's peaks times held clock / the peaks' clock, and the bytes of other work at full bandwidth. The clock is the one of
this step: with fewer bytes to move the cap would hold a lower one.
"""

import math
from collections.abc import Sequence

from flopwise.analysis.bandwidth import bytes_ns
from flopwise.analysis.computing import Computing
from flopwise.records import limit as causes
from flopwise.records import waterfall as parts
from flopwise.records.ceilings import Ceilings
from flopwise.records.limit import LimitCause, StepLimit
from flopwise.records.waterfall import WaterfallPart
from flopwise.spec.gpu import Gpu
from flopwise.work.operation import OpWork

_CAUSE_OF = {
    **dict.fromkeys(
        (parts.MATMUL_SHAPE, parts.MATMUL_UNALIGNED, parts.MATMUL_PRECISION, parts.MATMUL_OTHER), causes.MATMUL
    ),
    parts.ATTENTION_PART: causes.ATTENTION,
    parts.MEMORY_BOUND: causes.MEMORY,
    parts.BELOW_BANDWIDTH: causes.MEMORY,
    parts.FP8_CASTS: causes.CASTS,
    parts.OPTIMIZER_PART: causes.OPTIMIZER,
    parts.RECOMPUTATION: causes.RECOMPUTATION,
    parts.EXPOSED_COMMUNICATION: causes.COMMUNICATION,
    parts.TRANSFERS: causes.TRANSFERS,
    parts.IDLE_LAUNCH: causes.LAUNCH,
}


def step_limit(
    made: Sequence[WaterfallPart],
    step_ns: float,
    done: Computing,
    ops: Sequence[OpWork] | None,
    ceilings: Ceilings,
    gpu: Gpu,
    held: tuple[float, int] | None,
) -> StepLimit | None:
    """From a waterfall's parts. `ops`: the step's, where its workload is known; `held`: the clock that the cap left, the highest.

    None where the step's FLOPs are not known, or the GPU's peak in its precision.
    """
    if done.useful_flops is None or done.used not in gpu.peaks:
        return None
    share, peak_mhz = _clock_share(held, gpu)
    flops_ns = _products_ns(done, gpu), _attention_ns(done, gpu)
    took = _took(made)
    least = {causes.MATMUL: _product_limit_ns(done, ceilings, gpu, share), causes.ATTENTION: flops_ns[1] / share}
    least |= _moving(ops, ceilings, took) if ops is not None else {}
    found = tuple(
        LimitCause(key=key, ns=took[key], least_ns=least.get(key, 0.0)) for key in causes.NAMES if took.get(key)
    )
    peak_ns = sum(flops_ns)
    return StepLimit(
        step_ns=step_ns,
        limit_ns=math.fsum(one.least_ns for one in found),
        peak_ns=peak_ns,
        capped_ns=peak_ns / share - peak_ns,
        clock_mhz=held[0] if held is not None else None,
        peak_mhz=peak_mhz,
        causes=found,
        notes=() if ops is not None else ("the bytes of memory-bound ops are not known: all of their time is beyond",),
    )


def _clock_share(held: tuple[float, int] | None, gpu: Gpu) -> tuple[float, float | None]:
    """Of the clock that the datasheet's peaks are at (where it is not known, of the highest seen), and that clock in MHz."""
    highest = gpu.tensor_clock_hz / 1e6 if gpu.tensor_clock_hz else float(held[1]) if held is not None else None
    return (min(1.0, held[0] / highest) if held is not None and highest else 1.0), highest


def _took(made: Sequence[WaterfallPart]) -> dict[str, float]:
    """By cause; the ideal's own classes go to theirs."""
    took: dict[str, float] = {}
    for part in made:
        split = part.by_class if part.name == parts.IDEAL else {_CAUSE_OF.get(part.name, causes.IDLE): part.ns}
        for cause, ns in split.items():
            took[cause] = took.get(cause, 0.0) + ns
    return took


def _peak(precision: str, done: Computing, gpu: Gpu) -> float:
    return gpu.peaks.get(precision) or gpu.peaks[done.used]


def _products_ns(done: Computing, gpu: Gpu) -> float:
    return math.fsum(1e9 * one.flops / _peak(one.precision, done, gpu) for one in done.products)


def _product_limit_ns(done: Computing, ceilings: Ceilings, gpu: Gpu, share: float) -> float:
    """Each product at the capped peak of its precision, or by its bytes."""
    return math.fsum(
        1e9 * max(one.flops / (share * _peak(one.precision, done, gpu)), one.n_bytes / ceilings.bandwidth_bytes_per_s)
        for one in done.products
    )


def _attention_ns(done: Computing, gpu: Gpu) -> float:
    return 1e9 * done.attention_flops / _peak(done.attention_in, done, gpu)


def _moving(ops: Sequence[OpWork], ceilings: Ceilings, took: dict[str, float]) -> dict[str, float]:
    """Memory-bound work and the optimizer by their bytes; no more than they took, since a cache is faster than memory."""
    update = sum(op.read_bytes + op.write_bytes for op in ops if op.phase == "optimizer")
    needed = {
        causes.MEMORY: sum(bytes_ns(ops, ceilings, phases=False).values()),
        causes.OPTIMIZER: 1e9 * update / ceilings.bandwidth_bytes_per_s,
    }
    return {cause: min(ns, took.get(cause, 0.0)) for cause, ns in needed.items()}
