"""`softmax-vs-matmul`: the softmax against the two matmuls of attention: time from a trace, FLOPs from its sizes.

On a GPU the time is that of the kernels, by the range that launched them; on the CPU that of the operations themselves. Other
work (scaling, the mask) is counted to neither. FLOPs: two for a multiply-add, five for each score of a softmax. The softmax comes
twice, with the same FLOPs: written out, and as one kernel, which moves a quarter of the bytes: that shows what its time follows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, line, table_of
from flopwise.experiments.rows import Row, by, values
from flopwise.experiments.verdict import INCONCLUSIVE, REFUTED, Check, holds, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table
from flopwise.spec.dtypes import item_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.experiments.bench import Bench
    from flopwise.trace.tables import Trace

LINE = "Inside attention: the softmax's share of the time against its share of the FLOPs, from a trace, by context."
CLAIM = (
    "Inside attention the softmax does a few per cent of the FLOPs and takes a far larger share of the time, because its time "
    "follows the bytes that it moves."
)
WRITTEN_OUT, ONE_KERNEL = "written out", "one kernel"
# Times that a score is read or written, at least: max 1, subtract 2, exp 2, sum 1, divide 2; or all at once.
PASSES = {WRITTEN_OUT: 8, ONE_KERNEL: 2}
FORWARD, BACKWARD = "forward", "backward"
ON_GPU, ON_CPU = "GPU kernels of a trace", "CPU operations of a trace"
HEAD_DIM = 64
GPU_CONTEXTS, CPU_CONTEXTS = (512, 1024, 2048, 4096, 8192), (256, 512, 1024, 2048)
GPU_TYPES, CPU_TYPES = ("bf16", "fp32"), ("fp32",)
STEPS = 5  # in a trace
FAR, NEAR = 5.0, 2.0  # softmax's share of the time over its share of the FLOPs: as claimed; not as claimed
# The times of the two softmaxes, of which one moves 4 times the bytes: nearer to 4 than to 1 on a scale of ratios; near to 1.
BY_BYTES, NOT_BY_BYTES = 2.0, 1.25
BY_WIDTH = 1.4  # fp32 over bf16, twice the bytes: nearer to 2 than to 1, on the same scale
MATRICES, ROOM = 8, 0.8  # of scores that a pass may hold at once; of the free memory that they may take


class Attention(Row, frozen=True, kw_only=True):
    how: str
    dtype: str
    batch: int
    context: int
    head_dim: int
    scores_bytes: int
    phase: str
    source: str
    matmul_kernels: str = ""
    softmax_ns: float
    matmul_ns: float
    rest_ns: float
    softmax_flops: float | None
    matmul_flops: float | None

    @property
    def time_share(self) -> float | None:
        """The softmax's share of softmax and matmuls; None where the trace does not tell it."""
        both = self.softmax_ns + self.matmul_ns
        return self.softmax_ns / both if both else None

    @property
    def flops_share(self) -> float | None:
        softmax, matmul = self.softmax_flops, self.matmul_flops
        return softmax / (softmax + matmul) if softmax and matmul else None

    @property
    def softmax_flops_per_s(self) -> float | None:
        return _per_second(self.softmax_flops, self.softmax_ns)

    @property
    def matmul_flops_per_s(self) -> float | None:
        return _per_second(self.matmul_flops, self.matmul_ns)

    @property
    def softmax_bytes_per_s(self) -> float | None:
        """At least; of the forward pass."""
        return _per_second(PASSES[self.how] * self.scores_bytes if self.phase == FORWARD else None, self.softmax_ns)


Rows = Sequence[Attention]
DERIVED = ("time_share", "flops_share", "softmax_flops_per_s", "matmul_flops_per_s", "softmax_bytes_per_s")


def _per_second(work: float | None, ns: float) -> float | None:
    return 1e9 * work / ns if work and ns else None


def measure(bench: "Bench") -> Iterator[Attention]:
    from flopwise.experiments.bench import one_thread

    with one_thread(bench):
        yield from _measured(bench)


def _measured(bench: "Bench") -> Iterator[Attention]:
    from flopwise.trace.read import read_trace

    bench.fp32_matmul()
    contexts: tuple[int, ...]
    batch, contexts = (16, GPU_CONTEXTS) if bench.on_gpu else (1, CPU_CONTEXTS)
    if bench.quick:
        contexts = contexts[-2::-2][::-1]  # every other one, without the longest
    warm = False
    for dtype, context in ((dtype, n) for dtype in (GPU_TYPES if bench.on_gpu else CPU_TYPES) for n in contexts):
        scores_bytes = batch * context**2 * item_bytes(dtype)
        if MATRICES * scores_bytes > ROOM * bench.free_bytes():
            continue  # the judgement is of the longest that fits
        for how in PASSES:
            bench.doing(f"{dtype}, softmax {how}, context {context}")
            phases = _phases(bench, how, dtype, (batch, context, HEAD_DIM))
            if not warm:  # a GPU raises its clocks before the first time is taken
                bench.time(phases[FORWARD], seconds=0.01)
            warm = True
            trace = read_trace(bench.trace(phases, f"softmax-vs-matmul-{dtype}-{how[:3]}-{context}.json", STEPS))
            about: dict[str, Any] = {"how": how, "dtype": dtype, "batch": batch, "context": context}
            for found in by_kernels(trace) if bench.on_gpu else [by_operations(trace)]:
                yield Attention(**about, head_dim=HEAD_DIM, scores_bytes=scores_bytes, **found)
            del phases


def _phases(bench: "Bench", how: str, dtype: str, sizes: tuple[int, int, int]) -> "dict[str, Callable[[], object]]":
    """Attention on random numbers, in phases; on the CPU forward alone: its trace does not say what an op of backward is for."""
    import torch

    from flopwise.lm.attention import attention_function

    attend = attention_function("naive", compiled_elsewhere=False) if how == WRITTEN_OUT else _one_kernel()
    inputs = [bench.randn(*sizes, dtype=dtype, requires_grad=bench.on_gpu) for _ in range(3)]
    gradient = bench.randn(*sizes, dtype=dtype)
    output: list[Tensor] = []

    def forward() -> None:
        output[:] = [attend(*inputs)]

    def backward() -> None:
        torch.autograd.grad(output.pop(), inputs, gradient)

    phases: dict[str, Callable[[], object]] = {FORWARD: forward}
    if bench.on_gpu:
        phases[BACKWARD] = backward
    for _ in range(2):
        for run in phases.values():
            run()
    return phases


def _one_kernel() -> "Callable[[Tensor, Tensor, Tensor], Tensor]":
    """Naive attention, but for PyTorch's own softmax: one kernel that keeps a row in registers or shared memory."""
    import torch
    from torch.profiler import record_function

    from flopwise.lm.layers import softmax_torch

    def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        context, head_dim = q.shape[-2:]
        with record_function("attn_scores"):
            scores = torch.einsum("bqd, bkd -> bqk", q, k) / math.sqrt(head_dim)  # [B, T, T]
            future = torch.ones(context, context, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        with record_function("attn_softmax"):
            weights = softmax_torch(scores)
        with record_function("attn_values"):
            return torch.einsum("bqk, bkd -> bqd", weights, v)

    return attend


def by_kernels(trace: "Trace") -> list[dict[str, Any]]:
    """What a GPU's trace says of attention, forward and backward: medians of the steps."""
    import polars as pl

    from flopwise.analysis.attention import attention_parts
    from flopwise.analysis.explanation import explain_steps
    from flopwise.analysis.steps import launch_times
    from flopwise.analysis.traced_steps import traced_steps

    part = traced_steps(trace)
    whole = explain_steps(part)
    words = [pl.col(name).cast(pl.String) for name in ("phase", "class", "op", "module", "path")]
    work = part.work.with_columns(*words, step=part.steps.of(launch_times(part.work)), shape=0, ops=0)
    precision = max(whole.matmul_precision.items(), key=lambda pair: pair[1], default=("", 0.0))[0]
    found = []
    for phase, both in ((FORWARD, whole.attention), (BACKWARD, whole.attention_backward)):
        steps = []
        for one in work.filter(pl.col("phase") == phase).partition_by("step"):
            inside = attention_parts(one, trace.shapes, 1)
            rest = int(one["duration_ns"].sum()) - inside.softmax_ns - inside.matmul_ns
            steps.append({"softmax_ns": inside.softmax_ns, "matmul_ns": inside.matmul_ns, "rest_ns": rest})
        flops = {"softmax_flops": both.softmax_flops, "matmul_flops": both.matmul_flops}
        found.append({"phase": phase, "source": ON_GPU, "matmul_kernels": precision, **_medians(steps), **flops})
    return found


def _medians(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: median(step[key] for step in steps) for key in steps[0]}


def by_operations(trace: "Trace") -> dict[str, Any]:
    """The same of the CPU's operations: the softmax by its range, the matmuls one by one; medians of the steps."""
    ranges = [(trace.names[n], *ends) for n, *ends in trace.ranges.select("name", "start_ns", "end_ns").iter_rows()]
    ops = _sized_ops(trace)
    steps = []
    for begin, end in (ends for name, *ends in ranges if name == "flopwise.forward"):
        softmax_ns = sum(e - s for name, s, e in ranges if name == "attn_softmax" and begin <= s < end)
        inside = [op for op in ops if begin <= op[1] < end]
        matmul_ns, matmul_flops = (sum(op[n] for op in inside if op[0]) for n in (2, 3))
        work = {"softmax_flops": sum(op[3] for op in inside) - matmul_flops, "matmul_flops": matmul_flops}
        rest_ns = end - begin - softmax_ns - matmul_ns
        steps.append({"softmax_ns": softmax_ns, "matmul_ns": matmul_ns, "rest_ns": rest_ns} | work)
    if not steps:
        raise FlopwiseError(f"{trace.path} has no forward pass in it", "was it cut off?")
    return {"phase": FORWARD, "source": ON_CPU, **_medians(steps)}


def _sized_ops(trace: "Trace") -> list[tuple[bool, int, int, float]]:
    """The operations with known sizes: whether it is a matmul, its start, its nanoseconds, its FLOPs."""
    from flopwise.work.sized import MATMULS, op_flops

    ops = trace.ops.select("name", "start_ns", "end_ns").rows()
    sized = [(trace.names[ops[op][0]], *ops[op][1:], trace.shapes[shape]) for op, shape in trace.sized_ops.rows()]
    return [(name in MATMULS, start, end - start, op_flops(name, shape) or 0) for name, start, end, shape in sized]


Pairs = Mapping[str, tuple[Attention, Attention]]  # by type: written out, and as one kernel


def _pairs(rows: Rows, place: Place) -> Pairs:
    """At the longest context that all types have: there the scores are least in any cache, and calls cost least. {} unless both
    softmaxes of every type were measured at the same contexts."""
    found = by((row for row in rows if row.phase == FORWARD), "dtype", "how", "context")
    types = GPU_TYPES if place.on_gpu else CPU_TYPES
    written, one = ([{n for a, b, n in found if (a, b) == (dtype, how)} for dtype in types] for how in PASSES)
    if written != one or not (common := set.intersection(*written)):
        return {}
    return {dtype: (found[dtype, WRITTEN_OUT, max(common)], found[dtype, ONE_KERNEL, max(common)]) for dtype in types}


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    pairs = _pairs(rows, place)
    yield require("both softmaxes", pairs, "not both softmaxes of every type were measured at the same contexts.")
    shares = [(row.time_share, row.flops_share) for pair in pairs.values() for row in pair]
    untold = "the traces do not tell the times and sizes of softmax and matmuls."
    yield require("times and sizes", all(map(all, shares)), untold)
    yield from (said(_described(*pair, place)) for pair in pairs.values())
    yield said(_wider_described(_wider(pairs)))
    larger = min((time or 0.0) / (flops or 1.0) for time, flops in shares)
    yield require("far larger share", larger >= FAR, "", REFUTED if larger < NEAR else INCONCLUSIVE)
    yield _follows_bytes(pairs)


def _follows_bytes(pairs: Pairs) -> Check:
    slower = min(written.softmax_ns / one.softmax_ns for written, one in pairs.values())
    wider = all(times >= BY_WIDTH for times in _wider(pairs).values())  # on a CPU there is one type
    answer = True if slower >= BY_BYTES and wider else False if slower < NOT_BY_BYTES else None
    refuted = "So the share is as large as claimed, but not because of the bytes."
    partly = "So the share is as large as claimed; the bytes are a part of the reason."
    return holds("time follows the bytes", answer, refuted=refuted, unknown=partly, times_slower=slower)


def _wider(pairs: Pairs) -> dict[str, float]:
    """How many times as long each softmax takes in fp32 as in bf16: twice the bytes, the same FLOPs. {} of one type alone."""
    if len(pairs) < 2:
        return {}
    both = zip(pairs["bf16"], pairs["fp32"], strict=True)
    return {narrow.how: wide.softmax_ns / narrow.softmax_ns for narrow, wide in both}


def _wider_described(wider: Mapping[str, float]) -> str:
    if not wider:
        return ""
    written, one = (units.significant(wider[how], 2) for how in PASSES)
    return (
        "From bf16 to fp32, twice the bytes for the same FLOPs take "
        f"{written} times as long {WRITTEN_OUT} and {one} times as long as {ONE_KERNEL}."
    )


def _described(written: Attention, one: Attention, place: Place) -> str:
    """Both softmaxes of one type, at one context."""
    moved = written.softmax_bytes_per_s or 0.0
    share = f", {units.percent(moved / place.bandwidth, 0)} of the datasheet's bandwidth" if place.bandwidth else ""
    return (
        f"{written.dtype}, context {written.context}: the softmax does {units.percent(written.flops_share or 0.0)} of the "
        f"FLOPs and takes {units.percent(written.time_share or 0.0, 0)} of the time where it is written out "
        f"({units.duration(written.softmax_ns)}, and {units.duration(written.matmul_ns)} for the matmuls, moving at "
        f"least {units.rate(moved, 'B/s')}{share}), and {units.percent(one.time_share or 0.0, 0)} as one kernel "
        f"({units.duration(one.softmax_ns)}); {PASSES[WRITTEN_OUT] // PASSES[ONE_KERNEL]} times the bytes for the same FLOPs "
        f"take {units.significant(written.softmax_ns / one.softmax_ns, 2)} times as long."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    forward = values((row for row in rows if row.phase == FORWARD), *DERIVED)
    written = [row for row in forward if row["how"] == WRITTEN_OUT]
    shares = [row | {"what": f"of the time, {row['how']}", "softmax_share": row["time_share"]} for row in forward]
    shares += [row | {"what": "of the FLOPs", "softmax_share": row["flops_share"]} for row in written]
    rates = [
        row | {"what": f"softmax, {row['how']}", "done_flops_per_s": row["softmax_flops_per_s"]} for row in forward
    ]
    rates += [row | {"what": "matmuls", "done_flops_per_s": row["matmul_flops_per_s"]} for row in written]
    context = Axis("context", "context", log=True)
    shared: dict[str, Any] = {"colour": "what", "column": "dtype" if len({row["dtype"] for row in forward}) > 1 else ""}
    return [
        line(shares, context, Axis("softmax_share", "softmax's share"), **shared).titled(
            "The softmax's share of softmax and matmuls in attention, forward",
            "The line of the FLOPs is flat. What lies between it and the lines of time, FLOPs do not explain.",
        ),
        line(rates, context, Axis("done_flops_per_s", "rate", log=True), **shared).titled(
            "FLOPs per second of the softmax and of the matmuls, forward",
            "The matmuls use each number that they load many times, the softmax uses it once.",
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns("dtype", "context", how="softmax", phase="pass", softmax_ns="softmax", matmul_ns="matmuls")
    headings |= columns(
        rest_ns="scale, mask, rest", time_share="softmax's share of the time", flops_share="of the FLOPs"
    )
    headings |= columns(softmax_flops_per_s="softmax's rate", matmul_flops_per_s="matmuls' rate")
    headings |= columns(softmax_bytes_per_s="softmax's bandwidth, at least")
    headings |= columns(matmul_kernels="matmul kernels compute in") if place.on_gpu else {}
    first = rows[0]
    title = f"attention, batch {first.batch}, head size {first.head_dim}, by the {first.source}"
    notes = ("a share is of softmax and matmuls together; of the FLOPs it is known where the trace has the sizes",)
    return [table_of(title, headings, values(rows, *DERIVED), notes)]


EXPERIMENT = Experiment(15, "softmax-vs-matmul", LINE, CLAIM, (Attention,), measure, judge, draw, tabulate)
