"""One Trace, whatever the profiler was: tables of what ran on the GPU, who launched it, and under which op and range.

Times are integers of nanoseconds, the earliest event of the trace at 0. Names are stored once in `names`; tables hold
their index (`name`, u32), because a trace repeats a few hundred long kernel names a million times.
"""

from dataclasses import dataclass, field, replace

import polars as pl

NO_ID = -1  # a sequence number, thread, correlation or graph node that the trace does not give

_SPAN = {"start_ns": pl.Int64, "end_ns": pl.Int64}
_HOST = _SPAN | {"process": pl.Int64, "thread": pl.Int64, "name": pl.UInt32}

KERNELS = _SPAN | {
    "process": pl.Int64,  # whose correlation ids they are
    "device": pl.Int32,
    "stream": pl.Int64,
    "name": pl.UInt32,
    "correlation": pl.Int64,
    "graph_node": pl.Int64,  # NO_ID outside a CUDA graph
}
COPIES = _SPAN | {
    "process": pl.Int64,
    "device": pl.Int32,
    "stream": pl.Int64,
    "kind": pl.String,  # HtoD, DtoH, DtoD, PtoP, HtoH, memset, other
    "bytes": pl.Int64,
    "correlation": pl.Int64,
    "graph_node": pl.Int64,
}
LAUNCHES = _HOST | {"correlation": pl.Int64}  # runtime and driver API calls that put work on the GPU
GRAPH_LAUNCHES = _HOST | {"correlation": pl.Int64}  # one call that runs a whole CUDA graph
SYNCS = _HOST  # calls in which the host waited for the GPU
OPS = _HOST | {
    "sequence": pl.Int64,  # shared by a forward op and its backward node
    "backward": pl.Boolean,  # it runs the gradient of the forward op with the same sequence number
    "forward_thread": pl.Int64,  # where a backward node's forward op ran, if the trace says; else NO_ID
}
RANGES = _HOST | {
    "kind": pl.String
}  # 'annotation' (record_function, NVTX), 'module' (nn.Module calls), 'step' (profiler steps)
FRAMES = _HOST  # functions of Python that are the user's own, where stacks were captured
GRAPH_RUNS = _SPAN | {  # a CUDA graph traced as one row, its kernels unknown
    "process": pl.Int64,
    "device": pl.Int32,
    "stream": pl.Int64,
    "correlation": pl.Int64,
}
GRAPH_NODES = {  # where the program was when it captured a node: what a replayed kernel belongs to
    "start_ns": pl.Int64,
    "process": pl.Int64,
    "thread": pl.Int64,
    "graph_node": pl.Int64,
}
SIZED_OPS = {  # matmuls, softmaxes and fused attention of a trace captured with shapes
    "op": pl.UInt32,  # row in `ops`
    "shape": pl.UInt32,  # place in `shapes`
}
OP_INPUTS = {  # ops of a trace captured with shapes whose bytes follow from what they were given
    "op": pl.UInt32,  # row in `ops`
    "inputs": pl.UInt32,  # place in `inputs`
}


@dataclass(frozen=True)
class Trace:
    """What a profiler saw. Every table is sorted by `start_ns`; durations are never negative."""

    source: str  # 'kineto' or 'nsys'
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
    sized_ops: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SIZED_OPS))
    shapes: tuple[str, ...] = ("",)  # sizes of an op's inputs, '[[48, 512, 64], [48, 64, 512]]', each text once
    op_inputs: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=OP_INPUTS))
    inputs: tuple[str, ...] = ("",)  # an op's sizes, types, strides and numbers, a list of JSON each; each text once
    gpu: str = ""  # the first device's name
    notes: tuple[str, ...] = field(
        default=()
    )  # what was odd in the file, one line each (events dropped, tables missing)


def of_process(trace: Trace, process: int) -> Trace:
    """What one process did, and what no process is known for; the whole trace if there is no other, or none is known.

    Rows keep their order, but not their numbers: `sized_ops` and `op_inputs` are left out.
    """
    names = (
        "kernels",
        "copies",
        "launches",
        "graph_launches",
        "graph_runs",
        "syncs",
        "ops",
        "ranges",
        "graph_nodes",
        "frames",
    )
    tables = {name: getattr(trace, name) for name in names}
    others = {name for name, table in tables.items() if not table["process"].is_in([process, NO_ID]).all()}
    if not others or process == NO_ID:
        return trace
    kept = {name: tables[name].filter(pl.col("process").is_in([process, NO_ID])) for name in others}
    kept |= {"sized_ops": pl.DataFrame(schema=SIZED_OPS), "op_inputs": pl.DataFrame(schema=OP_INPUTS)}
    return replace(trace, **kept)
