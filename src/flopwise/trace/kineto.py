"""PyTorch profiler (Kineto) traces, `.json` or `.json.gz`, into one Trace.

What the file says and what it does not:

- A kernel's `pid` is its device. Its process is the only host process; with several, the only one that made a call with its
  correlation id (ids are per process); else NO_ID.
- 'External id' links an op to its calls and is not a correlation id; it is not used.
- 'Fwd thread id' is PyTorch's own count of threads, not the `tid`. The thread it stands for is the one whose forward ops share
  most sequence numbers with the backward nodes that carry it; NO_ID on a tie.
- Several cpu_ops of one forward op carry the same sequence number; AccumulateGrad nodes carry none.
- gpu_user_annotation is not read: it misses what the autograd thread launched.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from flopwise.errors import FlopwiseError
from flopwise.trace import tables
from flopwise.trace.kineto_columns import Columns
from flopwise.trace.kineto_stream import EventStream
from flopwise.trace.kineto_times import NeedsExactTimes
from flopwise.trace.lookup import among, first_rows
from flopwise.trace.op_inputs import op_inputs, sizes_of_inputs
from flopwise.trace.op_shapes import sized_ops
from flopwise.trace.tables import NO_ID, Trace

_GRAPH_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch")
_SYNC = re.compile(
    r"(?:cuda|cu|hip)(?:Device|Stream|Event|Ctx|Thread)Synchronize"
    r"|(?:cuda|cu|hip)Memcpy(?!.*(?:Async|DtoD|Peer))"  # without Async the host waits, except between devices
)
_VOTERS = 20_000  # backward nodes asked, evenly spread, which thread their forward ops ran on
_BACKWARD = re.compile(r"autograd::engine::evaluate_function")
_STEP = re.compile(r"ProfilerStep#")
_MODULE = "flopwise.module:"  # how flopwise's own capture marks a module's forward
_COPY_KINDS = (
    (re.compile(r"[Mm]emset"), "memset"),
    (re.compile(r"HtoD|HostToDevice"), "HtoD"),
    (re.compile(r"DtoH|DeviceToHost"), "DtoH"),
    (re.compile(r"DtoD|DeviceToDevice"), "DtoD"),
    (re.compile(r"PtoP"), "PtoP"),
    (re.compile(r"HtoH|HostToHost"), "HtoH"),
)


def read_kineto(path: str | Path) -> Trace:
    """Read a PyTorch trace, plain or gzipped; nanoseconds are exact where the file's decimals are."""
    path = Path(path)
    try:
        return _read(path, exact=False)
    except NeedsExactTimes:
        pass
    return _read(path, exact=True)


def _read(path: Path, exact: bool) -> Trace:
    stream = EventStream(path, exact)
    columns = Columns(exact)
    for events in stream:
        columns.add(events)
    return _trace(columns, stream)


def _trace(columns: Columns, stream: EventStream) -> Trace:
    if columns.empty():
        found = (
            f"none of its {columns.events:,} events is a PyTorch op, kernel or range" if columns.events else "no events"
        )
        hint = "capture with torch.profiler, then export_chrome_trace"
        raise FlopwiseError(f"{stream.path} is not a PyTorch trace: {found}", hint)
    names = tuple(columns.names)
    ops, annotations, modules = (
        _with_backward(columns.take("ops"), names),
        columns.take("annotations"),
        columns.take("modules"),
    )
    calls = columns.take("calls")
    hosts = [table["process"] for table in (calls, ops, annotations, modules)]
    kernels, copies = (_with_process(columns.take(table), calls, hosts) for table in ("kernels", "copies"))
    kinds = pl.Series([_copy_kind(name) for name in names], dtype=pl.String)
    steps, marked = _named(names, _STEP), _named(names, re.compile(re.escape(_MODULE)))
    marked_steps = ops.filter(steps)
    if marked_steps.height:
        ops = ops.filter(~steps)
    inputs = columns.inputs.texts()
    shape, shapes = sizes_of_inputs(ops, names, inputs)
    return Trace(
        source="kineto",
        path=str(stream.path),
        names=tuple(name.removeprefix(_MODULE) for name in names),
        kernels=_shaped(kernels, tables.KERNELS),
        copies=_shaped(copies.with_columns(kind=kinds.gather(copies["name"])), tables.COPIES),
        launches=_shaped(_launches(calls.filter(~_named(names, _GRAPH_LAUNCH)), kernels, copies), tables.LAUNCHES),
        graph_launches=_shaped(calls.filter(_named(names, _GRAPH_LAUNCH)), tables.GRAPH_LAUNCHES),
        graph_runs=pl.DataFrame(schema=tables.GRAPH_RUNS),
        syncs=_shaped(calls.filter(_named(names, _SYNC)), tables.SYNCS),
        ops=_shaped(ops, tables.OPS),
        ranges=_ranges(annotations, marked_steps, modules, steps, marked),
        frames=_shaped(columns.take("frames"), tables.FRAMES),
        sized_ops=sized_ops(shape),
        shapes=shapes,
        op_inputs=op_inputs(ops["inputs"]),
        inputs=inputs,
        gpu=_gpu_name(stream),
        notes=_notes(columns, stream, [kernels, copies]),
    )


def _launches(calls: pl.DataFrame, kernels: pl.DataFrame, copies: pl.DataFrame) -> pl.DataFrame:
    """The calls whose correlation id a kernel or a copy carries, whatever the API; of a call within a call, the inner."""
    key = ["process", "correlation"]
    ids = np.concatenate([kernels["correlation"].to_numpy(), copies["correlation"].to_numpy()])
    found = calls[np.flatnonzero(among(calls["correlation"].to_numpy(), ids[ids != NO_ID]))]
    if found["process"].n_unique() > 1:  # ids are per process; one process needs no pairs
        found = found.join(
            pl.concat([kernels.select(key), copies.select(key)]), on=key, how="semi", maintain_order="left"
        )
    ordered = np.sort(found["correlation"].to_numpy(), kind="stable")
    if (ordered[1:] == ordered[:-1]).any():
        found = found.unique(key, keep="last", maintain_order=True)
    return found


def _shaped(table: pl.DataFrame, schema: dict[str, Any]) -> pl.DataFrame:
    """The columns of the contract; a device number that no table can hold is unknown."""
    table = table.select(pl.col(name).cast(kind, strict=False) for name, kind in schema.items())
    return table.with_columns(pl.col(pl.Int32).fill_null(NO_ID))


def _named(names: tuple[str, ...], pattern: re.Pattern[str]) -> pl.Expr:
    return pl.col("name").is_in([position for position, name in enumerate(names) if pattern.match(name)])


def _copy_kind(name: str) -> str:
    return next((kind for pattern, kind in _COPY_KINDS if pattern.search(name)), "other")


def _with_process(on_gpu: pl.DataFrame, calls: pl.DataFrame, hosts: list[pl.Series]) -> pl.DataFrame:
    """Whose correlation ids they are: the only process that made calls (or ran anything), else the only caller of that id."""
    processes = next((found for host in hosts if len(found := host.unique())), [NO_ID])
    if len(processes) == 1:
        return on_gpu.with_columns(process=pl.lit(processes[0], pl.Int64))
    by_id = calls.filter(pl.col("correlation") != NO_ID).group_by("correlation")
    owners = by_id.agg(pl.col("process").first(), callers=pl.col("process").n_unique()).filter(pl.col("callers") == 1)
    on_gpu = on_gpu.join(owners.drop("callers"), on="correlation", how="left", maintain_order="left")
    return on_gpu.with_columns(pl.col("process").fill_null(NO_ID))


def _with_backward(ops: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
    """Say which ops run a gradient, and turn the logical 'Fwd thread id' into a thread, by the sequence numbers shared."""
    logical, sequence = ["process", "forward_thread"], ["process", "sequence"]
    running = np.isin(np.arange(len(names)), [i for i, name in enumerate(names) if _BACKWARD.match(name)])
    named = ops["forward_thread"].to_numpy() > 0
    backward = named | running[ops["name"].to_numpy()]
    numbers = ops["sequence"].to_numpy()
    asking = np.flatnonzero(named & (numbers >= 0))
    asking = asking[:: max(1, len(asking) // _VOTERS)]
    voters = ops.select(*sequence, "forward_thread")[asking].unique()
    answering = np.flatnonzero(~backward & (numbers >= 0))
    answering = answering[among(numbers[answering], voters["sequence"].to_numpy())]
    forward = ops.select(*sequence, forward="thread")[answering].unique()
    votes = voters.join(forward, on=sequence).group_by(*logical, "forward").len()
    most = votes.filter(pl.col("len") == pl.col("len").max().over(logical)).group_by(logical)
    chosen = most.agg(pl.col("forward").first(), tied=pl.len() > 1).filter(~pl.col("tied"))
    rows = np.flatnonzero(named)
    wanted = (ops["process"].to_numpy()[rows], ops["forward_thread"].to_numpy()[rows])
    found = first_rows(wanted, (chosen["process"].to_numpy(), chosen["forward_thread"].to_numpy()))
    threads = np.full(len(ops), NO_ID, np.int64)
    threads[rows[found >= 0]] = chosen["forward"].to_numpy()[found[found >= 0]]
    return ops.with_columns(pl.Series("backward", backward), pl.Series("forward_thread", threads))


def _ranges(
    annotations: pl.DataFrame, steps: pl.DataFrame, modules: pl.DataFrame, is_step: pl.Expr, is_module: pl.Expr
) -> pl.DataFrame:
    """Ranges of all kinds; PyTorch before 1.12 wrote its profiler steps among the ops."""
    annotations = pl.concat([annotations, steps.select(annotations.columns)])
    kind = pl.when(is_step).then(pl.lit("step")).when(is_module).then(pl.lit("module")).otherwise(pl.lit("annotation"))
    ranges = pl.concat([annotations.with_columns(kind=kind), modules.with_columns(kind=pl.lit("module"))])
    return _shaped(ranges.sort("start_ns", "end_ns", descending=[False, True], maintain_order=True), tables.RANGES)


def _gpu_name(stream: EventStream) -> str:
    try:
        devices = msgspec.json.decode(stream.metadata.get("deviceProperties", b"[]"), type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    name = devices[0].get("name") if devices else None
    return name if isinstance(name, str) else ""


def _notes(columns: Columns, stream: EventStream, on_gpu: list[pl.DataFrame]) -> tuple[str, ...]:
    orphans = sum(int((table["process"] == NO_ID).sum()) for table in on_gpu)
    found = {
        "events have no usable time or a negative duration: dropped": columns.unusable + stream.dropped,
        "events are not complete spans (ph is not X): not read": columns.incomplete,
        "events begin without an end or end without a beginning: not read": columns.pairs.unpaired,
        "kernels and copies belong to no known process": orphans,
    }
    notes = [f"{count:,} {what}" for what, count in found.items() if count]
    none = [] if len(on_gpu[0]) else ["no kernel: nothing ran on the GPU, or its activity was not recorded"]
    return (*stream.notes, *notes, *none)
