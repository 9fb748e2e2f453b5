"""Time by operator, as PyTorch's profiler tables it: each op and CUDA call by name, on the host and on the GPU, per step.

Self time is without the ops and calls inside. A name's total is the sum over its calls; of the GPU, all that was launched
inside them. GPU self times add up to the GPU's time, as far as ops are known; host self times to the time in ops and calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.analysis.intervals import Times
from flopwise.analysis.steps import Steps
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.trace.nesting import Nesting
from flopwise.trace.tables import Trace

_SUMS = ("calls", "host_self_ns", "host_total_ns", "gpu_self_ns", "gpu_total_ns")
_BLOCK = 100_000  # spans, or more where they nest without a pause
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
    launched = _launched(work, trace.ops.height)
    sums = np.zeros((len(_SUMS), len(trace.names)))
    for spans in _spans(trace, work["process"].unique(), part.steps, launched):
        for place, amount in enumerate(_amounts(spans)):
            sums[place] += np.bincount(spans.name, amount, minlength=len(trace.names))
    gpu_ns, host_ns = int(work["duration_ns"].sum()), int(sums[_SUMS.index("host_self_ns")].sum())
    found = [
        _operator(
            trace.names[name], dict(zip(_SUMS, sums[:, name].tolist(), strict=True)), n, max(host_ns, 1), max(gpu_ns, 1)
        )
        for name in np.flatnonzero(sums[0]).tolist()
    ]
    if rest := gpu_ns - int(sums[_SUMS.index("gpu_self_ns")].sum()):
        nothing = dict.fromkeys(_SUMS, 0.0) | {"gpu_self_ns": rest, "gpu_total_ns": rest}
        found.append(_operator(NO_OP, nothing, n, max(host_ns, 1), max(gpu_ns, 1)))
    return tuple(sorted(found, key=lambda one: (-max(one.gpu_share, one.host_share), one.name)))


def _operator(name: str, row: dict[str, float], n: int, host_ns: int, gpu_ns: int) -> Operator:
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


@dataclass(frozen=True)
class _Spans:
    """Ops, and calls of the CUDA API that launch or wait, of one thread, by start."""

    start: Times
    end: Times
    name: npt.NDArray[np.uint32]
    launched: Times  # GPU time that the op itself launched


def _spans(trace: Trace, processes: pl.Series, steps: Steps, launched: Times) -> Iterator[_Spans]:
    """Of each thread, in blocks that no op crosses: with millions of ops, what is worked on at a time stays small."""
    alike = trace.launches.filter(pl.col("name").is_in(trace.syncs["name"].unique().implode()))
    waits = trace.syncs.join(alike, on=["process", "thread", "start_ns", "name"], how="anti")  # cudaMemcpy does both
    tables = (trace.ops, trace.launches, trace.graph_launches, waits)
    threads = (
        pl.concat([table.select("process", "thread").unique() for table in tables]).unique().sort("process", "thread")
    )
    for process, thread in threads.filter(pl.col("process").is_in(processes.implode())).iter_rows():
        mine = [_rows(table, process, thread, steps) for table in tables]
        order = np.argsort(_joined("start_ns", tables, mine), kind="stable")
        start, end, name = (_joined(column, tables, mine)[order] for column in ("start_ns", "end_ns", "name"))
        spent = np.concatenate([launched[mine[0]], np.zeros(len(start) - len(mine[0]), dtype=np.int64)])[order]
        first, reached = 0, np.maximum.accumulate(end)
        free = np.append(np.flatnonzero(reached[:-1] <= start[1:]) + 1, len(start))
        del order, reached
        while first < len(start):
            last = int(free[np.searchsorted(free, min(first + _BLOCK, len(start)))])
            yield _Spans(start[first:last], end[first:last], name[first:last], spent[first:last])
            first = last


def _rows(table: pl.DataFrame, process: int, thread: int, steps: Steps) -> npt.NDArray[np.int32]:
    """The rows of a thread that begin in the steps."""
    rows = np.flatnonzero((table["process"].to_numpy() == process) & (table["thread"].to_numpy() == thread)).astype(
        np.int32
    )
    return rows[steps.of(table["start_ns"].to_numpy()[rows]) >= 0]


def _joined(column: str, tables: Sequence[pl.DataFrame], rows: Sequence[npt.NDArray[np.int32]]) -> Any:
    return np.concatenate([table[column].to_numpy()[some] for table, some in zip(tables, rows, strict=True)])


def _launched(work: pl.DataFrame, ops: int) -> Times:
    """GPU time by the row of the op that launched it."""
    known = work.select(pl.col("op_index").cast(pl.Int64), "duration_ns").drop_nulls()
    spent = np.bincount(known["op_index"].to_numpy(), known["duration_ns"].to_numpy(), minlength=ops)
    launched: Times = spent.astype(np.int64)
    return launched


def _amounts(spans: _Spans) -> Iterator[npt.NDArray[np.float64] | Times]:
    """Of each span what _SUMS names."""
    nested = Nesting(np.zeros(len(spans.start), dtype=np.int64), spans.start, spans.end)
    yield np.ones(len(spans.start))
    yield _self_times(nested, spans.start, spans.end)
    yield spans.end - spans.start
    yield spans.launched
    yield _with_inner(nested, spans.launched)


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
