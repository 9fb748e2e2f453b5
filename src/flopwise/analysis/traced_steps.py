"""The part of a trace that is explained: the steps of one process on one device, by default the busiest."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from flopwise import units
from flopwise.analysis.blame import HostBlame, host_blame
from flopwise.analysis.host_activity import capturing
from flopwise.analysis.idle import COMPILATION, Idle, host_gaps, idle
from flopwise.analysis.intervals import clipped, counted_once, covered_ns, covered_within
from flopwise.analysis.serving import with_batches
from flopwise.analysis.shares import gpu_time, totals
from flopwise.analysis.step_times import STEADY, StepSpread, StepTime, edges, spread, steady_run, step_times
from flopwise.analysis.steps import BEFORE, Steps, find_steps, launch_times
from flopwise.analysis.transfers import NAMES
from flopwise.analysis.verdict import BOUND
from flopwise.errors import FlopwiseError
from flopwise.records.note import Note
from flopwise.trace.attribute import Attribution, Coverage, attribute
from flopwise.trace.phases import OPTIMIZER
from flopwise.trace.tables import NO_ID, Trace, of_process
from flopwise.work.operation import COMMUNICATION
from flopwise.work.operation import OPTIMIZER as OPTIMIZER_KERNEL

_NAMED = 3  # steps set apart that a note names


@dataclass(frozen=True)
class TracedSteps:
    """The steady steps of one process on one device; `times` has all of its steps."""

    whole: Trace
    trace: Trace  # of the process
    device: int
    process: int  # NO_ID: not known
    steps: Steps
    work: pl.DataFrame  # an Attribution's rows
    totals: pl.DataFrame  # the same, summed by everything that analyses group by
    idle: Idle
    blame: tuple[HostBlame, ...]  # of the idle time, per step
    low_ns: int  # the window
    high_ns: int
    captures: bool  # CUDA graphs, most of the time: their kernels do not run
    times: tuple[StepTime, ...]
    spread: StepSpread
    coverage: Coverage  # of the whole trace
    notes: tuple[Note, ...]


def traced_steps(
    trace: Trace, worker: tuple[int, int] | None = None, attribution: Attribution | None = None
) -> TracedSteps:
    """Find the steps and the work launched in them. Other work, and that of cold steps, is left out, and counted in the notes.

    `worker`: which device, and which process on it; else the busiest. `attribution`: of the whole trace, if it was made already.
    """
    if not trace.kernels.height and not trace.graph_runs.height:
        raise FlopwiseError(f"{trace.path} has no GPU work in it", "was it captured on a GPU, with CUDA activity on?")
    attribution = attribution or attribute(trace)
    all_workers = workers(attribution.table)
    device, process = worker or all_workers[0]
    everywhere = attribution.table
    if len(all_workers) > 1 or everywhere["device"].n_unique() > 1:
        chosen = pl.col("process").is_in([process, NO_ID])
        everywhere = everywhere.filter(pl.col("device") == device, chosen)
    mine = of_process(trace, process)
    found = find_steps(mine, everywhere)
    launched = launch_times(everywhere)
    outside = int((found.of(launched) < 0).sum())
    if outside == everywhere.height:
        problem = f"{trace.path}: no GPU work falls into the steps ({found.how})"
        raise FlopwiseError(problem, "is the trace cut off?")
    at = edges(found, everywhere, launched, mine, device)
    if at[-1] <= at[0]:
        problem = f"{trace.path}: its GPU work takes no time at all"
        raise FlopwiseError(problem, "is the trace cut off, or its clock too coarse?")
    times = with_batches(step_times(mine, found, everywhere, launched, at, device), mine, found.starts_ns)
    first, last = steady_run(times)
    steps, low, high = found.part(first, last), int(at[first]), int(at[last])
    waited = host_gaps(mine, low, high, device)
    lost = idle(mine, waited, low, high)
    inside = pl.Series(steps.of(launched) >= 0)
    work = everywhere if inside.all() else everywhere.filter(inside)
    return TracedSteps(
        whole=trace,
        trace=mine,
        device=device,
        process=process,
        steps=steps,
        work=work,
        totals=totals(_with_own_time(_with_shapes(work, trace))),
        idle=lost,
        blame=host_blame(mine, waited, lost, len(steps)),
        low_ns=low,
        high_ns=high,
        captures=2 * covered_ns(*clipped(*capturing(mine), low, high)) >= high - low,
        times=times,
        spread=spread(times, (first, last)),
        coverage=attribution.coverage,
        notes=(
            *_graph_notes(work),
            *_set_apart(times, (first, last)),
            *_only_cold(times, lost, high - low),
            *_left_out(found, outside, int((launched == BEFORE).sum())),
            *_others(attribution.table, device, (device, process) == all_workers[0]),
        ),
    )


def workers(work: pl.DataFrame) -> list[tuple[int, int]]:
    """Who worked: (device, process), the busiest first. Steps of several at once would not add up to one.

    Work whose process is not known counts as that of its device's busiest process."""
    spent = work.group_by("device", "process").agg(pl.col("duration_ns").sum())
    spent = spent.sort("duration_ns", "device", "process", descending=[True, False, False])
    pairs = [(int(device), int(process)) for device, process, _ in spent.iter_rows()]
    named = {device for device, process in pairs if process != NO_ID}
    return [(device, process) for device, process in pairs if process != NO_ID or device not in named]


def _graph_notes(work: pl.DataFrame) -> list[Note]:
    share = gpu_time(work.filter("replayed")) / max(gpu_time(work), 1)
    unknown = "comes from CUDA graphs captured outside the trace: its modules and phases are unknown"
    notes = [Note("unseen_graphs", f"{units.percent(share, 0)} of the GPU time {unknown}")] if share > 0 else []
    if (work["source"] == "graph run").any():
        busy = "CUDA graphs are traced as one row each: gaps inside count as busy, so busy time is an upper bound "
        notes.append(Note("whole_graphs", f"{busy}(nsys profile --cuda-graph-trace=node traces their kernels)"))
    return notes


def _set_apart(times: Sequence[StepTime], run: tuple[int, int]) -> list[Note]:
    """Steps that the figures are not of, each with its reason."""
    apart = [one for one in times if one.kind != STEADY]
    if not apart or len(apart) == len(times):
        return []
    named = "; ".join(f"step {one.number} ({units.duration(one.ns)}: {one.why})" for one in apart[:_NAMED])
    more = f" and {len(apart) - _NAMED} more" if len(apart) > _NAMED else ""
    which = f"step {run[1]}" if run[1] - run[0] == 1 else f"steps {run[0] + 1} to {run[1]}"
    some = f"; the figures are of {which}" if run[1] - run[0] < len(times) - len(apart) else ""
    return [Note("cold_steps", f"left out as not steady: {named}{more}{some}")]


def _only_cold(times: Sequence[StepTime], lost: Idle, window_ns: int) -> list[Note]:
    """A single step that compiles cannot be compared with others, but says so itself."""
    spent = lost.by_cause_ns[COMPILATION]
    text = f"the only step is cold: the GPU waits {units.duration(spent)} while the host compiles or loads kernels"
    return [Note("cold_step", text)] if len(times) == 1 and spent >= BOUND * window_ns else []


def _left_out(steps: Steps, outside: int, before: int) -> list[Note]:
    """What the device did besides the work that is explained."""
    after = outside - before
    cases = (
        (before, "queued_before", f"GPU work queued before the trace began is left out: {_pieces(before)}"),
        (after, "outside", f"GPU work launched outside the steps is left out: {_pieces(after)}"),
        (steps.n_empty, "empty_steps", f"marked steps that launched no GPU work, not counted: {steps.n_empty}"),
    )
    return [Note(key, text) for holds, key, text in cases if holds]


def _others(everything: pl.DataFrame, device: int, busiest: bool) -> list[Note]:
    """Which of several devices and processes this is."""
    n_devices, n_processes = everything["device"].n_unique(), (everything["process"].unique() != NO_ID).sum()
    which = ", the busiest" if busiest else ""
    cases = (
        (n_devices > 1, "devices", f"{n_devices} devices worked; this is device {device}{which}"),
        (
            n_processes > 1,
            "processes",
            f"{n_processes} processes used the GPU; this is {'the busiest' if busiest else 'one of them'}",
        ),
    )
    return [Note(key, text) for holds, key, text in cases if holds]


def _pieces(n: int) -> str:
    return "1 piece" if n == 1 else f"{n} pieces"


def _with_shapes(work: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """The number of the sizes of each row's op (0: not given), and a 1 in `ops` at the first row of an op that has them; of an
    op captured into a CUDA graph, at the first row of each replay."""
    if not trace.sized_ops.height:
        return work.with_columns(shape=pl.lit(0, pl.UInt32), ops=pl.lit(0, pl.UInt32))
    of_op = np.zeros(trace.ops.height + 1, dtype=np.uint32)  # the last: work without an op
    of_op[trace.sized_ops["op"].to_numpy()] = trace.sized_ops["shape"].to_numpy()
    op = work["op_index"].fill_null(trace.ops.height).to_numpy()
    shape = of_op[op]
    rows = np.flatnonzero(shape)
    ops = np.zeros(len(op), dtype=np.uint32)
    replay = np.where((work["attributed"] == "graph").to_numpy(), work["launch_ns"].fill_null(0).to_numpy(), 0)[rows]
    order = np.lexsort((rows, replay, op[rows]))
    again = (np.diff(op[rows][order]) == 0) & (np.diff(replay[order]) == 0)
    ops[rows[order[np.concatenate(([True], ~again))]] if len(order) else order] = 1
    return work.with_columns(pl.Series("shape", shape), pl.Series("ops", ops))


def _with_own_time(work: pl.DataFrame) -> pl.DataFrame:
    """`own_ns`: the durations, instants at which several pieces ran counted once, for the one that began first; those of
    the optimizer only where the model's own work did not run, those of communication only where neither ran, those of copies
    between host and device only where nothing else ran. They add up to the time in which there was work."""
    start, duration = work["start_ns"].to_numpy(), work["duration_ns"].to_numpy()
    end = start + duration
    updates = ((work["class"] == OPTIMIZER_KERNEL) | (work["phase"] == OPTIMIZER)).to_numpy()
    rank = np.where((work["class"] == COMMUNICATION).to_numpy(), 2, updates.astype(np.int64))
    copies = np.flatnonzero((work["source"] == "copy").to_numpy())  # few: their names are looked at one by one
    rank[copies[work["name"].gather(copies).cast(pl.String).is_in(list(NAMES)).to_numpy()]] = 3
    own = np.zeros(len(start), dtype=np.int64)
    for number in range(4):
        mine, before = rank == number, rank < number
        alone = counted_once(start[mine], end[mine])  # the last part of each
        own[mine] = alone - covered_within(end[mine] - alone, end[mine], start[before], end[before])
    return work.with_columns(pl.Series("own_ns", own))
