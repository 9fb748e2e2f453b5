"""What each thread of the host did at every moment: the innermost op, and its phase and module.

A thread's time is cut wherever an op or a range begins or ends on it. Each stretch belongs to the innermost op that is open,
so that an op has its self time, without the ops that it calls; the stretches of one thread never add up to more than the time
that has passed, however its ops overlap. Phases and modules follow the rules of `attribute`. Time outside every op that
lies between two ops of one phase is of that phase, too: it is the Python code that calls them.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise.trace.attribute import phase_codes, scope_at
from flopwise.trace.host import Host, Points, Scopes
from flopwise.trace.nesting import Ints
from flopwise.trace.phases import FORWARD, LOSS, OTHER, PHASES
from flopwise.trace.tables import Trace

_OTHER, _FORWARD, _LOSS = (np.int8(PHASES.index(phase)) for phase in (OTHER, FORWARD, LOSS))


def host_time(trace: Trace) -> pl.DataFrame:
    """By process, thread and start: process, thread, start_ns, duration_ns; op and op_index (its row in the Trace's ops), null
    outside every op; module and path, null where none is known; phase."""
    host = Host(trace)
    at, duration = _stretches(trace, host)
    op = host.ops().innermost(at.lane, at.time)
    node, marked = host.backward.innermost(at.lane, at.time), host.phases.innermost(at.lane, at.time)
    in_loss = host.losses.innermost(at.lane, at.time) >= 0
    phase = phase_codes(host, at, op, node, marked, in_loss).astype(np.int8)
    phase[(phase == _FORWARD) & in_loss] = _LOSS
    module, path = Scopes(host).of(scope_at(host, at, node, host.forward_of(node)))
    row = host.op_rows(op)
    index = pl.Series("op_index", np.maximum(row, 0).astype(np.uint32)).set(pl.Series(row < 0), None)
    names = pl.Series("op", [*trace.names, None], dtype=pl.Categorical)
    number = trace.ops["name"].to_numpy()[np.maximum(row, 0)] if trace.ops.height else np.zeros(len(row), np.uint32)
    return pl.DataFrame(
        [
            host.lanes["process"].gather(at.lane),
            host.lanes["thread"].gather(at.lane),
            pl.Series("start_ns", at.time),
            pl.Series("duration_ns", duration),
            names.gather(np.where(row < 0, len(trace.names), number)),
            index,
            module,
            path,
            pl.Series("phase", PHASES, dtype=pl.Enum(PHASES)).gather(_continued(phase, op < 0, at.lane)),
        ]
    )


def _stretches(trace: Trace, host: Host) -> tuple[Points, Ints]:
    """Where nothing begins or ends, and for how long."""
    tables = (trace.ranges, trace.ops)
    lane = np.concatenate([host.lanes_of(table["process"], table["thread"]) for table in tables] * 2)
    time = np.concatenate([table[name].to_numpy() for name in ("start_ns", "end_ns") for table in tables])
    order = np.lexsort((time, lane))
    lane, time = lane[order], time[order]
    duration = np.diff(time, append=time[-1:])
    kept = np.append(lane[1:] == lane[:-1], False)[: len(lane)] & (duration > 0)
    return Points(lane[kept], time[kept]), duration[kept]


def _continued(phase: NDArray[np.int8], outside: NDArray[np.bool_], lane: Ints) -> NDArray[np.int8]:
    """The phases, with that of the ops before and after where these agree on it."""
    unknown = outside & (phase == _OTHER)
    known = np.flatnonzero(~unknown)
    rows = np.flatnonzero(unknown)
    if not len(known) or not len(rows):
        return phase
    place = np.searchsorted(known, rows)
    before, after = known[np.maximum(place - 1, 0)], known[np.minimum(place, len(known) - 1)]
    between = (before < rows) & (after > rows) & (lane[before] == lane[rows]) & (lane[after] == lane[rows])
    agree = between & (phase[before] == phase[after])
    phase = phase.copy()
    phase[rows[agree]] = phase[before[agree]]
    return phase
