"""The datasheet's word on a step: no op ends before its FLOPs are done at the peak rate and its bytes are moved."""

from collections.abc import Iterable

import msgspec

from flopwise.spec.gpu import Gpu
from flopwise.work.op_rules import causal_share
from flopwise.work.operation import ATTENTION, OpWork


class StepLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The least time of a step's ops one after the other (an update beside the backward pass apart); launches are counted,
    not timed.
    """

    seconds: float
    compute_s: float  # in ops that the peak rate limits
    bandwidth_s: float  # in ops that the bandwidth limits
    kernels: int
    bound: str  # which of the two is the larger


def step_limit(ops: Iterable[OpWork], gpu: Gpu, *, overlap: bool = False) -> StepLimit | None:
    """Op by op the larger of FLOPs / peak and bytes / bandwidth; None where the GPU states no such figures.

    Fused attention is causal here and need not do the masked half, so that this stays a lower limit. `overlap`: weights are
    updated beside the backward pass, and what fits beside its compute-bound ops takes no time.

    >>> from flopwise.spec.gpu import gpu
    >>> op = OpWork(op="mm", module="", phase="forward", kind="matmul", dtype="bf16", flops=989_400_000_000, read_bytes=1)
    >>> step_limit([op], gpu("h100")).seconds
    0.001
    """
    bandwidth = gpu.bandwidth_bytes_s
    if not bandwidth:
        return None
    compute_s = bandwidth_s = updating_s = beside_s = 0.0
    kernels = 0
    for op in ops:
        flops = op.flops * causal_share(op.shapes[0][2]) if op.kind == ATTENTION and op.flops else op.flops
        peak = gpu.peaks.get(op.dtype)
        if flops and not peak:
            return None
        computing = flops / peak if flops and peak else 0.0
        moving = (op.read_bytes + op.write_bytes) / bandwidth
        kernels += op.kernels
        if computing >= moving:
            compute_s += computing
            beside_s += computing * (op.phase == "backward")
        else:
            bandwidth_s += moving
            updating_s += moving * (op.phase == "optimizer")
    bandwidth_s -= overlap * min(updating_s, beside_s)
    bound = "compute" if compute_s >= bandwidth_s else "bandwidth"
    return StepLimit(
        seconds=compute_s + bandwidth_s, compute_s=compute_s, bandwidth_s=bandwidth_s, kernels=kernels, bound=bound
    )
