"""One rank's trace reduced to what the ranks are compared by: its collectives, its states over time, its kernels by name.

A file is read in a process of its own; only this small record leaves it, so that memory is bounded whatever the files hold.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.analysis.collectives import ALL_TO_ALL, OTHER, SEND_RECEIVE, kind_of
from flopwise.analysis.host_activity import loading_ranges, span_times, waits
from flopwise.analysis.host_explanation import without_gpu_work
from flopwise.analysis.intervals import Times, gaps, overlaps, union
from flopwise.analysis.ranks.states import COMPUTE, COPY, INPUT, TRANSFER, States, coarsened, layered
from flopwise.analysis.step_times import edges
from flopwise.analysis.steps import find_steps, launch_times
from flopwise.analysis.traced_steps import workers
from flopwise.analysis.transfers import NAMES as HOST_COPIES
from flopwise.errors import FlopwiseError
from flopwise.trace.attribute import attribute
from flopwise.trace.collective_args import KERNEL, RANGE, ranks_of
from flopwise.trace.phases import PHASES
from flopwise.trace.read import read_trace
from flopwise.trace.tables import NO_ID, STEP, Distributed, Trace, of_process
from flopwise.work.operation import COMMUNICATION

_MOST_KERNELS = 48  # names that kernels are compared by
_LONGEST = 200  # letters of a name
_COMMUNICATION_RANGE = re.compile(r"^(?:gloo|mpi|ucc):")
_COMMUNICATION_OP = re.compile(r"^(?:c10d::|record_param_comms|gloo:|mpi:|ucc:)")
_SHAPE = re.compile(r"\[(\d+(?:, ?\d+)*)\]")
_RANK = re.compile(r"(?i)(?:rank|worker|device|gpu|proc|node|_r)[-_.]?(\d{1,6})(?!\d)")


@dataclass(frozen=True)
class Group:
    """A process group, as a trace names it."""

    name: str = ""
    ranks: tuple[int, ...] | None = None
    size: int = 0
    description: str = ""
    stream: int = NO_ID  # of collectives without a group: their stream, counted by first use


@dataclass(frozen=True, eq=False)
class RankTrace:
    """What is left of a rank's trace. Times are nanoseconds since `begin_ns`."""

    path: str
    source: str
    distributed: Distributed
    rank: int  # by the trace, else by the file's name; NO_ID: not known
    gpu: str
    begin_ns: int
    step_names: tuple[str, ...]
    step_edges: Times  # when each step begins, and the last one ends
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    events: dict[str, npt.NDArray[np.int64]]  # by start: EVENTS
    states: States
    late: tuple[
        Times, Times
    ]  # while a collective ran: when what comes next was not launched yet, and nothing held the host
    kernels: dict[str, tuple[int, int]]  # the longest by name: how many, nanoseconds
    elements: float  # in the tensors that matmuls and attention are given, all added up; 0: not known
    events_left_out: int = 0
    shortest_state_ns: int = 0  # shorter ones are joined with what is before them


@dataclass(frozen=True)
class UnreadableRank:
    """A file that could not be read, and why."""

    path: str
    problem: str
    hint: str = field(default="")


_NONE = np.zeros(0, np.int64), np.zeros(0, np.int64)
# step: which one, NO_ID outside of all; ready_ns: when the work that the collective waits for on its own rank was done.
EVENTS = (
    *("start_ns", "end_ns", "launched_ns", "ready_ns"),
    *("group", "kind", "sequence", "bytes", "source", "target", "phase", "step"),
)


def read_rank(path: str, most_events: int, most_states: int) -> RankTrace | UnreadableRank:
    """Reduce a trace; never raises for what is in the file."""
    try:
        trace = read_trace(path)
        return _of_host(trace, most_events) if without_gpu_work(trace) else _of_gpu(trace, most_events, most_states)
    except FlopwiseError as error:
        return UnreadableRank(path, error.message, error.hint)


def rank_in_name(name: str) -> int:
    """
    >>> [rank_in_name(name) for name in ("param_dlrm_rank7.json.gz", "host_r12.pt.trace.json", "step.json")]
    [7, 12, -1]
    """
    found = _RANK.findall(Path(name).name)
    return int(found[-1]) if found else NO_ID


def _of_gpu(trace: Trace, most_events: int, most_states: int) -> RankTrace:
    work = attribute(trace).table
    if not work.height:
        raise FlopwiseError(f"{trace.path} has no GPU work in it", "was it captured on a GPU, with CUDA activity on?")
    device, process = workers(work)[0]
    work = work.filter(pl.col("device") == device, pl.col("process").is_in([process, NO_ID]))
    mine = of_process(trace, process)
    found, launched = find_steps(mine, work), launch_times(work)
    if (found.of(launched) < 0).all():
        raise FlopwiseError(f"{trace.path}: no GPU work falls into the steps ({found.how})", "is the trace cut off?")
    at = edges(found, work, launched, mine, device)
    if at[-1] <= at[0]:
        raise FlopwiseError(f"{trace.path}: its GPU work takes no time at all", "is the trace cut off?")
    if found.marked_ns is not None:
        at[0] = found.starts_ns[0]  # where the ranks' steps begin is compared, too
    rows = work.with_columns(_correlation(work, trace), end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    rows = rows.with_columns(pl.Series("launched_ns", launched), pl.Series("step", found.of(launched)))
    told = trace.collective_args.filter(pl.col("on") == KERNEL)["correlation"].to_list()
    talks = (rows["class"] == COMMUNICATION) | (rows["correlation"].is_in(told) & (rows["source"] == "kernel"))
    others = rows.filter(~talks)
    copies = (others["source"] == "copy") & others["name"].cast(pl.String).is_in(list(HOST_COPIES))
    low, high = int(at[0]), int(at[-1])
    by_host = _host_collectives(mine, at) if not talks.any() else None
    layers = [
        (COMPUTE, *_spans(others.filter(~copies))),
        (TRANSFER, *_spans(rows.filter(talks) if by_host is None else by_host)),
        (COPY, *_spans(others.filter(copies))),
        (INPUT, *span_times(loading_ranges(mine))),
    ]
    states, shortest = coarsened(layered(low, high, layers), most_states)
    if by_host is not None:
        return _rank(trace, found.names, at, by_host, (states, shortest), _NONE, others, most_events)
    events = _with_args(rows.filter(talks), trace, mine)
    events = events.with_columns(pl.Series("ready_ns", _ready(events, others)))
    late = _late(others, rows.filter(talks), mine, (low, high))
    return _rank(trace, found.names, at, events, (states, shortest), _longest(late, most_states), others, most_events)


def _correlation(work: pl.DataFrame, trace: Trace) -> pl.Series:
    """Of each piece of work that is a kernel."""
    ids = np.append(trace.kernels["correlation"].to_numpy(), NO_ID)
    index = np.where((work["source"] == "kernel").to_numpy(), work["index"].to_numpy(), len(ids) - 1)
    return pl.Series("correlation", ids[index])


def _spans(rows: pl.DataFrame) -> tuple[Times, Times]:
    return rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()


def _with_args(events: pl.DataFrame, trace: Trace, mine: Trace) -> pl.DataFrame:
    """Collectives with what the trace says of them: on the kernel itself, else on the range that launched it."""
    exchanges = any(kind_of(name) == ALL_TO_ALL for name in trace.names)
    columns = ("collective", "group", "description", "ranks", "size", "sequence", "bytes", "source", "target")
    args = trace.collective_args
    by_kernel = args.filter(pl.col("on") == KERNEL).unique("correlation", keep="first").select("correlation", *columns)
    by_range = args.filter(pl.col("on") == RANGE).select("thread", "start_ns", *columns)
    spans = mine.ranges.select("thread", "start_ns", range_end="end_ns").unique(["thread", "start_ns"], keep="first")
    by_range = by_range.join(spans, on=["thread", "start_ns"], how="left").rename({"start_ns": "asked_ns"})
    told = events.drop("source").join(by_kernel, on="correlation", how="left", maintain_order="left")
    told = told.with_columns(thread=pl.col("launch_thread").fill_null(NO_ID).cast(pl.Int64), row=pl.int_range(pl.len()))
    ranged = (
        told.select("row", "thread", "launched_ns")
        .sort("launched_ns")
        .join_asof(
            by_range.sort("asked_ns"),
            left_on="launched_ns",
            right_on="asked_ns",
            by="thread",
            strategy="backward",
            check_sortedness=False,
        )
    )
    ranged = ranged.with_columns(
        pl.when(pl.col("launched_ns") <= pl.col("range_end")).then(pl.col(name)).alias(name) for name in columns
    ).sort("row")
    told = told.with_columns(pl.coalesce(pl.col(name), ranged[name]).alias(name) for name in columns)
    kinds = [
        _kind(*names, exchanges=exchanges)
        for names in told.select("collective", pl.col("name", "top_op").cast(pl.String)).iter_rows()
    ]
    return told.with_columns(pl.Series("kind", kinds, dtype=pl.String))


def _kind(collective: str | None, kernel: str | None, op: str | None, *, exchanges: bool) -> str:
    """By what the trace calls it, else by its kernel, else by the op above; NCCL's all-to-all are sends and receives."""
    for name in (collective, kernel, op):
        kind = kind_of(name or "")
        if kind == SEND_RECEIVE and name is kernel and (above := kind_of(op or "")) != OTHER:
            return above
        if kind == SEND_RECEIVE and name is kernel and exchanges:
            return ALL_TO_ALL
        if kind != OTHER:
            return kind
    return OTHER


def _ready(events: pl.DataFrame, others: pl.DataFrame) -> Times:
    """When the work was done that was launched before each collective: its stream waits for that."""
    order = np.argsort(others["launched_ns"].to_numpy(), kind="stable")
    when = others["launched_ns"].to_numpy()[order]
    reach = np.concatenate(([0], np.maximum.accumulate(others["end_ns"].to_numpy()[order])))
    launched, start = events["launched_ns"].to_numpy(), events["start_ns"].to_numpy()
    done = reach[np.searchsorted(when, launched, side="left")]
    ready: Times = np.minimum(start, np.maximum(done, np.maximum(launched, 0)))
    return ready


def _late(others: pl.DataFrame, talk: pl.DataFrame, mine: Trace, window: tuple[int, int]) -> tuple[Times, Times]:
    """When a collective ran and nothing was computed only because it was not launched yet, while nothing held the host.

    What begins before the collective ends did not wait for it."""
    (low, high), (start, end), (first, last) = window, _spans(others), union(*_spans(talk))
    opened, closed = gaps(start, end, low, high)
    order = np.argsort(start, kind="stable")
    place = np.clip(np.searchsorted(start[order], closed, side="left"), 0, max(0, len(order) - 1))
    launched = others["launched_ns"].to_numpy()[order][place] if len(order) else closed
    until = np.minimum(launched, closed)
    before = np.searchsorted(first, closed, side="right") > np.searchsorted(last, closed, side="right")
    some = (until > opened) & (closed < high) & before
    free = gaps(*span_times(waits(mine)), low, high)
    return overlaps(overlaps((opened[some], until[some]), free), (first, last))


def _longest(spans: tuple[Times, Times], most: int) -> tuple[Times, Times]:
    """No more than so many."""
    start, end = spans
    if len(start) <= most:
        return spans
    kept = np.sort(np.argsort(start - end, kind="stable")[:most])
    return start[kept], end[kept]


def _of_host(trace: Trace, most_events: int) -> RankTrace:
    """A rank on the CPU (Gloo, MPI): ranges of the backend are its collectives, other ops its compute."""
    talking = np.array([bool(_COMMUNICATION_OP.match(name)) for name in trace.names])
    ops = trace.ops.filter(pl.Series(~talking[trace.ops["name"].to_numpy()]))
    marks = trace.ranges.filter(pl.col("kind") == STEP)
    low = int(marks["start_ns"].min() if marks.height else trace.ops["start_ns"].min())  # type: ignore[arg-type]
    high = int(marks["end_ns"].max() if marks.height else trace.ops["end_ns"].max())  # type: ignore[arg-type]
    at = np.array([*(marks["start_ns"].to_list() or [low]), high], dtype=np.int64)
    called = tuple(trace.names[number] for number in marks["name"].to_list()) or ("",)
    text = pl.Series([*trace.names], dtype=pl.String)
    events = _host_collectives(trace, at)
    layers = [(COMPUTE, *_spans(ops)), (TRANSFER, *_spans(events)), (INPUT, *span_times(loading_ranges(trace)))]
    others = ops.with_columns(name=text.gather(ops["name"]), duration_ns=pl.col("end_ns") - pl.col("start_ns"))
    return _rank(trace, called, at, events, (layered(low, high, layers), 0), _NONE, others, most_events)


def _host_collectives(trace: Trace, at: Times) -> pl.DataFrame:
    """Of a backend that exchanges on the host, also what lies on a GPU: its ranges. `at`: where the steps begin, and the end."""
    names = np.array([bool(_COMMUNICATION_RANGE.match(name)) for name in trace.names])
    ranges = trace.ranges.filter(pl.Series(names[trace.ranges["name"].to_numpy()]))
    text = pl.Series([*trace.names], dtype=pl.String)
    args = trace.collective_args.filter(pl.col("on") == RANGE).unique(["thread", "start_ns"], keep="first")
    events = ranges.drop("kind").with_columns(name=text.gather(ranges["name"]))
    events = events.join(args.drop("on"), on=["thread", "start_ns"], how="left", maintain_order="left")
    step = np.searchsorted(at[:-1], events["start_ns"].to_numpy(), side="right") - 1
    return events.with_columns(
        pl.Series("step", step),
        stream=pl.lit(0, pl.Int64),
        phase=pl.lit("other"),
        ready_ns=pl.col("start_ns"),
        launched_ns=pl.col("start_ns"),
        kind=pl.Series([kind_of(name) for name in events["name"]], dtype=pl.String),
    )


def _rank(
    trace: Trace,
    step_names: tuple[str, ...],
    at: Times,
    events: pl.DataFrame,
    states: tuple[States, int],
    late: tuple[Times, Times],
    others: pl.DataFrame,
    most_events: int,
) -> RankTrace:
    events = events.sort("start_ns", "end_ns", maintain_order=True)
    left_out = max(0, events.height - most_events)  # the earliest: the last steps are whole
    events = events.tail(most_events)
    number, groups = _groups(events, trace.distributed)
    kinds = tuple(dict.fromkeys(events["kind"].to_list()))
    codes = {kind: place for place, kind in enumerate(kinds)}
    phases = {phase: place for place, phase in enumerate(PHASES)}
    columns = {
        "group": np.array(number, dtype=np.int64),
        "kind": np.array([codes[kind] for kind in events["kind"]], dtype=np.int64),
        "phase": np.array([phases[phase] for phase in events["phase"].cast(pl.String)], dtype=np.int64),
    }
    plain = [name for name in EVENTS if name not in columns]
    columns |= {name: events[name].fill_null(NO_ID).cast(pl.Int64).to_numpy() for name in plain}
    spent = others.group_by(pl.col("name").cast(pl.String)).agg(pl.len().alias("n"), pl.col("duration_ns").sum())
    longest = spent.sort("duration_ns", "name", descending=[True, False]).head(_MOST_KERNELS)
    rank = trace.distributed.rank
    return RankTrace(
        path=trace.path,
        source=trace.source,
        distributed=trace.distributed,
        rank=rank if rank != NO_ID else rank_in_name(trace.path),
        gpu=trace.gpu,
        begin_ns=trace.begin_ns,
        step_names=step_names or ("",) * (len(at) - 1),
        step_edges=at,
        groups=groups,
        kinds=kinds,
        events=columns,
        states=states[0],
        late=late,
        kernels={str(name)[:_LONGEST]: (n, ns) for name, n, ns in longest.iter_rows()},
        elements=_elements(trace),
        events_left_out=left_out,
        shortest_state_ns=states[1],
    )


def _elements(trace: Trace) -> float:
    """How large the tensors are that a rank works on."""
    sizes = np.array([sum(_product(one) for one in _SHAPE.findall(text)) for text in trace.shapes])
    times = np.bincount(trace.sized_ops["shape"].to_numpy(), minlength=len(sizes))
    return float((sizes * times).sum())


def _product(shape: str) -> float:
    """
    >>> _product("48, 512, 64")
    1572864.0
    """
    return math.prod(float(n) for n in shape.split(","))


def _only_group(known: Distributed) -> str | None:
    """The group that all collectives are of, where a job has groups of the same ranks alone; a group of one exchanges nothing."""
    several = {name: ranks for name, ranks in known.groups.items() if len(ranks) > 1}
    return next(iter(several)) if len(set(several.values())) == 1 else None


def _groups(events: pl.DataFrame, known: Distributed) -> tuple[list[int], tuple[Group, ...]]:
    """The process group of each collective; of those without, the only one that there is, or else their stream."""
    only = _only_group(known)
    numbers: dict[tuple[object, ...], int] = {}
    streams: dict[int, int] = {}
    found: list[int] = []
    groups: list[Group] = []
    for row in events.select("group", "ranks", "size", "description", "stream").iter_rows():
        name, ranks, size, description, stream = row
        name = name or only
        key = (name, ranks, size) if name else ("", stream)
        if key not in numbers:
            numbers[key] = len(groups)
            members = ranks_of(ranks or "") or known.groups.get(name or "")
            place = NO_ID if name else streams.setdefault(stream, len(streams))
            groups.append(Group(name or "", members, size or len(members or ()), description or "", place))
        found.append(numbers[key])
    return found, tuple(groups)
