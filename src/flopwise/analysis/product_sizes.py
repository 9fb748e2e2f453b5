"""The matrix products of a step by their sizes, where the trace was captured with shapes."""

import msgspec
import polars as pl

from flopwise.trace.tables import Trace
from flopwise.work.operation import MATMUL
from flopwise.work.recorded import input_sizes
from flopwise.work.sized import factors


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """Products of one size, per step."""

    op: str
    batch: int
    m: int
    n: int
    k: int
    count: float
    gpu_ns: float
    kernel: str  # the one that takes most of it


def products(trace: Trace, work: pl.DataFrame, n: int) -> tuple[Product, ...]:
    """By op and sizes, those that take longest first; `work` is an Attribution's rows of the steps."""
    if not trace.sized_ops.height:
        return ()
    matmuls = work.filter(pl.col("class") == MATMUL, pl.col("op_index").is_not_null())
    sized = matmuls.select(
        pl.col("op").cast(pl.String).alias("op_name"),
        "op_index",
        pl.col("name").cast(pl.String),
        "duration_ns",
        call=pl.struct("op_index", pl.when(pl.col("attributed") == "graph").then("launch_ns")),  # a replay is a call
    ).join(trace.sized_ops, left_on="op_index", right_on="op")
    kernels = sized.group_by("op_name", "shape", "name").agg(pl.col("duration_ns").sum(), pl.col("call").n_unique())
    rows = (
        kernels.sort("duration_ns", "name", descending=[True, False])
        .group_by("op_name", "shape", maintain_order=True)
        .agg(pl.col("name").first(), pl.col("duration_ns").sum(), pl.col("call").max())
        .sort("duration_ns", "op_name", "shape", descending=[True, False, False])
    )
    made = []
    for op, shape, kernel, ns, count in rows.iter_rows():
        sizes = input_sizes(trace.shapes[shape])
        if sizes is not None and (pair := factors(op, sizes)) is not None:
            a, b = pair
            batch = a[0] if len(a) > 2 else 1
            made.append(
                Product(op=op, batch=batch, m=a[-2], n=b[-1], k=a[-1], count=count / n, gpu_ns=ns / n, kernel=kernel)
            )
    return tuple(made)
