"""Every op of a trace that put work on the GPU, under the roofs: bytes and FLOPs by its inputs, time by its kernels.

All that one op launched counts to it: a split product and the sum of its parts, a norm's gradients in three kernels, the
memset before them. Where the inputs do not tell the bytes there is no point; what is left out is listed with its time.
"""

from typing import Any

import msgspec
import polars as pl

from flopwise.analysis.roofline import MEASURED, RooflinePoint, Unplaced, roof
from flopwise.records.ceilings import Ceilings
from flopwise.trace.attribute import attribute
from flopwise.trace.op_inputs import NO_INPUTS
from flopwise.trace.tables import Trace
from flopwise.work.matmul_precision import UNKNOWN, matmul_precision
from flopwise.work.op_traffic import LIST_TOO_LONG, OVER_LISTS, op_traffic, traffic_rule
from flopwise.work.product_traffic import product, sized_product
from flopwise.work.recorded import BETWEEN, Recorded, recorded, recorded_dtypes
from flopwise.work.sized import MATMULS
from flopwise.work.traffic import Traffic, sensible

_ON_THE_DEVICE = ("Memcpy DtoD", "Memset")
NO_SIZES = "no sizes and types of its inputs"
_BETWEEN_DEVICES = "Memcpy PtoP"
# What a rule can fail with on numbers that no profiler writes: of a file's contents nothing is certain.
_NONSENSE = (ArithmeticError, ValueError, LookupError, TypeError)


def traced_points(trace: Trace, ceilings: Ceilings) -> tuple[list[RooflinePoint], list[Unplaced]]:
    """The ops of a trace that was captured with shapes, those alike together, and what has no point; the longest first."""
    points, rest = list[RooflinePoint](), list[Unplaced]()
    parsed: dict[int, Recorded | None] = {}
    for row in _alike(trace).iter_rows(named=True):
        number = row["inputs"]
        if number not in parsed:
            parsed[number] = recorded(trace.inputs[number]) if number != NO_INPUTS else None
        try:
            point = _point(row, parsed[number], trace, ceilings)
        except _NONSENSE:
            point = None
        if point is None:
            rest.append(_unplaced(row, parsed[number]))
        else:
            points.append(point)
    return _merged(points), sorted(rest, key=lambda one: (-one.ns, one.op, one.kernel))


def _alike(trace: Trace) -> pl.DataFrame:
    """Ops that launched the same for the same inputs, in one row; work that no op is known for, by its name.

    An op in a CUDA graph counts once for each replay.
    """
    table = attribute(trace).table.select(
        pl.col("op_index").cast(pl.Int64),
        "duration_ns",
        pl.col("name", "phase", "op", "class").cast(pl.String),
        launch=pl.when(pl.col("attributed") == "graph").then("launch_ns"),
        crosses=(pl.col("source") == "copy") & ~pl.col("name").cast(pl.String).is_in(_ON_THE_DEVICE),
        at=pl.when(pl.col("op_index").is_null()).then(pl.int_range(pl.len())),  # each by itself
    )
    table = table.join(_precisions(table["name"].unique()), on="name", how="left")
    longest = pl.col("duration_ns").arg_max()
    each = table.group_by("op_index", "launch", "at").agg(
        pl.col("duration_ns").sum(),
        pl.col("name", "class").get(longest),
        pl.col("told").sort_by("duration_ns", descending=True).drop_nulls().first(),
        pl.col("phase", "op").first(),
        pl.len().alias("kernels"),
        pl.col("crosses").any(),
    )
    for numbers, column in ((trace.sized_ops, "shape"), (trace.op_inputs, "inputs")):
        known = numbers.select(pl.col("op").cast(pl.Int64).alias("op_index"), pl.col(column).cast(pl.Int64))
        each = each.join(known, on="op_index", how="left").with_columns(pl.col(column).fill_null(0))
    alike = each.group_by("op", "phase", "shape", "inputs", "name", "told", "class", "kernels", "crosses")
    return alike.agg(pl.col("duration_ns").sum(), pl.len().alias("count"))


def _precisions(names: pl.Series) -> pl.DataFrame:
    """What each kernel's name says of the precision it multiplies in; null for most."""
    told = [matmul_precision(name) for name in names]
    known = [one.precision if one and one.precision != UNKNOWN else None for one in told]
    return pl.DataFrame({"name": names, "told": known}, schema={"name": pl.String, "told": pl.String})


def _traffic(row: dict[str, Any], inputs: Recorded | None, trace: Trace) -> Traffic | None:
    op = row["op"] or ""
    if row["crosses"]:
        return None
    if op not in MATMULS:
        return op_traffic(op, inputs, row["name"]) if inputs is not None else None
    told = row["told"] or ""
    if inputs is not None:
        return product(op, inputs, told) if not inputs.uncounted else None
    return sized_product(op, trace.shapes[row["shape"]], recorded_dtypes(trace.inputs[row["inputs"]]), told)


def _point(row: dict[str, Any], inputs: Recorded | None, trace: Trace, ceilings: Ceilings) -> RooflinePoint | None:
    traffic = _traffic(row, inputs, trace)
    if traffic is None or not sensible(traffic):
        return None
    if row["op"] in MATMULS and traffic.dtype not in ceilings.matmul:
        return None
    return RooflinePoint(
        op=row["op"],
        kind=row["class"],
        phase=row["phase"],
        dtype=traffic.dtype,
        shapes=_sizes(trace.shapes[row["shape"]] or trace.inputs[row["inputs"]]),
        count=row["count"],
        ns=float(row["duration_ns"]),
        flops=traffic.flops,
        n_bytes=traffic.n_bytes,
        roof_flops=roof(traffic.flops / traffic.n_bytes, traffic.dtype, ceilings),
        how=MEASURED,
        kernel=row["name"],
        kernels=row["kernels"],
        bytes_are=traffic.bytes_are,
    )


def _sizes(text: str) -> str:
    """The sizes of the tensors alone: the numbers between them have none."""
    return text.partition(BETWEEN)[0].replace(", []", "")


def _merged(points: list[RooflinePoint]) -> list[RooflinePoint]:
    """Those whose inputs differ in what moves nothing, such as a scalar, are one."""
    alike: dict[tuple[object, ...], list[RooflinePoint]] = {}
    for p in points:
        alike.setdefault((p.op, p.phase, p.dtype, p.shapes, p.n_bytes, p.flops, p.kernel, p.kernels), []).append(p)
    merged = [
        msgspec.structs.replace(some[0], count=sum(p.count for p in some), ns=sum(p.ns for p in some))
        for some in alike.values()
    ]
    return sorted(merged, key=lambda point: (-point.ns, point.op, point.shapes))


def _unplaced(row: dict[str, Any], inputs: Recorded | None) -> Unplaced:
    return Unplaced(
        op=row["op"] or "",
        kernel=row["name"],
        kind=row["class"],
        why=_why_unplaced(row, inputs),
        count=row["count"],
        ns=float(row["duration_ns"]),
    )


def _why_unplaced(row: dict[str, Any], inputs: Recorded | None) -> str:
    op = row["op"]
    if not op:
        return "no op of the trace launched it"
    if row["crosses"]:
        between_gpus = row["name"].startswith(_BETWEEN_DEVICES)
        return "a copy between GPUs" if between_gpus else "a copy between host and device"
    if inputs is not None:
        return _why_uncounted(op, inputs)
    if row["inputs"] != NO_INPUTS:
        return "sizes, types, strides or numbers of its inputs are missing, or beyond reason"
    return NO_SIZES if traffic_rule(op) or op in MATMULS else "no rule for its bytes"


def _why_uncounted(op: str, inputs: Recorded) -> str:
    if traffic_rule(op) in OVER_LISTS and not inputs.has_lists:
        return LIST_TOO_LONG
    if inputs.uncounted:
        return "a tensor of a type that is not counted"
    if op in MATMULS:
        return "its inputs and kernels do not tell its bytes, its precision or its roof"
    return "its inputs do not tell its bytes"
