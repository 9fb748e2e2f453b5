"""Three numbers of a step: what it takes now, what the changes found would bring it to, and what no change can beat."""

from collections.abc import Sequence

import msgspec

from flopwise.analysis.clocks import gpu_name, step_work, summarise
from flopwise.records.finding import Finding
from flopwise.records.run import Point
from flopwise.records.tuning import Tuning
from flopwise.records.waterfall import Waterfall
from flopwise.spec.gpu import find_gpu

_HALF = ("bf16", "fp16")  # what training computes in where the chip has it


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one step in nanoseconds; None where it is not known."""

    now_ns: float
    reachable_ns: float | None = None  # with every change found; of a tuning, as measured after it
    limit_ns: float | None = None  # the useful FLOPs at `peak_flops`: an MFU of 100 %
    peak_flops: float | None = None  # the datasheet's dense peak of `dtype`
    dtype: str = ""

    def mfu(self, ns: float) -> float | None:
        """The share of the limit's peak that a step of this time reaches."""
        return self.limit_ns / ns if self.limit_ns is not None and ns > 0 else None


def reach(found: Waterfall, findings: Sequence[Finding], gpu: str) -> Reach:
    """Of a step with its findings; each counts with what it still saves after those before it.

    >>> fall = Waterfall(step_ns=1e8, measured_by="", parts=(), mfu=0.2, hfu=None, roofline_share=None, precision="fp32")
    >>> found = reach(fall, [Finding(rule="", title="", arithmetic="", counted_ns=9e7)], "NVIDIA H200")
    >>> round(found.now_ns / 1e6), round(found.reachable_ns / 1e6), round(found.limit_ns / 1e6, 1), found.dtype
    (100, 10, 1.4, 'bf16')
    """
    machine = find_gpu(gpu) if gpu else None
    used = machine.peaks.get(found.precision) if machine is not None else None
    flops = found.mfu * used * found.step_ns / 1e9 if found.mfu is not None and used else 0.0
    most = limit(flops, found.precision, gpu)
    saved = sum(one.counted_ns or 0.0 for one in findings)
    least = most.limit_ns or 0.0
    return msgspec.structs.replace(
        most, now_ns=found.step_ns, reachable_ns=max(least, found.step_ns - saved) if saved > 0 else None
    )


def tuned_reach(tuning: Tuning) -> Reach:
    """Of a tuning: the step as it was, and as it is with all that was kept; both measured."""
    work = step_work(tuning.begun.workload, tuning.begun.ran)
    most = limit(work.flops, work.dtype, tuning.begun.gpu)
    return msgspec.structs.replace(most, now_ns=tuning.first_ns, reachable_ns=tuning.last_ns)


def point_reach(point: Point, after: Point | None = None) -> Reach:
    """Of a measured step, and of another that was measured against it."""
    work = step_work(point.trial.workload, point.ran)
    times = [summarise(one)[0].wall.median for one in (point, after) if one is not None]
    most = limit(work.flops, work.dtype, gpu_name(point))
    return msgspec.structs.replace(most, now_ns=times[0], reachable_ns=times[1] if after is not None else None)


def limit(flops: float, dtype: str, gpu: str) -> Reach:
    """At the peak in half precision, which any step may use; at that of its own dtype where it is higher."""
    machine = find_gpu(gpu) if gpu else None
    peaks = {one: machine.peaks[one] for one in (*_HALF, dtype) if one in machine.peaks} if machine is not None else {}
    if not flops or not peaks:
        return Reach(now_ns=0.0)
    best = max(peaks, key=lambda one: peaks[one])
    return Reach(now_ns=0.0, limit_ns=1e9 * flops / peaks[best], peak_flops=peaks[best], dtype=best)
