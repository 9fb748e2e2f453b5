"""The course's five questions of a trace: the forward pass by two clocks, its kernels, matmul's share, softmax and matmul."""

import msgspec
import polars as pl

from flopwise import units
from flopwise.analysis.attention import AttentionParts, is_attention, is_inner
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.intervals import covered_ns
from flopwise.analysis.shares import Kernel, gpu_time, kernels
from flopwise.analysis.steps import launch_times
from flopwise.analysis.traced_model import SOFTMAX_FLOPS, TracedModel, attention_flops
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.records.printed import Printed
from flopwise.trace.phases import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, phase_of_range
from flopwise.trace.phases import OTHER as UNKNOWN_PHASE
from flopwise.trace.tables import MODULE
from flopwise.work.operation import ATTENTION, MATMUL
from flopwise.work.sized import MATMULS, op_flops

CLOSE = 0.1  # two clocks that differ by less agree
MOST_KERNELS = 5
UNTOLD = 0.1  # of the GPU time in phases that are not known: from here on the questions have no answer
# Why two clocks differ.
AGREE, HOST, SHORT, MORE = "agree", "the GPU waits", "too short", "more than the pass"
BY_SHAPES, BY_SPEC = "the trace's shapes", "the model's sizes"


class Untraced(msgspec.Struct, frozen=True, kw_only=True):
    """A step measured without a profiler; None where it was not."""

    forward_ns: float | None = None
    backward_ns: float | None = None
    step_ns: float | None = None
    source: str = ""


class CourseAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Attention's forward pass, per step; None where not known."""

    softmax_ns: float
    matmul_ns: float  # scores and values
    projection_ns: float | None  # of the result, which is in neither
    fused_ns: float
    softmax_flops: float | None = None
    matmul_flops: float | None = None
    projection_flops: float | None = None
    flops_by: str = ""  # BY_SHAPES or BY_SPEC
    flops_ratio: float | None = None  # matmul over softmax: known by the width of a head alone

    @property
    def time_ratio(self) -> float | None:
        """Softmax over its matmuls."""
        return self.softmax_ns / self.matmul_ns if self.softmax_ns and self.matmul_ns else None


class CourseTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one trace. Times are nanoseconds of one step; `forward` is without the loss."""

    path: str
    source: str
    gpu: str
    model: TracedModel
    steps: int
    trains: bool  # it has a backward pass or an optimizer
    step_ns: float  # as traced
    forward_ns: float  # of the GPU's work, durations added up
    forward_span_ns: float  # from its first kernel to the end of its last
    forward_busy_ns: float  # of that, with a kernel of the pass at work
    forward_range_ns: float | None  # the host was inside ranges named 'forward'
    backward_ns: float
    optimizer_ns: float
    untraced: Untraced | None = None
    disagreement: str = ""  # of the untraced clock: AGREE, HOST, SHORT, MORE; '' without one
    top_forward: Kernel | None = None
    top_backward: Kernel | None = None
    top_both: Kernel | None = None
    others: tuple[Kernel, ...] = ()  # the five longest of forward that are no matmul; shares are of forward
    matmul_forward: float | None = None  # of forward's GPU time; of an inference trace, of all
    matmul_step: float | None = None  # of the whole step's, where it trains
    classes_forward: dict[str, float] = {}  # shares of GPU time
    classes_step: dict[str, float] = {}
    attention: CourseAttention
    precision: str = ""  # most of the matmuls' time, by their kernels' names
    unknown_share: float = 0.0  # of the step's GPU time: run by CUDA graphs, in a phase that is not known
    notes: tuple[str, ...] = ()

    @property
    def told(self) -> bool:
        """Whether what is forward and what is backward is known of nearly all work."""
        return self.unknown_share < UNTOLD

    @property
    def ratio(self) -> float | None:
        """The untraced forward pass over the GPU's work in it."""
        measured = self.untraced.forward_ns if self.untraced else None
        return measured / self.forward_ns if measured and self.forward_ns else None


class CourseReport(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """Answers for one trace or many."""

    traces: tuple[CourseTrace, ...]
    csv: str = ""
    notes: tuple[str, ...] = ()

    def headline(self) -> str:
        return f"the course's questions, {len(self.traces)} traces"

    def inference(self, train: CourseTrace) -> CourseTrace | None:
        """The inference trace of the same model and context, where one is given."""
        return next((one for one in self.traces if not one.trains and one.model.label == train.model.label), None)


def course_trace(part: TracedSteps, e: Explanation, model: TracedModel) -> CourseTrace:
    """The answers of one trace that was explained."""
    work, n = part.totals, len(part.steps)
    forward, backward = (work.filter(pl.col("phase") == phase) for phase in (FORWARD, BACKWARD))
    both = pl.concat([forward, backward])
    span, busy = _forward_span(part)
    phases = {phase.name: phase.gpu_ns for phase in e.phases}
    trains = any(phases.get(name) for name in (BACKWARD, OPTIMIZER, RECOMPUTE))
    return CourseTrace(
        path=e.path,
        source=e.source,
        gpu=e.gpu,
        model=model,
        steps=n,
        trains=trains,
        step_ns=e.window_ns,
        forward_ns=gpu_time(forward) / n,
        forward_span_ns=span / n,
        forward_busy_ns=busy / n,
        forward_range_ns=_forward_ranges(part),
        backward_ns=phases.get(BACKWARD, 0.0),
        optimizer_ns=phases.get(OPTIMIZER, 0.0),
        top_forward=next(iter(kernels(forward, n)), None),
        top_backward=next(iter(kernels(backward, n)), None),
        top_both=next(iter(kernels(both, n)), None) if backward.height else None,
        others=_others(forward, n),
        matmul_forward=_share(forward),
        matmul_step=_share(work) if trains else None,
        classes_forward=_classes(forward),
        classes_step=_classes(work),
        attention=_attention(part, e.attention, model),
        precision=next(iter(e.matmul_precision), "").split(" ")[0],
        unknown_share=gpu_time(part.work.filter("replayed", pl.col("phase") == UNKNOWN_PHASE)) / max(gpu_time(work), 1),
    )


def with_untraced(trace: CourseTrace, untraced: Untraced | None) -> CourseTrace:
    """The same with the step's times without a profiler, and whether they agree."""
    timed = msgspec.structs.replace(trace, untraced=untraced)
    return msgspec.structs.replace(timed, disagreement=_disagreement(timed))


def _others(forward: pl.DataFrame, n: int) -> tuple[Kernel, ...]:
    """The kernels that take longest and are no matmul, with their share of the whole pass."""
    total = max(gpu_time(forward), 1) / n
    found = kernels(forward.filter(pl.col("class") != MATMUL), n)[:MOST_KERNELS]
    return tuple(msgspec.structs.replace(one, share=one.gpu_ns / total) for one in found)


def _share(work: pl.DataFrame) -> float | None:
    return gpu_time(work.filter(pl.col("class") == MATMUL)) / gpu_time(work) if gpu_time(work) else None


def _classes(work: pl.DataFrame) -> dict[str, float]:
    total = max(gpu_time(work), 1)
    sums = work.group_by("class").agg(pl.col("duration_ns").sum()).sort("duration_ns", "class", descending=True)
    return {kind: ns / total for kind, ns in sums.iter_rows()}


def _forward_span(part: TracedSteps) -> tuple[int, int]:
    """From the first kernel of each forward pass to the end of its last, and the time of these in which one ran, added up."""
    rows = part.work.filter(pl.col("phase") == FORWARD)
    if not rows.height:
        return 0, 0
    begun, step = pl.col("start_ns").clip(part.low_ns), pl.Series(part.steps.of(launch_times(rows)))
    spans = rows.select(begun, end_ns=(pl.col("start_ns") + pl.col("duration_ns")).clip(part.low_ns), step=step)
    each = spans.group_by("step").agg(pl.col("end_ns").max() - pl.col("start_ns").min())
    return int(each["end_ns"].sum()), covered_ns(spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy())


def _forward_ranges(part: TracedSteps) -> float | None:
    """How long the host was inside ranges named after the forward pass, per step; None without such a range."""
    names = [number for number, name in enumerate(part.trace.names) if phase_of_range(name) == FORWARD]
    ranges = part.trace.ranges.filter(pl.col("name").is_in(names), pl.col("kind") != MODULE)
    ranges = ranges.filter(pl.Series(part.steps.of(ranges["start_ns"].to_numpy()) >= 0))
    if not ranges.height:
        return None
    return covered_ns(ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy()) / len(part.steps)


def _attention(part: TracedSteps, parts: AttentionParts, model: TracedModel) -> CourseAttention:
    """Softmax and matmuls as `explain` has them; the projection apart; FLOPs by shapes, else by the model's sizes."""
    projection_ns, projection_flops = _projection(part)
    by_spec, by = attention_flops(model), BY_SHAPES
    softmax, matmul = parts.softmax_flops, parts.matmul_flops
    if softmax is None or matmul is None:
        by = BY_SPEC
        softmax, matmul = (by_spec.softmax, by_spec.matmul) if by_spec is not None else (None, None)
    ratio = matmul / softmax if softmax and matmul else None
    if ratio is None and model.head_dim:
        ratio = 4.0 * model.head_dim / SOFTMAX_FLOPS  # whatever the context, the batch and the layers
    if projection_flops is None and by_spec is not None:
        projection_flops = by_spec.projection
    return CourseAttention(
        softmax_ns=parts.softmax_ns,
        matmul_ns=parts.matmul_ns,
        projection_ns=projection_ns,
        fused_ns=parts.fused_ns,
        softmax_flops=softmax,
        matmul_flops=matmul,
        projection_flops=projection_flops,
        flops_by=by if ratio is not None else "",
        flops_ratio=ratio,
    )


def _projection(part: TracedSteps) -> tuple[float | None, float | None]:
    """Time and FLOPs of attention's output projection: the product that follows the values, or a fused kernel."""
    forward = part.work.filter(pl.col("phase") == FORWARD).with_columns(
        pl.col("class", "op", "module", "path").cast(pl.String)
    )
    products = forward.filter(pl.col("class").is_in([MATMUL, ATTENTION])).with_columns(
        call=pl.coalesce(pl.col("op_index").cast(pl.Int64), -1 - pl.int_range(pl.len()))  # kernels of one op are one
    )
    ordered = products.with_columns(pl.Series("launched", launch_times(products))).sort("launched", "start_ns")
    inner = (is_attention() & is_inner()) | (pl.col("class") == ATTENTION)
    each = ordered.group_by("call", maintain_order=True).agg(
        inner.any().alias("inner"),
        is_attention().any().alias("attention"),
        pl.col("op").first(),
        pl.col("duration_ns").sum(),
    )
    follows = pl.col("attention") & ~pl.col("inner") & pl.col("inner").shift(1, fill_value=False)
    found = each.filter(follows)
    if not found.height:
        return None, None
    n, sized = len(part.steps), dict(part.whole.sized_ops.iter_rows())
    flops = [
        op_flops(op, part.whole.shapes[sized[index]]) if index in sized and op in MATMULS else None
        for index, op in found.select("call", "op").iter_rows()
    ]
    return int(found["duration_ns"].sum()) / n, None if None in flops else sum(one or 0 for one in flops) / n


def _disagreement(trace: CourseTrace) -> str:
    ratio = trace.ratio
    if ratio is None or trace.untraced is None or trace.untraced.forward_ns is None:
        return ""
    if ratio < 1 - CLOSE:
        return SHORT
    if ratio <= 1 + CLOSE:
        return AGREE
    idle = 1 - trace.forward_busy_ns / trace.forward_span_ns if trace.forward_span_ns else 0.0
    within = trace.untraced.forward_ns <= (1 + CLOSE) * trace.forward_span_ns  # a profiler makes the waiting longer
    return HOST if idle >= CLOSE and within else MORE


def why(trace: CourseTrace) -> str:
    """Why the two clocks of the forward pass agree or not, in a sentence."""
    idle = units.percent(1 - trace.forward_busy_ns / trace.forward_span_ns, 0) if trace.forward_span_ns else "0 %"
    apart = units.percent(abs((trace.ratio or 1.0) - 1), 0)
    texts = {
        AGREE: f"the two are {apart} apart, the GPU is the limit",
        HOST: f"the GPU waits for the host (traced, it is idle for {idle} of the pass)",
        SHORT: "it is less than the GPU's own work; the clock stopped before the GPU had, or it is of other work or another GPU",
        MORE: "the GPU's waiting in the trace does not explain it; the clock has more in it, or it is of other work",
    }
    return texts.get(trace.disagreement, "")
