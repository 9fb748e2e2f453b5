"""One Trace, whatever the profiler was: tables of what ran on the GPU, who launched it, and under which op and range.

Times are integers of nanoseconds, the earliest event of the trace at 0. Names are stored once in `names`; tables hold
their index (`name`, u32), because a trace repeats a few hundred long kernel names a million times.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

from flopwise.records.note import Note

LONGEST_NS = 1 << 50  # thirteen days: no event of a trace takes that long, and sums of thousands fit 64 bits
# Every name is matched against some fifty patterns. Real traces hold a few hundred, and hardly a million characters.
MAX_NAMES, MAX_NAMES_CHARACTERS = 50_000, 8_000_000
OTHER_NAMES = "(other names)"
FOLDED = f"beyond the first {MAX_NAMES:,}, or {MAX_NAMES_CHARACTERS:,} characters: called {OTHER_NAMES}"
NO_ID = -1  # a sequence number, thread, correlation or graph node that the trace does not give

_SPAN = {"start_ns": pl.Int64, "end_ns": pl.Int64, "process": pl.Int64}
_HOST = _SPAN | {"thread": pl.Int64, "name": pl.UInt32}
_GPU = _SPAN | {"device": pl.Int32, "stream": pl.Int64}
_CALL = {"correlation": pl.Int64}  # unique within a process
_LINKS = _CALL | {"graph_node": pl.Int64}  # NO_ID outside a CUDA graph

KERNELS = _GPU | {"name": pl.UInt32} | _LINKS
COPIES = _GPU | {"kind": pl.String, "bytes": pl.Int64} | _LINKS  # kind: HtoD, DtoH, DtoD, PtoP, HtoH, memset, other
LAUNCHES = _HOST | _CALL  # runtime and driver API calls that put work on the GPU
GRAPH_LAUNCHES = LAUNCHES  # one call that runs a whole CUDA graph
GRAPH_RUNS = _GPU | _CALL  # a CUDA graph traced as one row, its kernels unknown
SYNCS = _HOST  # calls in which the host waited for the GPU
CALLS = _HOST  # other calls that take the host's time: memory, kernels' code, capture of graphs; see call_names
OPS = _HOST | {
    "sequence": pl.Int64,  # shared by a forward op and its backward node
    "backward": pl.Boolean,  # it runs the gradient of the forward op with the same sequence number
    "forward_thread": pl.Int64,  # where a backward node's forward op ran, if the trace says; else NO_ID
}
RANGES = _HOST | {"kind": pl.String}  # ANNOTATION, MODULE or STEP
ANNOTATION, MODULE, STEP = "annotation", "module", "step"  # record_function and NVTX; nn.Module calls; profiler steps
FRAMES = _HOST  # the user's own Python functions, where stacks were captured
# Where the program was when it captured a node: what a replayed kernel is attributed to.
GRAPH_NODES = {
    "start_ns": pl.Int64,
    "process": pl.Int64,
    "thread": pl.Int64,
    "graph_node": pl.Int64,
    "host": pl.Int64,  # the process that captured it: another one where a trace of the capture was joined
}
CAPTURED = _HOST  # calls that put work into a CUDA graph while it was captured: nothing ran
# Of a trace captured with shapes, as rows of `ops` and places in `shapes` and `inputs`: matmuls, softmaxes and fused
# attention; and ops whose bytes follow from their inputs.
SIZED_OPS = {"op": pl.UInt32, "shape": pl.UInt32}
OP_INPUTS = {"op": pl.UInt32, "inputs": pl.UInt32}
# What a trace says of collectives: of a kernel by its correlation id, of a range by its thread and time.
COLLECTIVE_ARGS: dict[str, Any] = {
    "start_ns": pl.Int64,
    "on": pl.String,  # 'kernel' or 'range'
    "thread": pl.Int64,
    "correlation": pl.Int64,
    "collective": pl.String,  # 'allreduce', '_allgather_base', 'nccl:all_reduce'
    "group": pl.String,
    "description": pl.String,
    "ranks": pl.String,  # '[0, 1]', as written
    "size": pl.Int64,  # of the group; 0: not given
    "sequence": pl.Int64,  # place in the group's order
    "bytes": pl.Int64,  # of the larger of what is given and what is received
    "source": pl.Int64,  # of point-to-point: ranks within the group
    "target": pl.Int64,
}

TABLES: dict[str, dict[str, Any]] = {
    "kernels": KERNELS,
    "copies": COPIES,
    "launches": LAUNCHES,
    "graph_launches": GRAPH_LAUNCHES,
    "graph_runs": GRAPH_RUNS,
    "syncs": SYNCS,
    "ops": OPS,
    "ranges": RANGES,
    "graph_nodes": GRAPH_NODES,
    "frames": FRAMES,
    "calls": CALLS,
    "captured": CAPTURED,
}


@dataclass(frozen=True)
class DeviceName:
    """What a GPU of the trace is called; `note`: how that is known, where not by its own name."""

    name: str = ""
    note: Note | None = None


@dataclass(frozen=True)
class Distributed:
    """The rank that a trace is of, as far as the trace says."""

    rank: int = NO_ID
    world: int = 0  # ranks of the job; 0: not given
    backend: str = ""
    host: str = ""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # ranks of process groups by name


@dataclass(frozen=True)
class Trace:
    """The content of a trace file. Every table is sorted by `start_ns`; durations are never negative."""

    source: str  # 'kineto', 'nsys' or 'rocprof'
    path: str
    names: tuple[str, ...]
    kernels: pl.DataFrame
    copies: pl.DataFrame
    launches: pl.DataFrame
    graph_launches: pl.DataFrame
    graph_runs: pl.DataFrame
    syncs: pl.DataFrame
    ops: pl.DataFrame
    ranges: pl.DataFrame
    graph_nodes: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=GRAPH_NODES))
    frames: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=FRAMES))
    calls: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=CALLS))
    captured: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=CAPTURED))
    sized_ops: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SIZED_OPS))
    shapes: tuple[str, ...] = ("",)  # sizes of an op's inputs, '[[48, 512, 64], [48, 64, 512]]', each text once
    op_inputs: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=OP_INPUTS))
    inputs: tuple[str, ...] = ("",)  # an op's sizes, types, strides and numbers, a list of JSON each; each text once
    python_calls: int = 0  # Python functions recorded, most of which are in no table
    collective_args: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=COLLECTIVE_ARGS))
    distributed: Distributed = Distributed()
    begin_ns: int = 0  # the clock's time at which the tables' times begin; 0: not given
    gpu: str = ""  # the first device's name
    gpus: dict[tuple[int, int], DeviceName] = field(default_factory=dict)  # by process (NO_ID: any) and device
    notes: tuple[Note, ...] = ()  # what was odd in the file: events dropped, tables missing


def of_process(trace: Trace, process: int) -> Trace:
    """The rows of one process and of none; the whole trace if there is no other process, or `process` is not known.

    Rows keep their order, but not their numbers: `sized_ops` and `op_inputs` are left out.
    """
    tables: dict[str, pl.DataFrame] = {name: getattr(trace, name) for name in TABLES}
    mixed = [name for name, table in tables.items() if not table["process"].is_in([process, NO_ID]).all()]
    if not mixed or process == NO_ID:
        return trace
    own: dict[str, Any] = {name: tables[name].filter(pl.col("process").is_in([process, NO_ID])) for name in mixed}
    return replace(trace, **own, sized_ops=pl.DataFrame(schema=SIZED_OPS), op_inputs=pl.DataFrame(schema=OP_INPUTS))
