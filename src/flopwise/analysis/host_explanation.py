"""Where the host's time of a step went, of a trace without GPU work: by phase, module and op, as self time of one thread."""

import re
from collections.abc import Iterator
from statistics import median

import msgspec
import polars as pl

from flopwise import units
from flopwise.analysis.details import optimizer_classes
from flopwise.analysis.explanation import host_clock
from flopwise.analysis.host_activity import loading_ranges
from flopwise.analysis.intervals import covered_within
from flopwise.analysis.reach import Reach
from flopwise.analysis.shares import folded_module
from flopwise.analysis.steps import Steps, find_steps
from flopwise.analysis.verdict import BOUND
from flopwise.errors import FlopwiseError
from flopwise.records.finding import Finding
from flopwise.records.note import Note
from flopwise.records.printed import Printed
from flopwise.records.run import STEP, Point
from flopwise.trace.host_time import host_time
from flopwise.trace.tables import Trace, of_process
from flopwise.work.catalogue import operation
from flopwise.work.operation import ATTENTION, MATMUL, OTHER
from flopwise.work.recorded import BETWEEN

LOADING = "data loading"  # a phase here: the host fetches the next batch
NO_KERNELS = "no_kernels"  # the key of a note of the trace
OUTSIDE = "(outside every op)"  # Python, and whatever calls no op
DATA_BOUND, PYTHON_BOUND, OP_BOUND = "data", "python", "ops"
_BUSY_THREAD = 0.05  # of the step: another thread that does more is named
_NODE = re.compile(
    r"^(torch::)?autograd::|^\w+$"
)  # autograd's nodes and calls: their self time is dispatch, not arithmetic
_COMPILED = re.compile(r"^Torch-Compiled Region|^## Call CompiledFxGraph")
_FUSED_OPTIMIZER = re.compile(r"_fused_(adam|sgd|adagrad)")


class HostShare(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of one phase or module on the thread that is explained, per step."""

    name: str
    wall_ns: float
    outside_ns: float  # of it, outside every op
    share: float


class HostOp(msgspec.Struct, frozen=True, kw_only=True):
    """One op, per step; its self time is without the ops that it calls."""

    name: str
    kind: str
    self_ns: float
    share: float
    count: float
    mean_ns: float  # self time of a call
    total_ns: float = 0.0  # with the ops that it calls


class HostThread(msgspec.Struct, frozen=True, kw_only=True):
    """Another thread that ran ops, per step."""

    thread: int
    busy_ns: float  # in ops
    share: float  # of the step
    largest_op: str


class HostExplanation(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """What a trace without GPU work says about its steps. Times are nanoseconds of one step.

    Phases, modules, and ops with what is outside them each add up to the step: all are of the thread that ran most ops.
    """

    path: str
    source: str
    steps: int
    steps_found_by: str
    window_ns: float  # the traced step's wall time
    outside_ns: float  # of it, outside every op
    loading_ns: float  # of it, in the data loader
    bound: str  # DATA_BOUND, PYTHON_BOUND or OP_BOUND
    verdict: str
    phases: tuple[HostShare, ...]
    modules: tuple[HostShare, ...]  # layers together; none where the trace names no module
    ops: tuple[HostOp, ...]
    threads: tuple[HostThread, ...] = ()
    loaders: tuple[str, ...] = ()  # names of the ranges in which batches were fetched
    compiled: bool = False  # by torch.compile, in part at least
    fused_optimizer: bool = False
    optimizers: tuple[str, ...] = ()  # classes whose step the trace shows: 'AdamW'
    loader_workers: int | None = None  # of a loop that was watched; None: not known
    phase_kinds: dict[str, dict[str, float]] = {}  # self time by phase and class of op
    double_ns: float = 0.0  # self time of matmuls and attention in fp64, of traces with shapes
    host_ns: dict[str, float] = {}  # wall time of the untraced step and its phases, where it was measured
    waited_for_data_ns: float | None = None  # of an untraced step of a loop that was watched; None: not known
    notes: tuple[str, ...] = ()
    note_keys: tuple[str, ...] = ()
    findings: tuple[Finding, ...] | None = None
    reach: Reach | None = None  # the step now, and with all of them made; None with `findings`
    subject: str = ""  # what was traced, where the trace is of a run

    def headline(self) -> str:
        return f"{self.subject or self.path}: {self.verdict}"

    @property
    def step_ns(self) -> float:
        """One step: untraced where that was timed, else as traced."""
        return self.host_ns.get(STEP) or self.window_ns

    @property
    def untraced_outside_ns(self) -> float:
        """Time outside every op without the profiler, at the least: all that the profiler costs is taken from it."""
        return max(0.0, self.outside_ns - max(0.0, self.window_ns - self.step_ns))

    @property
    def op_time_left(self) -> float:
        """Of an op's traced time, what it takes untraced: all, unless the ops took longer than the whole untraced step."""
        in_ops = self.window_ns - self.outside_ns
        return min(1.0, (self.step_ns - self.untraced_outside_ns) / in_ops) if in_ops > 0 else 1.0

    @property
    def untraced_loading_ns(self) -> float:
        """Time in the data loader without the profiler: as measured, else its share of the traced step."""
        if self.waited_for_data_ns is not None:
            return min(self.waited_for_data_ns, self.step_ns)
        return self.loading_ns * min(1.0, self.step_ns / self.window_ns)


def without_gpu_work(trace: Trace) -> bool:
    """Whether a trace holds ops and nothing that ran on a GPU."""
    of_gpu = (trace.kernels, trace.copies, trace.graph_runs)
    return trace.ops.height > 0 and not any(table.height for table in of_gpu)


def explain_host(trace: Trace, untraced: Point | None = None) -> HostExplanation:
    """Explain a trace without GPU work. `untraced`: the same step measured without a profiler."""
    everything = host_time(trace)
    process, thread = _busiest(everything)
    mine = of_process(trace, process)
    steps = find_steps(mine, _calls(mine))
    low, high = _window(mine, steps)
    if high <= low:
        raise FlopwiseError(f"{trace.path}: its ops take no time at all", "is the trace cut off?")
    window, n = high - low, len(steps)
    inside = _clipped(everything.filter(pl.col("process") == process), low, high)
    loads = loading_ranges(mine).filter(pl.col("thread") == thread)
    main = _with_loading(inside.filter(pl.col("thread") == thread), loads)
    outside = _total(main.filter(pl.col("op").is_null())) + window - _total(main)
    calls = trace.ops.filter(
        pl.col("process") == process,
        pl.col("thread") == thread,
        pl.col("start_ns").is_between(low, high, closed="left"),
    )
    ops = _ops(main, _called(trace, calls.with_columns(pl.col("end_ns").clip(upper_bound=high))), window, n)
    loading = _total(main.filter(pl.col("phase") == LOADING))
    names = [trace.names[number] for number in {*calls["name"].to_list(), *mine.ranges["name"].to_list()}]
    explanation = HostExplanation(
        path=trace.path,
        source=trace.source,
        steps=n,
        steps_found_by=steps.how,
        window_ns=window / n,
        outside_ns=outside / n,
        loading_ns=loading / n,
        bound="",
        verdict="",
        phases=_phases(main, window, n),
        modules=_modules(main, window, n),
        ops=ops,
        threads=_threads(inside.filter(pl.col("thread") != thread), window, n),
        loaders=tuple(sorted({trace.names[number] for number in loads["name"].to_list()})),
        compiled=any(_COMPILED.search(name) for name in names),
        optimizers=optimizer_classes(mine, steps),
        loader_workers=untraced.loop.loader_workers if untraced is not None and untraced.loop is not None else None,
        fused_optimizer=any(_FUSED_OPTIMIZER.search(name) for name in names),
        phase_kinds=_phase_kinds(main, n),
        double_ns=_double_ns(trace, main) / n,
        host_ns=host_clock(untraced),
        waited_for_data_ns=_waited_for_data(untraced),
    )
    bound, verdict = _verdict(explanation)
    on_cpu = (
        untraced is not None and untraced.ran is not None and untraced.ran.device == "cpu"
    )  # so no kernel is missing
    notes = (*(note for note in trace.notes if not (on_cpu and note.key == NO_KERNELS)), *_notes(explanation))
    return msgspec.structs.replace(
        explanation,
        bound=bound,
        verdict=verdict,
        notes=tuple(note.text for note in notes),
        note_keys=tuple(note.key for note in notes),
    )


def _waited_for_data(untraced: Point | None) -> float | None:
    """The median over the steps, as the step's own time is; a loop that was watched and never waited has none."""
    if untraced is None or untraced.loop is None or (times := untraced.times()) is None:
        return None
    waits = untraced.loop.waits_ns.get(LOADING, ())
    return float(median([*waits, *[0] * (len(times.wall_ns) - len(waits))]))


def op_kind(name: str) -> str:
    """The class of work of a host's op; autograd's own calls and views do none.

    >>> [op_kind(name) for name in ("aten::addmm", "autograd::engine::evaluate_function: AddmmBackward0", "aten::view")]
    ['matmul', 'other', 'other']
    """
    known = operation(name)
    return OTHER if _NODE.search(name) or not known.launches else known.kind


def _total(rows: pl.DataFrame) -> int:
    return int(rows["duration_ns"].sum())


def _busiest(time: pl.DataFrame) -> tuple[int, int]:
    """The process and thread that spent most time in ops."""
    spent = time.filter(pl.col("op").is_not_null()).group_by("process", "thread").agg(pl.col("duration_ns").sum())
    spent = spent.sort("duration_ns", "process", "thread", descending=[True, False, False])
    if not spent.height:
        raise FlopwiseError("its ops take no time at all", "is the trace cut off?")
    return int(spent["process"][0]), int(spent["thread"][0])


def _calls(trace: Trace) -> pl.DataFrame:
    """The ops as work, in the form that steps are found by."""
    names = pl.Series("name", trace.names, dtype=pl.Categorical)
    return trace.ops.select(
        "start_ns",
        (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"),
        pl.col("start_ns").alias("launch_ns"),
        pl.col("thread").alias("launch_thread"),
        pl.lit("kernel").alias("source"),
        pl.lit(OTHER).alias("class"),
        names.gather(trace.ops["name"]),
    )


def _window(trace: Trace, steps: Steps) -> tuple[int, int]:
    if steps.marked_ns is not None:
        return steps.marked_ns
    first, last = int(trace.ops["start_ns"].to_numpy().min()), int(trace.ops["end_ns"].to_numpy().max())
    return max(steps.starts_ns[0], first), min(steps.end_ns, last)


def _clipped(time: pl.DataFrame, low: int, high: int) -> pl.DataFrame:
    start, end = pl.col("start_ns").clip(low, high), (pl.col("start_ns") + pl.col("duration_ns")).clip(low, high)
    return time.with_columns(start_ns=start, duration_ns=end - start).filter(pl.col("duration_ns") > 0)


def _with_loading(time: pl.DataFrame, loads: pl.DataFrame) -> pl.DataFrame:
    """Phases as text, with what the data loader does as one of them."""
    start = time["start_ns"].to_numpy()
    end = start + time["duration_ns"].to_numpy()
    fetching = covered_within(start, end, loads["start_ns"].to_numpy(), loads["end_ns"].to_numpy()) > 0
    phase = pl.when(pl.Series(fetching)).then(pl.lit(LOADING)).otherwise(pl.col("phase").cast(pl.String))
    return time.with_columns(phase=phase)


def _shares(rows: pl.DataFrame, column: str, window: int, n: int, rest: str) -> tuple[HostShare, ...]:
    """Per step, the largest first; what no row covers is added to `rest`, outside every op, so that they add up."""
    outside = pl.col("duration_ns").filter(pl.col("op").is_null()).sum()
    spent = rows.group_by(column).agg(pl.col("duration_ns").sum(), outside=outside)
    found = {str(name): (wall, out) for name, wall, out in spent.iter_rows()}
    if missing := window - _total(rows):
        wall, out = found.get(rest, (0, 0))
        found[rest] = wall + missing, out + missing
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(
        HostShare(name=name, wall_ns=wall / n, outside_ns=out / n, share=wall / window) for name, (wall, out) in ordered
    )


def _phases(rows: pl.DataFrame, window: int, n: int) -> tuple[HostShare, ...]:
    return _shares(rows, "phase", window, n, OTHER)


def _modules(rows: pl.DataFrame, window: int, n: int) -> tuple[HostShare, ...]:
    texts = rows.with_columns(pl.col("module", "path").cast(pl.String).fill_null(""))
    known = texts.select("module", "path").unique(maintain_order=True)
    folded = [folded_module(module, path) for module, path in known.iter_rows()]
    if not any(folded):
        return ()
    named = known.with_columns(pl.Series("folded", folded, dtype=pl.String))
    return _shares(texts.join(named, on=["module", "path"], how="left"), "folded", window, n, "")


def _called(trace: Trace, calls: pl.DataFrame) -> dict[str, tuple[int, int]]:
    """How often each op was called, and for how long in all."""
    sums = calls.group_by("name").agg(pl.len(), (pl.col("end_ns") - pl.col("start_ns")).sum())
    return {trace.names[name]: (count, ns) for name, count, ns in sums.iter_rows()}


def _ops(rows: pl.DataFrame, called: dict[str, tuple[int, int]], window: int, n: int) -> tuple[HostOp, ...]:
    spent = rows.filter(pl.col("op").is_not_null()).group_by(pl.col("op").cast(pl.String)).agg(pl.sum("duration_ns"))
    found = []
    for name, ns in spent.sort("duration_ns", "op", descending=[True, False]).iter_rows():
        count, total = called.get(name, (1, ns))  # an op that began before the steps is in them all the same
        kind, share = op_kind(name), ns / window
        found.append(
            HostOp(
                name=name,
                kind=kind,
                self_ns=ns / n,
                share=share,
                count=count / n,
                mean_ns=ns / count,
                total_ns=total / n,
            )
        )
    return tuple(found)


def _threads(rows: pl.DataFrame, window: int, n: int) -> tuple[HostThread, ...]:
    in_ops = rows.filter(pl.col("op").is_not_null()).with_columns(pl.col("op").cast(pl.String))
    found = []
    for (thread,), own in in_ops.group_by("thread"):
        by_op = own.group_by("op").agg(pl.sum("duration_ns")).sort("duration_ns", "op", descending=[True, False])
        busy = _total(own)
        found.append(
            HostThread(thread=int(str(thread)), busy_ns=busy / n, share=busy / window, largest_op=by_op["op"][0])
        )
    return tuple(sorted(found, key=lambda one: (-one.busy_ns, one.thread)))


def _phase_kinds(rows: pl.DataFrame, n: int) -> dict[str, dict[str, float]]:
    cells: dict[str, dict[str, float]] = {}
    in_ops = rows.filter(pl.col("op").is_not_null())
    for phase, op, ns in in_ops.group_by("phase", pl.col("op").cast(pl.String)).agg(pl.sum("duration_ns")).iter_rows():
        row = cells.setdefault(phase, {})
        row[op_kind(op)] = row.get(op_kind(op), 0.0) + ns / n
    return cells


def _double_ns(trace: Trace, rows: pl.DataFrame) -> int:
    """Of matmuls and attention with an input in fp64."""
    double = [number for number, text in enumerate(trace.inputs) if '"double"' in "".join(text.split(BETWEEN)[1:2])]
    given = trace.op_inputs.filter(pl.col("inputs").is_in(double))["op"]
    kinds = {name: op_kind(name) for name in rows["op"].cast(pl.String).drop_nulls().unique().to_list()}
    heavy = [name for name, kind in kinds.items() if kind in (MATMUL, ATTENTION)]
    return _total(rows.filter(pl.col("op_index").is_in(given.to_list()), pl.col("op").cast(pl.String).is_in(heavy)))


def _verdict(e: HostExplanation) -> tuple[str, str]:
    """What the step's time is mostly bound by, in words; outside the ops only what the profiler cannot explain."""
    loading, outside = e.untraced_loading_ns / e.step_ns, e.untraced_outside_ns / e.step_ns
    of = f"of the {units.duration(e.step_ns)} of a step"
    if loading >= BOUND:
        return DATA_BOUND, f"data-bound: the host fetches batches for {units.percent(loading, 0)} of the step"
    if outside >= BOUND:
        return PYTHON_BOUND, f"Python-bound: {units.percent(outside, 0)} {of} is outside every op"
    largest = f"; the largest is {e.ops[0].name}, {units.percent(e.ops[0].share, 0)}" if e.ops else ""
    in_ops = units.percent(1 - e.outside_ns / e.window_ns, 0)
    return OP_BOUND, f"op-bound: ops take {in_ops} of the traced step{largest}"


def _notes(e: HostExplanation) -> Iterator[Note]:
    if STEP in e.host_ns and e.window_ns > e.host_ns[STEP]:
        text = f"untraced, the step takes {units.duration(e.host_ns[STEP])}: the profiler adds the rest"
        yield Note("untraced", text)
    if STEP not in e.host_ns:
        text = "this is the traced step: the profiler slows the CPU, most of all between ops; --timings RUN gives its real time"
        yield Note("traced_only", text)
    busy = [one for one in e.threads if one.share >= _BUSY_THREAD]
    if busy:
        text = f"{len(busy) + 1} threads ran ops; this is the busiest, the others are listed"
        yield Note("threads", text)
