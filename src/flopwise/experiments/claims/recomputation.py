"""`recomputation`: throwing activations away and computing them again, against keeping them: memory and time.

First the lecture's three stacked sigmoids, eager and as fused kernels of our own. Then a Transformer whose blocks are
checkpointed in segments of N. On a GPU the memory is the allocator's; on the CPU, which has none, what the profiler saw allocated
and freed. Computing again adds launches, which may take longer than the work. So on a GPU the step is timed twice: launched one
by one, as eager PyTorch does it, and as one CUDA graph, which is the GPU's work alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, bar, columns, scatter, table_of
from flopwise.experiments.rows import Interval, Moved, Timed, by, fields, select, values
from flopwise.experiments.verdict import INCONCLUSIVE, Check, holds, least_certain, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.table import Table
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Workload, workload

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench, Run

LINE = "Three stacked sigmoids, and a Transformer checkpointed every N blocks: memory against time, and the best N."
CLAIM = (
    "Computing activations again saves more than half of a training step's memory for at most 40 % more of the device's time; "
    "of three fused sigmoids it saves time, too, because it moves fewer bytes."
)
EAGER_KEPT, EAGER_AGAIN = EAGER = ("eager, kept", "eager, computed again")
FUSED_KEPT, FUSED_AGAIN = "fused, kept", "fused, computed again"
# Reads and writes of a tensor of the input's size, forward and backward. Eager: a sigmoid reads one and writes one, its gradient
# reads two and writes one; of fused kernels, see `kernels/pointwise_chains.py`.
ACCESSES = {EAGER_KEPT: 3 * 2 + 3 * 3, EAGER_AGAIN: 3 * 2 + 3 * 2 + 3 * 3, FUSED_KEPT: 8, FUSED_AGAIN: 5}
MOST_EXTRA, LEAST_SAVED = 0.4, 0.5
GAIN = 0.5  # of what the bytes promise the fused sigmoids, at least; at most what they promise is that share of it
WRONG = 1e-5  # an error above is not the gradient, which is below 0.1; rounding leaves an error of 1e-7
PACED = 1.1  # times the device's time that the wall clock shows: launches set the pace
AFTER_FORWARD = "flopwise: after forward"


class Sigmoids(Moved, frozen=True, tag_field="part", tag="sigmoids"):
    way: str
    n: int
    accesses: int
    off: float  # largest difference from the eager gradient
    peak_bytes: int | None


class Blocks(Timed, frozen=True, tag_field="part", tag="blocks"):
    """One step with segments of `every` blocks; 0: everything is kept."""

    every: int
    layers: int
    segments: int
    input_bytes: int
    workload: str
    kept_bytes: int
    peak_bytes: int
    memory_from: str
    graph_ns: float | None = None  # as one CUDA graph: with one launch for all, the wall clock shows the GPU
    graph_low_ns: float | None = None
    graph_high_ns: float | None = None

    @property
    def label(self) -> str:
        return f"N = {self.every}" if self.every else "all kept"

    def step(self, as_graph: bool) -> Interval:
        """The device's time."""
        if not as_graph or self.graph_ns is None:
            return self.device
        low, high = self.graph_low_ns or self.graph_ns, self.graph_high_ns or self.graph_ns
        return Interval(self.graph_ns, low, high, f"{units.duration(low)} to {units.duration(high)}")


Rows = Sequence[Sigmoids | Blocks]


def measure(bench: "Bench") -> Iterator[Sigmoids | Blocks]:
    yield from _sigmoids(bench)
    base, segments = _model(bench)
    for every in segments:
        bench.doing(f"{base.target}, checkpoint = {every}")
        yield _blocks(bench, base, every)


def _sigmoids(bench: "Bench") -> Iterator[Sigmoids]:
    import torch
    from torch.utils.checkpoint import checkpoint

    # On a GPU 256 MiB, 128 MiB if quick: more than its L2 cache holds. On a CPU 64 MiB, 1 MiB if quick.
    n = 2 ** ((26 - bench.quick) if bench.on_gpu else (24 - 6 * bench.quick))
    x, dy = bench.randn(n, requires_grad=True), bench.randn(n)

    def three(x: "torch.Tensor") -> "torch.Tensor":
        return x.sigmoid().sigmoid().sigmoid()

    def kept() -> "torch.Tensor":
        return torch.autograd.grad(three(x), x, dy)[0]

    def again() -> "torch.Tensor":
        y = checkpoint(three, x, use_reentrant=False, preserve_rng_state=False)
        return torch.autograd.grad(y, x, dy)[0]

    ways: dict[str, Run] = {EAGER_KEPT: kept, EAGER_AGAIN: again}
    right = kept()
    if bench.on_gpu:
        from flopwise.kernels.pointwise_chains import sigmoids_keeping, sigmoids_recomputing

        plain = x.detach()
        ways[FUSED_KEPT] = lambda: sigmoids_keeping(plain, dy)[1]
        ways[FUSED_AGAIN] = lambda: sigmoids_recomputing(plain, dy)[1]
    for way, run in ways.items():
        bench.doing(f"three sigmoids, {way}")
        result: Any = run()
        off = float((result - right).abs().max())
        del result
        accesses, peak, timing = ACCESSES[way], bench.peak_bytes(run), bench.time(run)
        yield Sigmoids(way, n, accesses, off, peak, moved_bytes=accesses * x.nbytes, **fields(timing))


def _model(bench: "Bench") -> tuple[Workload, tuple[int, ...]]:
    if bench.on_gpu:
        segments = (0, 1, 4, 12) if bench.quick else (0, 1, 2, 3, 4, 6, 12)
        return workload("small", batch=8, context=1024, phase="backward", precision="bf16"), segments
    if bench.quick:
        return workload("tiny", set={"n_layers": 3}, batch=2, phase="backward"), (0, 1, 3)
    return workload("tiny", set={"n_layers": 8}, batch=8, phase="backward"), (0, 1, 2, 4, 8)


def _blocks(bench: "Bench", base: Workload, every: int) -> Blocks:
    """One step: forward, loss, backward."""
    from flopwise.capture.build import build_step

    spec = base.subject
    assert isinstance(spec, ModelSpec)
    chosen = msgspec.structs.replace(base, recipe=msgspec.structs.replace(base.recipe, checkpoint=every))
    step = build_step(chosen, bench.device)

    def run() -> None:
        for phase in step.phases.values():
            phase()

    segments = math.ceil(spec.n_layers / every) if every else 0
    input_bytes = base.batch * base.context * spec.d_model * 4  # the residual stream is fp32, under autocast too
    sizes = (every, spec.n_layers, segments, input_bytes, base.label())
    memory = _allocated(bench, step) if bench.on_gpu else _profiled(step)
    timing = fields(bench.time(run, repeats=1, seconds=0.1 if bench.on_gpu else 0.15 if bench.quick else 0.3))
    return Blocks(*sizes, *memory, *(_as_graph(bench, run) if bench.on_gpu else ()), **timing)


def _as_graph(bench: "Bench", run: "Run") -> tuple[float, ...]:
    """Its time and the interval's ends; nothing where it cannot be captured: what was launched one by one still counts."""
    try:
        replay = bench.graphed(run)
    except RuntimeError:
        return ()
    timing = bench.time(replay, repeats=1, seconds=0.4)
    return (timing.wall_ns, timing.wall_low_ns, timing.wall_high_ns)


def _allocated(bench: "Bench", step: Any) -> tuple[int, int, str]:
    """What forward keeps, the peak, and who says so."""
    import torch

    step.trained.zero_grad(set_to_none=True)
    bench.synchronise()
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    *forward, backward = step.phases.values()
    for phase in forward:
        phase()
    bench.synchronise()
    kept = torch.cuda.memory_allocated(bench.device) - before
    backward()
    bench.synchronise()
    peak = torch.cuda.max_memory_allocated(bench.device) - before
    return kept, peak, "the allocator"


def _profiled(step: Any) -> tuple[int, int, str]:
    """From every allocation and free on the CPU, which the profiler writes down. It agrees with the dry run."""
    import torch

    step.trained.zero_grad(set_to_none=True)
    *forward, backward = step.phases.values()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for phase in forward:
            phase()
        with torch.profiler.record_function(AFTER_FORWARD):
            pass
        backward()
    events = profile.profiler.kineto_results.events()
    after = next(event.start_ns() for event in events if event.name() == AFTER_FORWARD)
    live = peak = kept = 0
    for at, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += change
        peak = max(peak, live)
        kept = live if at <= after else kept
    return kept, peak, "the profiler"


class Checkpointing(NamedTuple):
    """The best segment that was measured, what it saves and costs, and what the sizes of a block predict."""

    none: Blocks  # everything kept
    best: Blocks
    whole: Blocks  # one segment of all blocks
    as_graph: bool  # timed as CUDA graphs
    inputs_per_block: float  # what a block keeps for its backward pass
    predicted: float  # the best N

    @property
    def saved_share(self) -> float:
        return 1 - self.best.peak_bytes / self.none.peak_bytes

    @property
    def longer(self) -> Interval:
        return self.best.step(self.as_graph) / self.none.step(self.as_graph)


def checkpointing(rows: Rows) -> Checkpointing:
    """With L blocks in segments of N, L / N inputs are kept and N blocks at once run backward. That is least at
    N = √(L · input / block), where a block keeps `block` bytes for its backward pass."""
    blocks = sorted(select(rows, Blocks), key=attrgetter("every"))
    none, whole = blocks[0], blocks[-1]
    best = min(blocks[1:], key=attrgetter("peak_bytes"))
    inputs = (none.kept_bytes - whole.kept_bytes + whole.segments * none.input_bytes) / none.layers / none.input_bytes
    predicted = max(1.0, math.sqrt(none.layers / inputs))
    return Checkpointing(none, best, whole, all(row.graph_ns for row in blocks), inputs, predicted)


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    ways, blocks = by(select(rows, Sigmoids), "way"), by(select(rows, Blocks), "every")
    measured = f"only {len(blocks)} settings of the Transformer and {len(ways)} ways of the sigmoids were measured."
    segments = 0 in blocks and len(blocks) >= 3 and blocks[0].layers in blocks
    yield require("all segments and ways", segments and set(ACCESSES if place.on_gpu else EAGER) <= set(ways), measured)
    wrong = ", ".join(way for way, row in ways.items() if row.off > WRONG)
    yield require("right gradients", not wrong, f"wrong gradients of three sigmoids: {wrong}.")
    found = checkpointing(rows)
    yield said(_described(found))
    yield said(_pace(found))
    yield holds("memory saved", found.saved_share > LEAST_SAVED, saved_share=found.saved_share)
    yield within("time added", {found.best.label: found.longer}, most=1 + MOST_EXTRA)
    yield least_certain({row.label: row.step(found.as_graph) for row in (found.none, found.best)})
    yield from _fused_gain(ways) if place.on_gpu else _eager_cost(ways)


def _fused_gain(ways: Mapping[str, Sigmoids]) -> Iterator[Check]:
    kept, again = ways[FUSED_KEPT], ways[FUSED_AGAIN]
    faster, fewer = kept.device / again.device, ACCESSES[FUSED_KEPT] / ACCESSES[FUSED_AGAIN]
    yield said(
        f"Three fused sigmoids take {units.duration(kept.took_ns)} kept and {units.duration(again.took_ns)} computed "
        f"again, {faster.middle:.2f} times as fast where the bytes say {fewer:.2f}."
    )
    yield within("fused sigmoids gain", {FUSED_AGAIN: faster}, 1 + GAIN * (fewer - 1), 1 + (fewer - 1) / GAIN)


def _eager_cost(ways: Mapping[str, Sigmoids]) -> Iterator[Check]:
    extra = ways[EAGER_AGAIN].took_ns / ways[EAGER_KEPT].took_ns - 1
    yield said(
        f"Computing three eager sigmoids again changes their time by {100 * extra:+.0f} %; fused ones need a GPU."
    )
    yield Check("fused sigmoids gain", INCONCLUSIVE)


def _described(found: Checkpointing) -> str:
    none, best = found.none, found.best
    device = "time" if none.gpu_ns is None else "GPU's time"
    return (
        f"segments of {best.every} of the {none.layers} blocks take the peak from {units.size(none.peak_bytes)} to "
        f"{units.size(best.peak_bytes)} ({units.percent(found.saved_share, 0)} saved) and the {device} by "
        f"{100 * (found.longer.middle - 1):+.0f} %; one segment of all saves "
        f"{units.percent(1 - found.whole.peak_bytes / none.peak_bytes, 0)}. A block keeps {found.inputs_per_block:.1f} "
        f"times its input, so N = {found.predicted:.1f} is predicted, not √{none.layers} = {math.sqrt(none.layers):.1f}."
    )


def _pace(found: Checkpointing) -> str:
    """Whether launches set the pace of the wall clock."""
    none, best = (row.step(found.as_graph).middle for row in (found.none, found.best))
    if found.best.wall_ns <= PACED * best:
        return ""
    return (
        f"Launched one by one, launches set the pace: {units.duration(found.none.wall_ns)} became "
        f"{units.duration(found.best.wall_ns)} on the wall clock, and {units.duration(none)} became "
        f"{units.duration(best)} on the GPU."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    blocks = _with_steps(rows)
    sizes = [
        {"label": row["label"], "moment": name, "size_bytes": row[key]}
        for row in blocks
        for name, key in (("peak of the step", "peak_bytes"), ("kept after forward", "kept_bytes"))
    ]
    source = blocks[0]["memory_from"] if blocks else ""
    time = "the GPU's time" if place.on_gpu else "time"
    return [
        bar(sizes, Axis("label", "blocks in a segment"), Axis("size_bytes", "memory"), colour="moment").titled(
            "Memory by the number of blocks in a segment",
            f"Weights not counted; from {source}. Longer segments keep fewer inputs, and more at once going backward.",
        ),
        scatter(blocks, Axis("step_ns", "time of a step"), Axis("peak_bytes", "peak memory"), colour="label").titled(
            "Memory against time",
            f"Down is less memory, left is less of {time}. Every N adds the same work: one more forward pass.",
        ),
        bar(values(select(rows, Sigmoids), "took_ns"), Axis("way"), Axis("took_ns", "time")).titled(
            "Three stacked sigmoids, forward and backward",
            "Eager, computing again adds work. Fused, it takes away reads and writes.",
        ),
    ]


def _with_steps(rows: Rows) -> list[dict[str, Any]]:
    """The Transformer's rows with the device's time of a step, and how much more that is than with everything kept."""
    blocks = select(rows, Blocks)
    as_graph = all(row.graph_ns for row in blocks)
    steps = {row.every: row.step(as_graph).middle for row in blocks}
    extra = {every: ns / steps[0] - 1 if 0 in steps else None for every, ns in steps.items()}
    shown = values(blocks, "label")
    return [row | {"step_ns": steps[row["every"]], "extra_share": extra[row["every"]]} for row in shown]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    blocks, steps = select(rows, Blocks), _with_steps(rows)
    of_sigmoids = columns("way", n="numbers", accesses="reads and writes") | columns("moved_bytes", "wall_ns")
    of_steps = columns(label="blocks in a segment", segments="segments", kept_bytes="kept after forward")
    of_steps |= columns("peak_bytes", "memory_from", step_ns="step", extra_share="more time")
    notes = ["memory beyond the weights: activations and gradients"]
    if place.on_gpu:
        of_sigmoids |= columns(gpu_ns="GPU", peak_bytes="peak")
        of_steps |= columns(step_ns="step, GPU", wall_ns="step, wall", launch_ns="launches")
        graph = all(row.graph_ns for row in blocks)
        notes.append(
            f"step, GPU: {'as one CUDA graph' if graph else 'by its clock, which includes waits for launches'}"
        )
        notes.append("step, wall: launched one by one; where it is the launches' time, they set the pace")
    title = f"forward, loss and backward of {blocks[0].workload if blocks else ''}"
    return [
        table_of(
            "three sigmoids, forward and backward", of_sigmoids | columns(off="error"), values(select(rows, Sigmoids))
        ),
        table_of(title, of_steps, steps, tuple(notes)),
    ]


EXPERIMENT = Experiment(9, "recomputation", LINE, CLAIM, (Sigmoids, Blocks), measure, judge, draw, tabulate)
