"""rocprofv3's JSON (`rocprofv3 --output-format json --sys-trace -- python train.py`) into one Trace.

The file holds one object per process: `agents` (CPUs and GPUs), `kernel_symbols`, `strings` (names of calls, by kind and
operation; messages of markers, by correlation id) and `buffer_records`, one list per kind: kernel dispatches, HIP calls, copies,
ROCTx markers. Times are nanoseconds. A dispatch and the HIP call that launched it share `correlation_id.internal`; ops and
modules are in it only as far as the program marked them with ROCTx.

Schema: https://rocm.docs.amd.com/projects/rocprofiler-sdk/en/latest/how-to/using-rocprofv3.html#json-output-schema
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from flopwise.errors import FlopwiseError, one_line
from flopwise.records.note import Note, counted
from flopwise.trace.columns import launching, shaped_tables
from flopwise.trace.gpu_names import MOST_GPUS, Described, device_name
from flopwise.trace.json_text import repaired
from flopwise.trace.kineto_stream import FileBytes, beginning
from flopwise.trace.tables import ANNOTATION, GRAPH_NODES, GRAPH_RUNS, LONGEST_NS, NO_ID, OPS, TABLES, DeviceName, Trace
from flopwise.work.demangle import demangled_names

_TOP = re.compile(rb'^\s*\{\s*"rocprofiler-sdk-tool"\s*:')
_LARGEST_BYTES = 8 << 30  # of a file that is read whole
_TIME_LIMIT = 2**61
_GPU_AGENT = 2  # rocprofiler_agent_type_t
_SYNC = re.compile(r"hip(?:Device|Stream|Event)Synchronize|hipMemcpy(?!.*(?:Async|DtoD|Peer))")
_GRAPH_LAUNCH = re.compile(r"hipGraphLaunch")
_CALLS = ("hip_api", "hip_runtime_api", "hip_api_ext")
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


class _Symbol(msgspec.Struct, gc=False):
    kernel_id: int = NO_ID
    kernel_name: str = ""
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""


class _Kind(msgspec.Struct, gc=False):
    kind: str = ""
    operations: list[str] = []


class _Message(msgspec.Struct, gc=False):
    key: int = NO_ID
    value: str = ""


class _Strings(msgspec.Struct, gc=False):
    buffer_records: list[_Kind] = []
    marker_api: list[_Message] = []


class _Metadata(msgspec.Struct, gc=False):
    pid: int = NO_ID


class _Process(msgspec.Struct, gc=False):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []
    strings: _Strings = msgspec.field(default_factory=_Strings)
    buffer_records: dict[str, msgspec.Raw] = {}


class _File(msgspec.Struct):
    tool: list[_Process] | _Process = msgspec.field(name="rocprofiler-sdk-tool")


_RECORDS = msgspec.json.Decoder(list[_Record])


def is_rocprof(path: Path) -> bool:
    """Whether a `.json` file is rocprofv3's: by how it begins."""
    try:
        return _TOP.match(beginning(path, 1 << 12).removeprefix(b"\xef\xbb\xbf")) is not None
    except FlopwiseError:  # the reader of other files says what is wrong with it
        return False


def read_rocprof(path: str | Path) -> Trace:
    """Read rocprofv3's JSON, plain or gzipped."""
    path = Path(path)
    processes = _decoded(path)
    rows = _Rows()
    for number, process in enumerate(processes):
        rows.add(process, process.metadata.pid if process.metadata.pid >= 0 else number)
    if not rows.has_any():
        hint = "record kernels and calls: rocprofv3 --sys-trace --output-format json -- python train.py"
        raise FlopwiseError(f"{path} has no kernel, copy, call or marker", hint)
    return rows.trace(str(path))


def _decoded(path: Path) -> list[_Process]:
    file, parts = FileBytes(path), []
    try:
        while part := file.read(1 << 24):
            parts.append(part)
            if file.total > _LARGEST_BYTES:
                hint = "trace fewer steps; rocprofv3 itself advises another format for such sizes"
                raise FlopwiseError(f"{path} is larger than {_LARGEST_BYTES >> 30} GiB: refused", hint)
    finally:
        file.close()
    text = b"".join(parts)
    del parts
    try:
        try:
            found = msgspec.json.decode(text, type=_File).tool
        except UnicodeDecodeError:
            found = msgspec.json.decode(repaired(text), type=_File).tool
    except (msgspec.DecodeError, RecursionError) as error:
        again = "copy the whole file again, or record again: a profiler that was killed does not finish its file"
        raise FlopwiseError(f"{path} is not rocprofv3's JSON: {one_line(str(error))}", again) from None
    return found if isinstance(found, list) else [found]


class _Rows:
    """The tables' columns of all processes, as lists."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._tables: dict[str, list[tuple[Any, ...]]] = {name: [] for name in ("kernels", "copies", "calls", "ranges")}
        self._gpus: dict[tuple[int, int], DeviceName] = {}
        self._dropped = self._unreadable = 0

    def has_any(self) -> bool:
        return any(self._tables.values())

    def add(self, process: _Process, pid: int) -> None:
        gpus = [agent for agent in process.agents if agent.type == _GPU_AGENT]
        devices = {
            agent.id.handle: agent.logical_node_type_id if agent.logical_node_type_id >= 0 else place
            for place, agent in enumerate(gpus)
        }
        for agent in gpus[:MOST_GPUS]:
            self._gpus.setdefault((pid, devices[agent.id.handle]), device_name(_described(agent)))
        self._add_device_work(process, pid, devices)
        for record in (one for api in _CALLS for one in self._records(process, api)):
            name = self._number(_operation(process, record) or "(unnamed call)")
            self._tables["calls"].append((*_times(record, pid), record.thread_id, name, record.correlation_id.internal))
        messages = {one.key: one.value for one in process.strings.marker_api}
        for record in self._records(process, "marker_api"):
            if message := messages.get(record.correlation_id.internal):
                self._tables["ranges"].append(
                    (*_times(record, pid), record.thread_id, self._number(message), ANNOTATION)
                )

    def _add_device_work(self, process: _Process, pid: int, devices: dict[int, int]) -> None:
        symbols = {one.kernel_id: _kernel_name(one) for one in process.kernel_symbols}
        for record in self._records(process, "kernel_dispatch"):
            dispatch = record.dispatch_info
            where = (devices.get(dispatch.agent_id.handle, NO_ID), _stream(record))
            name = self._number(symbols.get(dispatch.kernel_id, "(unnamed kernel)"))
            self._tables["kernels"].append((*_times(record, pid), *where, name, record.correlation_id.internal, NO_ID))
        for record in self._records(process, "memory_copy"):
            agent = record.dst_agent_id.handle if record.dst_agent_id.handle in devices else record.src_agent_id.handle
            kind = _copy_kind(_operation(process, record))
            row = (*_times(record, pid), devices.get(agent, NO_ID), _stream(record), kind, max(record.bytes, 0))
            self._tables["copies"].append((*row, record.correlation_id.internal, NO_ID))

    def _records(self, process: _Process, kind: str) -> list[_Record]:
        """The records of a kind that have a time."""
        try:
            found = _RECORDS.decode(process.buffer_records.get(kind, b"[]"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._unreadable += 1
            return []
        usable = [
            one
            for one in found
            if 0 < one.start_timestamp <= one.end_timestamp < min(_TIME_LIMIT, one.start_timestamp + LONGEST_NS)
        ]
        self._dropped += len(found) - len(usable)
        return usable

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def trace(self, path: str) -> Trace:
        names = demangled_names(self._names)
        schemas: dict[str, dict[str, Any]] = {name: TABLES[name] for name in ("kernels", "copies", "ranges")}
        tables = {
            name: pl.DataFrame(self._tables.pop(name), schema=schema, orient="row") for name, schema in schemas.items()
        }
        calls = pl.DataFrame(self._tables.pop("calls"), schema=TABLES["launches"], orient="row")
        origin = min(int(table["start_ns"].to_numpy().min()) for table in (*tables.values(), calls) if table.height)
        tables = {name: _from_zero(table, origin) for name, table in tables.items()}
        calls = _from_zero(calls, origin)
        graphs, syncs = (_named(names, pattern) for pattern in (_GRAPH_LAUNCH, _SYNC))
        tables |= {
            "launches": launching(calls.filter(~graphs), [tables["kernels"], tables["copies"]]),
            "graph_launches": calls.filter(graphs),
            "graph_runs": pl.DataFrame(schema=GRAPH_RUNS),
            "syncs": calls.filter(syncs),
            "ops": pl.DataFrame(schema=OPS),
            "graph_nodes": pl.DataFrame(schema=GRAPH_NODES),
        }
        no_kernels = Note("no_kernels", "no kernel: nothing ran on the GPU, or rocprofv3 ran without --kernel-trace")
        notes = counted(
            dropped=(self._dropped, "record", "without a usable time or of a negative duration: dropped"),
            unreadable=(self._unreadable, "list", "of records not as rocprofv3 writes them: not read"),
        )
        some = () if tables["kernels"].height else (no_kernels,)
        first = next(iter(self._gpus.values()), DeviceName())
        called: dict[str, Any] = {"gpu": first.name, "gpus": self._gpus}
        return Trace(source="rocprof", path=path, names=names, **shaped_tables(tables), **called, notes=(*notes, *some))


def _from_zero(table: pl.DataFrame, origin: int) -> pl.DataFrame:
    """By start, of two that start together the enclosing one first; the earliest of all at 0."""
    start, end = table["start_ns"].to_numpy() - origin, table["end_ns"].to_numpy() - origin
    return table.with_columns(start_ns=pl.Series(start), end_ns=pl.Series(end))[np.lexsort((-end, start))]


def _named(names: tuple[str, ...], pattern: re.Pattern[str]) -> pl.Expr:
    return pl.col("name").is_in([place for place, name in enumerate(names) if pattern.match(name)])


def _times(record: _Record, pid: int) -> tuple[int, int, int]:
    return record.start_timestamp, record.end_timestamp, pid


def _stream(record: _Record) -> int:
    """The HIP stream, where it was recorded; else the queue."""
    stream = record.stream_id.handle
    return stream if stream > 0 else record.dispatch_info.queue_id.handle


def _operation(process: _Process, record: _Record) -> str:
    """The name of what a record is of: `hipLaunchKernel`, `MEMORY_COPY_HOST_TO_DEVICE`."""
    kind, operation = record.kind, record.operation
    if isinstance(operation, str):
        return operation
    kinds = process.strings.buffer_records
    if isinstance(kind, str):
        known = next((one for one in kinds if one.kind == kind), None)
    else:
        known = kinds[kind] if 0 <= kind < len(kinds) else None
    return known.operations[operation] if known is not None and 0 <= operation < len(known.operations) else ""


def _copy_kind(operation: str) -> str:
    return next((kind for words, kind in _COPY_KINDS.items() if words in operation), "other")


def _kernel_name(symbol: _Symbol) -> str:
    """As people write it, with template arguments; the formatted name may be cut."""
    return symbol.demangled_kernel_name or symbol.formatted_kernel_name or symbol.kernel_name or "(unnamed kernel)"


def _described(agent: _Agent) -> Described:
    memory = max((bank.size_in_bytes for bank in agent.mem_banks), default=0)
    name = agent.product_name or agent.name
    return Described(name=name, processors=agent.cu_count, memory_bytes=memory, capability="")
