"""Steps found by marks, by ranges named after steps or phases, or by the kernels; and the window that they span."""

from dataclasses import replace

import pytest

from flopwise.analysis.explanation import explain_trace
from flopwise.analysis.idle import BETWEEN, LATE_LAUNCH, NOTHING, SYNCHRONISATION
from flopwise.errors import FlopwiseError
from flopwise.trace import tables

from .test_idle import frame, trace

MAIN, OTHER = 11, 22


def made(kernels, ranges=(), syncs=(), lasting=None):
    """kernels: names in order, one every 10 ns, launched at its start − 5 and lasting 8; ranges (start, end, name, kind)."""
    names = list(dict.fromkeys([*kernels, *(r[2] for r in ranges)]))
    last = lasting or {}
    times = [(10 * i, 10 * i + last.get(name, 8), i) for i, name in enumerate(kernels, 1)]
    base = trace(times, [(s - 5, s - 4, c) for s, _, c in times], syncs)
    rows = [(s, e, 1, 0, 7, names.index(kernels[i]), c, -1) for i, (s, e, c) in enumerate(times)]
    spans = [(s, e, 1, MAIN, names.index(name), kind) for s, e, name, kind in ranges]
    return replace(base, names=tuple(names), kernels=frame(tables.KERNELS, *rows), ranges=frame(tables.RANGES, *spans))


def annotated(*ranges):
    return [(*r, "annotation") for r in ranges]


def found(made_trace):
    e = explain_trace(made_trace)
    return e.steps, e.steps_found_by


def test_layers_are_not_steps():
    """One forward of 48 layers: an embedding before them and a head after them occur once."""
    layers = ["mm", "add", "attention"] * 48
    assert found(made(["embedding", *layers, "head"])) == (1, "whole trace")
    assert found(made(["embedding", *layers])) == (1, "whole trace")
    assert found(made([*layers, "head"])) == (1, "whole trace")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_period_holds_all_the_layers_of_a_step(n):
    assert found(made(["embedding", *["mm", "add"] * 12, "head"] * n)) == (n, "period of the kernels")


def test_a_period_repeats_nearly_all_of_the_time():
    """Every kernel comes again, and 98 % of them a period later: but not the one that takes most of the time."""
    one, two = ["a", "b", *["c"] * 100, "long"], ["a", "b", "long", *["c"] * 100]
    lasting = {"long": 500}
    assert found(made([*one, *one], lasting=lasting)) == (2, "period of the kernels")
    assert found(made([*one, *two], lasting=lasting)) == (1, "whole trace")
    assert found(made([*one, *two])) == (2, "period of the kernels")


def test_a_mark_without_work_is_no_step():
    """A loop that ends inside the profiler's window leaves a mark behind it."""
    marks = [(0, 29, "ProfilerStep#1", "step"), (30, 60, "ProfilerStep#2", "step"), (70, 71, "ProfilerStep#3", "step")]
    e = explain_trace(made(["a"] * 5, marks))
    assert (e.steps, e.steps_found_by) == (2, "profiler steps")
    assert "marked steps that launched no GPU work, not counted: 1" in e.notes
    assert e.window_ns == 30  # to the end of the second


@pytest.mark.parametrize("names", [("step 0", "step 1"), ("train_step", "train_step"), ("iteration 3", "iteration 4")])
def test_ranges_named_as_steps_are_steps(names):
    """Not the forward ranges in them: the second step accumulates two."""
    ranges = annotated(
        (0, 29, names[0]), (30, 60, names[1]), (1, 9, "forward"), (31, 39, "forward"), (41, 49, "forward")
    )
    assert found(made(["a"] * 5, ranges)) == (2, "ranges")


def test_a_range_named_step_around_the_optimizer_alone_is_none():
    ranges = annotated((0, 20, "forward"), (22, 29, "step"), (30, 50, "forward"), (52, 59, "step"))
    e = explain_trace(made(["a", "b", "a", "c"] * 2, ranges))
    assert (e.steps, e.steps_found_by) == (2, "ranges")
    assert not any("left out" in note for note in e.notes)


def test_forwards_before_one_optimizer_are_one_step():
    accumulated = [(s, s + 8, "forward") for s in (0, 10, 20, 40, 50, 60)]
    updates = [(30, 38, "Optimizer.step#AdamW.step"), (70, 78, "optimizer")]
    cleared = [(s, s + 1, "Optimizer.zero_grad#AdamW.zero_grad") for s in (9, 19, 49)]
    assert found(made(["a"] * 8, annotated(*accumulated, *updates, *cleared))) == (2, "ranges")
    assert found(made(["a"] * 8, annotated(*accumulated))) == (6, "ranges")


def test_steps_are_those_of_the_process_that_is_explained():
    """Two ranks in one file, the second doing the same at the same times on a device of its own."""
    marks = [(0, 29, "ProfilerStep#1", "step"), (30, 60, "ProfilerStep#2", "step")]
    one = made(["a"] * 5, marks, syncs=[(55, 57)])
    both = {}
    for name in ("kernels", "launches", "ranges", "syncs"):
        table = getattr(one, name)
        twin = [{**row, "process": 2, "device": 1} for row in table.to_dicts()]
        both[name] = frame(table.schema, *table.rows(), *(tuple(row[c] for c in table.columns) for row in twin))
    alone, among = explain_trace(one), explain_trace(replace(one, **both))
    for field in ("steps", "window_ns", "busy_ns", "gpu_ns", "launches", "idle", "phases"):
        assert getattr(among, field) == getattr(alone, field)
    assert "2 processes used the GPU; this is the busiest" in among.notes


def test_work_of_no_known_process_is_in_the_marked_steps():
    """Correlation ids that two processes share: nobody can say whose kernel it is, but the marks hold."""
    marks = [(0, 29, "ProfilerStep#1", "step"), (30, 60, "ProfilerStep#2", "step")]
    one = made(["a"] * 5, marks)
    assert found(replace(one, kernels=one.kernels.with_columns(process=-1))) == (2, "profiler steps")


def test_marks_are_those_of_the_thread_that_launched_the_work():
    marks = [(0, 29, "ProfilerStep#1", "step"), (30, 60, "ProfilerStep#2", "step")]
    one = made(["a"] * 5, marks)
    other = [(s, s + 4, 1, OTHER, 1, "step") for s in (2, 12, 22, 32)]
    assert found(replace(one, ranges=frame(tables.RANGES, *one.ranges.rows(), *other))) == (2, "profiler steps")


def marked(kernel, mark, syncs=(), ops=()):
    """One kernel launched at its start − 2, in one marked step."""
    start, end = kernel
    base = trace([(start, end, 1)], [(start - 2, start - 1, 1)], syncs)
    return replace(
        base,
        names=("x", "ProfilerStep#1"),
        ranges=frame(tables.RANGES, (*mark, 1, MAIN, 1, "step")),
        ops=frame(tables.OPS, *((s, e, 1, MAIN, 0, -1, False, -1) for s, e in ops)),
    )


def test_the_window_spans_the_marked_step():
    """100 ns of step for 10 ns of work: not a busy GPU."""
    e = explain_trace(marked((80, 90), (0, 100)))
    assert (e.window_ns, e.busy_ns) == (100, 10)
    assert {cause: ns for cause, ns in e.idle.by_cause_ns.items() if ns} == {LATE_LAUNCH: 79, BETWEEN: 1, NOTHING: 10}
    assert e.launch_bound


def test_after_the_last_work_the_host_waits_works_or_does_nothing():
    e = explain_trace(marked((20, 30), (0, 100), syncs=[(22, 35)], ops=[(34, 60), (50, 70)]))
    after = {SYNCHRONISATION: 5, LATE_LAUNCH: 19 + 35, BETWEEN: 1, NOTHING: 30}
    assert {cause: ns for cause, ns in e.idle.by_cause_ns.items() if ns} == after


def test_the_window_reaches_to_the_last_work_of_the_marked_step():
    e = explain_trace(marked((50, 300), (0, 100)))
    assert (e.window_ns, e.idle.by_cause_ns[NOTHING]) == (300, 0)


def test_a_step_begins_when_the_work_before_it_is_done():
    """The host ran ahead: the mark opens while the GPU is busy with what was launched earlier."""
    late = marked((80, 90), (20, 60))
    late = replace(late, launches=frame(tables.LAUNCHES, (1, 2, 1, MAIN, 0, 9), (21, 22, 1, MAIN, 0, 1)))
    late = replace(late, kernels=frame(tables.KERNELS, (10, 78, 1, 0, 7, 0, 9, -1), *late.kernels.rows()))
    e = explain_trace(late)
    assert (e.window_ns, e.busy_ns, e.idle.by_cause_ns[BETWEEN]) == (12, 10, 2)


def test_work_without_a_duration_is_one_line():
    with pytest.raises(FlopwiseError, match="takes no time at all"):
        explain_trace(trace([(5, 5, 1)], [(0, 2, 1)]))
