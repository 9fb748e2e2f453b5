"""The clock of another run beside a trace: whose it is, which of its points, and whether it can be compared at all."""

from pathlib import Path

import pytest

import flopwise
from flopwise.errors import FlopwiseError
from flopwise.records import Environment, Gpu, PhaseTimes, Point, Ran, RunHeader
from flopwise.render.explain_view import explanation_view, explanations_view
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import StoredRun
from flopwise.verbs.explain import timing_of

TRACE = Path(__file__).parent.parent / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"


def point(target="small", device="cuda:0", gpu="NVIDIA H200", wall_ns=5_000_000, **options):
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
    found = flopwise.explain(TRACE, timings=run(point(precision="bf16"), point(batch=8)))
    assert found.host_ns == {"step": 5_000_000}
    assert (
        found.timings
        == "run r1: small b4 t512 train precision=bf16 on NVIDIA H200; the first of 2 workloads in that run"
    )
    shown = "\n".join(explanation_view(found)[0][0].notes)
    assert f"of wall time ({found.timings})" in shown
    assert f"host's clock, one for all traces: {found.timings}" in explanations_view([found, found])[0][0].notes


def test_another_gpu_is_named():
    found = flopwise.explain(TRACE, timings=run(point(gpu="NVIDIA A100")))
    assert found.timings.endswith("on NVIDIA A100; another GPU than the trace's NVIDIA H200")


def test_the_point_of_the_traces_own_workload_is_taken():
    own, other = point(batch=8), point(batch=4)
    assert timing_of(run(other, own), own) == (own, ())
    assert timing_of(run(point(batch=8, device="cpu"), own), own) == (own, ())
    taken, notes = timing_of(run(other), own)
    assert (taken, notes) == (other, ("another workload than the trace's small b8 t512 train",))


def test_the_verdict_is_of_the_untraced_step_only_if_it_is_the_same_work():
    """Two steps of 23.9 ms traced, with 6.4 ms of GPU work in each."""
    alone = flopwise.explain(TRACE)
    assert alone.launch_bound
    assert alone.untraced_idle is None
    fast = point(precision="bf16", wall_ns=7_000_000)
    assert flopwise.explain(TRACE, timings=run(fast)).verdict.startswith(
        "GPU-bound: the GPU is busy 91% of the 7.00 ms"
    )
    for other in (run(point(gpu="NVIDIA A100", wall_ns=7_000_000)), run(fast, point(batch=8))):
        assert flopwise.explain(TRACE, timings=other).verdict == alone.verdict
