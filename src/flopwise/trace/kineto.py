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
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import polars as pl

from flopwise.errors import FlopwiseError
from flopwise.records.note import Note, counted
from flopwise.trace.call_names import is_kept, puts_work
from flopwise.trace.columns import among, first_rows, known_bytes, launching, one_call_each, shaped_tables
from flopwise.trace.distributed_info import base_ns, distributed
from flopwise.trace.gpu_names import MOST_GPUS, Described, device_name
from flopwise.trace.kineto_columns import EventColumns, NeedsExactTimes, start_times
from flopwise.trace.kineto_stream import EventStream, beginning
from flopwise.trace.lanes import fold_lanes
from flopwise.trace.op_inputs import op_inputs, sizes_of_inputs
from flopwise.trace.op_shapes import sized_ops
from flopwise.trace.tables import ANNOTATION, FOLDED, GRAPH_RUNS, MODULE, NO_ID, STEP, DeviceName, Trace
from flopwise.work.demangle import demangled_names

_GRAPH_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch")
_SYNC = re.compile(
    r"(?:cuda|cu|hip)(?:Device|Stream|Event|Ctx|Thread)Synchronize"
    r"|(?:cuda|cu|hip)Memcpy(?!.*(?:Async|DtoD|Peer))"  # without Async the host waits, except between devices
)
# How XLA's profiler, which JAX and TensorFlow use, names processes, and what it says of a kernel.
_XLA = re.compile(rb'"/(?:device:(?:GPU|TPU|CUSTOM):|host:(?:CPU|metadata))|"hlo_(?:module|op)"')
_SEARCHED_BYTES = 4 << 20
_SILENT_EVENTS, _SILENT_SHARE = 1_000_000, 1000  # of so many events, one in so many is an op, a kernel or a range
_ACCELERATORS = {"mtia_": "Meta's MTIA", "hpu_": "Intel's Gaudi"}  # how Kineto begins the categories of their work
_CAPTURE = "capture with torch.profiler, then export_chrome_trace"
_VOTERS = 20_000  # backward nodes, evenly spread, that decide which thread their forward ops ran on
_BACKWARD = re.compile(r"autograd::engine::evaluate_function")
_STEP = re.compile(r"ProfilerStep#")
_MODULE_MARK = "flopwise.module:"  # how flopwise's own capture marks a module's forward
_COPY_KINDS = {
    "memset": re.compile(r"[Mm]emset"),
    "HtoD": re.compile(r"HtoD|HostToDevice"),
    "DtoH": re.compile(r"DtoH|DeviceToHost"),
    "DtoD": re.compile(r"DtoD|DeviceToDevice"),
    "PtoP": re.compile(r"PtoP"),
    "HtoH": re.compile(r"HtoH|HostToHost"),
}


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
    columns = EventColumns(exact)
    looked = _SILENT_EVENTS
    for events in stream:
        columns.add(events)
        if columns.events > looked:
            _refuse_silent(columns, path)
            looked += _SILENT_EVENTS
    return _trace(columns, stream)


def _trace(columns: EventColumns, stream: EventStream) -> Trace:
    _refuse_others(columns, stream.path)
    part = columns.cut(stream.path)
    names = tuple(columns.names)
    ops = _with_backward(columns.take("ops"), names)
    annotations, modules, calls = (columns.take(table) for table in ("annotations", "modules", "calls"))
    hosts = [table["process"] for table in (calls, ops, annotations, modules)]
    kernels, copies = (_with_process(columns.take(table), calls, hosts) for table in ("kernels", "copies"))
    copies, odd_sizes = known_bytes(copies)
    kinds = [next((kind for kind, named in _COPY_KINDS.items() if named.search(name)), "other") for name in names]
    is_step, is_graph_launch = _named(names, _STEP), _named(names, _GRAPH_LAUNCH)
    steps_among_ops = ops.filter(is_step)  # as PyTorch wrote them before 1.12
    if steps_among_ops.height:
        ops = ops.filter(~is_step)
    annotations = pl.concat([annotations, steps_among_ops.select(annotations.columns)])
    inputs = columns.inputs.texts()
    gpus = _gpus(stream)
    starts = start_times(cast(Any, stream.collectives.events), columns.exact) - columns.earliest_ns
    collective_args = stream.collectives.table(starts)
    shape, shapes = sizes_of_inputs(ops, names, inputs)
    tables = {
        "kernels": kernels,
        "copies": copies.with_columns(kind=pl.Series(kinds, dtype=pl.String).gather(copies["name"])),
        "launches": launching(calls.filter(~is_graph_launch), [kernels, copies]),
        "graph_launches": calls.filter(is_graph_launch),
        "graph_runs": pl.DataFrame(schema=GRAPH_RUNS),
        "syncs": calls.filter(_named(names, _SYNC)),
        "ops": ops,
        "ranges": _ranges(annotations, modules, is_step, _named(names, re.compile(re.escape(_MODULE_MARK)))),
        "frames": columns.take("frames"),
        "calls": calls.filter(_holds(names, is_kept)),
        "captured": _captured(calls, names),
    }
    folded = fold_lanes(tables)
    return Trace(
        source="kineto",
        path=str(stream.path),
        names=demangled_names(name.removeprefix(_MODULE_MARK) for name in names),
        **shaped_tables(tables),
        sized_ops=sized_ops(shape),
        shapes=shapes,
        op_inputs=op_inputs(ops["inputs"]),
        inputs=inputs,
        python_calls=columns.python_calls,
        collective_args=part.of_times(collective_args) if part else collective_args,
        distributed=distributed(stream.metadata),
        begin_ns=columns.earliest_ns + base_ns(stream.metadata),
        gpu=next(iter(gpus.values()), DeviceName()).name,
        gpus=gpus,
        notes=(*(part.notes if part else ()), *_notes(columns, stream, kernels, copies), *odd_sizes, *folded),
    )


def _refuse_silent(columns: EventColumns, path: Path) -> None:
    """Gigabytes of events that say nothing are not read to their end."""
    rows = columns.rows()
    if not rows:
        _refuse_others(columns, path)
    if rows * _SILENT_SHARE < columns.events:
        content = f"of its first {columns.events:,} events, {rows:,} are a PyTorch op, kernel or range"
        raise FlopwiseError(f"{path} is not a PyTorch trace: {content}", _CAPTURE)


def _refuse_others(columns: EventColumns, path: Path) -> None:
    """A trace of another framework, of an accelerator that is no GPU, or of nothing."""
    chips = (chip for mark, chip in _ACCELERATORS.items() if any(one.startswith(mark) for one in columns.others))
    if (chip := next(chips, None)) is not None and not columns.count("kernels"):
        hint = "flopwise knows NVIDIA's and AMD's GPUs, and the CPU"
        raise FlopwiseError(f"{path} is a trace of {chip} accelerator, whose work flopwise does not know", hint)
    if columns.rows():
        return
    if _XLA.search(beginning(path, _SEARCHED_BYTES)):
        hint = "flopwise reads what nsys profile records of the same program (GPU); XProf reads this file"
        raise FlopwiseError(f"{path} is a profile of JAX or TensorFlow (XLA), not of PyTorch", hint)
    n = columns.events
    content = f"none of its {n:,} events is a PyTorch op, kernel or range" if n else "no events"
    raise FlopwiseError(f"{path} is not a PyTorch trace: {content}", _CAPTURE)


def _named(names: tuple[str, ...], pattern: re.Pattern[str]) -> pl.Expr:
    return pl.col("name").is_in([position for position, name in enumerate(names) if pattern.match(name)])


def _holds(names: tuple[str, ...], holds: Callable[[str], bool]) -> pl.Expr:
    return pl.col("name").is_in([position for position, name in enumerate(names) if holds(name)])


def _captured(calls: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
    """Calls that put work into a CUDA graph, on whatever thread: autograd's launches are captured, too."""
    marks = (calls.filter(_named(names, re.compile(rf"\w+Stream{what}Capture"))) for what in ("Begin", "End"))
    opened, closed = (np.sort(some["start_ns"].to_numpy()) for some in marks)
    calls = calls.filter(_holds(names, puts_work)) if len(opened) else calls.clear()
    time = calls["start_ns"].to_numpy()
    inside = np.searchsorted(opened, time) > np.searchsorted(closed, time)
    return one_call_each(calls.filter(pl.Series(inside, dtype=pl.Boolean)).sort("start_ns"))


def _with_process(on_gpu: pl.DataFrame, calls: pl.DataFrame, hosts: list[pl.Series]) -> pl.DataFrame:
    """The process of each correlation id: the only one that made calls (or ran anything), else the only caller of that id."""
    processes = next((distinct for host in hosts if len(distinct := host.unique())), [NO_ID])
    if len(processes) == 1:
        return on_gpu.with_columns(process=pl.lit(processes[0], pl.Int64))
    by_id = calls.filter(pl.col("correlation") != NO_ID).group_by("correlation")
    owners = by_id.agg(pl.col("process").first(), callers=pl.col("process").n_unique()).filter(pl.col("callers") == 1)
    on_gpu = on_gpu.join(owners.drop("callers"), on="correlation", how="left", maintain_order="left")
    return on_gpu.with_columns(pl.col("process").fill_null(NO_ID))


def _with_backward(ops: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
    """Flag the ops that run a gradient, and turn the logical 'Fwd thread id' into a thread, by the sequence numbers shared."""
    logical, sequence = ["process", "forward_thread"], ["process", "sequence"]
    is_engine_call = np.isin(np.arange(len(names)), [i for i, name in enumerate(names) if _BACKWARD.match(name)])
    named = ops["forward_thread"].to_numpy() > 0
    backward = named | is_engine_call[ops["name"].to_numpy()]
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
    place = first_rows(wanted, (chosen["process"].to_numpy(), chosen["forward_thread"].to_numpy()))
    threads = np.full(len(ops), NO_ID, np.int64)
    threads[rows[place >= 0]] = chosen["forward"].to_numpy()[place[place >= 0]]
    return ops.with_columns(pl.Series("backward", backward), pl.Series("forward_thread", threads))


def _ranges(annotations: pl.DataFrame, modules: pl.DataFrame, is_step: pl.Expr, is_module: pl.Expr) -> pl.DataFrame:
    kind = pl.when(is_step).then(pl.lit(STEP)).when(is_module).then(pl.lit(MODULE)).otherwise(pl.lit(ANNOTATION))
    ranges = pl.concat([annotations.with_columns(kind=kind), modules.with_columns(kind=pl.lit(MODULE))])
    return ranges.sort("start_ns", "end_ns", descending=[False, True], maintain_order=True)


def _gpus(stream: EventStream) -> dict[tuple[int, int], DeviceName]:
    """What each device of the file is called."""
    try:
        devices = msgspec.json.decode(stream.metadata.get("deviceProperties", b"[]"), type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    found: dict[tuple[int, int], DeviceName] = {}
    for place, one in enumerate(devices[:MOST_GPUS]):
        number = one.get("id")
        found.setdefault((NO_ID, number if isinstance(number, int) else place), device_name(_described(one)))
    return found


def _described(device: dict[str, Any]) -> Described:
    name, sms, memory = (device.get(key) for key in ("name", "numSms", "totalGlobalMem"))
    cuda = f"{device.get('computeMajor')}.{device.get('computeMinor')}"
    return Described(
        name=name if isinstance(name, str) else "",
        processors=sms if isinstance(sms, int) else 0,
        memory_bytes=memory if isinstance(memory, int) else 0,
        capability=cuda if device.get("warpSize") == 32 else "",
    )


def _notes(columns: EventColumns, stream: EventStream, kernels: pl.DataFrame, copies: pl.DataFrame) -> tuple[Note, ...]:
    orphans = sum(int((table["process"] == NO_ID).sum()) for table in (kernels, copies))
    notes = counted(
        dropped=(
            columns.unusable + stream.dropped,
            "event",
            "without a usable time, far from all others or of a negative duration: dropped",
        ),
        incomplete=(columns.incomplete, "event", "not written as a complete span (ph is not X): not read"),
        unpaired=(columns.pairs.unpaired, "event", "without its beginning or its end: not read"),
        collectives=(stream.collectives.left_out, "collective", "beyond the first: its group and size are not kept"),
        names=(columns.names.folded, "event", f"with a name {FOLDED}"),
        no_process=(orphans, "piece", "of GPU work of no known process"),
    )
    no_kernel = Note("no_kernels", "no kernel: nothing ran on the GPU, or its activity was not recorded")
    return (*stream.notes, *notes, *(() if len(kernels) else (no_kernel,)))
