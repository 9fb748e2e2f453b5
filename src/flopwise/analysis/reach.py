"""Three numbers of a step: what it takes now, what all changes found would bring it to, and what no change can beat."""

from collections.abc import Sequence

import msgspec

from flopwise.analysis.clocks import gpu_name, step_level_ns, step_work
from flopwise.records.run import Point
from flopwise.records.tuning import Tuning
from flopwise.records.waterfall import Waterfall
from flopwise.spec.gpu import find_gpu

_HALF = ("bf16", "fp16")  # what training computes in where the chip has it


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one step in nanoseconds; None where it is not known."""

    now_ns: float
    reachable_ns: float | None = None  # with all changes found that leave the training as it is; of a tuning, measured
    changes: int = 0  # how many
    limit_ns: float | None = (
        None  # the useful FLOPs at `peak_flops`: an MFU of 100 %; or its bytes at `bandwidth`, if longer
    )
    peak_flops: float | None = None  # the datasheet's dense peak of `dtype`
    dtype: str = ""
    bandwidth: float | None = None  # bytes per second, where they set the limit
    bytes_in: str = "bf16"  # what they are counted in; '': as the trace's own kernels read them

    def mfu(self, ns: float) -> float | None:
        """The share of the peak that a step of this time reaches; None where bytes set its limit, which MFU says nothing of."""
        return self.limit_ns / ns if self.limit_ns is not None and not self.bandwidth and ns > 0 else None


def reach(
    now_ns: float, saved_ns: Sequence[float], found: Waterfall | None = None, gpu: str = "", least_bytes: float = 0.0
) -> Reach:
    """Of a traced step: what each change saves with those before it made, and its waterfall where the GPU is known.

    `least_bytes`: as for `limit`.

    >>> fall = Waterfall(step_ns=1e8, measured_by="", parts=(), mfu=0.2, hfu=None, roofline_share=None, precision="fp32")
    >>> found = reach(1e8, [9e7], fall, "NVIDIA H200")
    >>> round(found.now_ns / 1e6), round(found.reachable_ns / 1e6), round(found.limit_ns / 1e6, 1), found.dtype
    (100, 10, 1.4, 'bf16')
    """
    if found is None:
        return after(Reach(now_ns=0.0), now_ns, saved_ns)
    machine = find_gpu(gpu) if gpu else None
    used = machine.peaks.get(found.precision) if machine is not None else None
    flops = found.mfu * used * now_ns / 1e9 if found.mfu is not None and used else 0.0
    most = limit(flops or float(least_bytes > 0), found.precision, gpu, least_bytes)
    return after(msgspec.structs.replace(most, bytes_in=""), now_ns, saved_ns)


def tuned_reach(tuning: Tuning) -> Reach:
    """Of a tuning: the step as it was, and as it is with all that was kept; both measured."""
    work, kept = step_work(tuning.begun.workload, tuning.begun.ran), len(tuning.kept)
    dtype = tuning.best.recipe.linear if tuning.best.own_model is not None else work.dtype
    most = limit(work.flops, dtype, tuning.begun.gpu)
    reached = tuning.last_ns if kept else None
    return msgspec.structs.replace(most, now_ns=tuning.first_ns, reachable_ns=reached, changes=kept)


def point_reach(point: Point, saved_ns: Sequence[float] = ()) -> Reach:
    """Of a measured step."""
    work = step_work(point.trial.workload, point.ran)
    most = limit(work.flops, work.dtype, gpu_name(point), work.least_bytes)
    return after(most, step_level_ns(point), saved_ns)


def after(most: Reach, now_ns: float, saved_ns: Sequence[float]) -> Reach:
    """The step with changes made, no faster than its limit; `most` has that limit."""
    left = max(now_ns - sum(saved_ns), most.limit_ns or 0.0)
    reached = left if 0 < left < now_ns else None
    return msgspec.structs.replace(most, now_ns=now_ns, reachable_ns=reached, changes=len(saved_ns) if reached else 0)


def limit(flops: float, dtype: str, gpu: str, least_bytes: float = 0.0) -> Reach:
    """At the peak in half precision, which any step may use; at that of its own dtype where it is higher.

    `least_bytes`: what a step of generation cannot do without, read and written once.

    >>> limit(1e9, "bf16", "h200", 2.4e9).limit_ns     # a token of a model of 1.2 billion parameters, at 4.8 TB/s
    500000.0
    """
    machine = find_gpu(gpu) if gpu else None
    peaks = {one: machine.peaks[one] for one in (*_HALF, dtype) if one in machine.peaks} if machine is not None else {}
    if not flops or not peaks:
        return Reach(now_ns=0.0)
    best = max(peaks, key=lambda one: peaks[one])
    computing_ns, bandwidth = 1e9 * flops / peaks[best], machine.bandwidth_bytes_s if machine is not None else None
    moving_ns = 1e9 * least_bytes / bandwidth if bandwidth else 0.0
    found = Reach(now_ns=0.0, limit_ns=computing_ns, peak_flops=peaks[best], dtype=best)
    return (
        msgspec.structs.replace(found, limit_ns=moving_ns, bandwidth=bandwidth) if moving_ns > computing_ns else found
    )
