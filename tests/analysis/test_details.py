"""What rules ask of a trace, on traces made by hand and on real ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.analysis.details import details
from flopwise.analysis.host_activity import PAGEABLE
from flopwise.analysis.traced_steps import traced_steps
from flopwise.trace import tables
from flopwise.trace.read import read_trace

from .test_idle import frame, trace

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
NAMES = (
    "gemm", "cudaStreamSynchronize", "aten::item", "ProfilerStep#1", "add_elementwise_kernel", "ncclDevKernel_AllReduce",
    "enumerate(DataLoader)#_Iter.__next__", "Torch-Compiled Region: 0/0", "Torch-Compiled Region: 1/0", "layers.0.norm",
)  # fmt: skip


def made(kernels, syncs=(), ops=(), ranges=(), copies=(), launches=()):
    """kernels (start, end, name, stream): each launched 1 before it starts; ops and ranges (start, end, name)."""
    base = trace([], [])
    work = [(s, e, 1, 0, stream, name, i + 1, -1) for i, (s, e, name, stream) in enumerate(kernels)]
    calls = [(s - 1, s, 1, 11, 0, i + 1) for i, (s, *_) in enumerate(kernels)]
    steps = [(0, 1000, 1, 11, 3, "step")]
    return replace(
        base,
        names=NAMES,
        kernels=frame(tables.KERNELS, *work),
        copies=frame(tables.COPIES, *copies),
        launches=frame(tables.LAUNCHES, *calls, *launches),
        syncs=frame(tables.SYNCS, *((s, e, 1, 11, 1) for s, e in syncs)),
        ops=frame(tables.OPS, *((s, e, 1, 11, name, -1, False, -1) for s, e, name in ops)),
        ranges=frame(tables.RANGES, *steps, *((s, e, 1, 11, name, "annotation") for s, e, name in ranges)),
    )


def details_of(trace):
    return details(traced_steps(trace))


def test_a_wait_is_told_with_its_op_and_its_range():
    (wait,) = details_of(made([(10, 50, 0, 7), (200, 300, 0, 7)], [(20, 60)], [(19, 61, 2)], [(5, 150, 9)])).waits
    assert (wait.call, wait.op, wait.where) == ("cudaStreamSynchronize", "aten::item", "layers.0.norm")
    assert (wait.count, wait.waited_ns) == (1.0, 40.0)


def test_a_wait_is_told_with_the_innermost_function_around_it():
    without = made([(10, 50, 0, 7), (200, 300, 0, 7)], [(20, 60), (70, 90)], [(19, 61, 2)])
    names = (*NAMES, "train.py(12): step", "train.py(3): log")
    frames = frame(tables.FRAMES, (1, 900, 1, 11, 10), (15, 65, 1, 11, 11), (15, 65, 1, 99, 11))
    waits = details_of(replace(without, names=names, frames=frames)).waits
    assert [wait.line for wait in waits] == ["train.py(3): log", "train.py(12): step"]
    assert [wait.line for wait in details_of(without).waits] == ["", ""]


def test_a_wait_after_the_last_launch_ends_the_measurement():
    assert details_of(made([(10, 50, 0, 7), (200, 300, 0, 7)], [(310, 400)])).waits == ()


@pytest.mark.parametrize(("returned", "waits"), [(90, 1), (62, 0)])
def test_a_copy_that_its_call_waits_for_is_a_wait(returned, waits):
    copy, call = (65, 80, 1, 0, 7, "DtoH", 4, 99, -1), (60, returned, 1, 11, 0, 99)
    found = details_of(made([(10, 50, 0, 7), (200, 300, 0, 7)], copies=[copy], launches=[call])).waits
    assert [wait.call for wait in found] == [PAGEABLE] * waits


def test_neighbours_that_move_memory_are_a_chain_and_a_product_breaks_it():
    kernels = [(10, 20, 4, 7), (20, 40, 4, 7), (40, 70, 4, 7), (70, 100, 0, 7), (100, 110, 4, 7)]
    (chain,) = details_of(made(kernels)).chains
    assert (chain.length, chain.count, chain.gpu_ns) == (3, 1.0, 60.0)
    assert chain.removable_ns == pytest.approx(40.0)


def test_communication_beside_other_work_is_hidden():
    found = details_of(made([(10, 60, 0, 7), (40, 100, 5, 8)]))
    assert (found.communication_ns, found.exposed_communication_ns) == (60.0, 40.0)


def test_the_gpu_waits_for_the_batch_only_while_it_is_idle():
    found = details_of(made([(10, 50, 0, 7), (120, 300, 0, 7)], ranges=[(40, 110, 6)]))
    assert found.loading_ns == 70.0


def test_a_region_that_repeats_is_no_break():
    once = details_of(made([(10, 50, 0, 7)], ops=[(5, 8, 7), (12, 15, 7)])).compiled
    assert (once.frames, once.calls, once.breaks) == (("0/0",), 2.0, 0)
    twice = details_of(made([(10, 50, 0, 7)], ops=[(5, 8, 7), (12, 15, 8)])).compiled
    assert twice.breaks == 1


def test_the_products_of_a_real_trace_are_its_matmul_time():
    found = details_of(read_trace(FIXTURES / "h200-small-fp32-naive-2steps.kineto.json.gz"))
    assert found.steps == 2
    assert {(p.m, p.n, p.k) for p in found.products} >= {(2048, 10000, 768), (2048, 3072, 768)}
    assert sum(p.gpu_ns for p in found.products) == pytest.approx(39.04e6, rel=0.02)
