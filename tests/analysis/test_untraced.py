"""The step without its profiler: laws of the estimate, steps made by hand, and steps measured with and without one."""

from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.analysis.explanation import explain_trace
from flopwise.analysis.profiler_cost import NO_COST, CostRange, ProfilerCost, unit_ns
from flopwise.analysis.traced_steps import traced_steps
from flopwise.analysis.untraced import LAUNCH_QUEUE, estimate, host_timeline, replay
from flopwise.trace import tables
from flopwise.trace.read import read_trace

from .test_idle import frame, trace

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
# Milliseconds without a profiler: docs/explanation/waterfall.md; a run of the compiled step's recipe.
UNTRACED_MS = {
    "h200-small-fp32-naive-2steps.kineto.json.gz": 65.0,
    "h200-small-fp32-naive-2steps.nsys.sqlite.gz": 65.0,
    "h200-small-bf16-compiled-2steps.kineto.json.gz": 22.0,
}


def fixed(event, python_call=0.0):
    cost = ProfilerCost(event=event, python_call=python_call)
    return CostRange(least=cost, likely=cost, most=cost)


def total(part, costs):
    """Of all steps."""
    return estimate(part, costs).ns * len(part.steps)


def made(n, kernel_ns, host_ns, syncs=()):
    """`n` launches, one each `host_ns`, under as many ops with an op inside, and a kernel of `kernel_ns` for each.

    From an op to the one inside it: 1 µs, the unit."""
    launches = [(i * host_ns + 4_000, i * host_ns + 6_000, i + 1) for i in range(n)]
    kernels, free = [], 0
    for _, end, number in launches:
        kernels.append((max(end, free), max(end, free) + kernel_ns, number))
        free = kernels[-1][1]
    spans = [(i * host_ns + at, i * host_ns + 7_000 - at) for i in range(n) for at in (0, 1_000)]
    ops = frame(tables.OPS, *((s, e, 1, 11, 0, -1, False, -1) for s, e in spans))
    return replace(trace(kernels, launches, syncs), ops=ops)


@pytest.fixture(scope="module", params=[*UNTRACED_MS, "by hand"])
def part(request):
    if request.param == "by hand":
        return traced_steps(made(60, 3_000, 10_000, syncs=[(206_500, 209_000)]))
    return traced_steps(read_trace(FIXTURES / request.param))


def test_without_a_cost_the_step_is_the_traced_one(part):
    found = estimate(part, fixed(0.0))
    window = (part.high_ns - part.low_ns) / len(part.steps)
    assert (found.ns, found.low_ns, found.high_ns) == (window, window, window)
    assert replay(host_timeline(part), NO_COST)[0] / len(part.steps) == pytest.approx(window, rel=0.001)


def test_the_dearer_the_profiler_the_shorter_the_step_and_never_shorter_than_its_work(part):
    window = part.high_ns - part.low_ns
    steps = [estimate(part, fixed(event)).ns * len(part.steps) for event in (0.0, 0.5, 1.0, 2.0, 4.0, 1e9)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] <= window
    assert steps[-1] >= window - part.idle.total_ns


def test_the_likely_step_lies_within_the_range(part):
    found = estimate(part)
    assert found.low_ns <= found.ns <= found.high_ns
    assert not found.measured
    assert 0 < found.host_left < 1


@pytest.mark.parametrize("name", UNTRACED_MS)
def test_the_estimate_is_nearer_to_the_clock_than_the_trace(name):
    found, clock = explain_trace(read_trace(FIXTURES / name)), 1e6 * UNTRACED_MS[name]
    near, traced = (abs(ns / clock - 1) for ns in (found.untraced_step.ns, found.window_ns))
    if "fp32" in name:  # the other clock is of another machine
        assert near < 0.1 < traced
    assert 0.97 * found.untraced_step.low_ns <= clock <= found.untraced_step.high_ns


def test_a_host_that_only_the_profiler_makes_slow_is_no_bound():
    """65 ms untraced for 59 of work and pauses; the trace shows 111."""
    found = explain_trace(read_trace(FIXTURES / "h200-small-fp32-naive-2steps.kineto.json.gz"))
    assert found.idle.total_ns > 0.4 * found.window_ns * found.steps
    assert not found.launch_bound
    assert found.verdict == "GPU-bound: the GPU is busy 93 % of the step"


def test_a_host_that_sets_the_step_gets_faster_by_all_that_the_profiler_cost():
    """60 launches of 10 µs, of which three events cost 3 µs; the kernels take 1 µs."""
    slow = traced_steps(made(60, 1_000, 10_000))
    assert unit_ns(slow.trace) == 1_000
    assert total(slow, fixed(1.0)) == pytest.approx(60 * 7_000, rel=0.03)
    assert estimate(slow, fixed(1.0)).host_left == pytest.approx(0.7, abs=0.02)


def test_a_gpu_that_sets_the_step_stays_as_it_is():
    busy = traced_steps(made(60, 20_000, 10_000))
    assert total(busy, fixed(1.0)) == pytest.approx(busy.high_ns - busy.low_ns, rel=0.01)


def test_a_launch_bound_step_is_called_so_only_if_it_is_at_the_optimistic_end():
    """A launch each 30 µs, of which three events cost 9 µs at most. Kernels of 10 µs wait for it anyway, of 20 µs hardly."""
    slow, nearly = (explain_trace(made(60, kernel_ns, 30_000)) for kernel_ns in (10_000, 20_000))
    assert slow.launch_bound
    assert nearly.idle.total_ns > 0.3 * nearly.window_ns * nearly.steps
    assert not nearly.launch_bound


def test_the_host_waits_for_the_gpu_where_it_waited_in_the_trace():
    """It waits for 30 kernels of 20 µs, then launches 30 more: their time does not overlap the wait, however fast the host."""
    before, after = made(30, 20_000, 10_000), made(30, 20_000, 10_000)
    done = int(before.kernels["end_ns"].max())
    sync = 300_000
    later = [
        (s + done, e + done, c + 30) for s, e, c in after.launches.select("start_ns", "end_ns", "correlation").rows()
    ]
    begun = done + 6_000
    kernels = [(begun + 20_000 * i, begun + 20_000 * (i + 1), 31 + i) for i in range(30)]
    rows = before.kernels.select("start_ns", "end_ns", "correlation").rows() + kernels
    launches = before.launches.select("start_ns", "end_ns", "correlation").rows() + later
    part = traced_steps(replace(trace(rows, launches, syncs=[(sync, done)]), ops=before.ops))
    assert replay(host_timeline(part), NO_COST)[0] == part.high_ns - part.low_ns
    assert total(part, fixed(1.0)) > part.high_ns - part.low_ns - 10_000


def test_a_host_does_not_run_ahead_of_a_full_queue():
    """Without a limit the long pause at the end would be hidden behind the work that is queued."""
    part = traced_steps(made(3 * LAUNCH_QUEUE, 9_000, 10_000))
    host = host_timeline(part)
    free = replay(replace(host, ready=host.ready * 0.0, launch=host.launch * 0.0), NO_COST)[0]
    assert free == pytest.approx(host.work.sum() - host.ready[0], rel=0.01)
    late = host.launch * 0.0
    late[-1] = 5_000_000.0
    held = replay(replace(host, ready=late, launch=late), NO_COST)[0]
    assert held > free + 5_000_000.0 - 9_000 * (LAUNCH_QUEUE + 2)


def test_python_calls_cost_too():
    part = traced_steps(replace(made(60, 1_000, 10_000), python_calls=600))
    plain, stacks = (total(part, fixed(1.0, each)) for each in (0.0, 0.1))
    assert stacks == pytest.approx(plain - 60 * 1_000, rel=0.03)


def test_a_trace_without_ops_has_its_unit_from_the_launches():
    assert unit_ns(trace([(5, 9, 1)], [(0, 100, 1), (0, 200, 2), (0, 100, 3)])) == pytest.approx(27)
    assert unit_ns(trace([(5, 9, 1)], [])) == 0


def test_a_trace_of_the_gpu_alone_has_no_estimate():
    found = explain_trace(trace([(5, 9, 1), (20, 30, 2)], []))
    assert found.untraced_step is None
    assert found.step_ns == found.window_ns
