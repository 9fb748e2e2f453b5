"""What only a GPU can show of the tracing: both profilers see the same kernels, and every lever's trace is understood."""

import pytest
import torch

from flopwise.api.explain import explain
from flopwise.api.profile import profile
from flopwise.capture.nsys_program import find_nsys
from flopwise.records.run import OK
from flopwise.render.explain_view import explanation_view

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
needs_nsys = pytest.mark.skipif(not find_nsys(), reason="needs nsys")


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """Profile and explain; the same twice is done once."""
    known = {}

    def run(**options):
        key = str(options)
        if key not in known:
            runs = tmp_path_factory.mktemp("runs")
            stored = profile("small", batch=2, context=256, seconds=1.0, device="cuda", runs=runs, **options)
            (point,) = stored.points
            assert (point.status, point.reason) == (OK, "")
            assert point.traced_step_ns > 0
            known[key] = explain(stored)
        return known[key]

    return run


def shares(explanation):
    return {phase.name: phase.share for phase in explanation.phases}


@needs_nsys
def test_both_profilers_see_the_same(explained):
    kineto, nsys = explained(profiler="kineto"), explained(profiler="nsys")
    assert (kineto.source, nsys.source) == ("kineto", "nsys")
    assert (kineto.steps, nsys.steps) == (2, 2)
    counts = [{kernel.name: kernel.count for kernel in e.kernels} for e in (kineto, nsys)]
    assert sum(counts[0].values()) == sum(counts[1].values())
    by_kineto, by_nsys = shares(kineto), shares(nsys)
    assert by_kineto.keys() == by_nsys.keys()
    for phase, share in by_kineto.items():
        assert by_nsys[phase] == pytest.approx(share, abs=0.02), phase


@pytest.mark.parametrize("profiler", ["kineto", pytest.param("nsys", marks=needs_nsys)])
def test_nearly_all_gpu_time_has_a_module(explained, profiler):
    explanation = explained(profiler=profiler)
    assert explanation.coverage["launch"] == pytest.approx(1.0, abs=0.01)
    assert explanation.coverage["module"] >= 0.95
    assert {"forward", "loss", "backward", "optimizer"} <= shares(explanation).keys()


@pytest.mark.parametrize("profiler", ["kineto", pytest.param("nsys", marks=needs_nsys)])
def test_checkpointing_shows_as_recomputation(explained, profiler):
    """One forward pass more: as long as the forward pass itself, but for the embedding and the head."""
    found = shares(explained(profiler=profiler, checkpoint=1))
    assert found["recompute"] > 0.5 * found["forward"]
    assert "recompute" not in shares(explained(profiler=profiler))


@pytest.mark.parametrize("profiler", ["kineto", pytest.param("nsys", marks=needs_nsys)])
def test_a_graph_is_one_launch_and_its_coverage_is_told(explained, profiler):
    eager, graph = explained(profiler=profiler), explained(profiler=profiler, graph="on")
    assert graph.launches < 0.1 * eager.launches
    assert graph.gpu_ns == pytest.approx(eager.gpu_ns, rel=0.5)
    tables, _ = explanation_view(graph)
    assert any("share of the GPU time with a known launch" in note for table in tables for note in table.notes)


@pytest.mark.parametrize("profiler", ["kineto", pytest.param("nsys", marks=needs_nsys)])
def test_a_compiled_step_is_understood(explained, profiler):
    explanation = explained(profiler=profiler, compile="default")
    assert any("triton" in kernel.name for kernel in explanation.kernels)
    assert explanation.coverage["phase"] >= 0.95
    assert shares(explanation)["backward"] > shares(explanation)["forward"]
