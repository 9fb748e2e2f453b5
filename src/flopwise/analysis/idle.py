"""Why the GPU was idle: every gap between two pieces of its work, by cause, and where the host waited for the GPU.

The causes add up to the idle time exactly.
"""

import re

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.analysis.intervals import Times, clipped, covered_ns, covered_within, gaps
from flopwise.analysis.steps import Steps
from flopwise.trace.columns import first_rows
from flopwise.trace.host import Host, Points, Scopes
from flopwise.trace.nesting import Nesting
from flopwise.trace.tables import Trace

LATE_LAUNCH = "late launch"  # the host had not yet launched what came next
SYNCHRONISATION = "synchronisation"  # nor could it: it had just waited for the GPU
INPUT = "input pipeline"  # it was waiting for data, or copying it to the GPU out of pageable memory
BETWEEN = "between kernels"  # the next piece was queued already; the GPU took its time to begin it
NOTHING = "nothing to do"  # all work of the window was done, and the host was in no op, launch or wait
UNKNOWN = "unknown"  # the trace does not say who launched the next piece
CAUSES = (LATE_LAUNCH, SYNCHRONISATION, INPUT, BETWEEN, NOTHING, UNKNOWN)
# An untraced clock is of the same steps if these hold; launch-bound steps vary by a fifth from one to the next.
_MOST_BUSY = 1.1  # of the untraced time, the GPU's work in the trace
_LONGEST = 1.25  # of the traced time, the untraced
FITS, TOO_SHORT, TOO_LONG = "fits", "too short", "too long"
_LOADING = re.compile(
    r"(?i)data_?loader|^(?:flopwise[./: ])?data(?:[ _]?(?:load(?:ing)?|fetch|wait))?$"
    r"|^(?:get|fetch|load|next)[ _]?batch|^fetch$"
)
# A normal launch is as long as the shortest tenth: in a step that waits for the GPU all the time, most are held up. In traces of
# six machines without a full queue, one launch in twenty is longer than twice that, and together they take a hundredth of it.
_NORMAL_LAUNCHES, _HELD_UP = 0.1, 2.0
_LEAST_INPUT = 4096  # bytes of a copy that may be a batch: an optimizer's numbers are less
PAGEABLE = "copy to pageable memory"  # 'Async' in name only: the call returns when the bytes have arrived


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Idle time of one device in one window, in nanoseconds."""

    total_ns: int
    by_cause_ns: dict[str, int]
    n_gaps: int


class HostWait(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of wait, per step."""

    call: str  # 'cudaStreamSynchronize', or PAGEABLE
    op: str  # the outermost op: 'aten::item'; '' where there is none
    where: str  # ranges and modules around it, outer to inner
    line: str = ""  # the user's function that waited, 'train.py(95): step', where stacks were captured
    count: float
    waited_ns: float  # in the call; the GPU's idle time after it is counted as idle


class _Next(msgspec.Struct, frozen=True, kw_only=True):
    """For each gap, the call that launched the work which ended it; -1 where there is none."""

    launch_start: Times
    launch_end: Times
    thread: Times


def idle(trace: Trace, low: int, high: int, device: int = 0) -> Idle:
    """Split the device's idle time between `low` and `high` by cause.

    A gap ends when the next piece of work begins. The part of it until that work's launch call returned is the host's:
    'input pipeline' while the host was loading data, else 'synchronisation' if the launching thread's last wait for the GPU
    ended within the gap, else 'late launch'. The rest, after the call had returned, is the device's own ('between kernels').
    After the last piece, what the host spent loading is 'input pipeline', in waits 'synchronisation', in ops and launches
    'late launch' (of work that the window does not hold); else there was 'nothing to do'.
    """
    work = gpu_work(trace, device)
    gap_start, gap_end = gaps(work["start_ns"].to_numpy(), work["end_ns"].to_numpy(), low, high)
    following = _following(trace, work, gap_end)
    host_ns = np.clip(np.minimum(following.launch_end, gap_end) - gap_start, 0, None)
    device_ns = gap_end - gap_start - host_ns
    waiting, loading = waits(trace), _loading(trace)
    input_ns = covered_within(gap_start, gap_start + host_ns, *loading)
    waited = _waited(waiting, following, gap_start)
    last, known = gap_end >= high, following.thread >= 0
    inside = ~last & known
    causes = {
        NOTHING: 0,
        UNKNOWN: int((gap_end - gap_start)[~last & ~known].sum()),
        INPUT: int(input_ns[inside].sum()),
        SYNCHRONISATION: int((host_ns - input_ns)[inside & waited].sum()),
        LATE_LAUNCH: int((host_ns - input_ns)[inside & ~waited].sum()),
        BETWEEN: int(device_ns[inside].sum()),
    }
    for cause, ns in _afterwards(trace, waiting, loading, gap_start[last], high).items():
        causes[cause] += ns
    total = int((gap_end - gap_start).sum())
    assert sum(causes.values()) == total
    return Idle(total_ns=total, by_cause_ns={cause: causes[cause] for cause in CAUSES}, n_gaps=len(gap_start))


def clock_fit(traced: Idle, window_ns: float, wall_ns: float) -> str:
    """Whether steps that took `wall_ns` untraced can be those of a trace: FITS, TOO_SHORT or TOO_LONG."""
    if window_ns - traced.total_ns > _MOST_BUSY * wall_ns:
        return TOO_SHORT
    return TOO_LONG if wall_ns > _LONGEST * window_ns else FITS


def untraced_idle(traced: Idle, window_ns: int, wall_ns: float) -> Idle:
    """The idle time of the same steps without a profiler, which take `wall_ns`.

    A profiler records on the host and makes it slower. The GPU's work and its gaps between queued kernels are taken as they
    were traced; what the untraced steps are idle beyond these is the host's, and its causes share it as they do in the trace.
    """
    total = max(0, round(wall_ns) - (window_ns - traced.total_ns))
    between = min(total, traced.by_cause_ns[BETWEEN])
    host_ns = traced.total_ns - traced.by_cause_ns[BETWEEN]
    slower = (total - between) / host_ns if host_ns else 0.0
    causes = {cause: int(ns * slower) for cause, ns in traced.by_cause_ns.items()} | {BETWEEN: between}
    causes[UNKNOWN] += total - sum(causes.values())  # rounding; all of it where the trace knows no idle host
    return Idle(total_ns=total, by_cause_ns=causes, n_gaps=traced.n_gaps)


def _afterwards(
    trace: Trace, waiting: pl.DataFrame, loading: tuple[Times, Times], done: Times, high: int
) -> dict[str, int]:
    """What the host did from the last piece of work to the end of the window; `done` is empty if that lasted to the end."""
    if not len(done):
        return {}
    low = int(done[0])

    def covered(*tables: pl.DataFrame) -> int:
        near = [table.filter(pl.col("end_ns") > low, pl.col("start_ns") < high) for table in tables]
        start, end = (
            np.concatenate([own, *(table[name].to_numpy() for table in near)])
            for name, own in zip(("start_ns", "end_ns"), loading, strict=True)
        )
        return covered_ns(*clipped(start, end, low, high))

    data, waited = covered(), covered(waiting)
    busy = covered(waiting, trace.ops, trace.launches, trace.graph_launches)
    return {INPUT: data, SYNCHRONISATION: waited - data, LATE_LAUNCH: busy - waited, NOTHING: high - low - busy}


def waits(trace: Trace) -> pl.DataFrame:
    """Calls in which the host waited for the GPU: synchronisations, and copies to pageable memory, 'Async' in name only."""
    columns = ["start_ns", "end_ns", "process", "thread"]
    names = pl.Series("call", trace.names, dtype=pl.String)
    syncs = trace.syncs.select(*columns, names.gather(trace.syncs["name"]))
    pageable = _spanning(trace, trace.copies.filter(pl.col("kind") == "DtoH"))
    return pl.concat([syncs, pageable.select(*columns, pl.lit(PAGEABLE).alias("call"))])


def _spanning(trace: Trace, copies: pl.DataFrame) -> pl.DataFrame:
    """The calls that returned only when the copy they asked for had arrived: they span it, those that only queue it do not."""
    copies = copies.filter(pl.col("correlation") > 0)
    wanted, known = ((t["process"].to_numpy(), t["correlation"].to_numpy()) for t in (copies, trace.launches))
    row = first_rows(wanted, known)
    copies, calls = copies.filter(pl.Series(row >= 0)), trace.launches[row[row >= 0]]
    return calls.filter((calls["start_ns"] <= copies["start_ns"]) & (calls["end_ns"] >= copies["end_ns"]))


def host_calls(trace: Trace) -> pl.DataFrame:
    """The calls that put work on the GPU, single kernels and whole graphs."""
    return pl.concat([trace.launches, trace.graph_launches])


def held_up_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls that took much longer than a normal one, without the time that a normal one takes: the queue was full."""
    if not calls.height:
        return calls
    took = pl.col("end_ns") - pl.col("start_ns")
    normal = int(np.quantile(calls.select(took).to_series().to_numpy(), _NORMAL_LAUNCHES))
    return calls.filter(took > _HELD_UP * normal).with_columns(pl.col("start_ns") + normal)


def host_work_ns(trace: Trace, steps: Steps) -> float | None:
    """The host's own time in a step, on average; None where no launch is known.

    From each step's first op to its last launch, without waits for the GPU. A queue that is full holds up the next launch
    until a kernel has ended: what such a call takes beyond a normal one is waiting, too.
    """
    calls, spent = host_calls(trace), 0.0
    start, end = (calls[name].to_numpy() for name in ("start_ns", "end_ns"))
    number = steps.of(start)
    if not (number >= 0).any():
        return None
    waiting = [table.select("start_ns", "end_ns") for table in (held_up_calls(calls), waits(trace))]
    wait_start, wait_end = (pl.concat(waiting)[name].to_numpy() for name in ("start_ns", "end_ns"))
    begun = np.concatenate([start, trace.ops["start_ns"].to_numpy()])
    in_step = steps.of(begun)
    for step in range(len(steps)):
        mine = number == step
        if mine.any():
            low, high = int(begun[in_step == step].min()), int(end[mine].max())
            spent += high - low - covered_ns(*clipped(wait_start, wait_end, low, high))
    return spent / len(steps)


def loading_ranges(trace: Trace) -> pl.DataFrame:
    """When the host was in a data loader."""
    named = [number for number, name in enumerate(trace.names) if _LOADING.search(name)]
    tables = (table.filter(pl.col("name").is_in(named)) for table in (trace.ops, trace.ranges))
    return pl.concat([table.select("start_ns", "end_ns", "process", "thread", "name") for table in tables])


def _loading(trace: Trace) -> tuple[Times, Times]:
    """When the host waited for data: in a data loader, or in a copy of a batch that was not in pinned memory."""
    batches = trace.copies.filter(pl.col("kind") == "HtoD", pl.col("bytes") >= _LEAST_INPUT)
    columns = ["start_ns", "end_ns"]
    loading = pl.concat([loading_ranges(trace).select(columns), _spanning(trace, batches).select(columns)])
    return loading["start_ns"].to_numpy(), loading["end_ns"].to_numpy()


def gpu_work(trace: Trace, device: int | None = None) -> pl.DataFrame:
    """Kernels, copies and whole graphs of a device (of all, if None): when, and by which call."""
    columns = ["start_ns", "end_ns", "process", "device", "stream", "correlation"]
    tables = [table.select(columns) for table in (trace.kernels, trace.copies, trace.graph_runs)]
    if device is not None:
        tables = [table.filter(pl.col("device") == device) for table in tables]
    filled = [table for table in tables if table.height] or tables[:1]
    return filled[0] if len(filled) == 1 else pl.concat(filled).sort("start_ns", maintain_order=True)


def _following(trace: Trace, work: pl.DataFrame, gap_end: Times) -> _Next:
    """Only the work that ends a gap is looked up: a busy trace has few."""
    at = np.searchsorted(work["start_ns"].to_numpy(), gap_end, side="left")
    begun = np.flatnonzero(at < work.height)

    def of_calls(name: str) -> Times:
        return np.concatenate([table[name].to_numpy() for table in (trace.launches, trace.graph_launches)])

    correlation = of_calls("correlation")
    known = np.flatnonzero(correlation > 0)
    wanted = (work["process"].to_numpy()[at[begun]], work["correlation"].to_numpy()[at[begun]])
    row = first_rows(wanted, (of_calls("process")[known], correlation[known]))
    launched, row = begun[row >= 0], known[row[row >= 0]]

    def column(name: str) -> Times:
        values = np.full(len(gap_end), -1, dtype=np.int64)
        values[launched] = of_calls(name)[row]
        return values

    return _Next(launch_start=column("start_ns"), launch_end=column("end_ns"), thread=column("thread"))


def _waited(waits: pl.DataFrame, following: _Next, gap_start: Times) -> npt.NDArray[np.bool_]:
    """Whether the launching thread's last wait before the launch ended inside the gap."""
    waited = np.zeros(len(gap_start), dtype=np.bool_)
    for (thread,), calls in waits.group_by("thread"):
        ends = np.sort(calls["end_ns"].to_numpy())
        mine = following.thread == thread
        before = np.searchsorted(ends, following.launch_start[mine], side="right") - 1
        last_end = np.where(before >= 0, ends[np.maximum(before, 0)], -1)
        waited[mine] = last_end >= gap_start[mine]
    return waited


def host_waits(trace: Trace, steps: Steps) -> tuple[HostWait, ...]:
    """The waits between the first launch of the steps and the last, the longest first: call, op above it, ranges around it.

    A wait after which nothing is launched any more ends the measurement and delays nothing: it is left out.
    """
    calls = waits(trace)
    launches = [int(t["start_ns"].to_numpy().max()) for t in (trace.launches, trace.graph_launches) if t.height]
    inside = (steps.of(calls["start_ns"].to_numpy()) >= 0) & (calls["end_ns"].to_numpy() <= max(launches, default=0))
    calls = calls.filter(pl.Series(inside))
    if not calls.height:
        return ()
    host = Host(trace)
    at = host.points(calls["process"], calls["thread"], calls["start_ns"])
    top = host.ops().outermost().innermost(at.lane, at.time)
    _, path = Scopes(host).of(host.scopes.innermost(at.lane, at.time))
    ops = ["" if row < 0 else trace.names[int(host.name[row])] for row in top.tolist()]
    where = path.cast(pl.String).fill_null("").alias("where")
    calls = calls.with_columns(pl.Series("op", ops), where, pl.Series("line", _lines(trace, host, at), dtype=pl.String))
    kind, waited = ["call", "op", "where", "line"], (pl.col("end_ns") - pl.col("start_ns")).sum()
    rows = calls.group_by(kind).agg(pl.len(), ns=waited).sort("ns", *kind, descending=[True, *[False] * 4])
    n = len(steps)
    return tuple(
        HostWait(call=call, op=op, where=where, line=line, count=count / n, waited_ns=ns / n)
        for call, op, where, line, count, ns in rows.iter_rows()
    )


def _lines(trace: Trace, host: Host, at: Points) -> list[str]:
    """The innermost function of the user's own around each point."""
    lane = host.lanes_of(trace.frames["process"], trace.frames["thread"])
    frames, lane = trace.frames.filter(pl.Series(lane >= 0)), lane[lane >= 0]
    if not frames.height:
        return [""] * len(at.time)
    nested = Nesting(lane, frames["start_ns"].to_numpy(), frames["end_ns"].to_numpy())
    position, names = nested.innermost(at.lane, at.time), frames["name"].to_numpy()
    rows = np.where(position < 0, -1, nested.order[np.maximum(position, 0)])
    return ["" if row < 0 else trace.names[int(names[row])] for row in rows.tolist()]
