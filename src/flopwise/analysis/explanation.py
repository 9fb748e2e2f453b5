"""Where the time of a step went: GPU time by phase, class and module, the top kernels, idle time by cause."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Self

import msgspec
import numpy as np
import polars as pl

from flopwise import units
from flopwise.analysis.attention import AttentionParts, attention_parts
from flopwise.analysis.blame import HostBlame
from flopwise.analysis.idle import TOO_LONG, TOO_SHORT, Idle, clock_fit, untraced_idle
from flopwise.analysis.intervals import covered_ns
from flopwise.analysis.operators import Operator, operators
from flopwise.analysis.reach import Reach
from flopwise.analysis.serving import Serving, serving
from flopwise.analysis.shares import Kernel as Kernel
from flopwise.analysis.shares import Part, gpu_time, kernels, matrix, parts, shares
from flopwise.analysis.shares import Share as Share
from flopwise.analysis.step_times import StepSpread, StepTime
from flopwise.analysis.traced_steps import TracedSteps, traced_steps
from flopwise.analysis.transfers import Transfer, transfers
from flopwise.analysis.untraced import estimate
from flopwise.analysis.verdict import CAPTURE, CAPTURED, LAUNCH, TRANSFER, verdict
from flopwise.analysis.verdict import COMMUNICATION as COMMUNICATION_BOUND
from flopwise.records.finding import Finding
from flopwise.records.note import Note
from flopwise.records.printed import Printed
from flopwise.records.run import STEP, Point
from flopwise.records.together import Together
from flopwise.records.untraced import UntracedStep
from flopwise.records.waterfall import Waterfall
from flopwise.trace.gpu_names import name_on
from flopwise.trace.phases import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from flopwise.trace.tables import NO_ID, DeviceName, Trace
from flopwise.work.kernel_spelling import one_spelling
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import COMMUNICATION, MATMUL

UNDISTURBED = 0.05  # a traced step that is longer by less than this needs no remark


class Explanation(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says about its steps. Times are nanoseconds of one step, unless named otherwise."""

    path: str
    source: str
    gpu: str
    steps: int  # found in the trace
    steady_steps: int  # that the figures are of: cold ones are set apart
    steps_found_by: str  # one of analysis.steps: PROFILER_STEPS, RANGES, PERIOD, WHOLE_TRACE, …
    gpu_ns: float  # sum of the durations
    busy_ns: float  # at least one stream at work
    window_ns: float  # from the first mark of the steps (without marks, their first work) to their end
    idle: Idle  # of all steady steps
    step_times: tuple[StepTime, ...] = ()  # every step as it was traced
    step_spread: StepSpread | None = None  # of the steady ones
    serving: Serving | None = None  # of a serving engine whose iterations say what they serve
    blame: tuple[HostBlame, ...] = ()  # what the host did while the GPU was idle
    transfers: tuple[Transfer, ...] = ()  # between host and device
    exposed_communication_ns: float = 0.0  # while nothing else ran
    graph_share: float = 0.0  # of the GPU time, run by CUDA graphs
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
    bound: str  # by what: one of analysis.verdict's words
    launch_bound: bool  # that is LAUNCH
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
    device: int = 0
    process: int = NO_ID  # that kept the device busiest
    devices: tuple["Explanation", ...] = ()  # of a trace with several: each one's own, this one's too
    together: Together | None = None  # of those

    def headline(self) -> str:
        return f"{self.subject or self.path}: {self.verdict}"

    def with_notes(self, *notes: Note) -> Self:
        texts, keys = tuple(note.text for note in notes), tuple(note.key for note in notes)
        return msgspec.structs.replace(self, notes=self.notes + texts, note_keys=self.note_keys + keys)

    @property
    def step_ns(self) -> float:
        """One step: untraced where that is measured or estimated, else as traced."""
        return self.untraced_step.ns if self.untraced_step is not None else self.window_ns


def idle_share(e: Explanation) -> float:
    """How much of the step the GPU is idle: untraced where that is measured or estimated, else as traced."""
    idle_ns = (e.untraced_idle or e.idle).total_ns
    return idle_ns / max(e.busy_ns * e.steady_steps + idle_ns, 1)


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
    moved = transfers(part.work, work, part.whole, n)
    talk = int(work.filter(pl.col("class") == COMMUNICATION)["own_ns"].sum())
    bound, why = verdict(idle, window, _only(moved, talk / n, n), part.blame)
    if part.captures:
        bound, why = CAPTURE, CAPTURED
    called = name_on(trace.gpus, part.device, part.process) if trace.gpus else DeviceName(trace.gpu)
    explanation = Explanation(
        path=trace.path,
        source=trace.source,
        gpu=called.name,
        steps=len(part.times),
        steady_steps=n,
        steps_found_by=part.steps.how,
        step_times=part.times,
        step_spread=part.spread,
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
        bound=bound,
        launch_bound=bound == LAUNCH,
        verdict=why,
        coverage=asdict(part.coverage),
        device=part.device,
        process=part.process,
        serving=serving(part.times, trace, part.work, n),
        blame=part.blame,
        transfers=moved,
        exposed_communication_ns=talk / n,
        graph_share=gpu_time(part.work.filter(pl.col("attributed") == "graph")) / max(gpu_time(part.work), 1),
    )
    guess = () if called.note is None else (called.note,)
    estimated = _with_untraced(explanation.with_notes(*trace.notes, *guess, *part.notes), estimate(part))
    return with_clock(estimated, untraced, same=same)


def _with_untraced(explanation: Explanation, step: UntracedStep | None) -> Explanation:
    """The explanation of the step without the profiler."""
    if step is None or explanation.bound == CAPTURE:
        return explanation
    n, traced = explanation.steady_steps, explanation.idle
    window = round(explanation.window_ns * n)
    idle, optimistic = (untraced_idle(traced, window, ns * n) for ns in (step.ns, step.low_ns))
    busy, only = explanation.busy_ns * n, _only(explanation.transfers, explanation.exposed_communication_ns, n)
    # An estimate is launch-bound if it is at its optimistic end, too.
    sure = verdict(optimistic, busy + optimistic.total_ns, only)[0] == LAUNCH
    bound, why = verdict(idle, busy + idle.total_ns, only, explanation.blame, launch_bound=sure)
    return msgspec.structs.replace(
        explanation,
        untraced_step=step,
        untraced_idle=idle,
        optimistic_idle=optimistic,
        bound=bound,
        launch_bound=bound == LAUNCH,
        verdict=why,
    )


def with_clock(explanation: Explanation, untraced: Point | None, *, same: bool = True, origin: str = "") -> Explanation:
    """The same trace with the untraced step's clock, from the run `origin`; a clock that the GPU's work exceeds is left out."""
    host_ns, n = host_clock(untraced), explanation.steady_steps
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


def _only(moved: Sequence[Transfer], communication_ns: float, n: int) -> dict[str, float]:
    """Nanoseconds of all steps in which nothing but transfers, or nothing but communication, ran."""
    return {TRANSFER: n * sum(one.exposed_ns for one in moved), COMMUNICATION_BOUND: n * communication_ns}


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
