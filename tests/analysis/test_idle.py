"""Gaps on the GPU by cause, on traces made by hand."""

from dataclasses import replace

import polars as pl
import pytest

from flopwise.analysis.host_waits import host_work_ns
from flopwise.analysis.idle import (
    ALLOCATOR,
    BETWEEN,
    CAUSES,
    COMPILATION,
    HOST,
    INPUT,
    LATE_LAUNCH,
    NOTHING,
    SYNCHRONISATION,
    TRANSFER,
    UNKNOWN,
    host_gaps,
)
from flopwise.analysis.idle import idle as idle_of
from flopwise.analysis.steps import WHOLE_TRACE, Steps
from flopwise.trace import tables
from flopwise.trace.tables import Trace


def frame(schema, *rows):
    return pl.DataFrame(rows, schema=schema, orient="row").sort("start_ns")


def trace(kernels, launches, syncs=()):
    """kernels (start, end, correlation), launches (start, end, correlation), syncs (start, end): one process, one thread."""
    return Trace(
        source="kineto",
        path="",
        names=("x",),
        kernels=frame(tables.KERNELS, *((s, e, 1, 0, 7, 0, c, -1) for s, e, c in kernels)),
        copies=frame(tables.COPIES),
        launches=frame(tables.LAUNCHES, *((s, e, 1, 11, 0, c) for s, e, c in launches)),
        graph_launches=frame(tables.GRAPH_LAUNCHES),
        graph_runs=frame(tables.GRAPH_RUNS),
        syncs=frame(tables.SYNCS, *((s, e, 1, 11, 0) for s, e in syncs)),
        ops=frame(tables.OPS),
        ranges=frame(tables.RANGES),
    )


def idle(made, low, high):
    return idle_of(made, host_gaps(made, low, high, 0), low, high)


def test_a_launch_that_comes_late_is_the_hosts_and_the_rest_the_devices():
    found = idle(trace([(10, 20, 1), (50, 60, 2)], [(0, 5, 1), (40, 45, 2)]), 10, 60)
    assert found.by_cause_ns[LATE_LAUNCH] == 25  # idle from 20; the call returned at 45
    assert found.by_cause_ns[BETWEEN] == 5
    assert (found.total_ns, found.n_gaps) == (30, 1)


def test_work_that_was_queued_leaves_only_the_devices_gap():
    found = idle(trace([(10, 20, 1), (22, 60, 2)], [(0, 5, 1), (6, 9, 2)]), 10, 60)
    assert found.by_cause_ns == dict.fromkeys(CAUSES, 0) | {BETWEEN: 2}


@pytest.mark.parametrize(("wait", "waited"), [((6, 22), 16), ((15, 22), 7), ((21, 24), 3), ((0, 22), 22)])
def test_a_wait_explains_no_more_than_it_lasted(wait, waited):
    """Idle from 20 to 45: while the host waits, and after it for as long as it had waited before the GPU was idle."""
    found = idle(trace([(10, 20, 1), (50, 60, 2)], [(0, 5, 1), (40, 45, 2)], syncs=[wait]), 10, 60)
    assert (found.by_cause_ns[SYNCHRONISATION], found.by_cause_ns[LATE_LAUNCH]) == (waited, 25 - waited)


def test_a_long_wait_explains_the_whole_gap_and_none_after_it():
    kernels, launches = [(100, 200, 1), (230, 240, 2), (260, 270, 3)], [(0, 5, 1), (220, 225, 2), (250, 255, 3)]
    found = idle(trace(kernels, launches, syncs=[(6, 202)]), 100, 270)
    assert (found.by_cause_ns[SYNCHRONISATION], found.by_cause_ns[LATE_LAUNCH]) == (25, 15)


def test_a_wait_long_before_explains_nothing():
    found = idle(trace([(10, 20, 1), (50, 60, 2)], [(0, 5, 1), (40, 45, 2)], syncs=[(1, 3)]), 10, 60)
    assert (found.by_cause_ns[SYNCHRONISATION], found.by_cause_ns[LATE_LAUNCH]) == (0, 25)


def test_no_launch_and_no_more_work():
    found = idle(trace([(10, 20, 1), (50, 60, 99)], [(0, 5, 1)]), 10, 100)
    assert (found.by_cause_ns[UNKNOWN], found.by_cause_ns[NOTHING]) == (30, 40)


@pytest.mark.parametrize("kernels", [[], [(0, 100, 1)]])
def test_nothing_at_all_and_nothing_idle(kernels):
    found = idle(trace(kernels, [(0, 5, 1)]), 0, 100)
    assert found.total_ns == (0 if kernels else 100)


@pytest.mark.parametrize(("kind", "returned", "waited"), [("DtoH", 30, True), ("DtoH", 23, False), ("HtoD", 30, False)])
def test_a_copy_that_its_call_waits_for_is_a_wait(kind, returned, waited):
    """cudaMemcpyAsync to pageable memory comes back with the bytes; to pinned memory at once."""
    made = trace([(10, 20, 1), (50, 60, 2)], [(0, 5, 1), (22, returned, 3), (40, 45, 2)])
    made = replace(made, copies=frame(tables.COPIES, (24, 28, 1, 0, 7, kind, 4, 3, -1)))
    found = idle(made, 28, 60)  # of the 17 ns it waits 2, and had waited 6
    assert (found.by_cause_ns[SYNCHRONISATION], found.by_cause_ns[LATE_LAUNCH]) == ((8, 9) if waited else (0, 17))


def test_a_gap_in_the_data_loader_is_the_input_pipelines():
    """The host loads from 22 to 38, and launches at 40; another loader's range while the GPU is busy takes nothing."""
    made = trace([(10, 20, 1), (50, 60, 2)], [(0, 5, 1), (40, 45, 2)], syncs=[(6, 21)])
    ranges = frame(tables.RANGES, (22, 38, 1, 11, 1, "annotation"), (11, 15, 1, 11, 1, "annotation"))
    made = replace(made, names=("x", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"), ranges=ranges)
    found = idle(made, 10, 60)
    assert (found.by_cause_ns[INPUT], found.by_cause_ns[SYNCHRONISATION], found.by_cause_ns[BETWEEN]) == (16, 2, 5)


def test_a_batch_copied_from_pageable_memory_is_a_transfer():
    """The call spans the copy: the host stages the batch from 21 on. A few bytes are no batch, and a queued copy no wait."""
    made = trace([(10, 20, 1)], [(0, 5, 1), (21, 60, 2)])
    for size, spans, expected in ((16384, 60, 29), (64, 60, 0), (16384, 40, 0)):
        launches = frame(tables.LAUNCHES, (0, 5, 1, 11, 0, 1), (21, spans, 1, 11, 0, 2))
        copies = frame(tables.COPIES, (50, 55, 1, 0, 7, "HtoD", size, 2, -1))
        found = idle(replace(made, launches=launches, copies=copies), 10, 55)
        assert found.by_cause_ns[TRANSFER] == expected


MS = 1_000_000


def late(launched, **more):
    """Idle from 1 ms on until a launch that returns at `launched` ms; `more` has rows (from ms, to ms, name)."""
    made = trace(
        [(0, MS, 1), (launched * MS + 5, launched * MS + 9, 2)], [(0, 5, 1), (launched * MS - 9, launched * MS, 2)]
    )
    names = ["x", *dict.fromkeys(name for rows in more.values() for *_, name in rows)]
    own = {"ops": (-1, False, -1), "ranges": ("annotation",)}
    spans = {
        table: frame(
            tables.TABLES[table],
            *((a * MS, b * MS, 1, 11, names.index(name), *own.get(table, ())) for a, b, name in rows),
        )
        for table, rows in more.items()
    }
    return replace(made, names=tuple(names), **spans)


def causes(made, until):
    found = idle(made, 0, until * MS + 9).by_cause_ns
    return {cause: round(ns / MS) for cause, ns in found.items() if ns >= MS / 2}


def test_what_the_host_does_in_a_gap_is_to_blame():
    """From 1 to 60 ms: it fetches a batch, compiles, asks for memory, and runs a function that launches nothing."""
    made = late(
        60,
        ranges=[(2, 12, "enumerate(DataLoader)#_Iter.__next__"), (12, 20, "compile_inner (dynamo_timed)")],
        calls=[(20, 27, "cudaMalloc")],
        frames=[(0, 60, "train.py(9): step"), (30, 58, "data.py(3): prepare")],
    )
    assert causes(made, 60) == {INPUT: 10, COMPILATION: 8, ALLOCATOR: 7, HOST: 34}


def test_code_that_launches_is_late_unless_it_takes_too_long():
    """An op that launches at its end: 3 ms are what a slow one takes, 30 ms are not."""
    for until, cause in ((4, LATE_LAUNCH), (31, HOST)):
        assert causes(late(until, ops=[(1, until, "aten::conv2d")]), until) == {cause: until - 1}


def test_a_launch_that_takes_milliseconds_loads_its_kernel():
    made = late(20)
    calls = frame(tables.LAUNCHES, (0, 5, 1, 11, 1, 1), (2 * MS, 20 * MS, 1, 11, 1, 2))
    made = replace(made, names=("x", "cudaLaunchKernel"), launches=calls)
    assert causes(made, 20) == {LATE_LAUNCH: 1, COMPILATION: 18}


def test_work_that_waits_long_in_the_queue_waits_for_something_that_is_not_shown():
    kernels = [(0, MS, 1), (9 * MS, 10 * MS, 2), (10 * MS + 500, 11 * MS, 3)]
    found = idle(trace(kernels, [(0, 5, 1), (10, 15, 2), (20, 25, 3)]), 0, 11 * MS).by_cause_ns
    assert (found[UNKNOWN], found[BETWEEN]) == (8 * MS, 500)


def run_on_a_queue(n, kernel_ns, host_ns=20, launch_ns=5, queue=100):
    """A host that launches `n` kernels and computes before each, and a GPU that takes them from a queue of so many places."""
    now, free, ends, launches, kernels = 0, 0, [], [], []
    for number in range(1, n + 1):
        now += host_ns
        begin = now
        if len(ends) >= queue:  # the call returns when there is a place again
            now = max(now, ends[len(ends) - queue])
        now += launch_ns
        free = max(free, now) + kernel_ns
        ends.append(free)
        launches.append((begin, now, number))
        kernels.append((free - kernel_ns, free, number))
    return trace(kernels, launches), Steps(starts_ns=(0,), end_ns=free, how=WHOLE_TRACE)


@pytest.mark.parametrize("kernel_ns", [1, 24, 100, 1000])
def test_the_hosts_work_is_the_same_however_long_the_gpu_takes(kernel_ns):
    """In a step that the GPU sets, all launches but the first hundred are held up by a full queue: that is waiting."""
    made, steps = run_on_a_queue(1000, kernel_ns)
    # Before the first launch there is no op in this trace.
    assert host_work_ns(made, steps) == pytest.approx(1000 * (20 + 5), rel=0.03)


def test_a_wait_for_the_gpu_is_not_the_hosts_work_and_without_launches_nothing_is_known():
    made = trace([(0, 10, 1), (100, 110, 2)], [(0, 5, 1), (95, 100, 2)], syncs=[(10, 80)])
    steps = Steps(starts_ns=(0,), end_ns=110, how=WHOLE_TRACE)
    assert host_work_ns(made, steps) == 100 - 70
    assert host_work_ns(trace([(0, 10, 1)], []), steps) is None
