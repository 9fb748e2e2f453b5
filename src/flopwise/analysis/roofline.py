"""Operations under a machine's roofs: how much each does per byte, how fast it goes, and how far that is from the limit."""

from collections.abc import Sequence
from math import prod

import msgspec
import polars as pl

from flopwise.analysis.op_flops import MATMULS, factors, input_sizes
from flopwise.ceilings import Ceilings
from flopwise.cost.roofline import OpTime
from flopwise.trace.attribute import attribute
from flopwise.trace.matmul_precision import matmul_precision
from flopwise.trace.tables import Trace
from flopwise.work import MATMUL, OpWork

PREDICTED, MEASURED = "predicted", "measured"
ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class RooflinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of one kind and size, together."""

    op: str
    kind: str
    phase: str
    dtype: str
    shapes: str
    count: int
    ns: float  # of all of them
    flops: float  # of one; one for every element where no matmul is in it
    n_bytes: float  # of one, each tensor read or written once
    roof_flops: float  # FLOP/s that its intensity and precision allow
    how: str

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.n_bytes if self.n_bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        """What it reaches."""
        return 1e9 * self.flops * self.count / self.ns if self.ns else 0.0

    @property
    def share(self) -> float:
        """Of its roof."""
        return self.flops_per_s / self.roof_flops if self.roof_flops else 0.0


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """Points and the roofs over them."""

    title: str
    how: str  # 'measured' or 'predicted': the points
    ceilings: Ceilings
    points: tuple[RooflinePoint, ...]
    notes: tuple[str, ...] = ()


def roof(intensity: float, dtype: str, ceilings: Ceilings) -> float:
    """FLOP/s at most: by the bandwidth, or by the precision's rate."""
    limits = ceilings.matmul.get(dtype) or ceilings.matmul["fp32"]
    return min(limits.peak_flops, intensity * ceilings.bandwidth_bytes_per_s)


def predicted_points(ops: Sequence[OpWork], times: Sequence[OpTime], ceilings: Ceilings) -> list[RooflinePoint]:
    """The operations of a step that was not run, those alike together, the longest first."""
    alike: dict[tuple[object, ...], list[tuple[OpWork, OpTime]]] = {}
    for op, time in zip(ops, times, strict=True):
        if op.kernels:
            key = (op.op, op.kind, op.phase, op.dtype, op.shapes, op.read_bytes, op.write_bytes)
            alike.setdefault(key, []).append((op, time))
    points = [_point(some[0][0], sum(time.ns for _, time in some), len(some), ceilings) for some in alike.values()]
    return sorted(points, key=lambda point: -point.ns)


def _point(op: OpWork, ns: float, count: int, ceilings: Ceilings) -> RooflinePoint:
    n_bytes = op.read_bytes + op.write_bytes
    elements = max([op.write_bytes // ITEM_BYTES.get(op.dtype, 4), *(prod(shape) for shape in op.shapes)])
    flops = op.flops or max(1, elements)
    return RooflinePoint(
        op=op.op,
        kind=op.kind,
        phase=op.phase,
        dtype=op.dtype,
        shapes=" ".join(str(list(shape)) for shape in op.shapes),
        count=count,
        ns=ns,
        flops=flops,
        n_bytes=n_bytes,
        roof_flops=roof(flops / max(1, n_bytes), op.dtype, ceilings),
        how=PREDICTED,
    )


def measured_points(trace: Trace, ceilings: Ceilings) -> list[RooflinePoint]:
    """The matmuls of a trace that was captured with shapes: FLOPs and bytes by their sizes, time by their kernels.

    All kernels of one op count to it: a split product and the sum of its parts are one product.
    """
    if not trace.sized_ops.height:
        return []
    table = attribute(trace).table.filter(pl.col("class").cast(pl.String) == MATMUL)
    kernels = table.select(
        pl.col("op_index").cast(pl.Int64), "duration_ns", pl.col("name", "phase", "op").cast(pl.String)
    )
    sized = trace.sized_ops.select(pl.col("op").cast(pl.Int64).alias("op_index"), "shape")
    each = (
        kernels.join(sized, on="op_index")
        .group_by("op_index")
        .agg(pl.col("duration_ns").sum(), pl.col("name", "phase", "op", "shape").first())
    )
    alike = each.group_by("op", "phase", "shape", "name").agg(pl.col("duration_ns").sum(), pl.len().alias("count"))
    points = [_traced(row, trace.shapes, ceilings) for row in alike.iter_rows(named=True)]
    return sorted((point for point in points if point), key=lambda point: -point.ns)


def _traced(row: dict[str, object], shapes: tuple[str, ...], ceilings: Ceilings) -> RooflinePoint | None:
    op, sizes = str(row["op"]), shapes[int(row["shape"])]  # type: ignore[call-overload]
    pair = factors(op, input_sizes(sizes) or []) if op in MATMULS else None
    if pair is None:
        return None
    left, right = pair
    flops = 2 * prod(left) * right[-1]
    told = matmul_precision(str(row["name"]))
    dtype = told.precision if told is not None and told.precision in ITEM_BYTES else "fp32"
    elements = prod(left) + prod(right) + prod(left[:-1]) * right[-1]
    n_bytes = elements * ITEM_BYTES[dtype]
    return RooflinePoint(
        op=op,
        kind=MATMUL,
        phase=str(row["phase"]),
        dtype=dtype,
        shapes=sizes,
        count=int(row["count"]),  # type: ignore[call-overload]
        ns=float(row["duration_ns"]),  # type: ignore[arg-type]
        flops=flops,
        n_bytes=n_bytes,
        roof_flops=roof(flops / n_bytes, dtype, ceilings),
        how=MEASURED,
    )
