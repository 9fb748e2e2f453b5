"""The part of a trace that is explained: the steps of one process on one device, the busiest."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from flopwise import units
from flopwise.analysis.idle import Idle, idle
from flopwise.analysis.intervals import counted_once, covered_within
from flopwise.analysis.shares import gpu_time, totals
from flopwise.analysis.steps import Steps, find_steps, launch_times
from flopwise.errors import FlopwiseError
from flopwise.records.note import Note
from flopwise.trace.attribute import Coverage, attribute
from flopwise.trace.phases import OPTIMIZER
from flopwise.trace.tables import NO_ID, Trace, of_process
from flopwise.work.operation import COMMUNICATION
from flopwise.work.operation import OPTIMIZER as OPTIMIZER_KERNEL


@dataclass(frozen=True)
class TracedSteps:
    """The steps of one process on one device."""

    whole: Trace
    trace: Trace  # of the process
    device: int
    steps: Steps
    work: pl.DataFrame  # an Attribution's rows
    totals: pl.DataFrame  # the same, summed by everything that analyses group by
    idle: Idle
    low_ns: int  # the window
    high_ns: int
    coverage: Coverage  # of the whole trace
    notes: tuple[Note, ...]


def traced_steps(trace: Trace) -> TracedSteps:
    """Find the steps and the work in them. Work launched outside the steps is left out, and counted in the notes."""
    if not trace.kernels.height and not trace.graph_runs.height:
        raise FlopwiseError(f"{trace.path} has no GPU work in it", "was it captured on a GPU, with CUDA activity on?")
    attribution = attribute(trace)
    device, process, everywhere = _busiest(attribution.table)
    mine = of_process(trace, process)
    steps = find_steps(mine, everywhere)
    inside = pl.Series(steps.of(launch_times(everywhere)) >= 0)
    work, outside = (everywhere, everywhere.clear()) if inside.all() else map(everywhere.filter, (inside, ~inside))
    if not work.height:
        problem = f"{trace.path}: no GPU work falls into the steps ({steps.how})"
        raise FlopwiseError(problem, "is the trace cut off?")
    low, high = _window(steps, work, outside)
    if high <= low:
        problem = f"{trace.path}: its GPU work takes no time at all"
        raise FlopwiseError(problem, "is the trace cut off, or its clock too coarse?")
    return TracedSteps(
        whole=trace,
        trace=mine,
        device=device,
        steps=steps,
        work=work,
        totals=totals(_with_own_time(_with_shapes(work, trace))),
        idle=idle(mine, low, high, device),
        low_ns=low,
        high_ns=high,
        coverage=attribution.coverage,
        notes=(*_graph_notes(work), *_left_out(steps, attribution.table, device, outside.height)),
    )


def _busiest(work: pl.DataFrame) -> tuple[int, int, pl.DataFrame]:
    """The device and the process that kept it busiest, and their work: steps of several at once would not add up to one.

    Work whose process is not known counts as this one's."""
    spent = work.group_by("device", "process").agg(pl.col("duration_ns").sum())
    spent = spent.sort("duration_ns", "device", "process", descending=[True, False, False])
    device = int(spent["device"][0])
    known = spent.filter(pl.col("device") == device, pl.col("process") != NO_ID)["process"]
    process = int(known[0]) if len(known) else NO_ID
    if spent.height > 1:
        work = work.filter(pl.col("device") == device, pl.col("process").is_in([process, NO_ID]))
    return device, process, work


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


def _graph_notes(work: pl.DataFrame) -> list[Note]:
    share = gpu_time(work.filter("replayed")) / max(gpu_time(work), 1)
    unknown = "comes from CUDA graphs captured outside the trace: its modules and phases are unknown"
    notes = [Note("unseen_graphs", f"{units.percent(share, 0)} of the GPU time {unknown}")] if share > 0 else []
    if (work["source"] == "graph run").any():
        busy = "CUDA graphs are traced as one row each: gaps inside count as busy, so busy time is an upper bound "
        notes.append(Note("whole_graphs", f"{busy}(nsys profile --cuda-graph-trace=node traces their kernels)"))
    return notes


def _left_out(steps: Steps, everything: pl.DataFrame, device: int, outside: int) -> list[Note]:
    """What the trace holds besides the work that is explained."""
    n_devices, n_processes = everything["device"].n_unique(), (everything["process"].unique() != NO_ID).sum()
    cases = (
        (outside, "outside", f"{outside} pieces of GPU work were launched outside the steps and are left out"),
        (steps.n_empty, "empty_steps", f"marked steps that launched no GPU work, not counted: {steps.n_empty}"),
        (n_devices > 1, "devices", f"{n_devices} devices worked; this is device {device}, the busiest"),
        (n_processes > 1, "processes", f"{n_processes} processes used the GPU; this is the busiest"),
    )
    return [Note(key, text) for holds, key, text in cases if holds]


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


def _with_own_time(work: pl.DataFrame) -> pl.DataFrame:
    """`own_ns`: the durations, instants at which several pieces ran counted once, for the one that began first; those of
    the optimizer only where the model's own work did not run, those of communication only where nothing else ran. They add
    up to the time in which there was work."""
    start, duration = work["start_ns"].to_numpy(), work["duration_ns"].to_numpy()
    end = start + duration
    updates = ((work["class"] == OPTIMIZER_KERNEL) | (work["phase"] == OPTIMIZER)).to_numpy()
    rank = np.where((work["class"] == COMMUNICATION).to_numpy(), 2, updates.astype(np.int64))
    own = np.zeros(len(start), dtype=np.int64)
    for number in range(3):
        mine, before = rank == number, rank < number
        alone = counted_once(start[mine], end[mine])  # the last part of each
        own[mine] = alone - covered_within(end[mine] - alone, end[mine], start[before], end[before])
    return work.with_columns(pl.Series("own_ns", own))
