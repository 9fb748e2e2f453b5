"""How long a step must take: per operation the slowest of its limits, and the CPU and the GPU as two queues.

An operation on the GPU takes the longer of computing and moving its bytes, and never less than the shortest kernel.
The CPU launches one operation after the other; the GPU starts each when it was launched and the one before it has ended.
Which of the two is late is decided anew at every operation: a step can be launch-bound in one half and not in the other.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from flopwise.predict.launching import Host, host_ns
from flopwise.predict.warmth import cold_bytes
from flopwise.records.ceilings import (
    BACKWARD,
    EXPONENTIAL,
    FUSED,
    HALF,
    INDICES,
    JOINED,
    MEASURED,
    MIXED,
    RMS,
    STRIDES,
    Ceilings,
    Curve,
    Matmul,
    Near,
)
from flopwise.work.catalogue import copies_first
from flopwise.work.operation import (
    ATTENTION,
    COPY,
    ELEMENTWISE,
    INDEX,
    LOSS,
    MATMUL,
    NORMALISATION,
    OPTIMIZER,
    PART,
    REDUCTION,
    SOFTMAX,
    OpWork,
)

COMPUTE, BANDWIDTH, LAUNCH = "compute", "bandwidth", "launch"
SPLITS = (1, 2, 4, 8, 16)  # a product with few tiles and a long inner dimension is split along it
NARROW, WIDE = 64, ", wide heads"  # up to so many numbers a head; the name of the curves for more
NEAR_WIDTH, NEAR_PRIOR, NEAR_ENOUGH = (
    1.2,
    0.1,
    10.0,
)  # of shapes in powers of two: halved the error of products left out
NEAR = 0.9  # a GPU busy for less than this share of the step waits for its launches, if they take longer than its work


# Of the time that an update and matmuls have for each other, what is gained: both want the same multiprocessors. A matmul
# that fills them leaves an update the ends of its waves. An H200 hid 0.45 of 2.0 ms of medium's update (4 × 512, as a graph).
BESIDE = 0.2


class OpTime(msgspec.Struct, frozen=True, kw_only=True):
    """One operation's time on the GPU and what sets it."""

    ns: float
    bound: str  # 'compute' or 'bandwidth'; 'launch': shorter than any kernel can be


Products = dict[tuple[int, int, int, int, str], float]  # batch, M, N, K and the precision: nanoseconds


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


def matmul_shape(op: OpWork) -> tuple[int, int, int, int]:
    """(batch, M, N, K) of a product, from its inputs' shapes.

    >>> matmul_shape(OpWork(op="bmm", module="", phase="forward", kind=MATMUL, dtype="fp32", shapes=((8, 4, 2), (8, 2, 3))))
    (8, 4, 3, 2)
    """
    matrices = [shape for shape in op.shapes if len(shape) in (2, 3)][-2:]  # addmm has its bias first
    if len(matrices) < 2:
        return (1, 1, 1, max(1, op.flops // 2))
    a, b = matrices
    return (a[0] if len(a) == 3 else 1, a[-2], b[-1], a[-1])


def matmul_ns(batch: int, m: int, n: int, k: int, limits: Matmul, processors: int) -> float:
    """The time of a product by its best tile and split: as many waves as they need, the last one whether full or not.

    >>> from flopwise.records.ceilings import Tile
    >>> limits = Matmul(peak_flops=1e15, tiles=(Tile(m=128, n=128, start_ns=0.0, flops_per_s=1e13),), join_ns=2000.0)
    >>> [round(matmul_ns(1, 128 * tiles, 128, 500, limits, 100)) for tiles in (1, 100, 101)]
    [1638, 1638, 3277]
    """
    times = [
        tile.start_ns + waves * (2e9 * tile.m * tile.n * k / split / tile.flops_per_s) + (split > 1) * limits.join_ns
        for tile in limits.tiles
        for split in SPLITS
        for waves in (math.ceil(batch * split * math.ceil(m / tile.m) * math.ceil(n / tile.n) / processors),)
    ]
    return min(times) * math.exp(_miss((batch, m, n, k), limits.near))


def _miss(shape: tuple[int, int, int, int], near: tuple[Near, ...]) -> float:
    """The mean of the misses of measured products, each the less the further its shape is; far from all of them, none."""
    here = [math.log2(max(1, side)) for side in shape]
    pulls = total = 0.0
    for one in near:
        far = sum((math.log2(side) - at) ** 2 for side, at in zip(one.shape, here, strict=True))
        if far < NEAR_ENOUGH:
            weight = math.exp(-far / NEAR_WIDTH**2)
            pulls, total = pulls + weight * one.miss, total + weight
    return pulls / (total + NEAR_PRIOR)


def curve_name(op: OpWork) -> str:
    """The class of an operation's kernels, and what makes them unlike others of it.

    >>> curve_name(OpWork(op="mul", module="", phase="forward", kind=ELEMENTWISE, dtype="bf16", strided=True))
    'elementwise, strided, half'
    """
    name = op.kind
    if op.op.startswith(WRITTEN_IN_TRITON) and op.kind in TRITONS:
        # Rows are read in order, whatever lies between them, and numbers in wide words, whatever they become.
        name = NORMALISATION + RMS if op.kind == NORMALISATION else ELEMENTWISE
        return name + HALF if op.dtype in ("bf16", "fp16") else name
    if op.op == "cat":
        name = COPY + JOINED if op.strided else ELEMENTWISE  # what lies in order is copied by wide loads
    elif op.kind in (ELEMENTWISE, COPY) and (op.strided or op.broadcasts or op.op in _MOVERS):
        name += STRIDES
    elif op.kind == ELEMENTWISE and op.op.removesuffix("_backward") in _EXPONENTIALS:
        name += EXPONENTIAL
    elif op.kind == NORMALISATION and op.op in ("rms_norm", "rms_norm_backward"):  # its weights' gradient is slower
        name += RMS
    elif op.kind == INDEX and op.op in ("embedding_backward", "embedding_dense_backward"):
        name += BACKWARD
    elif op.kind == LOSS and "log_softmax" in op.op:
        name = SOFTMAX  # the same kernel, with another last step
    elif op.kind == REDUCTION and op.op in _FINDERS:
        name += INDICES
    elif op.op == "flopwise::adamw_":
        return ELEMENTWISE  # it reads and writes once and in order: at 99 % of a copy, where torch's is at 81 %
    elif op.kind == OPTIMIZER and "fused" in op.op:
        name += FUSED
    if op.kind == ELEMENTWISE and op.mixed:
        return name + MIXED
    if op.kind == COPY and op.read_bytes != op.write_bytes:
        return (
            name + HALF if op.read_bytes < op.write_bytes else name
        )  # a cast: by what it reads, not what it computes in
    return name + HALF if op.dtype in ("bf16", "fp16") else name


def op_time(
    op: OpWork, ceilings: Ceilings, *, graph: bool = False, cold: float = 0.0, products: Products | None = None
) -> OpTime:
    """What an operation takes on the GPU: the longer of computing and moving, and the change from the kernel before.

    `cold`: how many of the bytes that it reads the cache has not kept. `products`: the times of those that were met.
    """
    found = _alone(op, ceilings, cold, {} if products is None else products)
    if not found.ns:
        return found
    change_ns = op.kernels * (ceilings.switch_ns + graph * ceilings.graph_gap_ns)
    return OpTime(ns=max(found.ns / 4, found.ns + change_ns), bound=found.bound)  # a graph's gap may be below zero


def op_times(ops: Sequence[OpWork], ceilings: Ceilings, *, graph: bool = False) -> list[OpTime]:
    """What the operations of a step take one after the other, the cache being what those before have left in it."""
    products: Products = {}
    known: dict[tuple[object, ...], OpTime] = {}  # layers are alike
    times = []
    for op, far in zip(ops, cold_bytes(ops, ceilings.cached_bytes), strict=True):
        moved = (op.op, op.phase, op.kind, op.dtype, op.flops, op.read_bytes, op.write_bytes, op.kernels)
        like = (*moved, op.strided, op.mixed, op.shapes, far)
        if like not in known:
            known[like] = op_time(op, ceilings, graph=graph, cold=far, products=products)
        times.append(known[like])
    return times


def beside_backward(ops: Sequence[OpWork], times: Sequence[OpTime]) -> list[OpTime]:
    """The same times with the optimizer's shorter by what the backward pass hides of it.

    That is BESIDE × the smaller of two: the optimizer's time, and the time of backward's compute-bound kernels. Beside a
    kernel that waits for memory itself nothing is gained.
    """
    updating = math.fsum(time.ns for op, time in zip(ops, times, strict=True) if op.phase == "optimizer")
    computing = math.fsum(
        time.ns for op, time in zip(ops, times, strict=True) if op.phase == "backward" and time.bound == COMPUTE
    )
    left = 1 - BESIDE * min(updating, computing) / updating if updating else 1.0
    return [
        OpTime(ns=time.ns * left, bound=time.bound) if op.phase == "optimizer" else time
        for op, time in zip(ops, times, strict=True)
    ]


def _alone(op: OpWork, ceilings: Ceilings, cold: float, products: Products) -> OpTime:
    if not op.kernels or (op.op.startswith(PART) and ceilings.how == MEASURED):
        return OpTime(ns=0.0, bound=BANDWIDTH)  # fused attention was measured whole
    curve = ceilings.curve(curve_name(op))
    read = max(op.read_bytes, sum(size for _, size in op.reads))  # a compiled kernel that sums columns reads twice
    moved, kernels = read + op.write_bytes, op.kernels
    copied = copies_first(op.op)
    if op.kind in (OPTIMIZER, INDEX) or copied:
        kernels = 1  # lists of tensors, and sorts by index, were measured whole, in as many launches as they take
    moving = curve.at(moved / kernels) * kernels + (0.0 if op.kind == OPTIMIZER else ceilings.cold_ns(cold))
    if copied:
        moving += ceilings.curve(COPY).at(2 * op.write_bytes)
    computing = 0.0
    if op.kind in (MATMUL, ATTENTION) and op.flops:
        attention = op.kind == ATTENTION
        computing = _attention_curve(op, ceilings).at(op.flops) if attention else _product_ns(op, ceilings, products)
    if computing > moving:
        return OpTime(ns=computing, bound=COMPUTE)
    shortest = curve.ns[0] * op.kernels
    return OpTime(ns=moving, bound=BANDWIDTH if moving > 1.5 * shortest else LAUNCH)


def _product_ns(op: OpWork, ceilings: Ceilings, products: Products) -> float:
    shape, way = matmul_shape(op), op.dtype + BACKWARD if op.phase == "backward" else op.dtype
    if (*shape, way) not in products:
        limits = ceilings.matmul.get(way) or ceilings.matmul.get(op.dtype) or ceilings.matmul["fp32"]
        products[*shape, way] = matmul_ns(*shape, limits, ceilings.processors)
    return products[*shape, way]


def _attention_curve(op: OpWork, ceilings: Ceilings) -> Curve:
    curves = ceilings.attention_backward if op.phase == "backward" else ceilings.attention
    wide = bool(op.shapes and op.shapes[0]) and op.shapes[0][-1] > NARROW
    dtypes = (op.dtype, "bf16") if op.dtype == "fp16" else (op.dtype,)  # of the two, one is probed
    name = op.op.replace("flopwise::flash", "triton")  # as a dry run tells it
    backend = next((f", {one}" for one in ("flash", "cudnn", "triton") if one in name), "")
    names = [dtype + way for way in dict.fromkeys((backend, "")) for dtype in dtypes]
    known = (curves.get(way + width) for way in names for width in ((WIDE, "") if wide else ("",)))
    return next((curve for curve in known if curve is not None), curves["fp32"])


FUSED_OP = "fused "  # what a compiled kernel is called, then its parts
WRITTEN_IN_TRITON = ("flopwise::", FUSED_OP)
TRITONS = (ELEMENTWISE, COPY, NORMALISATION)  # kinds of which such a kernel is not like PyTorch's
_FINDERS = ("max", "min", "argmax", "argmin", "sort", "topk")  # reductions that remember where
_EXPONENTIALS = ("silu", "gelu", "sigmoid", "tanh")  # more to compute for a number than to load and store it
_MOVERS = ("copy", "clone", "contiguous", "permute")  # copies that are made because the order changes


class _Queues:
    """The two clocks, in nanoseconds since the step began."""

    def __init__(self, ceilings: Ceilings, graph: bool) -> None:
        self.ceilings, self.graph = ceilings, graph
        self.host_ns = self.gpu_ns = 0.0

    def run(self, op: OpWork, host_ns: float, ns: float) -> None:
        if self.graph:
            self.gpu_ns += ns
            return
        self.host_ns += host_ns
        if op.kernels:
            queued_ns = self.gpu_ns + op.kernels * self.ceilings.pause_ns
            self.gpu_ns = max(queued_ns, self.host_ns + self.ceilings.latency_ns) + ns

    @property
    def end_ns(self) -> float:
        return max(self.host_ns, self.gpu_ns)


def predict(
    ops: Sequence[OpWork],
    ceilings: Ceilings,
    *,
    graph: bool = False,
    compiled: Container[str] = (),
    calls: Mapping[int, float] | None = None,
    overlap: bool = False,
) -> StepTime:
    """The step that consists of `ops`, in their order.

    `graph`: it is replayed as one CUDA graph, so that the CPU has no part in it. `compiled`: the phases that are one
    call of a compiled graph each, which costs the CPU something before the first kernel. `calls`: nanoseconds that the CPU
    spends before some operations, by their place. `overlap`: weights are updated beside the backward pass.
    """
    times, host = op_times(ops, ceilings, graph=graph), Host(ops, ceilings, compiled)
    if overlap:
        times = beside_backward(ops, times)
    called = calls or {}
    launches = [host_ns(op, host.cost(op.phase)) + called.get(place, 0.0) for place, op in enumerate(ops)]
    queues, moved, starts, last = _Queues(ceilings, graph), dict[str, float](), dict[str, int](), ""
    for op, time, launch_ns in zip(ops, times, launches, strict=True):
        before = queues.end_ns
        if op.phase not in starts or (
            op.phase == "optimizer" and last != op.phase
        ):  # an update of its own for every block
            queues.host_ns += host.start_ns(op.phase)
            starts[op.phase] = starts.get(op.phase, 0) + 1
        last = op.phase
        queues.run(op, launch_ns, time.ns)
        moved[op.phase] = moved.get(op.phase, 0.0) + queues.end_ns - before
    phases = [
        PhaseTime(
            phase=phase,
            wall_ns=wall_ns,
            gpu_ns=math.fsum(time.ns for op, time in zip(ops, times, strict=True) if op.phase == phase),
            host_ns=0.0
            if graph
            else math.fsum(ns for op, ns in zip(ops, launches, strict=True) if op.phase == phase)
            + host.start_ns(phase) * starts[phase],
            kernels=sum(op.kernels for op in ops if op.phase == phase),
        )
        for phase, wall_ns in moved.items()
    ]
    gpu_ns = math.fsum(time.ns for time in times)
    by_bound = _sums((time.bound, time.ns) for time in times)
    wall_ns = queues.end_ns
    return StepTime(
        how=ceilings.how,
        wall_ns=wall_ns,
        gpu_ns=gpu_ns,
        host_ns=queues.host_ns,
        bound=LAUNCH
        if gpu_ns < min(NEAR * wall_ns, queues.host_ns)
        else max(by_bound, key=by_bound.__getitem__, default=LAUNCH),
        phases=tuple(phases),
        gpu_ns_by_kind=_sums((op.kind, time.ns) for op, time in zip(ops, times, strict=True)),
        gpu_ns_by_bound=by_bound,
    )


def _sums(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, ns in parts:
        sums[name] = sums.get(name, 0.0) + ns
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
