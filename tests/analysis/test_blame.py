"""Idle time by what the host was in; transfers as their own kind of busy; the verdict by the largest."""

from dataclasses import replace

import polars as pl
import pytest

from flopwise.analysis import verdict as words
from flopwise.analysis.blame import OUTSIDE
from flopwise.analysis.explanation import explain_trace
from flopwise.analysis.idle import ALLOCATOR, HOST
from flopwise.trace import tables

from .test_idle import MS, frame, late, trace


def blamed(made):
    return [(one.cause, one.what, round(one.idle_ns / MS)) for one in explain_trace(made).blame]


def test_the_outermost_function_that_launches_nothing_is_to_blame():
    """step() launches; prepare() does not, nor does what it calls."""
    frames = [(0, 61, "train.py(9): step"), (2, 58, "data.py(3): prepare"), (5, 40, "data.py(7): decode")]
    e = explain_trace(late(60, frames=frames))
    assert (e.bound, e.blame[0].what, e.blame[0].stack) == (words.HOST, "data.py(3): prepare", ("train.py(9): step",))
    assert e.blame[0].inner["data.py(7): decode"] == pytest.approx(35 * MS)
    assert "data.py(3): prepare" in e.verdict


def test_code_that_the_trace_does_not_show_is_called_so():
    made = late(60, ops=[(59.9, 60, "aten::embedding")])
    one = explain_trace(made).blame[0]
    assert (one.cause, one.what, one.before) == (HOST, OUTSIDE, "aten::embedding")


def test_of_memory_the_call_is_to_blame_with_the_op_around_it():
    made = late(60, calls=[(2, 50, "cudaFree")], ops=[(2, 60, "aten::conv2d")])
    e = explain_trace(made)
    first = e.blame[0]
    assert (first.cause, first.what, first.stack, e.bound) == (
        ALLOCATOR,
        "cudaFree",
        ("aten::conv2d",),
        words.ALLOCATOR,
    )


def test_what_another_thread_runs_is_not_to_blame():
    made = late(60, frames=[(2, 58, "monitor.py(60): run")])
    away = made.frames.with_columns(thread=pl.lit(99, pl.Int64))
    assert blamed(replace(made, frames=away)) == [(HOST, OUTSIDE, 59)]


def copied(copy, kernel):
    """A copy and a kernel (from ms, to ms), both launched at the beginning."""
    made = trace([(kernel[0] * MS, kernel[1] * MS, 1)], [(0, 5, 1), (6, 9, 2)])
    return replace(made, copies=frame(tables.COPIES, (copy[0] * MS, copy[1] * MS, 1, 0, 8, "HtoD", 10**9, 2, -1)))


def test_a_step_that_only_copies_is_transfer_bound():
    e = explain_trace(copied((0, 90), (90, 100)))
    assert (e.bound, e.transfers[0].exposed_ns) == (words.TRANSFER, 90 * MS)
    assert e.verdict.startswith("transfer-bound: 90 % of the step is copies between host and GPU and nothing else")


def test_a_copy_beside_a_kernel_holds_up_nothing():
    e = explain_trace(copied((0, 90), (0, 100)))
    assert (e.bound, e.transfers[0].exposed_ns, e.transfers[0].gpu_ns) == (words.GPU, 0, 90 * MS)


def test_a_capture_is_no_step():
    calls = [(1, 2, "cudaStreamBeginCapture"), (58, 59, "cudaStreamEndCapture")]
    assert explain_trace(late(60, calls=calls)).bound == words.CAPTURE
