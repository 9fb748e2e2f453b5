"""How long an operation takes on the GPU: the longer of computing and moving its bytes, but never less than a kernel can."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from flopwise.predict import constants as fitted
from flopwise.records import ceilings as curves
from flopwise.records.ceilings import MEASURED, Ceilings, Curve, Matmul, Near, Tile
from flopwise.work import operation as kinds
from flopwise.work.catalogue import copies_first
from flopwise.work.operation import ATTENTION, COPY, ELEMENTWISE, MATMUL, NORMALISATION, OPTIMIZER, PART, OpWork

COMPUTE, BANDWIDTH, LAUNCH = "compute", "bandwidth", "launch"
FUSED_OP = "fused "  # a compiled kernel's name begins so, then come its parts
TRITON_KINDS = (ELEMENTWISE, COPY, NORMALISATION)  # kernels in Triton are unlike PyTorch's

_WHOLE_LOAD = 16  # bytes: without such loads tensor cores are fed by older kernels
_TRITON = ("flopwise::", FUSED_OP)  # names of kernels that are written in Triton
_MOVERS = ("copy", "clone", "contiguous", "permute")  # copies that are made because the order changes
_EXPONENTIALS = ("silu", "gelu", "sigmoid", "tanh")  # more to compute for a number than to load and store it
_VARIANTS = {  # ops that are unlike others of their kind, and the curve that they have for it
    ELEMENTWISE: ((*_EXPONENTIALS, *(f"{op}_backward" for op in _EXPONENTIALS)), curves.EXPONENTIAL),
    NORMALISATION: (("rms_norm", "rms_norm_backward"), curves.RMS),  # its weights' gradient is slower
    kinds.INDEX: (("embedding_backward", "embedding_dense_backward"), curves.BACKWARD),
    kinds.REDUCTION: (("max", "min", "argmax", "argmin", "sort", "topk"), curves.INDICES),  # they remember where
}


class OpTime(NamedTuple):
    """One operation's time on the GPU and what sets it."""

    ns: float
    bound: str  # 'compute' or 'bandwidth'; 'launch': shorter than any kernel can be


Products = dict[tuple[int, int, int, int, str], float]  # batch, M, N, K and the precision: nanoseconds


def matmul_shape(op: OpWork) -> tuple[int, int, int, int]:
    """(batch, M, N, K) of a product, from its inputs' shapes.

    >>> matmul_shape(OpWork(op="bmm", module="", phase="forward", kind=MATMUL, dtype="fp32", shapes=((8, 4, 2), (8, 2, 3))))
    (8, 4, 3, 2)
    >>> patches = {"flops": 2 * 49 * 64 * 48, "shapes": ((1, 3, 28, 28), (64, 3, 4, 4))}
    >>> matmul_shape(OpWork(op="convolution", module="", phase="forward", kind=MATMUL, dtype="fp32", **patches))
    (1, 49, 64, 48)
    """
    if "convolution" in op.op and len(op.shapes) > 1:  # of every place that the filters come to, with all filters
        filters = op.shapes[2 if op.op.endswith("_backward") and len(op.shapes) > 2 else 1]
        width, depth = filters[0], max(1, math.prod(filters[1:]))
        return (1, max(1, op.flops // (2 * width * depth)), width, depth)
    matrices = [shape for shape in op.shapes if len(shape) in (2, 3)][-2:]  # addmm has its bias first
    if len(matrices) < 2:
        side = max(1, round((op.flops / 2) ** (1 / 3)))
        return (1, side, side, side)
    a, b = matrices
    return (a[0] if len(a) == 3 else 1, a[-2], b[-1], a[-1])


def aligned_bytes(op: OpWork) -> int:
    """The largest power of two, up to 16, that divides the bytes of each row of a product's matrices; 16 where it is no matter.

    Which side a matrix lies along is not recorded: forward both inputs lie along K or N, backward one may lie along M. Within a
    loss the products are the fused loss's own, which pads the vocabulary.

    >>> of = {"module": "", "kind": MATMUL, "shapes": ((4096, 768), (768, 50_257))}
    >>> [aligned_bytes(OpWork(op="mm", phase="forward", dtype=dtype, **of)) for dtype in ("bf16", "fp32")]
    [2, 16]
    """
    item = {"bf16": 2, "fp16": 2, "tf32": 4}.get(op.dtype)
    if item is None or op.phase == kinds.LOSS or "convolution" in op.op or len(op.shapes) < 2:
        return _WHOLE_LOAD
    _, m, n, k = matmul_shape(op)
    sides = (m, n, k) if op.phase == "backward" else (n, k)
    return math.gcd(_WHOLE_LOAD, *(item * side for side in sides))


def unaligned_share(op: OpWork) -> float:
    """What is left of a product's rate if its rows are no whole number of 16 bytes; 1 if they are."""
    return fitted.UNALIGNED_SHARES.get(aligned_bytes(op), 1.0)


class Cut(NamedTuple):
    """A product cut into tiles of its result; a processor does one at a time."""

    m: int  # of a tile
    n: int
    rows: int  # of tiles
    columns: int
    waves: int
    last: float  # how full the last wave is
    ns: float


def cut(shape: tuple[int, int, int, int], tile: Tile, limits: Matmul, processors: int) -> Cut:
    """(batch, M, N, K) in tiles of one size.

    >>> from flopwise.records.ceilings import Tile
    >>> limits = Matmul(peak_flops=1e15, tiles=(Tile(m=256, n=128, start_ns=0.0, flops_per_s=1e13),), join_ns=2000.0)
    >>> [cut((1, side, side, side), limits.tiles[0], limits, 108)[2:5] for side in (1792, 1793)]     # an A100
    [(7, 14, 1), (8, 15, 2)]
    """
    batch, m, n, _ = shape
    rows, columns = math.ceil(m / tile.m), math.ceil(n / tile.n)
    full = batch * rows * columns / processors
    waves = math.ceil(full)
    return Cut(tile.m, tile.n, rows, columns, waves, full - waves + 1, _cut_ns(shape, tile, 1, limits, processors))


def _cut_ns(shape: tuple[int, int, int, int], tile: Tile, split: int, limits: Matmul, processors: int) -> float:
    """`split`: the parts of each tile's work, along K."""
    batch, m, n, k = shape
    waves = math.ceil(batch * split * math.ceil(m / tile.m) * math.ceil(n / tile.n) / processors)
    return tile.start_ns + waves * (2e9 * tile.m * tile.n * k / split / tile.flops_per_s) + (split > 1) * limits.join_ns


def matmul_ns(batch: int, m: int, n: int, k: int, limits: Matmul, processors: int) -> float:
    """The time of a product by its best tile and split: as many waves as they need, the last one whether full or not.

    >>> from flopwise.records.ceilings import Tile
    >>> limits = Matmul(peak_flops=1e15, tiles=(Tile(m=128, n=128, start_ns=0.0, flops_per_s=1e13),), join_ns=2000.0)
    >>> [round(matmul_ns(1, 128 * tiles, 128, 500, limits, 100)) for tiles in (1, 100, 101)]
    [1638, 1638, 3277]
    """
    shape = (batch, m, n, k)
    times = (_cut_ns(shape, tile, split, limits, processors) for tile in limits.tiles for split in fitted.SPLITS)
    return min(times) * math.exp(_miss(shape, limits.near))


def _miss(shape: tuple[int, int, int, int], near: tuple[Near, ...]) -> float:
    """The mean of the misses of measured products, each the less the further its shape is; far from all of them, none."""
    here = [math.log2(max(1, side)) for side in shape]
    pulls = total = 0.0
    for one in near:
        far = sum((math.log2(side) - at) ** 2 for side, at in zip(one.shape, here, strict=True))
        if far < fitted.NEAR_ENOUGH:
            weight = math.exp(-far / fitted.NEAR_WIDTH**2)
            pulls, total = pulls + weight * one.miss, total + weight
    return pulls / (total + fitted.NEAR_PRIOR)


def is_cast(op: OpWork) -> bool:
    """Whether an operation only changes the dtype: `to`; aten's name is `_to_copy`."""
    return op.kind == COPY and op.op in ("to", "_to_copy") and op.read_bytes != op.write_bytes


def curve_name(op: OpWork) -> str:
    """The class of an operation's kernels, and what makes them unlike others of it.

    >>> curve_name(OpWork(op="mul", module="", phase="forward", kind=ELEMENTWISE, dtype="bf16", strided=True))
    'elementwise, strided, half'
    """
    half = curves.HALF if op.dtype in ("bf16", "fp16") else ""
    if op.op == "flopwise::adamw_":
        return ELEMENTWISE  # it reads and writes once and in order: at 99 % of a copy, where torch's is at 81 %
    if op.kind in TRITON_KINDS and op.op.startswith(_TRITON):
        # Rows are read in order, whatever lies between them, and numbers in wide words, whatever they become.
        return (NORMALISATION + curves.RMS if op.kind == NORMALISATION else ELEMENTWISE) + half
    name = _eager_name(op)
    if op.kind == ELEMENTWISE and op.mixed:
        return name + curves.MIXED
    if op.kind == COPY and op.read_bytes != op.write_bytes:  # a cast: by what it reads, not what it computes in
        return name + (curves.HALF if op.read_bytes < op.write_bytes else "")
    return name + half


def _eager_name(op: OpWork) -> str:
    if op.op == "cat":
        return COPY + curves.JOINED if op.strided else ELEMENTWISE  # what lies in order is copied by wide loads
    if op.kind in (ELEMENTWISE, COPY) and (op.strided or op.op in _MOVERS or op.broadcasts):
        return op.kind + curves.STRIDES
    if op.kind == OPTIMIZER and "fused" in op.op:
        return op.kind + curves.FUSED
    if op.kind == kinds.LOSS and "log_softmax" in op.op:
        return kinds.SOFTMAX  # the same kernel, with another last step
    if op.kind == kinds.LOSS and op.op.startswith("nll_loss") and op.op.endswith("backward"):
        return kinds.MEMORY  # zeros, and a number in each row
    ops, variant = _VARIANTS.get(op.kind, ((), ""))
    return op.kind + variant if op.op in ops else op.kind


def op_time(
    op: OpWork, ceilings: Ceilings, *, graph: bool = False, cold: float = 0.0, products: Products | None = None
) -> OpTime:
    """What an operation takes on the GPU: the longer of computing and moving, and the change from the kernel before.

    `cold`: how many of the bytes that it reads the cache has not kept. `products`: the times of those that were met.
    """
    ns, bound = _alone(op, ceilings, cold, {} if products is None else products)
    if not ns:
        return OpTime(ns, bound)
    change_ns = op.kernels * (ceilings.switch_ns + graph * ceilings.graph_gap_ns)
    return OpTime(max(ns * fitted.LEAST_KERNEL_SHARE, ns + change_ns), bound)


def op_times(ops: Sequence[OpWork], ceilings: Ceilings, *, graph: bool = False) -> list[OpTime]:
    """What the operations of a step take one after the other, the cache being what those before have left in it."""
    products: Products = {}
    known: dict[tuple[object, ...], OpTime] = {}  # layers are alike
    times = []
    for op, far in zip(ops, cold_bytes(ops, ceilings.cached_bytes), strict=True):
        moved = (op.op, op.phase, op.kind, op.dtype, op.flops, op.read_bytes, op.write_bytes, op.kernels)
        like = (*moved, op.strided, op.mixed, op.whole, op.shapes, far)
        if like not in known:
            known[like] = op_time(op, ceilings, graph=graph, cold=far, products=products)
        times.append(known[like])
    return times


def cold_bytes(ops: Sequence[OpWork], cached_bytes: float) -> list[float]:
    """By operation, how many of the bytes that it reads lie in memory alone.

    A tensor stays in the cache until as many bytes have gone through it as it holds. What was touched in the step before
    has left it, and a cache of no size is one of which nothing is known: nothing is cold then.

    >>> op = OpWork(op="add", module="", phase="forward", kind="elementwise", dtype="fp32", reads=((1, 40),), writes=((2, 40),))
    >>> cold_bytes([op, op, op], cached_bytes=100.0)
    [40.0, 0.0, 0.0]
    """
    if not cached_bytes:
        return [0.0] * len(ops)
    passed, touched, cold = 0.0, dict[int, float](), []
    for op in ops:
        far = [size for tensor, size in op.reads if passed - touched.get(tensor, -cached_bytes) >= cached_bytes]
        cold.append(float(sum(far)))
        for tensor, size in (*op.reads, *op.writes):
            passed += size
            touched[tensor] = passed
    return cold


def _alone(op: OpWork, ceilings: Ceilings, cold: float, products: Products) -> OpTime:
    if not op.kernels or (op.op.startswith(PART) and ceilings.how == MEASURED):
        return OpTime(0.0, BANDWIDTH)  # fused attention was measured whole
    curve = ceilings.curve(curve_name(op))
    read = float(op.read_bytes)
    if op.op.startswith(FUSED_OP):
        read = max(read, sum(size for _, size in op.reads))  # a compiled kernel that sums columns reads twice
    else:
        cold = min(cold, read)  # of a table the rows that are asked for, of a shape nothing
    read *= _readings(op, ceilings)
    copied = copies_first(op.op)
    # Lists of tensors, and sorts by index, were measured whole, in as many launches as they take.
    kernels = 1 if op.kind in (OPTIMIZER, kinds.INDEX) or copied else op.kernels
    moving = curve.at((read + op.write_bytes) / kernels) * kernels
    moving += 0.0 if op.kind == OPTIMIZER else ceilings.cold_ns(cold)
    if copied:
        moving += ceilings.curve(COPY).at(2 * op.write_bytes)
    computing = _computing_ns(op, ceilings, products)
    if computing > moving:
        return OpTime(computing, COMPUTE)
    return OpTime(moving, BANDWIDTH if moving > fitted.SHORT_KERNEL * curve.ns[0] * op.kernels else LAUNCH)


def _readings(op: OpWork, ceilings: Ceilings) -> float:
    """How often an eager softmax reads its input: rows too long for a multiprocessor's own memory, forward for their largest
    number, their sum and the result, back for a sum and the result; from memory where the cache does not hold all at work.
    """
    if "softmax" not in op.op or op.op.startswith(_TRITON) or not op.shapes or not op.shapes[0]:
        return 1.0
    row_bytes = op.read_bytes / max(1, math.prod(op.shapes[0])) * op.shapes[0][-1]
    at_work = row_bytes * fitted.ROWS_AT_ONCE * ceilings.processors
    if row_bytes <= fitted.SHORT_ROW_BYTES or at_work <= ceilings.cached_bytes:
        return 1.0
    return fitted.LONG_ROW_READINGS["backward" in op.op]


def _computing_ns(op: OpWork, ceilings: Ceilings, products: Products) -> float:
    if not op.flops or op.kind not in (MATMUL, ATTENTION):
        return 0.0
    if op.kind == ATTENTION:
        # The curves are of causal attention, by the FLOPs of the whole square.
        return _attention_curve(op, ceilings).at(op.flops * (2 if op.whole else 1))
    shape, way = matmul_shape(op), op.dtype + curves.BACKWARD if op.phase == "backward" else op.dtype
    if (*shape, way) not in products:
        products[*shape, way] = _product_ns(op, shape, way, ceilings) / unaligned_share(op)
    # A sum that a product is added to is read and written when its tile is done, and nothing computes meanwhile.
    added = len(op.shapes) > 2 and len(op.shapes[-3]) == 2 and op.shapes[-3] == shape[1:3]
    return products[*shape, way] + (ceilings.curve(ELEMENTWISE).at(2.0 * op.write_bytes) if added else 0.0)


def _product_ns(op: OpWork, shape: tuple[int, int, int, int], way: str, ceilings: Ceilings) -> float:
    return matmul_ns(*shape, ceilings.matmul.get(way) or matmul_limits(op.dtype, ceilings), ceilings.processors)


def by_rows(ceilings: Ceilings) -> Ceilings:
    """The same machine for products in fp8 with a scale for every row."""
    known = {"fp8": matmul_limits("fp8", ceilings)} | {
        way: limits for way, limits in ceilings.matmul.items() if way.startswith("fp8")
    }
    slower = {way: _times_as_fast(limits, 1 / fitted.FP8_BY_ROWS) for way, limits in known.items()}
    return replace(ceilings, matmul=ceilings.matmul | slower)


def matmul_limits(dtype: str, ceilings: Ceilings) -> Matmul:
    """How fast products of a dtype go; where that was not measured, fp8 as a multiple of bf16, others as fp32."""
    found, half, times = ceilings.matmul.get(dtype), ceilings.matmul.get("bf16"), fitted.FP8_OVER_BF16
    if found is not None or dtype != "fp8" or half is None:
        return found or ceilings.matmul["fp32"]
    return _times_as_fast(half, times)


def _times_as_fast(known: Matmul, times: float) -> Matmul:
    tiles = (replace(one, start_ns=one.start_ns / times, flops_per_s=one.flops_per_s * times) for one in known.tiles)
    return replace(known, peak_flops=known.peak_flops * times, tiles=tuple(tiles), join_ns=known.join_ns / times)


def _attention_curve(op: OpWork, ceilings: Ceilings) -> Curve:
    """Of its precision, backend and width of heads, as far as they were measured."""
    known = ceilings.attention_backward if op.phase == "backward" else ceilings.attention
    name = op.op.replace("flopwise::flash", "triton")  # the dry run's name of our own kernel
    backend = next((f", {one}" for one in ("flash", "cudnn", "triton") if one in name), "")
    dtypes = (op.dtype, "bf16") if op.dtype == "fp16" else (op.dtype,)  # of the two, one is probed
    wide = bool(op.shapes and op.shapes[0]) and op.shapes[0][-1] > fitted.NARROW_HEAD
    names = [dtype + way for way in dict.fromkeys((backend, "")) for dtype in dtypes]
    widths = (curves.WIDE, "") if wide else ("",)
    return next((known[name + width] for name in names for width in widths if name + width in known), known["fp32"])
