"""Copies between host and device: how many, how fast, and how long the GPU did nothing else."""

import msgspec
import polars as pl

from flopwise.trace.tables import Trace

HTOD, DTOH = "HtoD", "DtoH"
NAMES = {f"Memcpy {kind}": kind for kind in (HTOD, DTOH)}  # as an Attribution names them


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """The copies in one direction, per step."""

    kind: str  # HTOD or DTOH
    count: float
    bytes: float
    gpu_ns: float
    exposed_ns: float  # while nothing else ran

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.gpu_ns * 1e9 if self.gpu_ns else 0.0


def transfers(work: pl.DataFrame, totals: pl.DataFrame, trace: Trace, n: int) -> tuple[Transfer, ...]:
    """By direction. `work` are an Attribution's rows of `n` steps, `totals` the same summed, with their own time."""
    copies = work.filter(pl.col("source") == "copy").select("index", "duration_ns", pl.col("name").cast(pl.String))
    moved = trace.copies["bytes"].gather(copies["index"]).clip(lower_bound=0).alias("bytes")
    rows = copies.with_columns(moved).group_by("name").agg(pl.len(), pl.col("bytes", "duration_ns").sum())
    own = {
        name: int(ns) for name, ns in totals.group_by("name").agg(pl.col("own_ns").sum()).iter_rows() if name in NAMES
    }
    return tuple(
        Transfer(kind=NAMES[name], count=count / n, bytes=moved / n, gpu_ns=ns / n, exposed_ns=own.get(name, 0) / n)
        for name, count, moved, ns in rows.sort("duration_ns", "name", descending=[True, False]).iter_rows()
        if name in NAMES
    )
