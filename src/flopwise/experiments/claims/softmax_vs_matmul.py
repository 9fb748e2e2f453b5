"""`softmax-vs-matmul`: inside attention, the softmax beside the two matmuls: their time from a trace, their FLOPs from its sizes.

For each context a trace is taken and read as `flopwise profile` and `flopwise explain` do it. On a GPU the time is that of the
kernels, by the range that launched them; on the CPU, which has no kernels, that of the operations themselves. Work beside both
(scaling, the mask) is counted to neither. FLOPs: two for a multiply-add, five for each score of a softmax.

The softmax comes twice, with the same FLOPs: written out, and as one kernel, which moves a quarter of the bytes. Whether its time
follows its bytes or its FLOPs shows in what that does to it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.experiments.experiment import (
    CONFIRMED,
    INCONCLUSIVE,
    REFUTED,
    Experiment,
    Picture,
    Row,
    Rows,
    TableOf,
    Verdict,
)
from flopwise.records.experiment import Place
from flopwise.spec.dtypes import item_bytes
from flopwise.spec.gpu import find_gpu

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.capture.step import Step
    from flopwise.experiments.bench import Bench
    from flopwise.trace.tables import Trace

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


def measure(bench: "Bench") -> Iterator[Row]:
    import torch

    threads = torch.get_num_threads()
    if not bench.on_gpu:  # large operations would run on all cores and small ones on one
        torch.set_num_threads(1)
    try:
        yield from _measured(bench)
    finally:
        torch.set_num_threads(threads)


def _measured(bench: "Bench") -> Iterator[Row]:
    from flopwise.capture.memory_limit import free_bytes
    from flopwise.lm.precision import apply_fp32_matmul
    from flopwise.spec.recipe import Recipe

    apply_fp32_matmul(Recipe(precision="fp32"))  # not TF32
    contexts: tuple[int, ...]
    batch, contexts = (16, GPU_CONTEXTS) if bench.on_gpu else (1, CPU_CONTEXTS)
    if bench.quick:
        contexts = contexts[-2::-2][::-1]  # every other one, without the longest
    cold = True
    for dtype in GPU_TYPES if bench.on_gpu else CPU_TYPES:
        for context in contexts:
            scores_bytes = batch * context**2 * item_bytes(dtype)
            free = free_bytes(bench.device)
            if free is not None and MATRICES * scores_bytes > ROOM * free:
                continue  # the judgement is of the longest that fits
            for how in (WRITTEN_OUT, ONE_KERNEL):
                bench.doing(f"{dtype}, softmax {how}, context {context}")
                step = _step(bench, how, dtype, (batch, context, HEAD_DIM))
                if cold:  # a GPU raises its clocks before the first time is taken
                    bench.time(step.phases[FORWARD], seconds=0.01)
                    cold = False
                about = {"how": how, "dtype": dtype, "batch": batch, "context": context, "head_dim": HEAD_DIM}
                for found in _traced(bench, step, bench.file(f"softmax-vs-matmul-{dtype}-{how[:3]}-{context}.json")):
                    yield {**about, "scores_bytes": scores_bytes, **found}
                del step
                _release(bench)


def _step(bench: "Bench", how: str, dtype: str, sizes: tuple[int, int, int]) -> "Step":
    """Attention on random numbers, in phases; on the CPU forward alone, since its trace does not tell whose backward an op is."""
    import torch

    from flopwise.capture.step import Step
    from flopwise.lm.attention import attention_function
    from flopwise.records.run import Ran

    attend = attention_function("naive", compiled_elsewhere=False) if how == WRITTEN_OUT else _one_kernel()
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    inputs = [torch.randn(sizes, device=bench.device, dtype=kind, requires_grad=bench.on_gpu) for _ in range(3)]
    gradient = torch.randn(sizes, device=bench.device, dtype=kind)
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
    return Step(phases=phases, ran=lambda: Ran(device=str(bench.device)))


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


def _traced(bench: "Bench", step: "Step", path: Path) -> list[Row]:
    """A trace of some steps: a row for each direction that it tells."""
    from flopwise.capture.kineto import trace_steps
    from flopwise.records.events import TraceRequest
    from flopwise.trace.read import read_trace

    trace_steps(step, bench.device, TraceRequest(path=str(path), steps=STEPS))
    trace = read_trace(path)
    return by_kernels(trace) if bench.on_gpu else by_operations(trace)


def by_kernels(trace: "Trace") -> list[Row]:
    """What a GPU's trace says of attention, forward and backward: medians of the steps."""
    import polars as pl

    from flopwise.analysis.attention import attention_parts
    from flopwise.analysis.explained import explained
    from flopwise.analysis.explanation import explain_part
    from flopwise.analysis.steps import launch_times

    part = explained(trace)
    found = explain_part(part)
    words = [pl.col(name).cast(pl.String) for name in ("phase", "class", "op", "module", "path")]
    work = part.work.with_columns(*words, step=part.steps.of(launch_times(part.work)), shape=0, ops=0)
    precision = max(found.matmul_precision.items(), key=lambda pair: pair[1], default=("", 0.0))[0]
    told = []
    for phase, whole in ((FORWARD, found.attention), (BACKWARD, found.attention_backward)):
        steps = []
        for one in work.filter(pl.col("phase") == phase).partition_by("step"):
            inside = attention_parts(one, trace.shapes, 1)
            rest = int(one["duration_ns"].sum()) - inside.softmax_ns - inside.matmul_ns
            steps.append({"softmax_ns": inside.softmax_ns, "matmul_ns": inside.matmul_ns, "rest_ns": rest})
        flops = {"softmax_flops": whole.softmax_flops, "matmul_flops": whole.matmul_flops}
        told.append({"phase": phase, "source": ON_GPU, "matmul_kernels": precision, **_medians(steps), **flops})
    return told


def _medians(steps: list[Row]) -> Row:
    return {key: median(step[key] for step in steps) for key in steps[0]}


def by_operations(trace: "Trace") -> list[Row]:
    """The same of the CPU's operations: the softmax by its range, the matmuls one by one; medians of the steps."""
    from flopwise.work.sized import MATMULS, op_flops

    ranges = [(trace.names[n], *span) for n, *span in trace.ranges.select("name", "start_ns", "end_ns").iter_rows()]
    sizes = dict(trace.sized_ops.select("op", "shape").iter_rows())
    sized = [(trace.names[op["name"]], op["start_ns"], op["end_ns"], trace.shapes[sizes[row]])
             for row, op in enumerate(trace.ops.iter_rows(named=True)) if row in sizes]  # fmt: skip
    steps: list[Row] = []
    for name, begin, end in ranges:
        if name != "flopwise.forward":
            continue
        inside = [(op, e - s, op_flops(op, shape) or 0) for op, s, e, shape in sized if begin <= s < end]
        softmax_ns = sum(e - s for within, s, e in ranges if within == "attn_softmax" and begin <= s < end)
        matmul_ns = sum(ns for op, ns, _ in inside if op in MATMULS)
        steps.append(
            {
                "softmax_ns": softmax_ns,
                "matmul_ns": matmul_ns,
                "rest_ns": end - begin - softmax_ns - matmul_ns,
                "softmax_flops": sum(flops for op, _, flops in inside if op not in MATMULS),
                "matmul_flops": sum(flops for op, _, flops in inside if op in MATMULS),
            }
        )
    if not steps:
        raise FlopwiseError(f"{trace.path} has no forward pass in it", "was it cut off?")
    return [{"phase": FORWARD, "source": ON_CPU, **_medians(steps)}]


def _release(bench: "Bench") -> None:
    import torch

    if bench.on_gpu:
        torch.cuda.empty_cache()


def compared(row: Mapping[str, Any]) -> Row:
    """The row with shares and rates; None where the trace does not tell them.

    >>> both = compared({"how": "one kernel", "phase": "forward", "scores_bytes": 100, "softmax_ns": 3.0, "matmul_ns": 1.0,
    ...                  "softmax_flops": 5, "matmul_flops": 95})
    >>> both["time_share"], both["flops_share"], round(both["softmax_bytes_per_s"] / 1e9)
    (0.75, 0.05, 67)
    """
    softmax_ns, matmul_ns = row["softmax_ns"], row["matmul_ns"]
    softmax, matmul = row["softmax_flops"], row["matmul_flops"]
    moved = PASSES[row["how"]] * row["scores_bytes"] if row["phase"] == FORWARD else None
    both = softmax_ns + matmul_ns
    return {
        **row,
        "time_share": softmax_ns / both if both else None,
        "flops_share": softmax / (softmax + matmul) if softmax and matmul else None,
        "softmax_flops_per_s": 1e9 * softmax / softmax_ns if softmax and softmax_ns else None,
        "matmul_flops_per_s": 1e9 * matmul / matmul_ns if matmul and matmul_ns else None,
        "softmax_bytes_per_s": 1e9 * moved / softmax_ns if moved and softmax_ns else None,
    }


def _forward(rows: Rows) -> list[Row]:
    return [compared(row) for row in rows if row["phase"] == FORWARD]


def judge(rows: Rows, place: Place) -> Verdict:
    """At the longest context that all types have: there the scores are least in any cache, and calls cost least."""
    found = {(row["dtype"], row["how"], row["context"]): row for row in _forward(rows)}
    types = GPU_TYPES if place.on_gpu else CPU_TYPES
    written, one = ({dtype: _contexts(found, dtype, how) for dtype in types} for how in PASSES)
    common = set.intersection(*written.values())
    if written != one or not common:
        return Verdict(INCONCLUSIVE, "not both softmaxes of every type were measured at the same contexts.")
    pairs = {dtype: (found[dtype, WRITTEN_OUT, max(common)], found[dtype, ONE_KERNEL, max(common)]) for dtype in types}
    told = [row for pair in pairs.values() for row in pair]
    if not all(row.get("time_share") and row.get("flops_share") for row in told):
        return Verdict(INCONCLUSIVE, "the traces do not tell the times and sizes of softmax and matmuls.")
    times_larger = min(row["time_share"] / row["flops_share"] for row in told)
    slower = min(written["softmax_ns"] / one["softmax_ns"] for written, one in pairs.values())
    wider = _wider(pairs)
    said = " ".join([*(_said(written, one, place) for written, one in pairs.values()), *_wider_said(wider)])
    if times_larger < FAR:
        return Verdict(REFUTED if times_larger < NEAR else INCONCLUSIVE, said)
    if slower >= BY_BYTES and all(by >= BY_WIDTH for by in wider.values()):  # on a CPU there is one type
        return Verdict(CONFIRMED, said)
    if slower < NOT_BY_BYTES:
        return Verdict(REFUTED, f"{said} So the share is as large as claimed, but not because of the bytes.")
    return Verdict(INCONCLUSIVE, f"{said} So the share is as large as claimed; the bytes are a part of the reason.")


def _contexts(found: Mapping[tuple[str, str, int], Row], dtype: str, how: str) -> set[int]:
    return {context for a_type, a_way, context in found if (a_type, a_way) == (dtype, how)}


def _wider(pairs: Mapping[str, tuple[Row, Row]]) -> dict[str, float]:
    """How many times as long each softmax takes in fp32 as in bf16: twice the bytes, the same FLOPs. {} of one type alone."""
    if not {"bf16", "fp32"} <= set(pairs):
        return {}
    both = zip(pairs["bf16"], pairs["fp32"], strict=True)
    return {narrow["how"]: wide["softmax_ns"] / narrow["softmax_ns"] for narrow, wide in both}


def _wider_said(wider: Mapping[str, float]) -> list[str]:
    if not wider:
        return []
    told = " and ".join(f"{units.significant(times, 2)} times as long {how}" for how, times in wider.items())
    return [
        f"From bf16 to fp32, twice the bytes for the same FLOPs take {told.replace(ONE_KERNEL, f'as {ONE_KERNEL}')}."
    ]


def _said(written: Row, one: Row, place: Place) -> str:
    """Both softmaxes of one type, at one context."""
    chip = find_gpu(place.name) if place.on_gpu else None
    moved = written["softmax_bytes_per_s"]
    share = moved / chip.bandwidth_bytes_s if chip and chip.bandwidth_bytes_s else None
    of_limit = f", {units.percent(share, 0)} of the datasheet's bandwidth" if share else ""
    return (
        f"{written['dtype']}, context {written['context']}: the softmax does {units.percent(written['flops_share'])} of the "
        f"FLOPs and takes {units.percent(written['time_share'], 0)} of the time where it is written out "
        f"({units.duration(written['softmax_ns'])} beside {units.duration(written['matmul_ns'])} for the matmuls, moving at "
        f"least {units.rate(moved, 'B/s')}{of_limit}), and {units.percent(one['time_share'], 0)} as one kernel "
        f"({units.duration(one['softmax_ns'])}); {PASSES[WRITTEN_OUT] // PASSES[ONE_KERNEL]} times the bytes for the same FLOPs "
        f"take {units.significant(written['softmax_ns'] / one['softmax_ns'], 2)} times as long."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    forward = _forward(rows)
    shares: list[Row] = [
        {**row, "what": f"of the time, {row['how']}", "softmax_share": row["time_share"]} for row in forward
    ]
    shares += [
        {**row, "what": "of the FLOPs", "softmax_share": row["flops_share"]}
        for row in forward
        if row["how"] == WRITTEN_OUT
    ]
    rates: list[Row] = [
        {**row, "what": f"softmax, {row['how']}", "done_flops_per_s": row["softmax_flops_per_s"]} for row in forward
    ]
    rates += [
        {**row, "what": "matmuls", "done_flops_per_s": row["matmul_flops_per_s"]}
        for row in forward
        if row["how"] == WRITTEN_OUT
    ]
    column = "dtype" if len({row["dtype"] for row in forward}) > 1 else ""
    return [
        Picture(
            title="The softmax's share of softmax and matmuls in attention, forward",
            caption="The line of the FLOPs is flat. What lies between it and the lines of time, FLOPs do not explain.",
            kind="line", rows=shares, x="context", y="softmax_share", colour="what", column=column, x_title="context",
            y_title="softmax's share", x_log=True,
        ),
        Picture(
            title="FLOPs per second of the softmax and of the matmuls, forward",
            caption="The matmuls use each number that they load many times, the softmax uses it once.",
            kind="line", rows=rates, x="context", y="done_flops_per_s", colour="what", column=column, x_title="context",
            y_title="rate", x_log=True, y_log=True,
        ),
    ]  # fmt: skip


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    columns = {
        "dtype": "type", "context": "context", "how": "softmax", "phase": "pass", "softmax_ns": "softmax",
        "matmul_ns": "matmuls", "rest_ns": "scale, mask, rest", "time_share": "softmax's share of the time",
        "flops_share": "of the FLOPs", "softmax_flops_per_s": "softmax's rate", "matmul_flops_per_s": "matmuls' rate",
        "softmax_bytes_per_s": "softmax's bandwidth, at least",
    }  # fmt: skip
    if place.on_gpu:
        columns["matmul_kernels"] = "matmul kernels compute in"
    first = rows[0]
    title = f"attention, batch {first['batch']}, head size {first['head_dim']}, by the {first['source']}"
    notes = ("a share is of softmax and matmuls together; of the FLOPs it is known where the trace has the sizes",)
    return [TableOf(title, columns, [compared(row) for row in rows], notes)]


EXPERIMENT = Experiment(
    name="softmax-vs-matmul",
    number=15,
    line="Inside attention: the softmax's share of the time against its share of the FLOPs, from a trace, by context.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
