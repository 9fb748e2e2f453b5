"""The clock of another run beside a trace: whose it is, which of its points, and whether it can be compared at all."""

from pathlib import Path

import msgspec
import pytest

import flopwise
from flopwise.analysis.explanation import explain_trace
from flopwise.analysis.timings import timing_of
from flopwise.errors import FlopwiseError
from flopwise.records.run import Environment, Gpu, PhaseTimes, Point, Ran, RunHeader
from flopwise.render.explain_view import explanation_view, explanations_view
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import StoredRun
from flopwise.trace.read import read_trace

TRACE = Path(__file__).parent.parent / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"


def point(target="small", device="cuda:0", gpu="NVIDIA H200", wall_ns=9_000_000, **options):
    trial = Trial(workload=workload(target, **options), sampling=Sampling())
    card = Gpu(name=gpu, memory_bytes=1, sm_count=1, l2_bytes=1, capability="9.0") if device != "cpu" else None
    return Point(
        key=trial.key(),
        trial=trial,
        status="ok",
        phases=(PhaseTimes(phase="step", wall_ns=(wall_ns,)),),
        ran=Ran(device=device),
        environment=Environment(flopwise="", python="", torch="", gpu=card),
    )


def run(*points):
    header = RunHeader(id="r1", kind="bench", created_at="", created_ns=0)
    return StoredRun(path=Path("r1"), header=header, points=points)


def test_a_clock_of_the_cpu_is_refused():
    with pytest.raises(FlopwiseError, match="measured on a CPU"):
        flopwise.explain(TRACE, timings=run(point(device="cpu")))
    with pytest.raises(FlopwiseError, match="no samples"):
        flopwise.explain(TRACE, timings=run())


def test_the_answer_says_whose_clock_it_is():
    found = flopwise.explain(TRACE, timings=run(point(precision="bf16")))
    assert found.host_ns == {"step": 9_000_000}
    assert found.timings == "run r1: small b4 t512 train precision=bf16 on NVIDIA H200"
    shown = "\n".join(explanation_view(found)[0][0].notes)
    assert f"of wall time ({found.timings})" in shown
    assert f"untraced times, one for all traces: {found.timings}" in explanations_view([found, found])[0][0].notes


def test_another_gpu_is_named():
    found = flopwise.explain(TRACE, timings=run(point(gpu="NVIDIA A100")))
    assert found.timings.endswith("on NVIDIA A100; another GPU than the trace's NVIDIA H200")


def test_the_point_of_the_traces_own_workload_is_taken():
    own, other = point(batch=8), point(batch=4)
    trace = read_trace(TRACE)
    found = explain_trace(trace)
    assert timing_of(run(other, own), own, trace, found) == (own, ())
    assert timing_of(run(point(batch=8, device="cpu"), own), own, trace, found) == (own, ())
    taken, notes = timing_of(run(other), own, trace, found)
    assert (taken, notes) == (other, ("another workload than the trace's small b8 t512 train",))


def test_of_several_points_only_one_that_can_be_the_traces_is_taken():
    """The trace is of a compiled training step, 23.9 ms traced, 6.4 ms of it GPU work."""
    own = point(compile="default")
    others = [
        point(),  # not compiled
        point(compile="default", graph="on"),
        point(compile="default", phase="forward"),
        point(compile="default", wall_ns=5_000_000, batch=2),
        point(compile="default", wall_ns=50_000_000, batch=16),
        point(compile="default", gpu="NVIDIA A100", batch=5),
    ]
    found = flopwise.explain(TRACE, timings=run(*others, own))
    assert found.timings == (
        "run r1: small b4 t512 train compile=default on NVIDIA H200; the only one of 7 points there that can be the trace's"
    )
    assert not found.untraced_step.measured  # possible is not known: the verdict stays the trace's own
    with pytest.raises(FlopwiseError, match="none of the 6 points of the run r1 can be the workload of"):
        flopwise.explain(TRACE, timings=run(*others))
    with pytest.raises(FlopwiseError, match="2 of the 3 points") as refused:
        flopwise.explain(TRACE, timings=run(point(), own, point(compile="default", batch=3)))
    assert refused.value.hint.endswith(
        "here are: small b4 t512 train compile=default, small b3 t512 train compile=default"
    )


def test_a_clock_shorter_than_the_gpus_work_is_not_shown():
    found = flopwise.explain(TRACE, timings=run(point(wall_ns=5_000_000)))
    assert (found.host_ns, found.timings, found.untraced_step.measured) == ({}, "", False)
    assert found.notes[-1] == (
        "the untraced clock is left out: the traced GPU work alone takes longer than that step of 5.00 ms "
        "(run r1: small b4 t512 train on NVIDIA H200)"
    )
    assert "untraced, the step takes 5" not in "\n".join(explanation_view(found)[0][0].notes)


def test_the_verdict_is_of_the_untraced_step_only_if_it_is_the_same_work():
    """Two steps of 23.9 ms traced, with 6.4 ms of GPU work in each."""
    alone = flopwise.explain(TRACE)
    assert alone.launch_bound
    assert not alone.untraced_step.measured
    fast = point(precision="bf16", wall_ns=7_000_000)
    judged = flopwise.explain(TRACE, timings=run(fast))
    assert (judged.step_ns, judged.verdict) == (7e6, "GPU-bound: the GPU is busy 91 % of the step")
    other = run(point(gpu="NVIDIA A100", wall_ns=7_000_000))
    assert flopwise.explain(TRACE, timings=other).verdict == alone.verdict


# --- the waterfall


def test_with_the_clock_the_waterfall_is_of_the_untraced_step():
    recipe = {"precision": "bf16", "compile": "default", "optimizer": "fused"}
    found = flopwise.explain(TRACE, timings=run(point(wall_ns=20_000_000, **recipe))).waterfall
    assert (found.step_ns, found.measured_by) == (20_000_000, "the untraced step")
    assert sum(part.ns for part in found.parts) == pytest.approx(20e6, rel=1e-6)
    assert found.ns("memory-bound work at full bandwidth") > 0  # the workload tells the bytes
    assert 0 < found.roofline_share < 0.25


def test_a_workload_with_other_flops_is_not_the_traces():
    found = flopwise.explain(TRACE, timings=run(point(wall_ns=20_000_000, batch=8, precision="bf16")))
    assert found.waterfall.roofline_share is None
    assert any("more FLOPs than the trace" in note for note in found.notes)


def test_of_a_run_of_ones_own_the_workload_is_known(tmp_path):
    own = point(wall_ns=20_000_000, precision="bf16", compile="default", optimizer="fused")
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / TRACE.name).write_bytes(TRACE.read_bytes())
    header = RunHeader(id="r1", kind="profile", created_at="", created_ns=0)
    stored = StoredRun(path=tmp_path, header=header, points=(msgspec.structs.replace(own, trace_file=TRACE.name),))
    found = flopwise.explain(stored).waterfall
    assert (found.step_ns, found.measured_by) == (20_000_000, "the untraced step")
    assert found.mfu == pytest.approx(0.081, abs=0.001)
    assert found.roofline_share > 0.15
