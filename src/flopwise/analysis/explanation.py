"""Where the time of a step went: GPU time by phase, class and module, the top kernels, idle time by cause."""

import re
from statistics import median

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.attention import AttentionParts, attention_parts
from flopwise.analysis.idle import LATE_LAUNCH, SYNCHRONISATION, Idle, idle
from flopwise.analysis.steps import Steps, find_steps, launch_times
from flopwise.errors import FlopwiseError
from flopwise.records import Point
from flopwise.trace.attribute import attribute
from flopwise.trace.matmul_precision import matmul_precision
from flopwise.trace.phases import BACKWARD, FORWARD, LOSS, OPTIMIZER, RECOMPUTE
from flopwise.trace.tables import NO_ID, Trace, of_process
from flopwise.work import MATMUL

LAUNCH_BOUND = 0.2  # of the window idle because the host launched late
_LAYER = re.compile(r"(?<=[._/])\d+(?=[._/]|$)|(?<=_)\d+$")


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time of one kind of work, per step."""

    name: str
    gpu_ns: float
    share: float
    count: float  # kernels and copies, per step


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel, by its full name, per step."""

    name: str
    kind: str
    gpu_ns: float
    share: float
    count: float
    mean_ns: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says about its steps. Times are nanoseconds of one step, unless named otherwise."""

    path: str
    source: str
    gpu: str
    steps: int
    steps_found_by: str
    gpu_ns: float  # durations added up
    busy_ns: float  # at least one stream at work
    window_ns: float  # from the first mark of the steps (without marks, their first work) to their end
    idle: Idle  # of all steps
    phases: tuple[Share, ...]
    classes: tuple[Share, ...]
    phase_classes: dict[str, dict[str, float]]
    modules: tuple[Share, ...]
    kernels: tuple[Kernel, ...]
    top_forward: Kernel | None
    top_forward_backward: Kernel | None
    matmul_share: dict[
        str, float
    ]  # of 'inference', where the trace holds nothing else; of 'forward' and the whole 'step'
    matmul_precision: dict[str, float]  # share of the matmul time by what the kernels' names say
    attention: AttentionParts  # of the forward pass
    attention_backward: AttentionParts
    launches: float  # per step
    launch_bound: bool
    verdict: str
    coverage: dict[str, float]
    host_ns: dict[str, float] = {}  # wall time of the untraced step and its phases, where it was measured
    notes: tuple[str, ...]


def explain_trace(trace: Trace, untraced: Point | None = None) -> Explanation:
    """Answer for one trace. Work launched outside the steps found is left out, and counted in the notes.

    `untraced`: the same workload measured without a profiler, to set its clock beside the trace's.
    """
    if not trace.kernels.height and not trace.graph_runs.height:
        raise FlopwiseError(f"{trace.path} has no GPU work in it", "was it captured on a GPU, with CUDA activity on?")
    attribution = attribute(trace)
    device, process, everywhere = _busiest(attribution.table)
    mine = of_process(trace, process)
    steps = find_steps(mine, everywhere)
    inside = pl.Series(steps.of(launch_times(everywhere)) >= 0)
    work = everywhere.filter(inside)
    if not work.height:
        raise FlopwiseError(
            f"{trace.path}: no GPU work falls into the steps found ({steps.how})", "is the trace cut off?"
        )
    low, high = _window(steps, work, everywhere.filter(~inside))
    if high <= low:
        raise FlopwiseError(
            f"{trace.path}: its GPU work takes no time at all", "is the trace cut off, or its clock too coarse?"
        )
    waiting = idle(mine, low, high, device)
    n = len(steps)
    launches = work.select(pl.struct("launch_thread", "launch_ns").filter(pl.col("launch_ns").is_not_null())).n_unique()
    work = _parts(_with_shapes(work, trace))
    forward = work.filter(pl.col("phase").is_in([FORWARD, LOSS]))
    both = work.filter(pl.col("phase").is_in([FORWARD, LOSS, BACKWARD]))
    bound, verdict = _verdict(waiting, high - low)
    return Explanation(
        path=trace.path,
        source=trace.source,
        gpu=trace.gpu,
        steps=n,
        steps_found_by=steps.how,
        gpu_ns=_sum(work) / n,
        busy_ns=(high - low - waiting.total_ns) / n,
        window_ns=(high - low) / n,
        idle=waiting,
        phases=_shares(work, "phase", n),
        classes=_shares(work, "class", n),
        phase_classes=_matrix(work, n),
        modules=_shares(_with_folded_modules(work), "module", n),
        kernels=_kernels(work, n),
        top_forward=next(iter(_kernels(forward, n)), None),
        top_forward_backward=next(iter(_kernels(both, n)), None),
        matmul_share=_matmul_shares(work, forward),
        matmul_precision=_precisions(work),
        attention=attention_parts(work.filter(pl.col("phase") == FORWARD), trace.shapes, n),
        attention_backward=attention_parts(work.filter(pl.col("phase") == BACKWARD), trace.shapes, n),
        launches=launches / n,
        launch_bound=bound,
        verdict=verdict,
        coverage={name: getattr(attribution.coverage, name) for name in ("launch", "op", "phase", "module", "range")},
        host_ns={t.phase: float(median(t.wall_ns)) for t in untraced.phases if t.wall_ns} if untraced else {},
        notes=trace.notes + _left_out(steps, attribution.table, everywhere, int((~inside).sum())),
    )


def _busiest(work: pl.DataFrame) -> tuple[int, int, pl.DataFrame]:
    """The device and the process that kept it busiest, and their work: steps of several at once would not add up to one."""
    spent = work.group_by("device", "process").agg(pl.col("duration_ns").sum())
    if spent.height == 1:
        return int(spent["device"][0]), int(spent["process"][0]), work
    device, process, _ = spent.sort("duration_ns", "device", "process").row(-1)
    return device, process, work.filter(pl.col("device") == device, pl.col("process").is_in([process, NO_ID]))


def _window(steps: Steps, work: pl.DataFrame, other: pl.DataFrame) -> tuple[int, int]:
    """From the first work of the steps to the last; of marked steps from the first mark to the end of the last, or of its work.

    A host that runs ahead opens a step while the GPU still has earlier work: the step begins when that is done.
    """
    first = int(work["start_ns"].to_numpy().min())
    last = int((work["start_ns"] + work["duration_ns"]).to_numpy().max())
    if steps.marked_ns is None:
        return first, last
    opened, closed = steps.marked_ns
    earlier = other.filter(pl.col("start_ns") < first)
    done = int((earlier["start_ns"] + earlier["duration_ns"]).to_numpy().max(initial=opened))
    return min(first, max(opened, done)), max(last, closed)


def _with_shapes(work: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """The number of the sizes of each row's op (0: not given), and a 1 in `ops` at the first row of an op that has them."""
    if not trace.sized_ops.height:
        return work.with_columns(shape=pl.lit(0, pl.UInt32), ops=pl.lit(0, pl.UInt32))
    of_op = np.zeros(trace.ops.height + 1, dtype=np.uint32)  # the last: work without an op
    of_op[trace.sized_ops["op"].to_numpy()] = trace.sized_ops["shape"].to_numpy()
    op = work["op_index"].fill_null(trace.ops.height).to_numpy()
    shape = of_op[op]
    rows = np.flatnonzero(shape)
    ops = np.zeros(len(op), dtype=np.uint32)
    ops[rows[np.unique(op[rows], return_index=True)[1]]] = 1
    return work.with_columns(pl.Series("shape", shape), pl.Series("ops", ops))


def _parts(work: pl.DataFrame) -> pl.DataFrame:
    """The work added up by all that is asked of it: what follows is sums over thousands of rows and not over millions."""
    telling = ["source", "phase", "class", "name", "op", "module", "path"]
    sums = [pl.col("duration_ns").sum(), pl.len().alias("count"), pl.col("ops").sum()]
    added = work.select(*telling, "shape", "ops", "duration_ns").group_by(*telling, "shape").agg(sums)
    return added.with_columns(pl.col(telling).cast(pl.String))


def _left_out(steps: Steps, everything: pl.DataFrame, mine: pl.DataFrame, outside: int) -> tuple[str, ...]:
    """What the trace holds besides the work that is explained."""
    n_devices, n_processes = (everything[column].n_unique() for column in ("device", "process"))
    notes = [f"{outside} pieces of GPU work were launched outside the steps and are left out"] if outside else []
    notes += [f"marked steps that launched no GPU work, not counted: {steps.n_empty}"] if steps.n_empty else []
    notes += [f"{n_devices} devices worked; this is device {mine['device'][0]}, the busiest"] if n_devices > 1 else []
    notes += [f"{n_processes} processes used the GPU; this is the busiest"] if n_processes > 1 else []
    return tuple(notes)


def _verdict(waiting: Idle, window_ns: int) -> tuple[bool, str]:
    late = waiting.by_cause_ns[LATE_LAUNCH] / window_ns
    waited = waiting.by_cause_ns[SYNCHRONISATION] / window_ns
    idle_share = waiting.total_ns / window_ns
    causes = f"{late:.0%} because the host launched late, {waited:.0%} after the host had waited"
    parts = f"idle {idle_share:.0%} of the time: {causes}"
    if late >= LAUNCH_BOUND:
        return True, f"launch-bound: the GPU is {parts}"
    if idle_share >= LAUNCH_BOUND:
        return False, f"the GPU is {parts}"
    return False, f"GPU-bound: the GPU is busy {1 - idle_share:.0%} of the time"


def _sum(work: pl.DataFrame) -> int:
    return int(work["duration_ns"].sum())


def _shares(work: pl.DataFrame, column: str, n: int) -> tuple[Share, ...]:
    total = max(_sum(work), 1)
    rows = (
        work.group_by(column)
        .agg(pl.col("duration_ns", "count").sum())
        .sort("duration_ns", column, descending=[True, False])
    )
    return tuple(
        Share(name=str(name or ""), gpu_ns=ns / n, share=ns / total, count=count / n)
        for name, ns, count in rows.iter_rows()
    )


def _matrix(work: pl.DataFrame, n: int) -> dict[str, dict[str, float]]:
    matrix: dict[str, dict[str, float]] = {}
    for phase, kind, ns in (
        work.group_by("phase", "class").agg(pl.col("duration_ns").sum()).sort("phase", "class").iter_rows()
    ):
        matrix.setdefault(phase, {})[kind] = ns / n
    return matrix


def _kernels(work: pl.DataFrame, n: int) -> tuple[Kernel, ...]:
    """By name; of a name in several classes, the class it is in most often."""
    total = max(_sum(work), 1)
    by_class = (
        work.filter(pl.col("source") == "kernel")
        .group_by("name", "class")
        .agg(pl.col("duration_ns", "count").sum())
        .sort("count", "class", descending=[True, False])
    )
    rows = (
        by_class.group_by("name", maintain_order=True)
        .agg(pl.col("class").first(), pl.col("duration_ns", "count").sum())
        .sort("duration_ns", "name", descending=[True, False])
    )
    return tuple(
        Kernel(name=name, kind=kind, gpu_ns=ns / n, share=ns / total, count=count / n, mean_ns=ns / count)
        for name, kind, ns, count in rows.iter_rows()
    )


def _matmul_shares(work: pl.DataFrame, forward: pl.DataFrame) -> dict[str, float]:
    """A trace with a forward pass and nothing that trains is of inference; its matmuls then have one share."""
    training = work["phase"].is_in([BACKWARD, RECOMPUTE, OPTIMIZER]).any()
    if forward.height and not training:
        return {"inference": _matmul_share(work)}
    return {"forward": _matmul_share(forward), "step": _matmul_share(work)}


def _matmul_share(work: pl.DataFrame) -> float:
    return _sum(work.filter(pl.col("class") == MATMUL)) / max(_sum(work), 1)


def _precisions(work: pl.DataFrame) -> dict[str, float]:
    """The matmuls' time by precision, as far as the names say."""
    matmuls = work.filter(pl.col("class") == MATMUL)
    spent: dict[str, int] = {}
    for name, ns in matmuls.group_by("name").agg(pl.col("duration_ns").sum()).iter_rows():
        found = matmul_precision(name)
        where = (
            ""
            if found is None or found.tensor_cores is None
            else " tensor cores"
            if found.tensor_cores
            else " CUDA cores"
        )
        label = f"{found.precision}{where}" if found else "unknown"
        spent[label] = spent.get(label, 0) + ns
    total = max(_sum(matmuls), 1)
    return {label: ns / total for label, ns in sorted(spent.items(), key=lambda item: (-item[1], item[0]))}


def _with_folded_modules(work: pl.DataFrame) -> pl.DataFrame:
    """Each distinct module is folded once: a trace has millions of rows and hundreds of modules."""
    distinct = work["module"].unique().drop_nulls()
    folded = {module: _folded(module) for module in distinct}
    return work.with_columns(pl.col("module").replace_strict(folded, default="", return_dtype=pl.String))


def _folded(module: str) -> str:
    """The same module of every layer under one name.

    >>> _folded("blocks.11.attention.q")
    'blocks.*.attention.q'
    """
    return _LAYER.sub("*", module)
