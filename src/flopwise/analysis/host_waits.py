"""Where the host waited for the GPU, and what it did itself, per step."""

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.host_activity import held_up_calls, host_calls, span_times, waits
from flopwise.analysis.intervals import covered_within
from flopwise.analysis.steps import Steps
from flopwise.trace.host import Host, Points, Scopes
from flopwise.trace.nesting import Nesting
from flopwise.trace.tables import Trace


class HostWait(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of wait, per step."""

    call: str  # 'cudaStreamSynchronize', or PAGEABLE
    op: str  # the outermost op: 'aten::item'; '' where there is none
    where: str  # ranges and modules around it, outer to inner
    line: str = ""  # the user's function that waited, 'train.py(95): step', where stacks were captured
    count: float
    waited_ns: float  # in the call; the GPU's idle time after it is counted as idle


def host_work_ns(trace: Trace, steps: Steps) -> float | None:
    """The host's own time in a step, on average; None where no launch is known.

    From each step's first op to its last launch, without waits for the GPU. A queue that is full holds up the next launch
    until a kernel has ended: what such a call takes beyond a normal one is waiting, too.
    """
    calls = host_calls(trace)
    start, end = (calls[name].to_numpy() for name in ("start_ns", "end_ns"))
    number = steps.of(start)
    if not (number >= 0).any():
        return None
    waiting = [table.select("start_ns", "end_ns") for table in (held_up_calls(calls), waits(trace))]
    wait_start, wait_end = span_times(pl.concat(waiting))
    begun = np.concatenate([start, trace.ops["start_ns"].to_numpy()])
    in_step = steps.of(begun)
    latest, earliest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    low, high = np.full(len(steps), earliest), np.full(len(steps), latest)
    np.minimum.at(low, in_step[in_step >= 0], begun[in_step >= 0])
    np.maximum.at(high, number[number >= 0], end[number >= 0])
    low, high = low[high > latest], high[high > latest]
    spent = (high - low - covered_within(low, high, wait_start, wait_end)).sum()
    return float(spent) / len(steps)


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
