"""Steps one by one: marks of every kind, what belongs to a step, which are cold, and that they add up."""

from dataclasses import replace

import numpy as np
import pytest

from flopwise.analysis.explanation import explain_trace
from flopwise.analysis.step_times import COLD, PARTIAL, STEADY, StepTime, steady_run
from flopwise.trace import tables

from .test_idle import MS, frame, trace

MAIN, AUTOGRAD = 11, 12


def loop(lengths, marks, *, kernels=4, names=("x",), calls=(), frames=(), modules=()):
    """Steps of so many ms, one after the other; in each so many kernels of 100 µs, launched 50 µs before they begin.

    `marks`: for step i from ms a to ms b, the ranges (from, to, name, kind) in ms. What the others hold is (from, to, name).
    """
    known = list(names)

    def number(name):
        if name not in known:
            known.append(name)
        return known.index(name)

    work, launches, ranges, at = [], [], [], 0.0
    for place, length in enumerate(lengths):
        for nth in range(kernels):
            start = at + (nth + 0.5) * length / kernels
            row = len(work) + 1
            work.append((int(start * MS), int((start + 0.1) * MS), 1, 0, 7, number(f"kernel {nth}"), row, -1))
            launches.append((int((start - 0.05) * MS), int((start - 0.04) * MS), 1, MAIN, 0, row))
        ranges += marks(place, at, at + length)
        at += length
    rows = [(int(a * MS), int(b * MS), 1, MAIN, number(name), kind) for a, b, name, kind in (*ranges, *modules)]
    others = {
        table: frame(tables.TABLES[table], *((int(a * MS), int(b * MS), 1, MAIN, number(name)) for a, b, name in spans))
        for table, spans in (("calls", calls), ("frames", frames))
    }
    made = replace(
        trace([], []),
        kernels=frame(tables.KERNELS, *work),
        launches=frame(tables.LAUNCHES, *launches),
        ranges=frame(tables.RANGES, *rows),
        **others,
    )
    return replace(made, names=tuple(known))


def whole(name, kind="annotation"):
    return lambda place, a, b: [(a, b - 0.01, name.format(place), kind)]


def at_its_end(name):
    return lambda place, a, b: [(b - 0.3, b - 0.01, name.format(place), "annotation")]


def at_its_start(name):
    return lambda place, a, b: [(a, a + 0.2, name.format(place), "annotation")]


MARKS = {
    "profiler steps": whole("ProfilerStep#{}", "step"),
    "iterations of the server": whole("execute_context_{}(12)_generation_3(3)"),
    "ranges": whole("[pl][profile]run_training_batch"),
    "optimizer steps": at_its_end("Optimizer.step#AdamW.step"),
    "fetched batches": at_its_start("enumerate(DataLoader)#_Iter.__next__"),
    "calls of the model": whole("GPT_0", "module"),
}


@pytest.mark.parametrize("how", MARKS)
def test_marks_of_every_kind_are_steps(how):
    e = explain_trace(loop([10, 10, 12, 10], MARKS[how]))
    assert (e.steps, e.steps_found_by) == (4, how)
    assert [one.launches for one in e.step_times] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    "name", ["step[DECODE bs={}]", "[Executor] _forward_step {}: 0 ctx reqs", "execute_new_1_cached_{}"]
)
def test_iterations_of_servers_have_their_own_names(name):
    e = explain_trace(loop([10, 10], whole(name)))
    assert (e.steps, [one.name for one in e.step_times]) == (2, [name.format(0), name.format(1)])


def test_ranges_of_one_name_that_hold_all_work_are_steps_and_layers_are_not():
    assert explain_trace(loop([10, 10, 10], whole("my thing {}"))).steps == 3
    # One call of the model around all of them: its layers.
    layers = loop([10, 10, 10], whole("layer {}"), modules=[(0, 30, "GPT_0", "module")])
    assert explain_trace(layers).steps == 1
    # An embedding before the first.
    marks = whole("layer {}")
    some = loop([10, 10, 10], lambda place, a, b: marks(place, a, b) if place else [])
    assert explain_trace(some).steps == 1


def test_one_profiler_step_around_many_optimizer_steps_says_less_than_these():
    end = at_its_end("Optimizer.step#AdamW.step")
    one = lambda place, a, b: [*end(place, a, b), *([(0, 40, "ProfilerStep#1", "step")] if place == 0 else [])]  # noqa: E731
    assert explain_trace(loop([10] * 4, one)).steps == 4
    # Two optimizers of one step, once each.
    both = lambda place, a, b: [  # noqa: E731
        (b - 0.3, b - 0.01, ("Optimizer.step#G.step", "Optimizer.step#D.step")[place], "annotation"),
        *([(0, 20, "ProfilerStep#1", "step")] if place == 0 else []),
    ]
    assert explain_trace(loop([10, 10], both)).steps == 1


def test_of_optimizers_that_alternate_the_rarest_ends_a_step():
    name = lambda place: "Optimizer.step#D.step" if place % 3 else "Optimizer.step#G.step"  # noqa: E731
    found = explain_trace(loop([10] * 6, lambda place, a, b: [(b - 0.3, b - 0.01, name(place), "annotation")]))
    assert (found.steps, {one.name for one in found.step_times}) == (2, {"Optimizer.step#G.step"})


def test_optimizers_that_step_one_after_the_other_are_one():
    marks = lambda place, a, b: [  # noqa: E731
        (b - 0.3, b - 0.2, "Optimizer.step#Muon.step", "annotation"),
        (b - 0.15, b - 0.05, "Optimizer.step#AdamW.step", "annotation"),
    ]
    assert explain_trace(loop([10] * 3, marks)).steps == 3


def test_a_first_step_that_is_much_longer_is_cold_and_its_reason_is_told():
    call = [(1, 80, "cudaMalloc")]
    e = explain_trace(loop([100, 10, 10, 12], MARKS["profiler steps"], calls=call))
    assert [one.kind for one in e.step_times] == [COLD, STEADY, STEADY, STEADY]
    assert "79.0 ms in cudaMalloc" in e.step_times[0].why
    assert e.window_ns == pytest.approx(32 * MS / 3, rel=0.01)
    assert e.step_spread.median_ns == pytest.approx(10 * MS, rel=0.01)
    assert "cold_steps" in e.note_keys


def test_a_later_step_is_cold_only_with_a_reason():
    lengths = [10, 10, 40, 10, 10]
    plain = explain_trace(loop(lengths, MARKS["profiler steps"]))
    assert (plain.steady_steps, plain.step_spread.outliers) == (5, (3,))
    compiled = lambda place, a, b: [  # noqa: E731
        *MARKS["profiler steps"](place, a, b),
        *([(a + 1, a + 25, "compile_inner (dynamo_timed)", "annotation")] if place == 2 else []),
    ]
    e = explain_trace(loop(lengths, compiled))
    assert [one.kind for one in e.step_times][2] == COLD
    assert (e.steady_steps, e.step_spread.cold) == (2, (3,))  # the two after it


def test_every_step_asks_for_memory_and_none_is_cold():
    calls = [(10 * place + 1, 10 * place + 6, "hipFree") for place in range(5)]
    assert explain_trace(loop([10] * 5, MARKS["profiler steps"], calls=calls)).steady_steps == 5


def test_the_first_step_of_a_trace_that_began_in_its_middle_is_partial():
    made = loop([10] * 4, MARKS["optimizer steps"])
    cut = replace(made, kernels=made.kernels[3:], launches=made.launches[3:])
    e = explain_trace(cut)
    assert [one.kind for one in e.step_times] == [PARTIAL, STEADY, STEADY, STEADY]


def test_work_without_a_launch_goes_with_the_piece_before_it_on_its_stream():
    """The first was queued before the trace; the launch of the third was lost."""
    made = loop([10, 10], MARKS["profiler steps"])
    lost = made.launches["correlation"].is_in([1, 3])
    e = explain_trace(replace(made, launches=made.launches.filter(~lost)))
    assert [one.launches for one in e.step_times] == [3, 4]
    assert "GPU work queued before the trace began is left out: 1 piece" in e.notes


def test_a_step_that_waits_for_work_that_was_cut_out_begins_with_its_own():
    """Launched at once, run 400 ms later with nothing on the GPU before: that is not this step's time."""
    made = loop([10], MARKS["iterations of the server"])
    later = made.kernels.with_columns(
        start_ns=made.kernels["start_ns"] + 400 * MS, end_ns=made.kernels["end_ns"] + 400 * MS
    )
    e = explain_trace(replace(made, kernels=later))
    assert e.window_ns < 10 * MS
    assert e.busy_ns == 4 * 0.1 * MS


def test_micro_batches_are_counted():
    """Two forward and backward passes before each optimizer step."""

    def marks(place, a, b):
        quarter = (b - a - 0.4) / 4
        phases = [
            (a + nth * quarter, a + (nth + 1) * quarter - 0.01, ("forward", "backward")[nth % 2]) for nth in range(4)
        ]
        return [*((s, e, name, "annotation") for s, e, name in phases), *MARKS["optimizer steps"](place, a, b)]

    e = explain_trace(loop([10, 10, 10], marks, kernels=8))
    assert (e.steps, e.step_spread.micro_batches) == (3, 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(20))
def test_steps_add_up_to_the_window(seed):
    """Whatever the queue: on the GPU, steps follow one another without a gap."""
    random = np.random.default_rng(seed)
    made = loop(random.uniform(2, 20, 6), MARKS["profiler steps"], kernels=int(random.integers(1, 9)))
    late = np.maximum.accumulate(made.kernels["start_ns"].to_numpy() + random.integers(0, 9 * MS, made.kernels.height))
    took = random.integers(1, 3 * MS, made.kernels.height)
    kernels = made.kernels.with_columns(start_ns=late, end_ns=late + took)
    e = explain_trace(replace(made, kernels=kernels))
    assert all(a.start_ns + a.ns == b.start_ns for a, b in zip(e.step_times, e.step_times[1:], strict=False))
    assert all(0 <= one.busy_ns <= one.ns for one in e.step_times)
    chosen = [one for one in e.step_times if one.kind == STEADY]
    assert e.window_ns * e.steady_steps <= sum(one.ns for one in chosen) + 1
    assert e.idle.total_ns == sum(e.idle.by_cause_ns.values())


def test_the_longest_run_of_steady_steps_counts_and_of_two_the_later():
    def run(kinds):
        made = [
            StepTime(number=n, name="", start_ns=0, ns=1, busy_ns=1, launches=1, kind={"s": STEADY, "c": COLD}[kind])
            for n, kind in enumerate(kinds)
        ]
        return steady_run(made)

    assert [run(kinds) for kinds in ("csss", "sscss", "ssscs", "cc", "s")] == [(1, 4), (3, 5), (0, 3), (0, 2), (0, 1)]
