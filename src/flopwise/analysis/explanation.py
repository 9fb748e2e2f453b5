"""Where the time of a step went: GPU time by phase, class and module, the top kernels, idle time by cause."""

from dataclasses import asdict
from statistics import median

import msgspec
import numpy as np
import polars as pl

from flopwise import units
from flopwise.analysis.attention import AttentionParts, attention_parts
from flopwise.analysis.explained import Explained, explained
from flopwise.analysis.idle import (
    BETWEEN,
    INPUT,
    LATE_LAUNCH,
    NOTHING,
    SYNCHRONISATION,
    UNKNOWN,
    Idle,
    too_short,
    untraced_idle,
)
from flopwise.analysis.intervals import covered_ns
from flopwise.analysis.shares import Kernel as Kernel
from flopwise.analysis.shares import Part, gpu_time, kernels, matrix, parts, shares
from flopwise.analysis.shares import Share as Share
from flopwise.records.finding import Finding
from flopwise.records.run import STEP, Point
from flopwise.records.waterfall import Waterfall
from flopwise.trace.phases import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from flopwise.trace.tables import Trace
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import MATMUL

LAUNCH_BOUND = 0.2  # of the window idle because the host launched late
UNDISTURBED = 0.05  # a traced step that is no longer than this beyond the untraced one needs no word
SMALLEST = 0.01  # of the window: causes of idle time below go unsaid
_BECAUSE = {
    LATE_LAUNCH: "because the host launched late",
    SYNCHRONISATION: "after the host had waited",
    INPUT: "while the host waited for data",
    BETWEEN: "between kernels that were queued",
    NOTHING: "with nothing left to do",
    UNKNOWN: "for reasons that the trace does not tell",
}


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
    overlap_ns: float = 0.0  # of `gpu_ns`, counted more than once as pieces ran at once
    stream_overlap_ns: float = 0.0  # the same within each stream
    phases: tuple[Share, ...]
    classes: tuple[Share, ...]
    phase_classes: dict[str, dict[str, float]]
    phase_class_modules: tuple[Part, ...] = ()
    modules: tuple[Share, ...]
    kernels: tuple[Kernel, ...]
    copies: float = 0.0  # copies and memsets, per step
    top_forward: Kernel | None  # without the loss, as everywhere in this record
    top_forward_backward: Kernel | None  # None in a trace without a backward pass
    matmul_share: dict[str, float]  # of 'inference', if that is all the trace holds; of 'forward' and the whole 'step'
    matmul_precision: dict[str, float]  # share of the matmul time by what the kernels' names say
    attention: AttentionParts  # of the forward pass
    attention_backward: AttentionParts
    launches: float  # per step
    launch_bound: bool
    verdict: str
    coverage: dict[str, float]
    host_ns: dict[str, float] = {}  # wall time of the untraced step and its phases, where it was measured
    untraced_idle: Idle | None = None  # of all steps, without the profiler, where the untraced step was measured
    timings: str = ""  # whose clock `host_ns` is, if another run's
    notes: tuple[str, ...]
    waterfall: Waterfall | None = None  # from the ideal step to this one, where the GPU's limits are known
    findings: tuple[Finding, ...] | None = None  # what to change, the largest saving first; None: not looked for

    @property
    def step_ns(self) -> float:
        """One step: untraced where it was timed over the same work, else as traced."""
        if self.waterfall is not None:
            return self.waterfall.step_ns
        return self.host_ns[STEP] if self.untraced_idle is not None else self.window_ns


def explain_trace(trace: Trace, untraced: Point | None = None, *, same: bool = True) -> Explanation:
    """Answer for one trace. Work launched outside the steps found is left out, and counted in the notes.

    `untraced`: the workload measured without a profiler, to set its clock beside the trace's. A profiler slows the host, so
    the verdict is of the untraced step where that clock is of the `same` workload on the same GPU.
    """
    return explain_part(explained(trace), untraced, same=same)


def explain_part(part: Explained, untraced: Point | None = None, *, same: bool = True) -> Explanation:
    """As `explain_trace`, of steps that were found already."""
    trace, work, waiting = part.whole, part.added, part.idle
    n, window = len(part.steps), part.high_ns - part.low_ns
    overlap, in_stream = _overlaps(part.work)
    forward = work.filter(pl.col("phase") == FORWARD)
    both = work.filter(pl.col("phase").is_in([FORWARD, BACKWARD]))
    trains = both.height > forward.height
    bound, verdict = _verdict(waiting, window)
    found = Explanation(
        path=trace.path,
        source=trace.source,
        gpu=trace.gpu,
        steps=n,
        steps_found_by=part.steps.how,
        gpu_ns=gpu_time(work) / n,
        busy_ns=(window - waiting.total_ns) / n,
        window_ns=window / n,
        idle=waiting,
        overlap_ns=overlap / n,
        stream_overlap_ns=in_stream / n,
        phases=shares(work, "phase", n),
        classes=shares(work, "class", n),
        phase_classes=matrix(work, n),
        phase_class_modules=parts(work, n),
        modules=shares(work, "folded", n),
        kernels=kernels(work, n),
        copies=int(work["copies"].sum()) / n,
        top_forward=next(iter(kernels(forward, n)), None),
        top_forward_backward=next(iter(kernels(both, n)), None) if trains else None,
        matmul_share=_matmul_shares(work, forward),
        matmul_precision=_precisions(work),
        attention=attention_parts(forward, trace.shapes, n),
        attention_backward=attention_parts(work.filter(pl.col("phase") == BACKWARD), trace.shapes, n),
        launches=_launches(part.work) / n,
        launch_bound=bound,
        verdict=verdict,
        coverage=asdict(part.coverage),
        notes=trace.notes + part.notes,
    )
    return with_clock(found, untraced, same=same)


def with_clock(found: Explanation, untraced: Point | None, *, same: bool = True) -> Explanation:
    """The same trace with the untraced step's clock beside it; a clock into which the GPU's work does not fit is left out."""
    host_ns, n = host_clock(untraced), found.steps
    if STEP not in host_ns:
        return msgspec.structs.replace(found, host_ns=host_ns)
    window = round(found.window_ns * n)
    alone, unfit = untraced_idle(found.idle, window, host_ns[STEP] * n)
    if too_short(found.idle, window, host_ns[STEP] * n):
        said = f"{unfit} of {units.duration(host_ns[STEP])}"
        return msgspec.structs.replace(found, notes=(*found.notes, said))
    if not same:
        return msgspec.structs.replace(found, host_ns=host_ns)
    if alone is None:
        return msgspec.structs.replace(found, host_ns=host_ns, notes=(*found.notes, unfit))
    bound, verdict = _untraced(alone, host_ns[STEP], found.idle, window, n)
    return msgspec.structs.replace(found, host_ns=host_ns, untraced_idle=alone, launch_bound=bound, verdict=verdict)


def _launches(work: pl.DataFrame) -> int:
    """Calls that launched this work; one call launches all of a CUDA graph."""
    known = work["launch_ns"].is_not_null()
    thread, time = (work[name].filter(known).to_numpy() for name in ("launch_thread", "launch_ns"))
    order = np.lexsort((time, thread))
    again = (np.diff(time[order]) == 0) & (np.diff(thread[order]) == 0)
    return len(order) - int(again.sum())


def host_clock(untraced: Point | None) -> dict[str, float]:
    """The untraced step and its phases; a step that is nothing but a forward pass is that phase, too."""
    if untraced is None:
        return {}
    clock = {times.phase: float(median(times.wall_ns)) for times in untraced.phases if times.wall_ns}
    if STEP in clock and untraced.trial.workload.phase == FORWARD:
        clock.setdefault(FORWARD, clock[STEP])
    return clock


def _untraced(alone: Idle, step_ns: float, traced: Idle, window_ns: int, n: int) -> tuple[bool, str]:
    """The verdict on the step without the profiler; what the profiler made of it, where that is another picture."""
    wall_ns = window_ns - traced.total_ns + alone.total_ns
    bound, words = _verdict(alone, wall_ns, f"of the {units.duration(step_ns)} that the step takes untraced")
    if window_ns > (1 + UNDISTURBED) * wall_ns:
        share = traced.total_ns / window_ns
        words += f"; the profiler slows the host: traced, it is idle {share:.0%} of {units.duration(window_ns / n)}"
    return bound, words


def _verdict(waiting: Idle, window_ns: int, of: str = "of the time") -> tuple[bool, str]:
    """Launch-bound or not, in words; idle time with its causes, the largest first."""
    share = {cause: ns / window_ns for cause, ns in waiting.by_cause_ns.items()}
    ranked = sorted(share, key=lambda cause: -share[cause])
    told = [cause for cause in ranked if cause == ranked[0] or share[cause] >= SMALLEST]
    idle_share = waiting.total_ns / window_ns
    parts = f"idle {idle_share:.0%} {of}: {', '.join(f'{share[c]:.0%} {_BECAUSE[c]}' for c in told)}"
    if share[LATE_LAUNCH] >= LAUNCH_BOUND:
        return True, f"launch-bound: the GPU is {parts}"
    if idle_share >= LAUNCH_BOUND:
        return False, f"the GPU is {parts}"
    return False, f"GPU-bound: the GPU is busy {1 - idle_share:.0%} {of}"


def _overlaps(work: pl.DataFrame) -> tuple[int, int]:
    """Nanoseconds counted twice where pieces run at once: on all streams together, and within each stream."""
    both = 0
    for _, stream in work.select("stream", "start_ns", "duration_ns").group_by("stream"):
        both += _counted_twice(stream)
    return _counted_twice(work), both


def _counted_twice(work: pl.DataFrame) -> int:
    start, duration = work["start_ns"].to_numpy(), work["duration_ns"].to_numpy()
    return int(duration.sum()) - covered_ns(start, start + duration)


def _matmul_shares(work: pl.DataFrame, forward: pl.DataFrame) -> dict[str, float]:
    """A trace with a forward pass and nothing that trains is of inference; its matmuls then have one share."""
    training = work["phase"].is_in([BACKWARD, RECOMPUTE, OPTIMIZER]).any()
    if not forward.height:
        return {"step": _matmul_share(work)}
    if not training:
        return {"inference": _matmul_share(forward)}
    return {"forward": _matmul_share(forward), "step": _matmul_share(work)}


def _matmul_share(work: pl.DataFrame) -> float:
    return gpu_time(work.filter(pl.col("class") == MATMUL)) / max(gpu_time(work), 1)


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
    total = max(gpu_time(matmuls), 1)
    return {label: ns / total for label, ns in sorted(spent.items(), key=lambda item: (-item[1], item[0]))}
