"""Where the time of a step went: GPU time by phase, class and module, the top kernels, idle time by cause."""

from dataclasses import asdict
from statistics import median
from typing import Self

import msgspec
import numpy as np
import polars as pl

from flopwise import units
from flopwise.analysis.attention import AttentionParts, attention_parts
from flopwise.analysis.idle import (
    BETWEEN,
    INPUT,
    LATE_LAUNCH,
    NOTHING,
    SYNCHRONISATION,
    TOO_LONG,
    TOO_SHORT,
    UNKNOWN,
    Idle,
    clock_fit,
    untraced_idle,
)
from flopwise.analysis.intervals import covered_ns
from flopwise.analysis.operators import Operator, operators
from flopwise.analysis.reach import Reach
from flopwise.analysis.shares import Kernel as Kernel
from flopwise.analysis.shares import Part, gpu_time, kernels, matrix, parts, shares
from flopwise.analysis.shares import Share as Share
from flopwise.analysis.traced_steps import TracedSteps, traced_steps
from flopwise.analysis.untraced import estimate
from flopwise.records.finding import Finding
from flopwise.records.note import Note
from flopwise.records.printed import Printed
from flopwise.records.run import STEP, Point
from flopwise.records.untraced import UntracedStep
from flopwise.records.waterfall import Waterfall
from flopwise.trace.phases import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from flopwise.trace.tables import Trace
from flopwise.work.kernel_spelling import one_spelling
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import MATMUL

LAUNCH_BOUND = 0.2  # of the window idle because the host launched late
UNDISTURBED = 0.05  # a traced step that is longer by less than this needs no remark
SMALLEST = 0.01  # of the window: causes of idle time below are not named
_CAUSES_NAMED = 2
_BECAUSE = {
    LATE_LAUNCH: "because the host launches late",
    SYNCHRONISATION: "after the host has waited",
    INPUT: "while the host waits for data",
    BETWEEN: "between queued kernels",
    NOTHING: "with nothing left to do",
    UNKNOWN: "for reasons that the trace does not show",
}


class Explanation(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says about its steps. Times are nanoseconds of one step, unless named otherwise."""

    path: str
    source: str
    gpu: str
    steps: int
    steps_found_by: str  # one of analysis.steps: PROFILER_STEPS, RANGES, PERIOD, WHOLE_TRACE
    gpu_ns: float  # sum of the durations
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
    operators: tuple[Operator, ...] = ()  # ops and CUDA calls, on the host and on the GPU
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
    untraced_step: UntracedStep | None = None  # measured where it was, else estimated; None where nothing tells it
    untraced_idle: Idle | None = None  # of all steps, without the profiler; None with `untraced_step`
    optimistic_idle: Idle | None = None  # the same at `untraced_step.low_ns`
    timings: str = ""  # the run that `host_ns` is from, if another one
    notes: tuple[str, ...] = ()
    note_keys: tuple[str, ...] = ()  # of the notes, in their order
    waterfall: Waterfall | None = None  # from the ideal step to this one, where the GPU's limits are known
    findings: tuple[Finding, ...] | None = None  # what to change, the largest saving first; None: not looked for
    reach: Reach | None = None  # the step now, with all of them made, and at its limit; None with `findings`
    subject: str = ""  # what was traced, where the trace is of a run
    named_gpu: str = ""  # that the waterfall's limits were asked of; '': the trace's own

    def headline(self) -> str:
        return f"{self.subject or self.path}: {self.verdict}"

    def with_notes(self, *notes: Note) -> Self:
        texts, keys = tuple(note.text for note in notes), tuple(note.key for note in notes)
        return msgspec.structs.replace(self, notes=self.notes + texts, note_keys=self.note_keys + keys)

    @property
    def step_ns(self) -> float:
        """One step: untraced where that is measured or estimated, else as traced."""
        return self.untraced_step.ns if self.untraced_step is not None else self.window_ns


def in_two_words(e: Explanation) -> str:
    """The verdict."""
    if e.launch_bound:
        return "launch-bound"
    return "GPU idle" if idle_share(e) >= LAUNCH_BOUND else "GPU-bound"


def idle_share(e: Explanation) -> float:
    """How much of the step the GPU is idle: untraced where that is measured or estimated, else as traced."""
    idle_ns = (e.untraced_idle or e.idle).total_ns
    return idle_ns / max(e.busy_ns * e.steps + idle_ns, 1)


def explain_trace(trace: Trace, untraced: Point | None = None, *, same: bool = True) -> Explanation:
    """Explain one trace. Work launched outside the steps is left out, and counted in the notes.

    A profiler slows the host, so the verdict is of the untraced step. `untraced`: the workload measured without a profiler;
    its clock is used where it is of the `same` workload on the same GPU, else the step is estimated from the trace.
    """
    return explain_steps(traced_steps(trace), untraced, same=same)


def explain_steps(part: TracedSteps, untraced: Point | None = None, *, same: bool = True) -> Explanation:
    """As `explain_trace`, of steps that are known already."""
    trace, work, idle = part.whole, part.totals, part.idle
    n, window = len(part.steps), part.high_ns - part.low_ns
    overlap, in_stream = _overlaps(part.work)
    forward = work.filter(pl.col("phase") == FORWARD)
    both = work.filter(pl.col("phase").is_in([FORWARD, BACKWARD]))
    trains = both.height > forward.height
    bound, verdict = _verdict(idle, window)
    explanation = Explanation(
        path=trace.path,
        source=trace.source,
        gpu=trace.gpu,
        steps=n,
        steps_found_by=part.steps.how,
        gpu_ns=gpu_time(work) / n,
        busy_ns=(window - idle.total_ns) / n,
        window_ns=window / n,
        idle=idle,
        overlap_ns=overlap / n,
        stream_overlap_ns=in_stream / n,
        phases=shares(work, "phase", n),
        classes=shares(work, "class", n),
        phase_classes=matrix(work, n),
        phase_class_modules=parts(work, n),
        modules=shares(work, "folded", n),
        kernels=kernels(work, n),
        operators=operators(part),
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
    )
    estimated = _with_untraced(explanation.with_notes(*trace.notes, *part.notes), estimate(part))
    return with_clock(estimated, untraced, same=same)


def _with_untraced(explanation: Explanation, step: UntracedStep | None) -> Explanation:
    """The explanation of the step without the profiler."""
    if step is None:
        return explanation
    n, traced = explanation.steps, explanation.idle
    window = round(explanation.window_ns * n)
    idle, optimistic = (untraced_idle(traced, window, ns * n) for ns in (step.ns, step.low_ns))
    busy = explanation.busy_ns * n
    sure = _is_launch_bound(optimistic, busy + optimistic.total_ns)  # an estimate: at its optimistic end, too
    bound, verdict = _verdict(idle, round(busy) + idle.total_ns, sure)
    return msgspec.structs.replace(
        explanation,
        untraced_step=step,
        untraced_idle=idle,
        optimistic_idle=optimistic,
        launch_bound=bound,
        verdict=verdict,
    )


def with_clock(explanation: Explanation, untraced: Point | None, *, same: bool = True, origin: str = "") -> Explanation:
    """The same trace with the untraced step's clock, from the run `origin`; a clock that the GPU's work exceeds is left out."""
    host_ns, n = host_clock(untraced), explanation.steps
    if STEP not in host_ns:
        return msgspec.structs.replace(explanation, host_ns=host_ns, timings=origin if host_ns else "")
    window, wall_ns = round(explanation.window_ns * n), host_ns[STEP] * n
    fit = clock_fit(explanation.idle, window, wall_ns)
    if fit == TOO_SHORT:
        text = "the untraced clock is left out: the traced GPU work alone takes longer than that step of "
        source = f" ({origin})" if origin else ""
        return explanation.with_notes(Note("clock_too_short", f"{text}{units.duration(host_ns[STEP])}{source}"))
    explanation = msgspec.structs.replace(explanation, host_ns=host_ns, timings=origin)
    if not same:
        return explanation
    if fit == TOO_LONG:
        text = "the untraced clock is not used for the verdict: that step takes much longer than the traced one"
        return explanation.with_notes(Note("clock_too_long", text))
    wall = host_ns[STEP]
    return _with_untraced(explanation, UntracedStep(ns=wall, low_ns=wall, high_ns=wall, measured=True))


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


def _is_launch_bound(idle: Idle, window_ns: float) -> bool:
    """Late launches are the largest cause of idle time, and much of the step."""
    late = idle.by_cause_ns[LATE_LAUNCH]
    return late >= max(LAUNCH_BOUND * window_ns, *idle.by_cause_ns.values())


def _verdict(idle: Idle, window_ns: int, bound: bool | None = None) -> tuple[bool, str]:
    """Launch-bound or not, in words; idle time with its causes, the largest first."""
    share = {cause: ns / window_ns for cause, ns in idle.by_cause_ns.items()}
    ranked = sorted(share, key=lambda cause: -share[cause])[:_CAUSES_NAMED]
    named = [cause for cause in ranked if cause == ranked[0] or share[cause] >= SMALLEST]
    idle_share = idle.total_ns / window_ns
    causes = ", ".join(f"{units.percent(share[cause], 0)} {_BECAUSE[cause]}" for cause in named)
    words = f"the GPU is idle {units.percent(idle_share, 0)} of the step: {causes}"
    if _is_launch_bound(idle, window_ns) if bound is None else bound:
        return True, f"launch-bound: {words}"
    if idle_share >= LAUNCH_BOUND:
        return False, words
    return False, f"GPU-bound: the GPU is busy {units.percent(1 - idle_share, 0)} of the step"


def _overlaps(work: pl.DataFrame) -> tuple[int, int]:
    """Nanoseconds counted twice where pieces run at once: on all streams together, and within each stream."""
    streams = work.select("stream", "start_ns", "duration_ns").group_by("stream")
    return _counted_twice(work), sum(_counted_twice(stream) for _, stream in streams)


def _counted_twice(work: pl.DataFrame) -> int:
    start, duration = work["start_ns"].to_numpy(), work["duration_ns"].to_numpy()
    return int(duration.sum()) - covered_ns(start, start + duration)


def _matmul_shares(work: pl.DataFrame, forward: pl.DataFrame) -> dict[str, float]:
    """A trace with a forward pass and nothing that trains is of inference; its matmuls then have one share."""
    if not forward.height:
        return {"step": _matmul_share(work)}
    if not work["phase"].is_in([BACKWARD, RECOMPUTE, OPTIMIZER]).any():
        return {"inference": _matmul_share(forward)}
    return {"forward": _matmul_share(forward), "step": _matmul_share(work)}


def _matmul_share(work: pl.DataFrame) -> float:
    return gpu_time(work.filter(pl.col("class") == MATMUL)) / max(gpu_time(work), 1)


def _precisions(work: pl.DataFrame) -> dict[str, float]:
    """The matmuls' time by precision, as far as the names say."""
    cores = {None: "", True: " tensor cores", False: " CUDA cores"}
    matmuls = work.filter(pl.col("class") == MATMUL)
    spent: dict[str, int] = {}
    for name, ns in matmuls.group_by("name").agg(pl.col("duration_ns").sum()).iter_rows():
        known = matmul_precision(name)
        label = f"{known.precision}{cores[known.tensor_cores]}" if known else "unknown"
        spent[label] = spent.get(label, 0) + ns
    total = max(gpu_time(matmuls), 1)
    return {label: ns / total for label, ns in sorted(spent.items(), key=lambda item: (-item[1], item[0]))}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel in two traces, nanoseconds per step."""

    name: str
    kind: str
    before_ns: float
    after_ns: float
    before_count: float
    after_count: float

    @property
    def saved_ns(self) -> float:
        return self.before_ns - self.after_ns


def changes(before: Explanation, after: Explanation) -> list[Change]:
    """What changed from one trace to the other, kernel by kernel, the largest saving first.

    Profilers spell kernels' names in their own ways; across two of them, the names are compared in one spelling."""
    spelling = str if before.source == after.source else one_spelling
    pairs: dict[str, tuple[list[Kernel], list[Kernel]]] = {}
    for side, explanation in enumerate((before, after)):
        for kernel in explanation.kernels:
            pairs.setdefault(spelling(kernel.name), ([], []))[side].append(kernel)
    found = [
        Change(
            name=(old or new)[0].name,
            kind=(old or new)[0].kind,
            before_ns=sum(kernel.gpu_ns for kernel in old),
            after_ns=sum(kernel.gpu_ns for kernel in new),
            before_count=sum(kernel.count for kernel in old),
            after_count=sum(kernel.count for kernel in new),
        )
        for old, new in pairs.values()
    ]
    return sorted(found, key=lambda change: -change.saved_ns)
