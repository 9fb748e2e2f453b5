"""rocprofv3's JSON (`rocprofv3 --output-format json --sys-trace -- python train.py`) into one Trace.

The file holds one object per process: `agents` (CPUs and GPUs), `kernel_symbols`, `strings` (names of calls, by kind and
operation; messages of markers, by correlation id) and `buffer_records`, one list per kind: kernel dispatches, HIP calls, copies,
ROCTx markers. Times are nanoseconds. A dispatch and the HIP call that launched it share `correlation_id.internal`; ops and
modules are in it only as far as the program marked them with ROCTx.

Schema: https://rocm.docs.amd.com/projects/rocprofiler-sdk/en/latest/how-to/using-rocprofv3.html#json-output-schema
"""

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from flopwise.errors import FlopwiseError
from flopwise.records.note import Note, counted
from flopwise.trace.columns import Ints, compact, first_rows, known_bytes, launching, near, shaped_tables
from flopwise.trace.gpu_names import MOST_GPUS, Described, device_name
from flopwise.trace.kineto_stream import beginning
from flopwise.trace.lanes import fold_lanes
from flopwise.trace.rocprof_names import Message, Names, Symbol, integers
from flopwise.trace.rocprof_stream import ListStream, decoded_frame
from flopwise.trace.spilled import PIECE_ROWS, GrowingTable, Rows
from flopwise.trace.tables import ANNOTATION, FOLDED, GRAPH_NODES, GRAPH_RUNS, LONGEST_NS, NO_ID, OPS, DeviceName, Trace
from flopwise.trace.window import MOST_ROWS, ON_GPU, cut, weight
from flopwise.work.demangle import demangled_names

_TOP = re.compile(rb'^\s*\{\s*"rocprofiler-sdk-tool"\s*:')
_TIME_LIMIT = 2**61
_GPU_AGENT = 2  # rocprofiler_agent_type_t
_SYNC = re.compile(r"hip(?:Device|Stream|Event)Synchronize|hipMemcpy(?!.*(?:Async|DtoD|Peer))")
_GRAPH_LAUNCH = re.compile(r"hipGraphLaunch")
_COPY_KINDS = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD", "HOST_TO_HOST": "HtoH"}


class _Handle(msgspec.Struct, frozen=True, gc=False):
    handle: int = NO_ID


class _Correlation(msgspec.Struct, frozen=True, gc=False):
    internal: int = NO_ID


_NONE, _NO_CORRELATION = _Handle(), _Correlation()


class _Dispatched(msgspec.Struct, frozen=True, gc=False):
    agent_id: _Handle = _NONE
    queue_id: _Handle = _NONE
    kernel_id: int = NO_ID


_NOT_DISPATCHED = _Dispatched()


class _Record(msgspec.Struct, gc=False):
    """A record of any kind: what a kernel, a copy, a call and a marker have is there, or its default."""

    start_timestamp: int = 0
    end_timestamp: int = -1
    kind: int | str = NO_ID
    operation: int | str = NO_ID
    thread_id: int = NO_ID
    correlation_id: _Correlation = _NO_CORRELATION
    stream_id: _Handle = _NONE
    dispatch_info: _Dispatched = _NOT_DISPATCHED
    dst_agent_id: _Handle = _NONE
    src_agent_id: _Handle = _NONE
    bytes: int = 0


class _Bank(msgspec.Struct, gc=False):
    size_in_bytes: int = 0


class _Agent(msgspec.Struct, gc=False):
    id: _Handle = _NONE
    type: int = 0
    name: str = ""
    product_name: str = ""
    cu_count: int = 0
    logical_node_type_id: int = NO_ID
    mem_banks: list[_Bank] = []


class _Metadata(msgspec.Struct, gc=False):
    pid: int = NO_ID


class _Process(msgspec.Struct, gc=False):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: list[_Agent] = []


class _File(msgspec.Struct):
    tool: list[_Process] | _Process = msgspec.field(name="rocprofiler-sdk-tool")


_CALLS = ("hip_api", "hip_runtime_api", "hip_api_ext")
_TABLE_OF = {"kernel_dispatch": "kernels", "memory_copy": "copies", "marker_api": "annotations"} | dict.fromkeys(
    _CALLS, "calls"
)
_LISTS: dict[tuple[str, str], msgspec.json.Decoder[Any]] = {
    ("", "kernel_symbols"): msgspec.json.Decoder(list[Symbol]),
    ("strings", "marker_api"): msgspec.json.Decoder(list[Message]),
    **{("buffer_records", kind): msgspec.json.Decoder(list[_Record]) for kind in _TABLE_OF},
}


def _stream(record: _Record) -> int:
    """The HIP stream, where it was recorded; else the queue."""
    stream = record.stream_id.handle
    return stream if stream > 0 else record.dispatch_info.queue_id.handle


_ALL: dict[str, Callable[[_Record], int]] = {
    "start_ns": attrgetter("start_timestamp"),
    "end_ns": attrgetter("end_timestamp"),
    "correlation": attrgetter("correlation_id.internal"),
}
_TAKEN: dict[str, dict[str, Callable[[_Record], int]]] = {
    "kernels": {"agent": attrgetter("dispatch_info.agent_id.handle"), "stream": _stream},
    "copies": {
        "agent": attrgetter("dst_agent_id.handle"),
        "source": attrgetter("src_agent_id.handle"),
        "stream": _stream,
        "bytes": lambda one: max(one.bytes, 0),
    },
    "calls": {"thread": attrgetter("thread_id")},
    "annotations": {"thread": attrgetter("thread_id")},
}
_COLUMNS = {table: (*_ALL, "process", "name", *taken) for table, taken in _TAKEN.items()}


def is_rocprof(path: Path) -> bool:
    """Whether a `.json` file is rocprofv3's: by how it begins."""
    try:
        return _TOP.match(beginning(path, 1 << 12).removeprefix(b"\xef\xbb\xbf")) is not None
    except FlopwiseError:  # the reader of other files says what is wrong with it
        return False


def read_rocprof(path: str | Path) -> Trace:
    """Read rocprofv3's JSON, plain or gzipped, of any size; of a long one whole steps from its middle are kept."""
    path, names = Path(path), Names()
    rows, processes = _read(path, names)
    if rows.unknown_markers and names.has_messages():
        rows, processes = _read(path, names)  # the messages came after the markers that they are of
    if not rows.has_any():
        hint = "record kernels and calls: rocprofv3 --sys-trace --output-format json -- python train.py"
        raise FlopwiseError(f"{path} has no kernel, copy, call or marker", hint)
    return rows.trace(str(path), processes)


def _read(path: Path, names: Names) -> tuple["_Rows", list[_Process]]:
    rows, stream = _Rows(names), ListStream(path, _LISTS)
    adding: dict[tuple[str, str], Callable[[int, list[Any]], None]] = {
        ("", "kernel_symbols"): names.add_symbols,
        ("strings", "buffer_records"): names.add_kinds,
        ("strings", "marker_api"): names.add_messages,
    }
    for part in stream:
        if part.objects is None:
            rows.unreadable += 1
        elif add := adding.get((part.group, part.kind)):
            add(part.process, part.objects)
        elif part.group == "buffer_records" and part.kind in _TABLE_OF:
            rows.add(part.process, _TABLE_OF[part.kind], part.objects)
    found = decoded_frame(stream, _File).tool
    return rows, found if isinstance(found, list) else [found]


class _Rows:
    """The tables' columns of all processes, those of a long file on the disk."""

    def __init__(self, names: Names) -> None:
        self.unreadable = self.unknown_markers = 0
        self._names = names
        self._dropped = 0
        self._tables = {
            table: GrowingTable({name: np.uint32 if name == "name" else np.int64 for name in columns})
            for table, columns in _COLUMNS.items()
        }

    def has_any(self) -> bool:
        return any(map(len, self._tables.values()))

    def add(self, process: int, table: str, found: list[_Record]) -> None:
        """The records that have a time; `process` is a place in the file."""
        records = [
            one
            for one in found
            if 0 < one.start_timestamp <= one.end_timestamp < min(_TIME_LIMIT, one.start_timestamp + LONGEST_NS)
        ]
        self._dropped += len(found) - len(records)
        columns: Rows = {
            name: integers([take(one) for one in records]) for name, take in (_ALL | _TAKEN[table]).items()
        }
        columns["process"] = np.full(len(records), process)
        columns["name"] = self._numbers(table, process, records, columns["correlation"])
        if table == "annotations":
            named = columns["name"] >= 0
            self.unknown_markers += int((~named).sum())
            columns = {name: values[named] for name, values in columns.items()}
        self._tables[table].append(columns)
        if self._tables[table].held >= PIECE_ROWS and weight(self._tables) > MOST_ROWS:
            self._tables[table].spill()

    def _numbers(self, table: str, process: int, records: list[_Record], correlation: Ints) -> Ints:
        if table == "annotations":
            return self._names.messages(process, correlation)
        if table == "kernels":
            return integers([self._names.kernel(process, one.dispatch_info.kernel_id) for one in records])
        return integers([self._names.operation(process, one.kind, one.operation) for one in records])

    def trace(self, path: str, processes: list[_Process]) -> Trace:
        texts, places = self._names.texts()
        part = None
        if weight(self._tables) > MOST_ROWS:
            part = cut(self._tables, [texts[place] for place in places.tolist()], path)
        tables = {table: self._taken(table, places, processes) for table in _COLUMNS}
        tables = self._without_strays(tables)
        kinds = [next((kind for words, kind in _COPY_KINDS.items() if words in text), "other") for text in texts]
        tables["copies"] = tables["copies"].with_columns(
            kind=pl.Series(kinds, dtype=pl.String).gather(tables["copies"]["name"])
        )
        tables["copies"], odd_sizes = known_bytes(tables["copies"])
        origin = min(int(table["start_ns"].to_numpy().min()) for table in tables.values() if table.height)
        tables = {name: _from_zero(table, origin) for name, table in tables.items()}
        calls, ranges = tables.pop("calls"), tables.pop("annotations")
        names = demangled_names(texts)
        graphs, syncs = (_named(names, pattern) for pattern in (_GRAPH_LAUNCH, _SYNC))
        tables |= {
            "launches": launching(calls.filter(~graphs), [tables["kernels"], tables["copies"]]),
            "graph_launches": calls.filter(graphs),
            "graph_runs": pl.DataFrame(schema=GRAPH_RUNS),
            "syncs": calls.filter(syncs),
            "ops": pl.DataFrame(schema=OPS),
            "ranges": ranges.with_columns(kind=pl.lit(ANNOTATION)),
            "graph_nodes": pl.DataFrame(schema=GRAPH_NODES),
        }
        folded = fold_lanes(tables)
        gpus, notes = _gpus(processes), self._notes(tables["kernels"].height)
        return Trace(
            source="rocprof",
            path=path,
            names=names,
            **shaped_tables(tables),
            gpu=next(iter(gpus.values()), DeviceName()).name,
            gpus=gpus,
            notes=(*(part.notes if part else ()), *notes, *odd_sizes, *folded),
        )

    def _without_strays(self, tables: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
        """Without records of another year than the others, which are counted."""
        usual = near([table["start_ns"].to_numpy() for table in tables.values()])
        if usual is None:
            return tables
        kept = {name: table.filter(pl.col("start_ns").is_between(*usual)) for name, table in tables.items()}
        self._dropped += sum(table.height - kept[name].height for name, table in tables.items())
        return kept

    def _notes(self, kernels: int) -> tuple[Note, ...]:
        no_kernels = Note("no_kernels", "no kernel: nothing ran on the GPU, or rocprofv3 ran without --kernel-trace")
        notes = counted(
            dropped=(self._dropped, "record", "without a usable time or of a negative duration: dropped"),
            unreadable=(self.unreadable, "list", "of records not as rocprofv3 writes them, or a part of one: not read"),
            names=(self._names.folded, "name", FOLDED),
        )
        return (*notes, *(() if kernels else (no_kernels,)))

    def _taken(self, table: str, names: Ints, processes: Sequence[_Process]) -> pl.DataFrame:
        """A table with names, processes and devices as a Trace has them."""
        growing = self._tables.pop(table)
        columns = {name: growing.pop(name) for name in _COLUMNS[table]}
        place = columns["process"]
        if table in ON_GPU:
            columns["device"] = _devices(processes, place, columns.pop("agent"))
            if table == "copies":  # to the host: of the GPU that it comes from
                source = _devices(processes, place, columns.pop("source"))
                columns["device"] = np.where(columns["device"] == NO_ID, source, columns["device"])
            columns["graph_node"] = np.full(len(place), NO_ID)
        columns["name"] = names[columns["name"]].astype(np.uint32)
        pids = integers([*(_pid(one, i) for i, one in enumerate(processes)), NO_ID])
        columns["process"] = pids[np.minimum(place, len(processes))]
        return compact(columns)


def _pid(process: _Process, place: int) -> int:
    return process.metadata.pid if process.metadata.pid >= 0 else place


def _numbered(process: _Process) -> dict[int, _Agent]:
    """The GPUs of a process by their numbers."""
    gpus = [agent for agent in process.agents if agent.type == _GPU_AGENT]
    return {
        agent.logical_node_type_id if agent.logical_node_type_id >= 0 else place: agent
        for place, agent in enumerate(gpus)
    }


def _devices(processes: Sequence[_Process], process: Ints, handle: Ints) -> Ints:
    """The number of the GPU of each handle in its process; NO_ID where it is none."""
    known = [(i, agent.id.handle, n) for i, one in enumerate(processes) for n, agent in _numbered(one).items()]
    if not known:
        return np.full(len(handle), NO_ID)
    places, handles, numbers = (integers(list(some)) for some in zip(*known, strict=True))
    row = first_rows((process, handle), (places, handles))
    return np.where(row >= 0, numbers[row], NO_ID)


def _gpus(processes: Sequence[_Process]) -> dict[tuple[int, int], DeviceName]:
    found: dict[tuple[int, int], DeviceName] = {}
    for place, process in enumerate(processes):
        for number, agent in list(_numbered(process).items())[:MOST_GPUS]:
            found.setdefault((_pid(process, place), number), device_name(_described(agent)))
    return found


def _from_zero(table: pl.DataFrame, origin: int) -> pl.DataFrame:
    """By start, of two that start together the enclosing one first; the earliest of all at 0."""
    start, end = table["start_ns"].to_numpy() - origin, table["end_ns"].to_numpy() - origin
    return table.with_columns(start_ns=pl.Series(start), end_ns=pl.Series(end))[np.lexsort((-end, start))]


def _named(names: tuple[str, ...], pattern: re.Pattern[str]) -> pl.Expr:
    return pl.col("name").is_in([place for place, name in enumerate(names) if pattern.match(name)])


def _described(agent: _Agent) -> Described:
    memory = max((bank.size_in_bytes for bank in agent.mem_banks), default=0)
    name = agent.product_name or agent.name
    return Described(name=name, processors=agent.cu_count, memory_bytes=memory, capability="")
