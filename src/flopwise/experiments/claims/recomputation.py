"""`recomputation`: throwing activations away and computing them again, against keeping them: memory and time.

First the lecture's three stacked sigmoids, eager and as fused kernels of our own. Then a Transformer whose blocks are
checkpointed in segments of N: what is kept is every segment's input, and while a segment runs backward, all that its blocks
keep. On a GPU the memory is what the allocator says; on the CPU, which has none, what the profiler saw allocated and freed.

A step has so many launches that they may take longer than its work, and to compute again adds launches. So on a GPU the step
is timed twice: launched one by one, as eager PyTorch does it, and as one CUDA graph, which is the GPU's work alone.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import INCONCLUSIVE, Experiment, Picture, Row, Rows, TableOf, Verdict, part
from flopwise.experiments.steadiness import device_clock, left_open, times, together, word
from flopwise.records.experiment import Place
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Workload, workload

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench, Run

CLAIM = (
    "Computing activations again saves more than half of a training step's memory for at most 40 % more of the device's time; "
    "of three fused sigmoids it saves time, too, because it moves fewer bytes."
)
EAGER_KEPT, EAGER_AGAIN, FUSED_KEPT, FUSED_AGAIN = (
    "eager, kept", "eager, computed again", "fused, kept", "fused, computed again",
)  # fmt: skip
# Reads and writes of a tensor of the input's size, forward and backward. Eager: a sigmoid reads one and writes one, its gradient
# reads two and writes one; of fused kernels, see `kernels/pointwise_chains.py`.
ACCESSES = {EAGER_KEPT: 3 * 2 + 3 * 3, EAGER_AGAIN: 3 * 2 + 3 * 2 + 3 * 3, FUSED_KEPT: 8, FUSED_AGAIN: 5}
MOST_EXTRA, LEAST_SAVED = 0.4, 0.5
GAIN = 0.5  # of what the bytes promise the fused sigmoids, at least; at most what they promise is that share of it
WRONG = 1e-5  # off by more: not the gradient, which is below 0.1; rounding leaves it off by 1e-7
GRAPH = "graph_ns"
PACED = 1.1  # times the device's time that the wall clock shows: launches set the pace
PROFILER, AFTER_FORWARD = "the profiler", "flopwise: after forward"


def measure(bench: "Bench") -> Iterator[Row]:
    yield from _sigmoids(bench)
    base, everies = _model(bench)
    for every in everies:
        bench.doing(f"{base.target}, checkpoint = {every}")
        yield _blocks(bench, base, every)


def _sigmoids(bench: "Bench") -> Iterator[Row]:
    import torch
    from torch.utils.checkpoint import checkpoint

    # On a GPU 256 MiB, 128 MiB if quick: more than its L2 cache holds. On a CPU 64 MiB, 1 MiB if quick.
    n = 2 ** ((26 - bench.quick) if bench.on_gpu else (24 - 6 * bench.quick))
    x, dy = torch.randn(n, device=bench.device, requires_grad=True), torch.randn(n, device=bench.device)

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
        found: Any = run()
        off = float((found - right).abs().max())
        del found
        yield {
            "part": "sigmoids", "way": way, "n": n, "accesses": ACCESSES[way], "moved_bytes": ACCESSES[way] * x.nbytes,
            "off": off, "peak_bytes": bench.peak_bytes(run), **bench.time(run).row(),
        }  # fmt: skip


def _model(bench: "Bench") -> tuple[Workload, tuple[int, ...]]:
    if bench.on_gpu:
        layers = (0, 1, 4, 12) if bench.quick else (0, 1, 2, 3, 4, 6, 12)
        return workload("small", batch=8, context=1024, phase="backward", precision="bf16"), layers
    if bench.quick:
        return workload("tiny", set={"n_layers": 3}, batch=2, phase="backward"), (0, 1, 3)
    return workload("tiny", set={"n_layers": 8}, batch=8, phase="backward"), (0, 1, 2, 4, 8)


def _blocks(bench: "Bench", base: Workload, every: int) -> Row:
    """One step (forward, loss, backward) with segments of so many blocks; 0: everything is kept."""
    import msgspec

    from flopwise.capture.build import build_step

    spec = base.subject
    assert isinstance(spec, ModelSpec)
    chosen = msgspec.structs.replace(base, recipe=msgspec.structs.replace(base.recipe, checkpoint=every))
    step = build_step(chosen, bench.device)

    def run() -> None:
        for phase in step.phases.values():
            phase()

    memory = _allocated(bench, step) if bench.on_gpu else _profiled(step)
    timing = bench.time(run, repeats=1, seconds=0.1 if bench.on_gpu else 0.15 if bench.quick else 0.3)
    return {
        "part": "blocks", "every": every, "layers": spec.n_layers, "segments": math.ceil(spec.n_layers / every) if every else 0,
        "input_bytes": base.batch * base.context * spec.d_model * 4,  # the residual stream is fp32, under autocast too
        "workload": base.label(), **memory, **timing.row(), **(_as_graph(bench, run) if bench.on_gpu else {}),
    }  # fmt: skip


def _as_graph(bench: "Bench", run: "Run") -> Row:
    """The step's time as one CUDA graph: with one launch for all, the wall clock shows the GPU."""
    try:
        replay = bench.graphed(run)
    except RuntimeError:  # not to be captured here: what was launched one by one still counts
        return {}
    timing = bench.time(replay, repeats=1, seconds=0.4)
    return {GRAPH: timing.wall_ns, "graph_low_ns": timing.wall_low_ns, "graph_high_ns": timing.wall_high_ns}


def _allocated(bench: "Bench", step: Any) -> Row:
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
    return {
        "kept_bytes": kept, "peak_bytes": torch.cuda.max_memory_allocated(bench.device) - before, "memory_from": "the allocator",
    }  # fmt: skip


def _profiled(step: Any) -> Row:
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
    return {"kept_bytes": kept, "peak_bytes": peak, "memory_from": PROFILER}


def step_clock(rows: Rows) -> str:
    """The clock of the device's work in a step: the CUDA graph's where there is one."""
    blocks = part(rows, "blocks")
    return GRAPH if all(row.get(GRAPH) for row in blocks) else device_clock(blocks[0])


def explained(rows: Rows) -> Row:
    """The best N that was found, what it saves and costs, and what the sizes of a block predict.

    With L blocks in segments of N, L / N inputs are kept and N blocks at once run backward, which is least at
    N = √(L · input / block), where a block keeps `block` bytes for its backward pass.
    """
    blocks = sorted(part(rows, "blocks"), key=lambda row: row["every"])
    none = next(row for row in blocks if not row["every"])
    whole = max(blocks, key=lambda row: row["every"])
    best = min((row for row in blocks if row["every"]), key=lambda row: row["peak_bytes"])
    layers, fed = none["layers"], none["input_bytes"]
    each = (none["kept_bytes"] - whole["kept_bytes"] + whole["segments"] * fed) / layers
    return {
        "best": best["every"], "saved_share": 1 - best["peak_bytes"] / none["peak_bytes"],
        "longer": times(best, none, step_clock(rows)), "block_bytes": each, "inputs_per_block": each / fed,
        "predicted": max(1.0, math.sqrt(layers * fed / each)), "none": none, "row": best, "whole": whole,
    }  # fmt: skip


def judge(rows: Rows, place: Place) -> Verdict:
    ways = {row["way"]: row for row in part(rows, "sigmoids")}
    blocks = {row["every"]: row for row in part(rows, "blocks")}
    asked = ACCESSES if place.on_gpu else (EAGER_KEPT, EAGER_AGAIN)
    if 0 not in blocks or len(blocks) < 3 or blocks[0]["layers"] not in blocks or any(way not in ways for way in asked):
        return Verdict(
            INCONCLUSIVE,
            f"only {len(blocks)} settings of the Transformer and {len(ways)} ways of the sigmoids were measured.",
        )
    if wrong := [way for way, row in ways.items() if row["off"] > WRONG]:
        return Verdict(INCONCLUSIVE, f"wrong gradients of three sigmoids: {', '.join(wrong)}.")
    transformer, pays = _transformer(rows)
    if place.on_gpu:
        kept, again = ways[FUSED_KEPT], ways[FUSED_AGAIN]
        faster, fewer = times(kept, again), ACCESSES[FUSED_KEPT] / ACCESSES[FUSED_AGAIN]
        sigmoids = (
            f"Three fused sigmoids take {units.duration(kept['gpu_ns'])} kept and {units.duration(again['gpu_ns'])} computed "
            f"again, {faster.middle:.2f} times as fast where the bytes say {fewer:.2f}."
        )
        return Verdict(
            word(together(pays, faster.within(1 + GAIN * (fewer - 1), 1 + (fewer - 1) / GAIN))),
            f"{transformer} {sigmoids}",
        )
    eager = times(ways[EAGER_AGAIN], ways[EAGER_KEPT]).middle - 1
    sigmoids = (
        f"To compute three eager sigmoids again changes their time by {100 * eager:+.0f} %; fused ones need a GPU."
    )
    return Verdict(word(together(pays, None)), f"{transformer} {sigmoids}")


def _transformer(rows: Rows) -> tuple[str, bool | None]:
    """What segments save and cost, and whether that is what is claimed."""
    told, clock = explained(rows), step_clock(rows)
    none, best, longer = told["none"], told["row"], told["longer"]
    said = [
        f"segments of {told['best']} of the {none['layers']} blocks take the peak from {units.size(none['peak_bytes'])} to "
        f"{units.size(best['peak_bytes'])} ({units.percent(told['saved_share'], 0)} saved) and the {_DEVICE[clock]} by "
        f"{100 * (longer.middle - 1):+.0f} %; one segment of all saves "
        f"{units.percent(1 - told['whole']['peak_bytes'] / none['peak_bytes'], 0)}. A block keeps "
        f"{told['inputs_per_block']:.1f} times its input, so N = {told['predicted']:.1f} is predicted, not "
        f"√{none['layers']} = {math.sqrt(none['layers']):.1f}."
    ]
    if best["wall_ns"] > PACED * best[clock]:
        said.append(
            f"Launched one by one, launches set the pace: {units.duration(none['wall_ns'])} became "
            f"{units.duration(best['wall_ns'])} on the wall clock, and {units.duration(none[clock])} became "
            f"{units.duration(best[clock])} on the GPU."
        )
    pays = together(told["saved_share"] > LEAST_SAVED, longer.within(most=1 + MOST_EXTRA))
    if pays is None:
        said.append(left_open(((_label(row), row) for row in (none, best)), clock))
    return " ".join(said), pays


_DEVICE = {GRAPH: "GPU's time", "gpu_ns": "GPU's time", "wall_ns": "time"}


def _label(row: Mapping[str, Any]) -> str:
    return f"N = {row['every']}" if row["every"] else "all kept"


def draw(rows: Rows, place: Place) -> list[Picture]:
    blocks = _stepped(rows)
    sizes = [
        {**row, "moment": name, "size_bytes": row[key]}
        for row in blocks
        for name, key in (("peak of the step", "peak_bytes"), ("kept after forward", "kept_bytes"))
    ]
    source = blocks[0]["memory_from"] if blocks else ""
    whose = "the GPU's time" if place.on_gpu else "time"
    pictures = [
        Picture(
            title="Memory by the number of blocks in a segment", kind="bar", rows=sizes, x="label", y="size_bytes",
            colour="moment",
            caption=f"Weights not counted; from {source}. Longer segments keep fewer inputs, and more at once going backward.",
            x_title="blocks in a segment", y_title="memory",
        ),
        Picture(
            title="Memory against time", kind="scatter", rows=blocks, x="step_ns", y="peak_bytes", colour="label",
            caption=f"Down is less memory, left is less of {whose}. Every N adds the same work: one more forward pass.",
            x_title="time of a step", y_title="peak memory",
        ),
        Picture(
            title="Three stacked sigmoids, forward and backward", kind="bar", rows=_timed(rows), x="way", y="took_ns",
            x_title="", y_title="time",
            caption="Eager, computing again adds work. Fused, it takes away reads and writes.",
        ),
    ]  # fmt: skip
    return [picture for picture in pictures if picture.rows]


def _stepped(rows: Rows) -> list[Row]:
    """The Transformer's rows with their name, the device's time of a step, and how much more that is than with all kept."""
    blocks = part(rows, "blocks")
    if not blocks:
        return []
    clock = step_clock(rows)
    kept = next((row[clock] for row in blocks if not row["every"]), None)
    return [
        {**row, "label": _label(row), "step_ns": row[clock], "extra_share": row[clock] / kept - 1 if kept else None}
        for row in blocks
    ]


def _timed(rows: Rows) -> list[Row]:
    return [{**row, "took_ns": row[device_clock(row)]} for row in part(rows, "sigmoids")]


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    tables = []
    if sigmoids := part(rows, "sigmoids"):
        columns = {
            "way": "way", "n": "numbers", "accesses": "reads and writes", "moved_bytes": "moved", "wall_ns": "wall",
        }  # fmt: skip
        if place.on_gpu:
            columns |= {"gpu_ns": "GPU", "peak_bytes": "peak"}
        tables.append(TableOf("three sigmoids, forward and backward", columns | {"off": "off by"}, sigmoids))
    if blocks := _stepped(rows):
        columns = {
            "label": "blocks in a segment", "segments": "segments", "kept_bytes": "kept after forward", "peak_bytes": "peak",
            "memory_from": "memory from", "step_ns": "step", "extra_share": "more time",
        }  # fmt: skip
        notes = ["memory beyond the weights: activations and gradients"]
        if place.on_gpu:
            columns |= {"step_ns": "step, GPU", "wall_ns": "step, wall", "launch_ns": "launches"}
            graph = step_clock(rows) == GRAPH
            notes.append(
                "step, GPU: " + ("as one CUDA graph" if graph else "by its clock, which holds waits for launches, too")
            )
            notes.append("step, wall: launched one by one; where it is the launches' time, they set the pace")
        tables.append(TableOf(f"forward, loss and backward of {blocks[0]['workload']}", columns, blocks, tuple(notes)))
    return tables


EXPERIMENT = Experiment(
    name="recomputation",
    number=9,
    line="Three stacked sigmoids, and a Transformer checkpointed every N blocks: memory against time, and the best N.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
