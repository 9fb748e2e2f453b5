"""Points under their roofs: of a real trace as measured, of a step as predicted."""

from pathlib import Path

import pytest

from flopwise.analysis.roofline import measured_points, predicted_points, roof
from flopwise.cost.datasheet import from_datasheet
from flopwise.cost.roofline import op_time
from flopwise.cost.step import account_step
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload
from flopwise.trace.read import read_trace

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
H200 = from_datasheet(gpu("h200"))


def test_the_matmuls_of_a_trace_have_the_flops_of_their_shapes():
    trace = read_trace(FIXTURES / "h200-small-fp32-naive-2steps.kineto.json.gz")
    points = measured_points(trace, H200)
    assert {point.dtype for point in points} == {"fp32"}
    up = next(p for p in points if p.shapes == "[[2048, 768], [768, 3072]]" and p.phase == "forward")
    assert (up.flops, up.n_bytes) == (2 * 2048 * 768 * 3072, 4 * (2048 * 768 + 768 * 3072 + 2048 * 3072))
    assert up.count == 2 * 2 * 12  # gate and up, two steps, twelve layers
    assert all(0.2 < point.share < 1 for point in points)
    # Every matmul of the trace that has a shape is in one of the points: counted from the step's own arithmetic.
    assert sum(p.flops * p.count for p in points) == pytest.approx(2 * 3 * 0.534e12, rel=0.03)


def test_a_compiled_trace_says_its_precision():
    points = measured_points(read_trace(FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"), H200)
    assert {point.dtype for point in points} == {"bf16"}


def test_a_trace_without_shapes_has_no_points():
    assert measured_points(read_trace(FIXTURES / "h200-small-fp32-naive-2steps.nsys.sqlite.gz"), H200) == []


def test_predicted_points_are_the_whole_step():
    ops = account_step(workload("tiny", phase="train"), gpu("h200")).ops
    times = [op_time(op, H200) for op in ops]
    points = predicted_points(ops, times, H200)
    assert sum(p.ns for p in points) == pytest.approx(sum(t.ns for t in times))
    assert sum(p.count for p in points) == sum(op.kernels > 0 for op in ops)
    assert [p.ns for p in points] == sorted((p.ns for p in points), reverse=True)
    matmuls = [p for p in points if p.kind == "matmul"]
    assert sum(p.flops * p.count for p in matmuls) == sum(op.flops for op in ops if op.kind == "matmul")
    assert all(p.share <= 1 for p in matmuls)


def test_the_roof_bends():
    ridge = H200.matmul["bf16"].peak_flops / H200.bandwidth_bytes_per_s
    assert roof(ridge / 2, "bf16", H200) == pytest.approx(H200.matmul["bf16"].peak_flops / 2)
    assert roof(2 * ridge, "bf16", H200) == H200.matmul["bf16"].peak_flops


def test_a_product_with_its_result_among_the_inputs_is_counted():
    """A past bug: compiled code calls mm(out=…), and only square results were found."""
    points = measured_points(read_trace(FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"), H200)
    assert sum(point.count for point in points) == 510
    assert sum(p.flops * p.count for p in points) == pytest.approx(2 * 3 * 0.495e12, rel=0.01)  # all but attention
