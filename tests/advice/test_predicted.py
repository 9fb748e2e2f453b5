"""Savings by the model: nothing changed saves nothing, a correction makes the prediction the measurement, and known orders."""

import msgspec
import pytest

from flopwise.advice.facts import Facts
from flopwise.advice.predicted import Corrections, baseline, corrected, predicted_change, saved_bytes
from flopwise.analysis.idle import BETWEEN
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict
from flopwise.spec.workload import workload

from .made import H200, MS, ceilings, explained, known, point, predicted, waterfall


def test_what_stays_as_it_is_saves_nothing():
    assert predicted_change(known(precision="bf16"), {"precision": "bf16"}).saving_ns == 0.0


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.6])
def test_ceilings_that_are_corrected_give_a_step_that_much_slower(slower):
    asked = workload("small", precision="bf16")
    cost, limits = predict(asked, Machine(gpu=H200)), ceilings()
    host = dict.fromkeys(("forward", "loss", "backward", "optimizer"), slower)
    by = Corrections(host=host, matmul=slower, attention=slower, rest=slower)
    plain = cost.time_with(limits)
    found = cost.time_with(corrected(limits, by, "bf16"))
    assert found.gpu_ns == pytest.approx(slower * plain.gpu_ns, rel=0.01)
    assert found.host_ns == pytest.approx(slower * plain.host_ns, rel=0.01)


def test_a_host_twice_as_slow_as_foretold_doubles_what_a_graph_saves():
    facts = known(precision="bf16")
    time = predicted(precision="bf16")
    slow = point(wall=2 * time.host_ns, launch=2 * time.host_ns, busy=time.gpu_ns, precision="bf16")
    one, two = (predicted_change(f, {"graph": "on"}) for f in (facts, msgspec.structs.replace(facts, point=slow)))
    assert two.saving_ns - one.saving_ns == pytest.approx(time.host_ns, rel=0.1)


def test_a_step_that_waits_for_its_host_does_not_say_how_fast_its_graph_is():
    """Slower than foretold for a reason no clock shows: what the graph leaves of it is the GPU's time, not that slower."""
    facts = known(precision="bf16")
    time = predicted(precision="bf16")
    clocks = {"launch": time.host_ns, "busy": time.gpu_ns}
    slow = msgspec.structs.replace(facts, point=point(wall=1.2 * time.wall_ns, **clocks, precision="bf16"))
    one, two = (predicted_change(each, {"graph": "on"}) for each in (facts, slow))
    assert two.saving_ns - one.saving_ns == pytest.approx(0.2 * time.wall_ns, rel=0.01)
    assert "as measured −" in two.arithmetic
    large = known("large", batch=16, context=1024, precision="bf16")
    time = predicted("large", batch=16, context=1024, precision="bf16")
    clocks = {"launch": time.host_ns, "busy": time.gpu_ns}
    shape = {"batch": 16, "context": 1024, "precision": "bf16"}
    slow = msgspec.structs.replace(large, point=point("large", wall=1.2 * time.wall_ns, **clocks, **shape))
    one, two = (predicted_change(each, {"graph": "on"}) for each in (large, slow))
    assert two.saving_ns == pytest.approx(1.2 * one.saving_ns, rel=0.01)


def test_a_host_that_waits_for_a_full_queue_is_not_slow():
    """A clock of launches below the step's, of more kernels than the queue takes: the host waited in between."""
    facts = known("medium", batch=16, context=1024, attention="naive", precision="bf16")
    time = predicted("medium", batch=16, context=1024, attention="naive", precision="bf16")
    clocks = {"wall": 1.06 * time.wall_ns, "busy": time.gpu_ns, "attention": "naive", "precision": "bf16"}
    shape = {"batch": 16, "context": 1024}
    waited, slow = (
        msgspec.structs.replace(facts, point=point("medium", launch=share * time.wall_ns, **clocks, **shape))
        for share in (0.85, 1.05)
    )
    assert baseline(waited).corrections.host == {}
    assert min(baseline(slow).corrections.host.values()) > 1.2


def test_a_graph_takes_away_the_pauses_that_a_trace_shows():
    """1.6 µs before each kernel, as H200s showed; a step whose GPU never waits for the host then still gains by a graph."""
    plain = known("large", batch=4, context=512, attention="naive")
    time = predicted("large", batch=4, context=512, attention="naive")
    kernels = sum(phase.kernels for phase in time.phases)
    paused_ns = 1600.0 * kernels
    parts = waterfall(time.wall_ns + paused_ns, IDLE_OTHER=paused_ns)
    parts = msgspec.structs.replace(
        parts, parts=tuple(msgspec.structs.replace(one, by_class={BETWEEN: one.ns}) for one in parts.parts)
    )
    traced = msgspec.structs.replace(plain, waterfall=parts, explanation=explained())
    before, after = (predicted_change(facts, {"graph": "on"}) for facts in (plain, traced))
    assert after.saving_ns - before.saving_ns == pytest.approx(paused_ns, rel=0.1)
    assert after.then.wall_ns == pytest.approx(before.then.wall_ns, rel=0.01)


def test_a_faster_gpu_saves_a_launch_bound_step_nothing():
    found = predicted_change(known(precision="bf16", batch=1, context=128), {"attention": "sdpa-cudnn"})
    assert abs(found.saving_ns) < 0.02 * found.now.wall_ns
    small = predicted_change(known(precision="fp32", batch=1, context=128), {"precision": "tf32"})
    assert small.gpu_saving_ns > 0.2 * small.now.gpu_ns
    assert small.saving_ns < 0.1 * small.now.wall_ns


def test_graphs_by_the_compiler_take_the_launches_of_what_is_compiled():
    known_step = known(precision="bf16", batch=1, context=128, optimizer="fused")
    whole, replayed, graph = (
        predicted_change(known_step, levers).then
        for levers in ({"compile": "default"}, {"compile": "reduce-overhead"}, {"compile": "default", "graph": "on"})
    )
    assert graph.wall_ns < replayed.wall_ns < whole.wall_ns
    assert graph.host_ns < replayed.host_ns < 0.5 * whole.host_ns
    of_phase = {phase.phase: phase.host_ns for phase in replayed.phases}
    assert of_phase["optimizer"] == {phase.phase: phase.host_ns for phase in whole.phases}["optimizer"]


def test_a_large_step_in_fp32_gains_several_times_from_bf16():
    found = predicted_change(known("large", batch=8, context=512), {"precision": "bf16"})
    assert found.saving_ns > 0.6 * found.now.wall_ns
    assert "precision = bf16" in found.arithmetic


def test_what_is_not_known_is_not_predicted():
    assert predicted_change(Facts(), {"graph": "on"}) is None
    assert (
        predicted_change(
            Facts(point=point("op:matmul", wall=MS, launch=MS, busy=MS), ceilings=ceilings()), {"graph": "on"}
        )
        is None
    )
    assert (
        predicted_change(known(precision="fp16", optimizer="foreach"), {"graph": "on"}) is None
    )  # they do not go together


def test_memory_saved():
    assert saved_bytes(known(attention="naive", batch=16), {"attention": "sdpa"}) > 2**30
    assert saved_bytes(known(), {"attention": "naive"}) == 0
    assert saved_bytes(Facts(), {"loss": "fused"}) == 0
