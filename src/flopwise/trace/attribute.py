"""Attribution of every kernel: kernel → launch → op → forward op → module, and the phase of the step it belongs to.

A kernel is tied to the call that launched it by (process, correlation), and the call to the ops and ranges that were open on
its thread at that time; the kernel of a replayed CUDA graph to those at the capture of its node, where the trace holds it.
Autograd launches from a thread of its own, so a backward kernel is traced back through the sequence number of its node to the
forward op, and takes that op's modules and ranges. The GPU-side copies of annotations (`gpu_user_annotation`) are not used:
they know nothing of the autograd thread.

Phases, the first rule that holds:
1. Inside a backward node: 'backward'; but 'recompute' under a forward op or range nested in it (checkpointing), and
   'optimizer' under an optimizer range nested in it (a step taken in a gradient hook).
2. Inside a range named after a phase on the launching thread (forward, loss, backward, optimizer, Optimizer.step#…): that one;
   but 'forward' under an op that autograd recorded inside the optimizer's (its closure runs the model).
3. On an autograd thread, or on a thread without ops while another thread of the process is in a 'backward' range: 'backward'.
4. By op: cross-entropy and its kin: 'loss'; fused and foreach optimizer ops: 'optimizer'; an op that autograd recorded, or
   any op of a trace without gradients and phase ranges (inference): 'forward'.
Within 'forward', loss ops and loss kernels are 'loss'. A kernel that only an optimizer has is 'optimizer' where nothing else
is known. Everything else is 'other'; so is the work of a CUDA graph whose capture the trace does not hold, unless an op
launched it, as compiled code does: the range around a replay says nothing of what the graph holds. Its op and modules are
unknown, and its phase is known only by the names of loss and optimizer kernels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise.trace.columns import first_rows
from flopwise.trace.host import Host, Points, Scopes
from flopwise.trace.nesting import Flags, Ints
from flopwise.trace.phases import BACKWARD, FORWARD, LOSS, OPTIMIZER, OTHER, PHASES, RECOMPUTE
from flopwise.trace.tables import NO_ID, Trace
from flopwise.work import kernel_class
from flopwise.work.operation import CLASSES
from flopwise.work.operation import LOSS as LOSS_KERNEL
from flopwise.work.operation import OPTIMIZER as OPTIMIZER_KERNEL

ATTRIBUTED = ("launch", "graph", "unattributed")
SOURCES = ("kernel", "copy", "graph run")  # which table of the Trace `index` counts in
GRAPH_RUN = "CUDA graph"  # the name of a graph traced as one row
_CODE = {phase: code for code, phase in enumerate(PHASES)}
_HOPS = 2  # a backward node inside a recomputed block leads to the recomputation, and that to the first forward


@dataclass(frozen=True)
class Coverage:
    """Shares of GPU time, 0 to 1 (of 1 where nothing ran)."""

    launch: float  # its launch is in the trace
    op: float
    phase: float  # with a phase other than 'other'
    module: float  # inside a module, a compiled graph or an annotation of the user's
    range: float  # inside any range, that of a phase included


@dataclass(frozen=True)
class Attribution:
    """One row per kernel, copy and CUDA graph traced as one row, by start.

    process, source, index (in the Trace's table), start_ns, duration_ns, device, stream, name; launch_thread, launch_ns;
    op (innermost), op_index (its row in the Trace's ops), top_op, forward_op (of backward work); module (innermost), path
    (of ranges, outer to inner, '/' between, without steps and phases); phase, class, attributed; replayed (by a CUDA graph whose
    capture the trace does not hold). What is not known is null. `class` is never null, nor is `phase`.
    """

    table: pl.DataFrame
    coverage: Coverage


def attribute(trace: Trace) -> Attribution:
    """Find for everything that ran on the GPU what launched it, and in which phase and module."""
    work = _work(trace)
    host = Host(trace)
    at = host.points(work["from_process"], work["from_thread"], work["from_ns"])
    ops = host.ops()
    op, top = ops.innermost(at.lane, at.time), ops.outermost().innermost(at.lane, at.time)
    replayed = ((work["attributed"] == "graph") & ~work["captured"]).to_numpy() & (op < 0)
    at.lane[replayed] = -1  # the program was elsewhere when it asked for this
    work = work.drop("from_process", "from_thread", "from_ns", "captured")
    above = {"op": _name(host, op), "top_op": _name(host, top)}
    del ops, top
    node = host.backward.innermost(at.lane, at.time)
    marked = host.phases.innermost(at.lane, at.time)
    in_loss = host.losses.innermost(at.lane, at.time) >= 0
    phase = phase_codes(host, at, op, node, marked, in_loss)
    kind = _class(work, host, op, phase)
    phase = _refined(work, phase, kind, in_loss)
    forward = host.forward_of(node)
    scope = scope_at(host, at, node, forward)
    ranged = (scope >= 0) | (marked >= 0)
    del node, marked, in_loss
    above["forward_op"] = _name(host, forward)
    op_index = host.op_rows(op)
    del at, op, forward
    module, path = Scopes(host).of(scope)
    del host, scope  # millions of spans: their memory serves the table
    names = pl.Series([*trace.names, None], dtype=pl.Categorical)
    ops_above = {column: names.gather(number).alias(column) for column, number in above.items()}
    table = work.with_columns(
        *ops_above.values(),
        pl.Series("op_index", op_index.astype(np.uint32)).set(pl.Series(op_index < 0), None),
        module,
        path,
        pl.Series("phase", PHASES, dtype=pl.Enum(PHASES)).gather(phase),
        _refined_class(kind, [ops_above["top_op"], ops_above["forward_op"], module]),
        pl.Series("replayed", replayed),
    )
    return Attribution(table, _coverage(table, ranged))


def _work(trace: Trace) -> pl.DataFrame:
    """Everything that ran on the GPU, with the call that launched it."""
    kinds = ("HtoD", "DtoH", "DtoD", "PtoP", "HtoH", "memset", "other")
    copy_names = ["Memset" if kind == "memset" else f"Memcpy {kind}" for kind in kinds]
    first = len(trace.names)
    numbers = {kind: first + number for number, kind in enumerate(kinds)}
    copies = trace.copies.with_columns(
        name=pl.col("kind").replace_strict(numbers, default=numbers["other"], return_dtype=pl.UInt32)
    )
    graphs = trace.graph_runs.with_columns(
        name=pl.lit(first + len(kinds), pl.UInt32), graph_node=pl.lit(NO_ID, pl.Int64)
    )
    tables = (trace.kernels, copies, graphs)
    order = _order([np.concatenate([t[name].to_numpy() for t in tables]) for name in ("start_ns", "device", "stream")])

    def column(name: str) -> Any:
        return np.concatenate([table[name].to_numpy() for table in tables])[order]

    heights = [table.height for table in tables]
    source = np.repeat(np.arange(len(tables), dtype=np.uint8), heights)[order]
    index = np.concatenate([np.arange(height, dtype=np.uint32) for height in heights])[order]
    start, process = column("start_ns"), column("process")
    names = pl.Series("name", [*trace.names, *copy_names, GRAPH_RUN], dtype=pl.Categorical)
    work = pl.DataFrame(
        [
            pl.Series("process", process),
            pl.Series("source", SOURCES, dtype=pl.Enum(SOURCES)).gather(source),
            pl.Series("index", index),
            pl.Series("start_ns", start),
            pl.Series("duration_ns", column("end_ns") - start),
            pl.Series("device", column("device")),
            pl.Series("stream", column("stream")),
            names.gather(column("name")),
        ]
    )
    calls = _calls(trace, process, column("correlation"))
    return work.with_columns(*calls, *_origin(trace, process, column("graph_node"), calls))


def _order(keys: list[Any]) -> Ints:
    """By the first key, then the next; rows that tie in all keep their order. Keys that are the same in all rows cost nothing."""
    varying = [key for key in keys if len(key) and (key != key[0]).any()]
    return np.lexsort(varying[::-1]) if varying else np.arange(len(keys[0]))


def _calls(trace: Trace, process: Ints, correlation: Ints) -> list[pl.Series]:
    """The launch of each correlation id; where a runtime call and the driver call in it share one, the outer."""
    both = (trace.launches, trace.graph_launches)

    def column(name: str) -> Ints:
        return np.concatenate([table[name].to_numpy() for table in both])

    start = column("start_ns")
    order = np.lexsort((-column("end_ns"), start))
    known = order[column("correlation")[order] > 0]
    row = first_rows((process, correlation), (column("process")[known], column("correlation")[known]))
    launched = row >= 0
    row = known[row] if len(known) else row
    how = np.where(launched, np.where(row < trace.launches.height, 0, 1), 2)
    return [
        pl.Series("attributed", ATTRIBUTED, dtype=pl.Enum(ATTRIBUTED)).gather(how),
        _or_null("launch_thread", column("thread"), row, launched),
        _or_null("launch_ns", start, row, launched),
    ]


def _origin(trace: Trace, process: Ints, node: Ints, calls: list[pl.Series]) -> list[pl.Series]:
    """Where the program was when it asked for the work: at the launch; of a graph's node at its capture, where ops and ranges
    are: the launch of the whole graph has none for each."""
    _, thread, time = calls
    nodes = trace.graph_nodes.filter(pl.col("graph_node") != NO_ID)
    row = first_rows((process, node), (nodes["process"].to_numpy(), nodes["graph_node"].to_numpy()))
    captured, by = row >= 0, pl.Series(process)
    if captured.any():
        at = pl.Series(captured)
        by = pl.Series(nodes["host"].to_numpy()[row]).zip_with(at, by)
        thread = _or_null("thread", nodes["thread"].to_numpy(), row, captured).zip_with(at, thread)
        time = _or_null("time", nodes["start_ns"].to_numpy(), row, captured).zip_with(at, time)
    return [
        by.alias("from_process"),
        thread.alias("from_thread"),
        time.alias("from_ns"),
        pl.Series("captured", captured),
    ]


def _or_null(name: str, values: Ints, rows: Ints, known: Flags) -> pl.Series:
    if not len(values):
        return pl.Series(name, [None], dtype=pl.Int64).new_from_index(0, len(rows))
    column = pl.Series(name, values[rows])
    return column if known.all() else column.set(pl.Series(~known), None)


def _name(host: Host, positions: Ints) -> NDArray[np.uint32]:
    """The names' numbers; one past the last name where there is no span."""
    nothing = np.uint32(len(host.names))
    if len(host.name) == 0:
        return np.full(len(positions), nothing)
    return np.where(positions >= 0, host.name[positions], nothing)


def scope_at(host: Host, at: Points, node: Ints, forward: Ints) -> Ints:
    """The innermost scope of each piece of work: the launch's own, unless it is backward work; of that the one opened inside
    the node (a compiled graph, a recomputed module), else the forward op's, else whatever the launching thread was in."""
    own = host.scopes.innermost(at.lane, at.time)
    scope = np.where((node < 0) | (own > node), own, -1)
    for _ in range(_HOPS):
        lead = np.flatnonzero((scope < 0) & (forward >= 0))
        if len(lead) == 0:
            break
        origin = host.at_start(forward[lead])
        scope[lead] = host.scopes.innermost(origin.lane, origin.time)
        forward = forward.copy()
        forward[lead] = host.forward_of(host.backward.innermost(origin.lane, origin.time))
    return np.where(scope < 0, own, scope)


def phase_codes(host: Host, at: Points, op: Ints, node: Ints, marked: Ints, in_loss: Flags) -> Ints:
    """Codes of PHASES by the rules above, without the kernels' own names."""
    by_range = np.where(marked >= 0, host.phase[marked], np.int8(-1)) if len(host.phase) else marked
    forward = host.forward.innermost(at.lane, at.time)
    lane = np.maximum(at.lane, 0)
    elsewhere = np.zeros(len(lane), dtype=bool)
    without_ops = np.flatnonzero(~host.lanes_with_ops[lane]) if len(host.lanes) else np.empty(0, np.int64)
    elsewhere[without_ops] = host.inside_backward_range(Points(at.lane[without_ops], at.time[without_ops]))
    autograd = host.autograd_lanes[lane] & (at.lane >= 0) if len(host.lanes) else elsewhere
    nested = marked > node  # the range was opened inside the node
    again = (forward > node) | (nested & np.isin(by_range, (_CODE[FORWARD], _CODE[LOSS], _CODE[RECOMPUTE])))
    rules = [
        ((node >= 0) & nested & (by_range == _CODE[OPTIMIZER]), OPTIMIZER),
        ((node >= 0) & again, RECOMPUTE),
        (node >= 0, BACKWARD),
        ((by_range == _CODE[OPTIMIZER]) & (forward > marked), FORWARD),
        *((by_range == _CODE[phase], phase) for phase in PHASES),
        (autograd | elsewhere, BACKWARD),
        (in_loss, LOSS),
        (host.optimizers.innermost(at.lane, at.time) >= 0, OPTIMIZER),
        ((forward >= 0) | ((op >= 0) & host.only_ops), FORWARD),
    ]
    codes = [np.int8(_CODE[phase]) for _, phase in rules]
    return np.select([holds for holds, _ in rules], codes, np.int8(_CODE[OTHER]))


def _refined(work: pl.DataFrame, phase: Ints, kind: pl.Series, in_loss: Flags) -> Ints:
    """By the kernels' own names: the loss inside the forward pass, the optimizer where nothing else is known."""
    is_loss = (kind == LOSS_KERNEL).to_numpy() | in_loss
    is_optimizer = (kind == OPTIMIZER_KERNEL).to_numpy()
    in_graph = (work["attributed"] == "graph").to_numpy()
    loose = (phase == _CODE[OTHER]) | in_graph
    phase = np.where((phase == _CODE[FORWARD]) & is_loss, _CODE[LOSS], phase)
    rows = np.flatnonzero(in_graph & (phase == _CODE[OTHER]) & is_loss)
    gradients = work["name"][rows].cast(pl.String).str.contains("(?i)backward|bwd").to_numpy()
    phase[rows[~gradients]] = _CODE[LOSS]
    return np.where(loose & is_optimizer, _CODE[OPTIMIZER], phase)


def _class(work: pl.DataFrame, host: Host, op: Ints, phase: Ints) -> pl.Series:
    """Each distinct (name, op, in the optimizer or not) is classified once."""
    ops = [*host.names, ""]
    keys = work["name"].to_physical().to_numpy().astype(np.int64)
    keys *= 2 * len(ops)
    keys += 2 * _name(host, op)
    keys += phase == _CODE[OPTIMIZER]
    cases, first, which = np.unique(keys, return_index=True, return_inverse=True)
    texts = work["name"][first].cast(pl.String)
    kinds = [
        kernel_class.classify(text, ops[case // 2 % len(ops)], OPTIMIZER if case % 2 else "")
        for text, case in zip(texts, cases.tolist(), strict=True)
    ]
    return pl.Series("class", kinds, dtype=pl.Enum(CLASSES)).gather(which)


def _refined_class(kind: pl.Series, around: list[pl.Series]) -> pl.Series:
    """Where neither the kernel's name nor its op tells the class: by the ops further out, then by the module."""
    unknown = (kind == OTHER).arg_true()
    if not len(unknown):
        return kind
    rows = pl.DataFrame([column.gather(unknown).cast(pl.String).fill_null("") for column in around])
    cases = {case: kernel_class.class_around(case[:-1], case[-1]) for case in rows.unique().iter_rows()}
    return kind.scatter(unknown, pl.Series([cases[row] for row in rows.iter_rows()], dtype=kind.dtype))


def _coverage(table: pl.DataFrame, ranged: Flags) -> Coverage:
    spent = table["duration_ns"].to_numpy()
    total = int(spent.sum())

    def share(known: pl.Series | Flags) -> float:
        flags = known.to_numpy() if isinstance(known, pl.Series) else known
        return float(spent[flags].sum()) / total if total else 1.0

    return Coverage(
        launch=share(table["attributed"] != "unattributed"),
        op=share(table["op"].is_not_null()),
        phase=share(table["phase"] != OTHER),
        module=share(table["module"].is_not_null()),
        range=share(ranged),
    )
