"""How long a step takes: the CPU and the GPU as two queues.

The CPU launches one operation after the other; the GPU starts each when it was launched and the one before it has ended.
Which of the two is late is decided anew at every operation: a step can be launch-bound in one half and not in the other.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from flopwise.predict.constants import FP8_HOST, GPU_BUSY_SHARE, LEAST_CALL_NS, OVERLAP_SHARE
from flopwise.predict.fusion import Graph, block_of
from flopwise.predict.op_time import COMPUTE, LAUNCH, OpTime, by_rows, is_cast, op_times
from flopwise.predict.shapes.overlap import updates_in_backward
from flopwise.records.ceilings import Ceilings, HostCost, HostCounts
from flopwise.spec.gpu import Gpu
from flopwise.spec.recipe import REPLAYED, Recipe
from flopwise.work.op_rules import causal_share
from flopwise.work.operation import ATTENTION, OPTIMIZER, PART, OpWork


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """A phase within the step; `wall_ns` is the time by which it moves the end of the step."""

    phase: str
    wall_ns: float
    gpu_ns: float
    host_ns: float
    kernels: int


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted step. The phases' wall times add up to the step's."""

    how: str  # the ceilings': 'measured' or 'specified'
    wall_ns: float
    gpu_ns: float  # the kernels alone, without the gaps between them
    host_ns: float
    bound: str
    phases: tuple[PhaseTime, ...]
    gpu_ns_by_kind: dict[str, float]
    gpu_ns_by_bound: dict[str, float]


class StepLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The least time of a step by the GPU's datasheet, one op after the other; launches are counted, not timed."""

    seconds: float
    compute_s: float  # in ops that the peak rate limits
    bandwidth_s: float  # in ops that the bandwidth limits
    kernels: int
    bound: str  # which of the two is the larger


def step_time(recipe: Recipe, ops: Sequence[OpWork], ceilings: Ceilings, blocks: Graph = block_of) -> StepTime:
    """The time of a step with these kernels: those of a compiled step are fused already, by `blocks` where it was so asked."""
    graph, overlap = recipe.graph == "on", updates_in_backward(recipe)
    ceilings = by_rows(ceilings) if recipe.precision == "fp8-rowwise" else ceilings
    if recipe.compile == "blocks" and not graph:
        return time_of(ops, ceilings, calls=_block_calls(ops, ceilings, blocks), overlap=overlap)
    if recipe.compile in ("off", "blocks"):
        return time_of(ops, ceilings, graph=graph, overlap=overlap)
    compiled, replays = () if graph else ("forward", "loss", "backward"), recipe.compile == REPLAYED
    return time_of(ops, ceilings, graph=graph, compiled=compiled, replayed=compiled if replays else ())


def time_of(
    ops: Sequence[OpWork],
    ceilings: Ceilings,
    *,
    graph: bool = False,
    compiled: Container[str] = (),
    replayed: Container[str] = (),
    calls: Mapping[int, float] | None = None,
    overlap: bool = False,
) -> StepTime:
    """The step that consists of `ops`, in their order.

    `graph`: it is replayed as one CUDA graph, so that the CPU has no part in it. `compiled`: the phases that are one
    call of a compiled graph each, which costs the CPU something before the first kernel. `replayed`: those whose kernels then
    come from a CUDA graph, at no cost of the CPU's. `calls`: nanoseconds that the CPU spends before some operations, by their
    place. `overlap`: weights are updated during the backward pass.
    """
    times, host = op_times(ops, ceilings, graph=graph), _Host(ops, ceilings, compiled)
    if replayed:
        in_graphs = op_times(ops, ceilings, graph=True)
        times = [in_graphs[n] if op.phase in replayed else times[n] for n, op in enumerate(ops)]
    times = _overlapped(ops, times) if overlap else times
    launches = [0.0 if op.phase in replayed else host_ns(op, host.costs[op.phase]) for op in ops]
    for place, call_ns in (calls or {}).items():
        launches[place] += call_ns
    rows, launched_ns, done_ns = _queues(ops, times, launches, host, graph, replayed)
    gpu_ns, wall_ns = math.fsum(time.ns for time in times), max(launched_ns, done_ns)
    by_bound = _sums((time.bound, time.ns) for time in times)
    waits = gpu_ns < min(GPU_BUSY_SHARE * wall_ns, launched_ns)
    return StepTime(
        how=ceilings.how,
        wall_ns=wall_ns,
        gpu_ns=gpu_ns,
        host_ns=launched_ns,
        bound=LAUNCH if waits else next(iter(by_bound), LAUNCH),
        phases=tuple(
            PhaseTime(phase=phase, wall_ns=row[0], gpu_ns=row[1], host_ns=row[2], kernels=int(row[3]))
            for phase, row in rows.items()
        ),
        gpu_ns_by_kind=_sums((op.kind, time.ns) for op, time in zip(ops, times, strict=True)),
        gpu_ns_by_bound=by_bound,
    )


def _queues(
    ops: Sequence[OpWork],
    times: Sequence[OpTime],
    launches: Sequence[float],
    host: "_Host",
    graph: bool,
    replayed: Container[str],
) -> tuple[dict[str, list[float]], float, float]:
    """By phase by how much it moves the step's end, its GPU and host time and kernels; and when both queues are empty."""
    launched_ns = done_ns = 0.0
    rows, last = dict[str, list[float]](), ""
    for op, time, launch_ns in zip(ops, times, launches, strict=True):
        phase, before, start_ns = op.phase, max(launched_ns, done_ns), 0.0
        if phase not in rows or (phase == "optimizer" and last != phase):  # an update of its own for each block
            start_ns = host.start_ns(phase)
        last, row = phase, rows.setdefault(phase, [0.0, 0.0, 0.0, 0])
        launched_ns += start_ns
        if graph:
            done_ns += time.ns
        else:
            launched_ns += launch_ns
            row[2] += start_ns + launch_ns
            if op.kernels:
                queued_ns = done_ns + (0.0 if phase in replayed else op.kernels * host.ceilings.pause_ns)
                done_ns = max(queued_ns, launched_ns + host.ceilings.latency_ns) + time.ns
        row[0] += max(launched_ns, done_ns) - before
        row[1] += time.ns
        row[3] += op.kernels
    return rows, launched_ns, done_ns


def _sums(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """By name, the largest first."""
    sums = defaultdict[str, float](float)
    for name, ns in parts:
        sums[name] += ns
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _overlapped(ops: Sequence[OpWork], times: Sequence[OpTime]) -> list[OpTime]:
    """The same times, the optimizer's shorter by what the backward pass hides.

    That is OVERLAP_SHARE × the smaller of two: the optimizer's time, and the time of backward's compute-bound kernels. A
    kernel that waits for memory itself hides nothing.
    """
    pairs = list(zip(ops, times, strict=True))
    updating = math.fsum(time.ns for op, time in pairs if op.phase == "optimizer")
    computing = math.fsum(time.ns for op, time in pairs if op.phase == "backward" and time.bound == COMPUTE)
    left = 1 - OVERLAP_SHARE * min(updating, computing) / updating if updating else 1.0
    return [OpTime(time.ns * left, time.bound) if op.phase == "optimizer" else time for op, time in pairs]


def _block_calls(ops: Sequence[OpWork], ceilings: Ceilings, blocks: Graph) -> dict[int, float]:
    """By the place of the first operation of each compiled block, in every phase: the host's work for calling it.

    A call's time goes with the tensors it checks and hands over, and is LEAST_CALL_NS at the least. Without a
    measurement of that, the blocks share what one call for all of them takes.
    """
    first: dict[tuple[str, str], int] = {}
    tensors = defaultdict[tuple[str, str], set[int]](set)
    for place, op in enumerate(ops):
        block = blocks(op)
        if block is not None and op.phase != "optimizer":
            first.setdefault((block, op.phase), place)
            tensors[block, op.phase].update(tensor for tensor, _ in op.reads)
    found: dict[int, float] = {}
    for (block, phase), place in first.items():
        cost = ceilings.compiled.get(phase) or ceilings.compiled.get("forward")
        share_ns = ceilings.compiled_call_ns / sum(one == phase for _, one in first)
        found[place] = max(LEAST_CALL_NS, cost.listed_ns * len(tensors[block, phase]) if cost else share_ns)
    return found


FP8_OPS = ("_scaled_mm", "flopwise::fp8_")


def host_ns(op: OpWork, cost: HostCost) -> float:
    """What the CPU spends on an operation.

    >>> cost = HostCost(op_ns=9.0, view_ns=1.0, kernel_ns=4.0, cast_ns=6.0)
    >>> cast = OpWork(op="to", module="", phase="forward", kind="copy/cast", dtype="bf16", read_bytes=4, write_bytes=2)
    >>> host_ns(cast, cost)
    6.0
    """
    if not op.kernels:
        return cost.view_ns
    if op.op.startswith(PART):
        return op.kernels * cost.kernel_ns
    listed = len(op.reads) if op.kind == OPTIMIZER else 0
    first_ns = cost.op_ns if cost.cast_ns is None or not is_cast(op) else cost.cast_ns
    if op.op.startswith(FP8_OPS):
        first_ns = FP8_HOST * cost.op_ns
    return first_ns + (op.kernels - 1) * cost.kernel_ns + listed * cost.listed_ns


def host_counts(ops: Iterable[OpWork]) -> HostCounts:
    """What of some operations the host has to launch, counted as `host_ns` charges for it."""
    some = list(ops)
    own = [op for op in some if op.kernels and not op.op.startswith(PART)]
    return HostCounts(
        ops=len(own),
        views=sum(not op.kernels for op in some),
        kernels=sum(op.kernels for op in some) - len(own),
        listed=sum(len(op.reads) for op in own if op.kind == OPTIMIZER),
        casts=sum(is_cast(op) for op in own),
    )


def counts_by_phase(ops: Iterable[OpWork]) -> dict[str, HostCounts]:
    """What each phase of a step launches, the loss counted with forward."""
    known = list(ops)
    phases = {"forward": ("forward", "loss"), "backward": ("backward",), "optimizer": ("optimizer",)}
    return {name: host_counts(op for op in known if op.phase in some) for name, some in phases.items()}


class _Host:
    """What launching costs, phase by phase: the CPU's part of a step, which is what the ceilings say of such phases."""

    def __init__(self, ops: Sequence[OpWork], ceilings: Ceilings, compiled: Container[str]) -> None:
        self.ceilings, self.compiled = ceilings, compiled
        phases = {op.phase for op in ops}
        self.inference = phases == {"forward"}  # then nothing is recorded for a backward pass
        self.checkpointed = "recompute" in phases  # then Python is asked about every tensor that is kept
        self.handed = _handed(ops) if compiled else {}
        self.costs = {phase: self._cost(phase) for phase in phases}

    def _cost(self, phase: str) -> HostCost:
        if phase in self.compiled and self.ceilings.compiled:
            return self.ceilings.compiled.get(phase) or self.ceilings.compiled["forward"]
        if phase == "forward" and self.inference:
            return self.ceilings.host_cost("inference")
        if phase in ("forward", "recompute") and self.checkpointed:
            return self.ceilings.host_cost("checkpointed")
        return self.ceilings.host_cost(phase)

    def start_ns(self, phase: str) -> float:
        """What the host does once, before the first operation of a phase."""
        cost, started = self.costs[phase], self.ceilings.backward_start_ns * (phase == "backward")
        if phase not in self.compiled:
            return cost.start_ns * (phase in ("forward", "backward", "optimizer")) + started
        if not self.ceilings.compiled:
            return self.ceilings.compiled_call_ns + started
        return cost.start_ns + started + cost.listed_ns * self.handed.get(phase, 0)


def _handed(ops: Sequence[OpWork]) -> dict[str, int]:
    """By phase, how many tensors it is handed: those that it reads and has not written itself."""
    handed, made = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for op in ops:
        handed[op.phase].update(tensor for tensor, _ in op.reads if tensor not in made[op.phase])
        made[op.phase].update(tensor for tensor, _ in op.writes)
    return {phase: len(tensors) for phase, tensors in handed.items()}


def step_limit(ops: Iterable[OpWork], gpu: Gpu, *, overlap: bool = False) -> StepLimit | None:
    """Op by op the larger of FLOPs / peak and bytes / bandwidth; None where the GPU states no such figures.

    Fused attention is causal here and need not do the masked half, so that this stays a lower limit. `overlap`: weights are
    updated during the backward pass, and what its compute-bound ops hide takes no time.

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
        causal = op.kind == ATTENTION and op.flops and not op.whole
        flops = op.flops * causal_share(op.shapes[0][2]) if causal else op.flops
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
    seconds = compute_s + bandwidth_s
    return StepLimit(seconds=seconds, compute_s=compute_s, bandwidth_s=bandwidth_s, kernels=kernels, bound=bound)
