"""Where the host waited for the GPU inside a step: the call, the op above it, and the ranges around it."""

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.steps import Steps
from flopwise.trace.host import Host, Points
from flopwise.trace.lookup import first_rows
from flopwise.trace.nesting import Nesting
from flopwise.trace.scopes import Scopes
from flopwise.trace.tables import Trace

PAGEABLE = "copy to pageable memory"  # 'Async' in name only: the call returns when the bytes have arrived


class HostWait(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of wait, per step."""

    call: str  # 'cudaStreamSynchronize', or PAGEABLE
    op: str  # the outermost op: 'aten::item'; '' where there is none
    where: str  # ranges and modules around it, outer to inner
    line: str = ""  # the user's function that waited, 'train.py(95): step', where stacks were captured
    count: float
    waited_ns: float  # in the call; what the GPU was idle afterwards is the idle time's to tell


def host_waits(trace: Trace, steps: Steps) -> tuple[HostWait, ...]:
    """The waits between the first launch of the steps and the last, those that took longest first.

    A wait after which nothing is launched any more ends the measurement and holds nothing up: it is left out.
    """
    calls = _calls(trace)
    last = max(
        (int(t["start_ns"].to_numpy().max()) for t in (trace.launches, trace.graph_launches) if t.height), default=0
    )
    inside = (steps.of(calls["start_ns"].to_numpy()) >= 0) & (calls["end_ns"].to_numpy() <= last)
    calls = calls.filter(pl.Series(inside))
    if not calls.height:
        return ()
    host = Host(trace)
    at = host.points(calls["process"], calls["thread"], calls["start_ns"])
    top = host.ops().outermost().innermost(at.lane, at.time)
    scope = host.scopes.innermost(at.lane, at.time)
    _, path = Scopes(host).of(scope)
    ops = ["" if row < 0 else trace.names[int(host.name[row])] for row in top.tolist()]
    told = calls.with_columns(
        pl.Series("op", ops), path.cast(pl.String).fill_null("").alias("where"), _lines(trace, host, at)
    )
    rows = told.group_by("call", "op", "where", "line").agg(
        pl.len().alias("n"), (pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns")
    )
    n = len(steps)
    return tuple(
        HostWait(call=call, op=op, where=where, line=line, count=count / n, waited_ns=ns / n)
        for call, op, where, line, count, ns in rows.sort(
            "ns", "call", "op", "line", descending=[True, False, False, False]
        ).iter_rows()
    )


def _lines(trace: Trace, host: Host, at: Points) -> pl.Series:
    """The innermost function of the user's own around each point."""
    lane = host.lanes_of(trace.frames["process"], trace.frames["thread"])
    frames, lane = trace.frames.filter(pl.Series(lane >= 0)), lane[lane >= 0]
    if not frames.height:
        return pl.Series("line", [""] * len(at.time), dtype=pl.String)
    nested = Nesting(lane, frames["start_ns"].to_numpy(), frames["end_ns"].to_numpy())
    found, names = nested.innermost(at.lane, at.time), frames["name"].to_numpy()
    rows = np.where(found < 0, -1, nested.order[np.maximum(found, 0)])
    return pl.Series(
        "line", ["" if row < 0 else trace.names[int(names[row])] for row in rows.tolist()], dtype=pl.String
    )


def _calls(trace: Trace) -> pl.DataFrame:
    """Calls that say they wait, and copies from the GPU that their call spans."""
    columns = ["start_ns", "end_ns", "process", "thread"]
    names = pl.Series("call", trace.names, dtype=pl.String)
    waits = trace.syncs.select(*columns, names.gather(trace.syncs["name"]))
    copies = trace.copies.filter(pl.col("kind") == "DtoH", pl.col("correlation") > 0)
    if not copies.height:
        return waits
    wanted, known = ((t["process"].to_numpy(), t["correlation"].to_numpy()) for t in (copies, trace.launches))
    row = first_rows(wanted, known)
    copies, calls = copies.filter(pl.Series(row >= 0)), trace.launches[row[row >= 0]]
    spanned = (calls["start_ns"] <= copies["start_ns"]) & (calls["end_ns"] >= copies["end_ns"])
    pageable = calls.filter(spanned).select(*columns, pl.lit(PAGEABLE).alias("call"))
    return pl.concat([waits, pageable])
