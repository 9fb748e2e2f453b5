"""Nsight Systems exports (.sqlite, .sqlite.gz, .nsys-rep) into one Trace.

Versions of the export differ: tables are called X, X_V2, X_V3; columns come and go. Every query is built from what the file
has. Its tables of the profiled process's environment and of the machine (META_DATA_CAPTURE, TARGET_INFO_*…) are never
read, except for the GPU's name.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise.records.note import Note, counted
from flopwise.trace.call_names import is_kept
from flopwise.trace.columns import compact, first_rows, known_bytes, launching, near, one_call_each, shaped_tables
from flopwise.trace.lanes import fold_lanes
from flopwise.trace.nsys_file import MISSING, Export, Ints, open_export, or_no_id, process_of, quoted, spellings
from flopwise.trace.nsys_gpus import gpus_of
from flopwise.trace.nsys_window import KERNELS, cut_export, in_steps, in_window, launched_in, rows_of
from flopwise.trace.nvtx import NameTable, read_nvtx, with_engine_sequence
from flopwise.trace.op_shapes import Shapes, sized_ops
from flopwise.trace.tables import LONGEST_NS, NO_ID, TABLES, DeviceName, Trace
from flopwise.trace.window import kept_part
from flopwise.work.demangle import demangled_names

TIME_LIMIT = 2**61  # times beyond are garbage, and their differences would overflow

_GPU_WORK = spellings(
    "start end process:globalPid device:deviceId stream:streamId correlation:correlationId graph_node:graphNodeId"
)
_KERNEL = _GPU_WORK | spellings("name:demangledName|shortName|mangledName")
_COPY = _GPU_WORK | spellings("bytes kind:copyKind")
_CALL = spellings("start end thread:globalTid correlation:correlationId name:nameId")
_NODE = spellings("start thread:globalTid node:graphNodeId original:originalGraphNodeId")

# CUpti_ActivityMemcpyKind; arrays live on the device, unified-memory migrations count as the copy they are
_COPY_KINDS = ["other", "HtoD", "DtoH", "HtoD", "DtoH", *["DtoD"] * 4, "HtoH", "PtoP", "HtoD", "DtoH", "DtoD"]
_MEMSET = len(_COPY_KINDS)
_KIND_NAMES = pl.Series([*_COPY_KINDS, "memset"])

# Calls that can put nothing on the GPU: half of all rows, not worth fetching. Whether any other call did is then decided by
# its correlation id.
_NEVER_LAUNCHES = re.compile(r"Get|Query|IsCapturing|Occupancy|Event(Create|Destroy|Record)|CallConfiguration")
# Without Async the host waits, except between devices.
_WAITS = re.compile(r"Synchronize|^cu(da)?Memcpy(?!.*(Async|DtoD|Peer))")
_API_NAME = re.compile(r"cu\w{1,100}")
_GRAPH_LAUNCH = re.compile(r"^cu(da)?GraphLaunch")
_API_VERSION = re.compile(r"(_ptsz|_ptds)?(_v\d{4,})?$")  # cudaLaunchKernel_v7000: the CUDA that introduced it

_TIMES = {"start": "start_ns", "end": "end_ns"}

Columns = dict[str, NDArray[Any]]


def read_nsys(path: str | os.PathLike[str]) -> Trace:
    """Read an export, or a report through the installed nsys. Every fault of the file is a FlopwiseError."""
    with open_export(path) as export:
        export, whole_ns = cut_export(export)
        names, shapes, notes = NameTable(), Shapes(), list[Note]()
        tables = _tables(export, names, shapes, notes, whole_ns)
        gpus = gpus_of(export, tables["kernels"]["process"].unique().to_list())
    _align_times(tables, notes)
    tables["copies"], odd_sizes = known_bytes(tables["copies"])
    folded = fold_lanes(tables)
    sizes = sized_ops(tables["ops"]["shape"])
    tables["ops"] = with_engine_sequence(tables["ops"])
    return Trace(
        source="nsys",
        path=str(Path(path)),
        names=demangled_names(names.ids),
        **shaped_tables(tables),
        sized_ops=sizes,
        shapes=tuple(shapes.ids),
        gpu=next(iter(gpus.values()), DeviceName()).name,
        gpus=gpus,
        notes=(*notes, *odd_sizes, *folded),
    )


def _tables(
    export: Export, names: NameTable, shapes: Shapes, notes: list[Note], whole_ns: int
) -> dict[str, pl.DataFrame]:
    ops, ranges = read_nvtx(export, names, shapes, notes)
    if export.window is not None:
        window = in_steps(export.window, ranges, list(names.ids))
        export = replace(export, window=window)
        ops, ranges = in_window(ops, window), in_window(ranges, window)
    calls = _calls(export, names)
    work = {
        "kernels": _kernels(export, names, notes),
        "copies": _copies(export),
        "graph_runs": _spans(_gpu_columns(export, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", _GPU_WORK)),
    }
    if export.window is not None:
        work = {name: launched_in(table, calls, export.window) for name, table in work.items()}
        notes += kept_part(export.window, whole_ns, work["kernels"].height, rows_of(export, KERNELS)).notes
    work = {name: _with_process(table, calls) for name, table in work.items()}
    of_calls = {
        "launches": launching(calls.filter(~pl.col("graph")), list(work.values())),
        "graph_launches": one_call_each(calls.filter("graph")),
        "syncs": calls.filter("waits"),
        "calls": calls.filter("kept"),
    }
    return {"ops": ops, "ranges": ranges, "graph_nodes": _graph_nodes(export)} | work | of_calls


def _spans(columns: Columns) -> pl.DataFrame:
    return compact({_TIMES.get(name, name): values for name, values in columns.items()})


def _gpu_columns(export: Export, base: str, wanted: Mapping[str, tuple[str, ...]]) -> Columns:
    table = export.table(base)
    empty = {name: np.empty(0, np.int64) for name in wanted}
    columns = export.integers(table, wanted, export.inside(table, work=True)) if table else empty
    columns["process"] = process_of(columns["process"])
    for name in ("device", "stream", "correlation", "graph_node"):
        columns[name] = or_no_id(columns[name])
    device, node = columns["device"], columns["graph_node"]
    columns["device"] = np.where(np.abs(device) < 2**31, device, NO_ID).astype(np.int32)  # a larger number is none
    columns["graph_node"] = np.where(node == 0, NO_ID, node)
    return columns


def _kernels(export: Export, names: NameTable, notes: list[Note]) -> pl.DataFrame:
    columns = _gpu_columns(export, KERNELS, _KERNEL)
    if not len(columns["start"]):
        text = "no kernels: CUDA was not traced, or nothing ran on the GPU (nsys profile -t cuda,nvtx)"
        notes.append(Note("no_kernels", text))
    return _spans(columns | {"name": _named(export, columns["name"], names, "(unnamed kernel)")})


def _named(
    export: Export, ids: Ints, names: NameTable, unnamed: str, shorten: Callable[[str], str] = str
) -> NDArray[np.uint32]:
    """StringIds ids as indices into `names`."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    texts = export.strings(distinct)
    known = np.array([names.id(shorten(texts.get(int(i), unnamed))) for i in distinct], dtype=np.uint32)
    return known[inverse]


def _copies(export: Export) -> pl.DataFrame:
    copies, sets = (_gpu_columns(export, f"CUPTI_ACTIVITY_KIND_{what}", _COPY) for what in ("MEMCPY", "MEMSET"))
    copies["kind"] = np.where((copies["kind"] >= 0) & (copies["kind"] < _MEMSET), copies["kind"], 0)
    sets["kind"] = np.full(len(sets["kind"]), _MEMSET)
    both = {name: np.concatenate([copies[name], sets[name]]) for name in copies}
    both["bytes"] = np.maximum(both["bytes"], 0)
    return _replaced(_spans(both), [_KIND_NAMES.gather(both["kind"]).alias("kind")])


def _calls(export: Export, names: NameTable) -> pl.DataFrame:
    """Runtime and driver API calls that may have launched something, launched a graph, waited for the GPU, or are kept."""
    tables = [export.table(f"CUPTI_ACTIVITY_KIND_{api}") for api in ("RUNTIME", "DRIVER")]
    parts = [_calls_of(export, table, names) for table in tables if table]
    flags = {"waits": pl.Boolean, "graph": pl.Boolean, "kept": pl.Boolean}
    return pl.concat(parts) if parts else pl.DataFrame(schema=TABLES["launches"] | flags)


def _calls_of(export: Export, table: str, names: NameTable) -> pl.DataFrame:
    name = export.column(table, "nameId")
    idle = _never_launching(export) if name else []
    where = f"{quoted(name)} NOT IN ({','.join(map(str, idle))})" if idle else "1"
    calls = export.integers(table, _CALL, f"{where} AND {export.inside(table)}")
    calls["process"] = process_of(calls["thread"])
    calls["thread"], calls["correlation"] = or_no_id(calls["thread"]), or_no_id(calls["correlation"])
    named = _named(export, calls["name"], names, "(unnamed call)", lambda text: _API_VERSION.sub("", text, count=1))
    texts = list(names.ids)
    distinct, inverse = np.unique(named, return_inverse=True)
    flags = {
        flag: np.array([bool(holds(texts[i])) for i in distinct], dtype=bool)[inverse]
        for flag, holds in (("waits", _WAITS.search), ("graph", _GRAPH_LAUNCH.search), ("kept", is_kept))
    }
    return _spans(calls | {"name": named} | flags)


def _never_launching(export: Export) -> list[int]:
    """Ids of the names of calls that need not be fetched; from the texts, as scanning all calls would cost half of them."""
    table = export.table("StringIds")
    if not (export.column(table, "id") and export.column(table, "value")):
        return []
    sql = f"SELECT CAST(id AS INTEGER), CAST(value AS TEXT) FROM {quoted(table)} WHERE substr(value, 1, 2) = 'cu' LIMIT 100000"
    calls = [(i, text) for i, text in export.db.execute(sql) if i is not None and _API_NAME.fullmatch(str(text))]
    return [i for i, text in calls if _NEVER_LAUNCHES.search(text) and not _WAITS.search(text)][:1000]


def _with_process(work: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Old exports do not name a kernel's process: it is the only one that made calls, if there is only one."""
    process = work["process"].to_numpy()
    known = np.unique(calls["process"].to_numpy())
    if len(known) != 1 or not (process == NO_ID).any():
        return work
    return _replaced(work, [pl.Series("process", np.where(process == NO_ID, known[0], process))])


def _replaced(table: pl.DataFrame, columns: Sequence[pl.Series]) -> pl.DataFrame:
    table = table.clone()
    for column in columns:
        table.replace_column(table.get_column_index(column.name), column)
    return table


def _graph_nodes(export: Export) -> pl.DataFrame:
    """When and where each node was captured. Instantiation clones a graph's nodes: a clone was captured with its original."""
    table = export.table("CUDA_GRAPH_NODE_EVENTS")
    columns = export.integers(table, _NODE) if table else {name: np.empty(0, np.int64) for name in _NODE}
    node, original = columns["node"], columns["original"]
    origin = np.sort(np.unique(node, return_index=True)[1])  # of each node the row of its capture
    made, none = node[origin], np.zeros(len(node), dtype=np.int64)
    first = origin
    for _ in range(4):  # a clone of a clone of a clone: deeper has not been seen
        parent = original[origin]
        row = first_rows((none[: len(parent)], parent), (none[: len(made)], made))
        origin = np.where((parent != MISSING) & (row >= 0), first[row] if len(first) else row, origin)
    start, thread = columns["start"][origin], columns["thread"][origin]
    times = {"start_ns": start, "end_ns": start}
    process = process_of(thread)
    where = {"process": process, "thread": or_no_id(thread), "graph_node": made, "host": process}
    return pl.DataFrame(times | where)


def _align_times(tables: dict[str, pl.DataFrame], notes: list[Note]) -> None:
    """Sort every table, the earliest event of all at 0; what has no sensible time is dropped and counted.

    In place, table by table, since two copies of everything would be the most memory ever used.
    """
    _close_open_ranges(tables, notes)
    dropped = 0
    starts = (table["start_ns"].to_numpy() for table in tables.values())
    usual = near([some[(some > -TIME_LIMIT) & (some < TIME_LIMIT)] for some in starts]) or (-TIME_LIMIT, TIME_LIMIT)
    for name, table in tables.items():
        start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
        sensible = (start > -TIME_LIMIT) & (end < TIME_LIMIT) & (end >= start)
        sensible[sensible] &= end[sensible] - start[sensible] < LONGEST_NS
        sensible &= (start >= usual[0]) & (start <= usual[1])
        if not sensible.all():
            tables[name] = table.filter(pl.Series(sensible))
            dropped += int((~sensible).sum())
    notes += counted(
        dropped=(dropped, "event", "dropped: no time, one far from all others, or an end before the start")
    )
    origin = min((int(t["start_ns"].to_numpy().min()) for t in tables.values() if len(t)), default=0)
    for name in tables:
        tables[name] = _sorted(tables[name], origin)


def _sorted(table: pl.DataFrame, origin: int) -> pl.DataFrame:
    """By start, of two that start together the enclosing one first; most exports are in this order."""
    start, end = table["start_ns"].to_numpy() - origin, table["end_ns"].to_numpy() - origin
    in_order = (start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] <= end[:-1]))
    table = _replaced(table, [pl.Series("start_ns", start), pl.Series("end_ns", end)])
    return table if in_order.all() else table[np.lexsort((-end, start))]


def _close_open_ranges(tables: dict[str, pl.DataFrame], notes: list[Note]) -> None:
    end = pl.col("end_ns")
    still_open = {name: int((tables[name]["end_ns"].to_numpy() == MISSING).sum()) for name in ("ops", "ranges")}
    if not any(still_open.values()):
        return
    ends = [t.filter(end.is_between(-TIME_LIMIT, TIME_LIMIT))["end_ns"].to_numpy() for t in tables.values()]
    last = max((int(column.max()) for column in ends if len(column)), default=0)
    for name in still_open:
        tables[name] = tables[name].with_columns(end_ns=pl.when(end == MISSING).then(pl.lit(last)).otherwise(end))
    text = "still open at the end of the trace: taken to end with its last event"
    notes += counted(open_ranges=(sum(still_open.values()), "range", text))
