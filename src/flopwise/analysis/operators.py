"""Time by operator, as PyTorch's profiler tables it: each op and CUDA call by name, on the host and on the GPU, per step.

Self time is without the ops and calls inside. A name's total is the sum over its calls; of the GPU, all that was launched
inside them. GPU self times add up to the GPU's time, as far as ops are known; host self times to the time in ops and calls.
"""

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times
from flopwise.analysis.steps import Steps
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.trace.nesting import Nesting
from flopwise.trace.tables import Trace

NO_OP = "(no op in the steps)"  # GPU work that none launched, as far as the trace shows


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One op, or one call of the CUDA API, on all threads, per step."""

    name: str
    calls: float
    host_self_ns: float
    host_total_ns: float
    host_share: float  # its self time, of all self times
    gpu_self_ns: float  # of the kernels and copies that it launched itself
    gpu_total_ns: float
    gpu_share: float  # its self time, of the GPU's


def operators(part: TracedSteps) -> tuple[Operator, ...]:
    """Of the steps, by the larger of the two shares."""
    trace, work, n = part.whole, part.work, len(part.steps)
    calls = _calls(trace, work["process"].unique(), part.steps)
    start, end = (calls[name].to_numpy() for name in ("start_ns", "end_ns"))
    spans = Nesting(_lanes(calls), start, end)
    launched = _launched(work, calls)
    calls = calls.with_columns(
        pl.Series("host_self_ns", _self_times(spans, start, end)),
        pl.Series("gpu_self_ns", launched),
        pl.Series("gpu_total_ns", _with_inner(spans, launched)),
        host_total_ns=pl.col("end_ns") - pl.col("start_ns"),
    )
    sums = pl.col("host_self_ns", "host_total_ns", "gpu_self_ns", "gpu_total_ns").sum()
    rows = calls.group_by("name").agg(sums, calls=pl.len())
    gpu_ns, host_ns = int(work["duration_ns"].sum()), int(rows["host_self_ns"].sum())
    found = [
        _operator(trace.names[row["name"]], row, n, max(host_ns, 1), max(gpu_ns, 1))
        for row in rows.iter_rows(named=True)
    ]
    if rest := gpu_ns - int(launched.sum()):
        nothing = {"calls": 0, "host_self_ns": 0, "host_total_ns": 0, "gpu_self_ns": rest, "gpu_total_ns": rest}
        found.append(_operator(NO_OP, nothing, n, max(host_ns, 1), max(gpu_ns, 1)))
    return tuple(sorted(found, key=lambda one: (-max(one.gpu_share, one.host_share), one.name)))


def _operator(name: str, row: dict[str, int], n: int, host_ns: int, gpu_ns: int) -> Operator:
    return Operator(
        name=name,
        calls=row["calls"] / n,
        host_self_ns=row["host_self_ns"] / n,
        host_total_ns=row["host_total_ns"] / n,
        host_share=row["host_self_ns"] / host_ns,
        gpu_self_ns=row["gpu_self_ns"] / n,
        gpu_total_ns=row["gpu_total_ns"] / n,
        gpu_share=row["gpu_self_ns"] / gpu_ns,
    )


def _calls(trace: Trace, processes: pl.Series, steps: Steps) -> pl.DataFrame:
    """Ops, and calls of the CUDA API that launch or wait; of ops, `row` is their place in the trace's table."""
    columns = ["start_ns", "end_ns", "process", "thread", "name"]
    ops = trace.ops.select(*columns, row=pl.int_range(pl.len(), dtype=pl.Int64))
    others = [
        table.select(*columns, row=pl.lit(-1, pl.Int64))
        for table in (trace.launches, trace.graph_launches, trace.syncs)
    ]
    calls = pl.concat([ops, *others]).filter(pl.col("process").is_in(processes.implode()))
    return calls.filter(pl.Series(steps.of(calls["start_ns"].to_numpy()) >= 0))


def _lanes(calls: pl.DataFrame) -> Times:
    lanes: Times = calls.select(pl.struct("process", "thread").rank("dense")).to_series().to_numpy().astype(np.int64)
    return lanes


def _launched(work: pl.DataFrame, calls: pl.DataFrame) -> Times:
    """GPU time by the row of `calls` whose op launched it."""
    spent = work.select(row=pl.col("op_index").cast(pl.Int64), ns="duration_ns").drop_nulls()
    spent = spent.group_by("row").agg(pl.col("ns").sum())
    known = calls.select("row").join(spent, on="row", how="left", maintain_order="left")
    launched: Times = known["ns"].fill_null(0).to_numpy().astype(np.int64)
    return launched


def _self_times(spans: Nesting, start: Times, end: Times) -> Times:
    """Each without what begins inside, as far as that lies inside."""
    order = spans.order
    around = spans.parents(np.arange(len(order)))
    inner = np.flatnonzero(around >= 0)
    child, parent = order[inner], order[around[inner]]
    taken = np.bincount(parent, np.minimum(end[child], end[parent]) - start[child], minlength=len(start))
    left: Times = np.maximum(end - start - taken.astype(np.int64), 0)
    return left


def _with_inner(spans: Nesting, amounts: Times) -> Times:
    """The sum of each span's amount and those of all that begins inside it."""
    order = spans.order
    summed = np.concatenate(([0], np.cumsum(amounts[order])))
    total = np.empty(len(order), dtype=np.int64)
    total[order] = summed[spans.after()] - summed[:-1]
    return total
