"""Kernels that could have been one: neighbours on a stream that move memory for the same module."""

import msgspec
import polars as pl

from flopwise.trace.phases import OPTIMIZER
from flopwise.work.operation import COPY, ELEMENTWISE, NORMALISATION, REDUCTION

_MOVERS = (ELEMENTWISE, REDUCTION, COPY, NORMALISATION)  # not softmax: fused attention takes that away whole
_FUSED = r"^triton_"  # a compiler's own kernel: what could be joined, it has joined


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring kernels of one module in one phase, per step."""

    module: str
    phase: str
    length: int  # kernels in a row
    count: float  # such rows
    gpu_ns: float
    kernels: tuple[str, ...] = ()  # names, of the first of its kind, at most four

    @property
    def removable_ns(self) -> float:
        """What they take beyond one of them: of n kernels that each read and write, n - 1 move what need not leave the chip."""
        return self.gpu_ns * (1 - 1 / self.length)


def chains(work: pl.DataFrame, n: int) -> tuple[Chain, ...]:
    """Rows of two or more, those that take longest first; `work` is an Attribution's rows of the steps."""
    ordered = work.filter(pl.col("source") == "kernel").sort("stream", "start_ns").select(
        "stream", "module", pl.col("phase").cast(pl.String), pl.col("name").cast(pl.String),
        pl.col("class").cast(pl.String), "duration_ns",
    )  # fmt: skip
    module = pl.col("module").cast(pl.String).fill_null("")
    moves = pl.col("class").is_in(_MOVERS) & (pl.col("phase") != OPTIMIZER) & ~pl.col("name").str.contains(_FUSED)
    marked = ordered.with_columns(module=module, moves=moves)
    runs = marked.with_columns(run=pl.struct("stream", "module", "phase", "moves").rle_id()).filter("moves")
    each = runs.group_by("run", maintain_order=True).agg(
        pl.col("module").first(), pl.col("phase").first(), pl.len().alias("length"), pl.col("duration_ns").sum(),
        pl.col("name").head(4).alias("names"),
    )  # fmt: skip
    rows = (
        each.filter(pl.col("length") > 1)
        .group_by("module", "phase", "length", maintain_order=True)
        .agg(pl.len().alias("n"), pl.col("duration_ns").sum(), pl.col("names").first())
        .sort("duration_ns", "module", "phase", "length", descending=[True, False, False, False])
    )
    return tuple(
        Chain(module=m, phase=p, length=length, count=count / n, gpu_ns=ns / n, kernels=tuple(names))
        for m, p, length, count, ns, names in rows.iter_rows()
    )
