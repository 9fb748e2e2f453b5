"""What a trace says: parts add up, two profilers agree, and the known answers of real captures."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from flopwise.analysis.explanation import explain_trace
from flopwise.analysis.shares import parts
from flopwise.errors import FlopwiseError
from flopwise.records.run import PhaseTimes, Point
from flopwise.render.explain_screen import slowed
from flopwise.render.explain_view import explanation_view, explanations_view
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.trace import tables
from flopwise.trace.attribute import attribute
from flopwise.trace.phases import phase_of_range
from flopwise.trace.read import read_trace

from .test_idle import frame, trace

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
NAIVE = "h200-small-fp32-naive-2steps"
COMPILED = FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"


@pytest.fixture(scope="module")
def naive():
    return {s: explain_trace(read_trace(FIXTURES / f"{NAIVE}.{s}")) for s in ("kineto.json.gz", "nsys.sqlite.gz")}


@pytest.fixture(scope="module")
def compiled():
    return explain_trace(read_trace(COMPILED))


def test_parts_add_up_to_the_whole(naive, compiled):
    for e in (*naive.values(), compiled):
        for shared in (e.phases, e.classes, e.modules):
            assert sum(p.gpu_ns for p in shared) == pytest.approx(e.gpu_ns, rel=1e-12)
            assert sum(p.share for p in shared) == pytest.approx(1.0)
        assert sum(p.gpu_ns for p in e.phase_class_modules) == pytest.approx(e.gpu_ns, rel=1e-12)
        assert e.gpu_ns - e.overlap_ns == pytest.approx(e.busy_ns, rel=1e-12)
        assert sum(p.copies for p in e.phases) == pytest.approx(e.copies)
        assert sum(p.count for p in e.phases) == pytest.approx(sum(k.count for k in e.kernels))
        assert sum(ns for row in e.phase_classes.values() for ns in row.values()) == pytest.approx(e.gpu_ns, rel=1e-12)
        assert sum(e.idle.by_cause_ns.values()) == e.idle.total_ns
        assert e.busy_ns * e.steps + e.idle.total_ns == pytest.approx(e.window_ns * e.steps, rel=1e-12)


def test_two_profilers_tell_the_same_story(naive):
    a, b = naive.values()
    assert (a.steps, b.steps) == (2, 2)
    for mine, other in ((a.phases, b.phases), (a.classes, b.classes)):
        shares = {p.name: p.share for p in other}
        assert all(p.share == pytest.approx(shares[p.name], abs=0.02) for p in mine)
    assert a.top_forward.name == b.top_forward.name
    assert a.matmul_share["step"] == pytest.approx(b.matmul_share["step"], abs=0.02)


def test_the_compiled_step_is_launch_bound(compiled):
    """The step took about 24 ms of wall time for 6.4 ms of GPU work."""
    assert compiled.launch_bound
    assert compiled.gpu_ns == pytest.approx(6.39e6, rel=0.01)
    assert 22e6 < compiled.window_ns < 25e6
    assert compiled.attention.fused_ns > 0
    assert compiled.attention.softmax_ns == 0
    assert list(compiled.matmul_precision) == ["bf16 tensor cores"]


def test_fp32_is_told_from_tf32_by_the_kernels(naive):
    shares = naive["kineto.json.gz"].matmul_precision
    assert shares["fp32 CUDA cores"] > 0.95
    assert not any("tf32" in name for name in shares)


def test_softmax_costs_more_than_the_attention_matmuls(naive):
    parts = naive["kineto.json.gz"].attention
    assert parts.softmax_ns > parts.matmul_ns > 0


def test_steps_by_the_period_of_the_kernels():
    """No ranges at all: five kernels, three times over, and a wait after each time."""
    names = ("a", "b", "c")
    order = [0, 1, 1, 2, 1] * 3
    kernels = [(10 * i, 10 * i + 5, i + 1) for i in range(len(order))]
    made = trace(kernels, [(10 * i - 5, 10 * i - 1, i + 1) for i in range(len(order))])
    rows = [(s, e, 1, 0, 7, order[i], c, -1) for i, (s, e, c) in enumerate(kernels)]
    made = replace(made, names=names, kernels=frame(tables.KERNELS, *rows))
    waits = frame(tables.SYNCS, *((10 * i - 4, 10 * i - 2, 1, 11, 0) for i in (5, 10, 15)))
    found = explain_trace(replace(made, syncs=waits))
    assert (found.steps, found.steps_found_by) == (3, "period of the kernels")
    assert explain_trace(made).steps == 1  # nothing says that these are more than layers
    assert {k.name: k.count for k in found.kernels} == {"a": 1, "b": 3, "c": 1}


def test_no_gpu_work_is_one_line():
    with pytest.raises(FlopwiseError, match="no GPU work"):
        explain_trace(trace([], []))


def test_of_several_devices_the_busiest_is_explained():
    """Two devices, the second with more to do; parts still add up, and the other is named."""
    made = trace([(0, 10, 1), (20, 30, 2)], [(0, 1, 1), (2, 3, 2), (4, 5, 3)])
    rows = [(0, 10, 1, 0, 7, 0, 1, -1), (10, 40, 1, 1, 7, 0, 2, -1), (50, 60, 1, 1, 7, 0, 3, -1)]
    found = explain_trace(replace(made, kernels=frame(tables.KERNELS, *rows)))
    assert (found.gpu_ns, found.busy_ns, found.window_ns, found.launches) == (40, 40, 50, 2)
    assert sum(p.gpu_ns for p in found.phases) == found.gpu_ns
    assert "2 devices worked; this is device 1, the busiest" in found.notes


def test_flops_of_attention_are_the_arithmetic_of_its_shapes(naive):
    """12 layers, batch 4 × 12 heads, 512 tokens, 64 wide: two matmuls of 2·B·T·T·D forward, four backward."""
    e = naive["kineto.json.gz"]
    matmul, elements = 2 * 48 * 512 * 512 * 64, 48 * 512 * 512
    assert e.attention.matmul_flops == 12 * 2 * matmul
    assert e.attention.softmax_flops == 12 * 5 * elements
    assert e.attention_backward.matmul_flops == 12 * 4 * matmul
    assert e.attention_backward.softmax_flops is None  # its softmax is written out, and so are the gradients
    assert e.attention.softmax_flops_share == pytest.approx(5 / (5 + 4 * 64))
    time = e.attention.softmax_ns / (e.attention.softmax_ns + e.attention.matmul_ns)
    assert e.attention.softmax_time_share == pytest.approx(time)
    assert e.attention.rate_ratio == pytest.approx(time / (1 - time) * 256 / 5)


def test_without_shapes_flops_are_unknown(naive):
    parts = naive["nsys.sqlite.gz"].attention
    assert parts.softmax_time_share is not None
    assert (parts.softmax_flops, parts.matmul_flops, parts.softmax_flops_share, parts.rate_ratio) == (None,) * 4


def forward_only(path, with_ranges):
    """The trace of a run that did nothing else: the work of the forward pass, no gradients, no other phase's ranges."""
    whole = read_trace(path)
    work = attribute(whole).table.filter(pl.col("phase") == "forward")
    kernels, copies = (sorted(work.filter(pl.col("source") == source)["index"]) for source in ("kernel", "copy"))
    phases = [i for i, name in enumerate(whole.names) if phase_of_range(name) not in (None, "forward")]
    if not with_ranges:
        phases = range(len(whole.names))
    return replace(
        whole,
        kernels=whole.kernels[kernels],
        copies=whole.copies[copies],
        ops=whole.ops.filter(~pl.col("backward")),
        ranges=whole.ranges.filter(~pl.col("name").is_in(list(phases))),
        sized_ops=whole.sized_ops.clear(),
    )


@pytest.mark.parametrize("source", ["kineto.json.gz", "nsys.sqlite.gz"])
@pytest.mark.parametrize("with_ranges", [True, False])
def test_a_trace_of_nothing_but_forward_is_inference(naive, source, with_ranges):
    found = explain_trace(forward_only(FIXTURES / f"{NAIVE}.{source}", with_ranges))
    assert [p.name for p in found.phases] == ["forward"]
    trained = naive[source].phase_classes["forward"]
    assert found.matmul_share == {"inference": pytest.approx(trained["matmul"] / sum(trained.values()))}
    assert set(naive[source].matmul_share) == {"forward", "step"}


def test_the_note_on_softmax_says_what_is_unknown(naive):
    told, untold = ("\n".join(explanation_view(e)[0][0].notes) for e in naive.values())
    assert "softmax takes 60 % of the time of softmax and its matmuls and does 1.9 % of their FLOPs" in told
    assert "unknown: no shapes in this trace" in untold


def test_forward_is_the_same_in_every_answer(naive):
    """Without the loss: the parts of a row would not add up to one otherwise."""
    for e in naive.values():
        forward = e.phase_classes["forward"]
        assert e.phase_classes["loss"]
        assert e.matmul_share["forward"] == pytest.approx(forward["matmul"] / sum(forward.values()))
        assert e.top_forward.share == pytest.approx(e.top_forward.gpu_ns / sum(forward.values()))


def test_parts_beyond_the_first_are_one_row():
    work = pl.DataFrame(
        {"phase": ["forward"] * 3, "class": ["matmul"] * 3, "folded": ["a", "b", "c"], "duration_ns": [5, 9, 1]}
    ).with_columns(kernels=1, copies=0)
    found = parts(work, 1, most=1)
    assert [(p.module, p.gpu_ns, p.count) for p in found] == [("b", 9, 1), ("(the rest)", 6, 2)]


def test_copies_are_not_counted_as_kernels():
    made = replace(trace([(0, 10, 1)], [(0, 1, 1)]), copies=frame(tables.COPIES, (10, 12, 1, 0, 7, "HtoD", 4, -1, -1)))
    found = explain_trace(made)
    assert [(p.name, p.count, p.copies) for p in found.phases] == [("other", 1, 1)]
    assert (found.copies, found.launches) == (1, 1)


def test_overlap_is_counted_within_streams_and_across_them():
    """Three kernels: two overlap by 5 on two streams, one lies within another on its own stream."""
    rows = [(5, 15, 1, 0, 7, 0, 1, -1), (10, 20, 1, 0, 8, 0, 2, -1), (12, 14, 1, 0, 7, 0, 3, -1)]
    found = explain_trace(replace(trace([], [(0, 1, 1)]), kernels=frame(tables.KERNELS, *rows)))
    assert (found.gpu_ns, found.busy_ns) == (22, 15)
    assert (found.overlap_ns, found.stream_overlap_ns) == (7, 2)


def test_the_verdict_names_the_largest_cause():
    """Of 10 µs 3 are idle: 0.9 late, 2.1 between kernels that had been launched long before."""
    kernels = [(0, 2_000, 1), (4_100, 5_000, 2), (6_000, 10_100, 3)]
    found = explain_trace(trace(kernels, [(0, 1, 1), (100, 101, 2), (5_899, 5_900, 3)]))
    assert found.verdict == (
        "the GPU is idle 31 % of the step: 22 % between queued kernels, 9 % because the host launches late"
    )


def test_a_step_that_waits_most_for_something_else_is_not_launch_bound():
    """Of 100 µs 30 are busy, 30 late, and 40 lie between kernels that were queued."""
    kernels = [(0, 10_000, 1), (40_000, 50_000, 2), (90_000, 100_000, 3)]
    found = explain_trace(trace(kernels, [(0, 10, 1), (39_990, 40_000, 2), (40_000, 40_010, 3)]), timed(100_000))
    assert found.verdict.startswith("the GPU is idle 70 % of the step: 40 % between queued kernels, 30 % because")
    assert not found.launch_bound


def timed(wall_ns, phase="train"):
    trial = Trial(workload=workload("small", phase=phase), sampling=Sampling())
    return Point(key="", trial=trial, status="ok", phases=(PhaseTimes(phase="step", wall_ns=(wall_ns,)),))


# Of 100 µs 40 are busy, 50 the host is late (the profiler's doing, or not), 10 lie between queued kernels.
SLOWED = trace(
    [(0, 20_000, 1), (70_000, 80_000, 2), (90_000, 100_000, 3)], [(0, 10, 1), (69_990, 70_000, 2), (70_000, 70_010, 3)]
)


def test_a_step_that_only_the_profiler_makes_launch_bound_is_not_called_so():
    traced, judged = explain_trace(SLOWED), explain_trace(SLOWED, timed(48_000))
    assert traced.launch_bound
    late = "launch-bound: the GPU is idle 60 % of the step: 50 % because the host launches late"
    assert traced.verdict == f"{late}, 10 % between queued kernels"
    assert not judged.launch_bound
    assert judged.verdict == "GPU-bound: the GPU is busy 83 % of the step"
    assert slowed(judged) == "Traced, the step takes 100 µs: the profiler slows the CPU."
    assert judged.untraced_idle.by_cause_ns["between kernels"] == judged.untraced_idle.total_ns == 8_000
    assert (judged.idle, judged.busy_ns) == (traced.idle, traced.busy_ns)  # what the trace holds stays as it is
    row = explanations_view([judged, traced])[0][0].rows[0]
    assert (row["untraced_ns"], row["untraced_idle_share"], row["verdict"]) == (48_000, 8 / 48, "GPU-bound")


def test_a_step_that_is_launch_bound_untraced_too_says_how_much():
    found = explain_trace(SLOWED, timed(80_000))
    assert found.launch_bound
    assert found.verdict == (
        "launch-bound: the GPU is idle 50 % of the step: 38 % because the host launches late, 12 % between queued kernels"
    )


@pytest.mark.parametrize(
    ("wall_ns", "why"), [(30_000, "alone takes longer"), (130_000, "much longer than the traced one")]
)
def test_a_clock_of_other_work_does_not_decide(wall_ns, why):
    found = explain_trace(SLOWED, timed(wall_ns))
    assert (found.verdict, found.untraced_step) == (explain_trace(SLOWED).verdict, explain_trace(SLOWED).untraced_step)
    assert not found.untraced_step.measured
    assert found.host_ns == (
        {"step": wall_ns} if wall_ns > 40_000 else {}
    )  # one shorter than the GPU's work is no clock
    assert any(why in note for note in found.notes)


def test_the_hosts_clock_of_inference_is_that_of_its_forward_pass():
    assert explain_trace(SLOWED, timed(90_000, "forward")).host_ns == {"step": 90_000, "forward": 90_000}


def test_a_graph_captured_unseen_is_noted():
    made = trace([(0, 30, 1), (30, 40, 2)], [(0, 1, 2)])
    launched = frame(tables.GRAPH_LAUNCHES, (0, 1, 1, 11, 0, 1))
    forward = frame(tables.RANGES, (0, 50, 1, 11, 1, "annotation"))
    found = explain_trace(replace(made, names=("x", "forward"), graph_launches=launched, ranges=forward))
    assert {p.name: p.gpu_ns for p in found.phases} == {"other": 30, "forward": 10}
    assert any(note.startswith("75 % of the GPU time comes from CUDA graphs") for note in found.notes)


def test_modules_named_by_class_are_told_apart_by_what_they_are_in():
    """As PyTorch writes them with stacks: every Linear has a number, and no path."""
    names = (
        "x",
        *(f"nn.Module: {name}" for name in ("Block_0", "Attention_0", "Linear_0", "FFN_0", "Linear_1", "Head_0")),
    )
    spans = [(0, 20, 1), (0, 9, 2), (2, 8, 3), (10, 19, 4), (12, 18, 5), (20, 30, 6)]
    made = trace([(10 * i, 10 * i + 5, i) for i in (1, 2, 3)], [(4, 5, 1), (14, 15, 2), (24, 25, 3)])
    ranges = frame(tables.RANGES, *((s, e, 1, 11, name, "module") for s, e, name in spans))
    found = explain_trace(replace(made, names=names, ranges=ranges))
    assert sorted(m.name for m in found.modules) == ["Block.Attention.Linear", "Block.FFN.Linear", "Head"]


def test_a_graph_traced_as_one_row_says_that_its_gaps_count_as_busy():
    made = trace([(0, 30, 1)], [(0, 1, 1)])
    run = frame(tables.GRAPH_RUNS, (40, 90, 1, 0, 7, 2))
    note = "gaps inside count as busy, so busy time is an upper bound"
    assert any(note in said for said in explain_trace(replace(made, graph_runs=run)).notes)
    assert not any(note in said for said in explain_trace(made).notes)


def test_without_a_backward_pass_there_is_no_top_kernel_with_it():
    made = trace([(0, 30, 1)], [(5, 6, 1)])
    ranges = frame(tables.RANGES, (0, 20, 1, 11, 1, "annotation"))
    found = explain_trace(replace(made, names=("gemm", "forward"), ranges=ranges))
    assert found.top_forward.name == "gemm"
    assert found.top_forward_backward is None
