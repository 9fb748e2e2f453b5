"""What the host did when: waits for the GPU, data loading, transfers, compilation, the driver's memory, graph capture."""

import re
from collections.abc import Callable

import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times
from flopwise.trace.call_names import is_allocation, is_module_load
from flopwise.trace.columns import first_rows
from flopwise.trace.phases import is_capture_range, is_compiler_function
from flopwise.trace.tables import Trace

PAGEABLE = "copy to pageable memory"  # 'Async' in name only: the call returns when the bytes have arrived
_SPAN = ["start_ns", "end_ns", "process", "thread"]
_LOADING = re.compile(
    r"(?i)data_?loader|^(?:## )?(?:flopwise[./: ])?data(?:[ _]?(?:load(?:ing)?|fetch|wait))?(?: ##)?$"
    r"|^(?:get|fetch|load|next)[ _]?batch|^fetch$|_dataloader_next$"
)
_COMPILING = re.compile(
    r"(?i)^(?!.*cache lookup)(.*torchdynamo|.*dynamo_timed|.*_compile\.|compile_inner|.*inductor.*compil|CachingAutotuner\.)"
)
_LEAST_INPUT = 4096  # bytes of a copy that may be a batch: an optimizer's numbers are less
# A normal launch is as long as the shortest tenth: in a step that waits for the GPU all the time, most are held up. In traces of
# six machines without a full queue, one launch in twenty is longer than twice that, and together they take a hundredth of it.
_NORMAL_LAUNCHES, _HELD_UP = 0.1, 2.0
_SLOW_LAUNCH_NS = 1_000_000

Spans = tuple[Times, Times]


def numbers(trace: Trace, holds: Callable[[str], object]) -> list[int]:
    """The numbers of the names for which something holds."""
    return [number for number, name in enumerate(trace.names) if holds(name)]


def waits(trace: Trace) -> pl.DataFrame:
    """Calls in which the host waited for the GPU: synchronisations, and copies to pageable memory, 'Async' in name only."""
    names = pl.Series("call", trace.names, dtype=pl.String)
    syncs = trace.syncs.select(*_SPAN, names.gather(trace.syncs["name"]))
    pageable = _spanning(trace, trace.copies.filter(pl.col("kind") == "DtoH"))
    pageable = pageable.join(trace.syncs, on=[*_SPAN, "name"], how="anti")  # cudaMemcpy, hipMemcpyWithStream: one wait
    return pl.concat([syncs, pageable.select(*_SPAN, pl.lit(PAGEABLE).alias("call"))])


def _spanning(trace: Trace, copies: pl.DataFrame) -> pl.DataFrame:
    """The calls that returned only when the copy they asked for had arrived: they span it, those that only queue it do not."""
    copies = copies.filter(pl.col("correlation") > 0)
    wanted, known = ((t["process"].to_numpy(), t["correlation"].to_numpy()) for t in (copies, trace.launches))
    row = first_rows(wanted, known)
    copies, calls = copies.filter(pl.Series(row >= 0)), trace.launches[row[row >= 0]]
    return calls.filter((calls["start_ns"] <= copies["start_ns"]) & (calls["end_ns"] >= copies["end_ns"]))


def blocking_uploads(trace: Trace) -> pl.DataFrame:
    """Calls in which the host copied a batch to the GPU that was not in pinned memory."""
    batches = trace.copies.filter(pl.col("kind") == "HtoD", pl.col("bytes") >= _LEAST_INPUT)
    return _spanning(trace, batches).select(_SPAN)


def loading_ranges(trace: Trace) -> pl.DataFrame:
    """When the host was in a data loader."""
    named = numbers(trace, _LOADING.search)
    tables = (table.filter(pl.col("name").is_in(named)) for table in (trace.ops, trace.ranges))
    return pl.concat([table.select(*_SPAN, "name") for table in tables])


def compiling(trace: Trace) -> pl.DataFrame:
    """When the host compiled: by ranges of the compiler, and by its functions where stacks were captured."""
    named, functions = numbers(trace, _COMPILING.search), numbers(trace, is_compiler_function)
    tables = ((trace.ops, named), (trace.ranges, named), (trace.frames, functions))
    return pl.concat([table.filter(pl.col("name").is_in(some)).select(*_SPAN, "name") for table, some in tables])


def allocations(trace: Trace) -> pl.DataFrame:
    """Calls that ask the driver for memory, or give some back."""
    return trace.calls.filter(pl.col("name").is_in(numbers(trace, is_allocation))).select(*_SPAN, "name")


def module_loads(trace: Trace) -> pl.DataFrame:
    """Calls that load kernels' code."""
    return trace.calls.filter(pl.col("name").is_in(numbers(trace, is_module_load))).select(*_SPAN, "name")


def slow_launches(trace: Trace) -> pl.DataFrame:
    """Launches of kernels that took so long that they did more: the driver loads a kernel's code at its first launch."""
    launches = pl.col("name").is_in(numbers(trace, lambda name: "Launch" in name))
    slow = pl.col("end_ns") - pl.col("start_ns") >= _SLOW_LAUNCH_NS
    return trace.launches.filter(launches, slow).select(*_SPAN, "name")


def capturing(trace: Trace) -> Spans:
    """When CUDA graphs were captured: from the call that begins it to the one that ends it, on each thread; by name, ranges."""
    begins, ends = (numbers(trace, re.compile(rf"Stream{what}Capture").search) for what in ("Begin", "End"))
    start, end = list[Times](), list[Times]()
    for _, calls in trace.calls.filter(pl.col("name").is_in([*begins, *ends])).group_by("thread"):
        opened = calls.filter(pl.col("name").is_in(begins))["start_ns"].to_numpy()
        closed = np.sort(calls.filter(pl.col("name").is_in(ends))["end_ns"].to_numpy())
        place = np.searchsorted(closed, opened)
        start.append(opened[place < len(closed)])
        end.append(closed[place[place < len(closed)]])
    ranges = trace.ranges.filter(pl.col("name").is_in(numbers(trace, is_capture_range)))
    spans = [*zip(start, end, strict=True), span_times(ranges)]
    return np.concatenate([one for one, _ in spans]), np.concatenate([one for _, one in spans])


def host_calls(trace: Trace) -> pl.DataFrame:
    """The calls that put work on the GPU, single kernels and whole graphs."""
    return pl.concat([trace.launches, trace.graph_launches])


def held_up_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls that took much longer than a normal one, without the time that a normal one takes: the queue was full."""
    if not calls.height:
        return calls
    took = pl.col("end_ns") - pl.col("start_ns")
    normal = int(np.quantile(calls.select(took).to_series().to_numpy(), _NORMAL_LAUNCHES))
    return calls.filter(took > _HELD_UP * normal).with_columns(pl.col("start_ns") + normal)


def span_times(table: pl.DataFrame) -> Spans:
    """Start and end of a table's rows."""
    return table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
