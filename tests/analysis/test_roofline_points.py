"""Points under their roofs: of a real trace as measured, of a step as predicted."""

import json
from pathlib import Path

import pytest

from flopwise.analysis.roofline import RooflinePoint, predicted_points, roof
from flopwise.analysis.traced_points import traced_points
from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.op_time import op_time
from flopwise.predict.shapes.step import account_step
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload
from flopwise.trace.read import read_trace

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
H200 = from_datasheet(gpu("h200"))


NAIVE, COMPILED = (FIXTURES / f"h200-small-{name}-2steps.kineto.json.gz" for name in ("fp32-naive", "bf16-compiled"))


def points_of(path: Path, kind: str = "") -> list[RooflinePoint]:
    points, _ = traced_points(read_trace(path), H200)
    return [point for point in points if kind in ("", point.kind)]


def test_the_matmuls_of_a_trace_have_the_flops_of_their_shapes():
    points = points_of(NAIVE, "matmul")
    assert {point.dtype for point in points} == {"fp32"}
    up = next(p for p in points if p.shapes == "[[2048, 768], [768, 3072]]" and p.phase == "forward")
    assert (up.flops, up.n_bytes) == (2 * 2048 * 768 * 3072, 4 * (2048 * 768 + 768 * 3072 + 2048 * 3072))
    assert up.count == 2 * 2 * 12  # gate and up, two steps, twelve layers
    assert all(0.2 < point.share < 1 for point in points)
    # Every matmul of the trace that has a shape is in one of the points: counted from the step's own arithmetic.
    assert sum(p.flops * p.count for p in points) == pytest.approx(2 * 3 * 0.534e12, rel=0.03)


@pytest.mark.parametrize(("path", "covered"), [(NAIVE, 0.947), (COMPILED, 0.829)])
def test_points_and_what_is_not_placed_are_all_the_gpu_time(path, covered):
    trace = read_trace(path)
    points, unplaced = traced_points(trace, H200)
    total = sum(int((table["end_ns"] - table["start_ns"]).sum()) for table in (trace.kernels, trace.copies))
    placed = sum(point.ns for point in points)
    assert placed + sum(one.ns for one in unplaced) == total
    assert placed / total >= covered
    # What is left is the optimizer, whose lists are too long for the profiler to write down.
    lists = sum(one.ns for one in unplaced if "more than 30 tensors" in one.why)
    assert placed + lists > 0.99 * total


@pytest.mark.parametrize("path", [NAIVE, COMPILED])
def test_no_kernel_moves_more_than_the_memory_or_the_cache_can(path):
    """If one did, its bytes were counted too high: 4.8 TB/s is the datasheet's, the L2 cache holds 60 MB."""
    for point in points_of(path):
        assert point.bytes_per_s < (4.8e12 if point.n_bytes > 60e6 else 7e12), point


def test_the_elementwise_work_of_written_out_attention_by_hand():
    scores = 4 * 12 * 512 * 512
    points = points_of(NAIVE)
    exp = next(point for point in points if point.op == "aten::exp")
    assert (exp.n_bytes, exp.flops, exp.count) == (2 * 4 * scores, scores, 24)
    masked = next(point for point in points if point.op == "aten::where")
    assert masked.n_bytes == 2 * 4 * scores + 512 * 512 + 4  # the mask once, a byte a flag, and the number put there
    largest = next(point for point in points if point.op == "aten::max")
    assert largest.n_bytes == 4 * scores + 12 * scores // 512  # values and their places
    expanded = [p for p in points if p.op == "aten::div" and p.shapes == "[[4, 512, 768]]"]
    assert {p.n_bytes for p in expanded} == {
        4 * 4 * 512 * 769 + 8
    }  # of a row one number is read, all are written; 8: the divisor
    assert sum(p.count for p in points if p.op == "aten::mul") == 1004


def test_a_compiled_trace_says_its_precision():
    assert {point.dtype for point in points_of(COMPILED, "matmul")} == {"bf16"}
    silu = next(p for p in points_of(COMPILED) if p.op == "triton_poi_fused__unsafe_view_mul_silu_6")
    assert (silu.n_bytes, silu.bytes_are) == (3 * 2 * 2048 * 3072, "about")
    cast = next(p for p in points_of(COMPILED) if p.op == "triton_poi_fused__to_copy_14")
    assert (cast.n_bytes, cast.bytes_are, cast.dtype) == (6 * 10000 * 768, "", "fp32")
    assert not [p for p in points_of(COMPILED) if "embedding" in p.op]  # which rows, no size tells


def test_causal_attention_is_a_triangle_and_its_kernels_one_point():
    forward, backward = sorted(points_of(COMPILED, "attention"), key=lambda p: p.flops)
    assert forward.flops == 4 * 4 * 12 * 64 * 512 * 513 / 2  # two products
    assert backward.flops == 2.5 * forward.flops
    tensor, sums = 2 * 4 * 12 * 512 * 64, 4 * 4 * 12 * 512
    assert forward.n_bytes == 4 * tensor + sums
    assert backward.n_bytes == pytest.approx(8 * tensor + sums, abs=16)  # and the seed of no dropout
    assert (forward.kernels, backward.kernels) == (2, 4)


def test_a_trace_without_shapes_has_no_points():
    points, unplaced = traced_points(read_trace(FIXTURES / "h200-small-fp32-naive-2steps.nsys.sqlite.gz"), H200)
    assert points == []
    assert {one.why for one in unplaced} <= {
        "no sizes and types of its inputs", "no rule for its bytes", "no op of the trace launched it",
        "a copy between host and device",
    }  # fmt: skip


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
    points = points_of(COMPILED, "matmul")
    assert sum(point.count for point in points) == 510
    assert sum(p.flops * p.count for p in points) == pytest.approx(2 * 3 * 0.495e12, rel=0.01)  # all but attention


def written(path: Path, op: str, args: dict[str, object], kernels: tuple[tuple[str, str], ...]) -> Path:
    """A trace of one op that launched kernels (category, name), 10 µs each."""

    def event(cat, name, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}

    events = [event("cpu_op", op, 0, 99) | {"args": args}]
    for i, (cat, name) in enumerate(kernels, start=1):
        events.append(event("cuda_runtime", "cudaLaunchKernel", i, 1, correlation=i))
        events.append(event(cat, name, 100 * i, 10, correlation=i, device=0, stream=7))
    path.write_text(json.dumps({"traceEvents": events}))
    return path


GIVEN = {
    "Input Dims": [[1024, 1024], [1024, 1]],
    "Input type": ["float", "float"],
    "Input Strides": [[1024, 1], [1, 1]],
    "Concrete Inputs": ["", ""],
}
KERNEL = ("kernel", "vectorized_elementwise_kernel<MulFunctor>")


def test_an_op_with_several_kernels_is_one_point(tmp_path):
    trace = read_trace(
        written(tmp_path / "t.json", "aten::mul", GIVEN, (KERNEL, KERNEL, ("gpu_memset", "Memset (Device)")))
    )
    (point,), unplaced = traced_points(trace, H200)
    assert (point.ns, point.kernels, point.count, unplaced) == (30e3, 3, 1, [])
    assert point.n_bytes == 4 * (2 * 1024 * 1024 + 1024)


def test_a_copy_across_the_bus_has_no_point(tmp_path):
    trace = read_trace(
        written(tmp_path / "t.json", "aten::copy_", GIVEN, (("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),))
    )
    points, (one,) = traced_points(trace, H200)
    assert (points, one.why) == ([], "a copy between host and device")


@pytest.mark.parametrize(
    "change",
    [
        {"Input type": ["float"]},
        {"Input type": [["float", []], {"float": 1}]},
        {"Input type": "float"},
        {"Input type": ["flo\x1eat", "c10::Nonsense"]},
        {"Input type": None},
        {"Input Dims": [[1024, "1024"], [1024, 1]]},
        {"Input Dims": [[[[[]]]], [1 << 70]]},
        {"Input Strides": []},
        {"Concrete Inputs": [1, 2, 3]},
    ],
)
def test_garbled_inputs_give_no_number(tmp_path, change):
    trace = read_trace(written(tmp_path / "t.json", "aten::mul", GIVEN | change, (KERNEL,)))
    points, (one,) = traced_points(trace, H200)
    assert (points, one.ns) == ([], 10e3)


def test_sizes_over_several_lines_are_read_as_well(tmp_path):
    path = written(tmp_path / "t.json", "aten::mul", GIVEN, (KERNEL,))
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    (point,), _ = traced_points(read_trace(path), H200)
    assert point.n_bytes == 4 * (2 * 1024 * 1024 + 1024)


def test_a_copy_between_gpus_is_called_so(tmp_path):
    kernels = (("gpu_memcpy", "Memcpy PtoP (Device -> Device)"),)
    points, (one,) = traced_points(read_trace(written(tmp_path / "t.json", "aten::copy_", GIVEN, kernels)), H200)
    assert (points, one.why) == ([], "a copy between GPUs")


def product(tmp_path, dtype, *names, **change):
    args = {
        "Input Dims": [[64, 4096], [4096, 64]],
        "Input type": [dtype, dtype],
        "Input Strides": [[4096, 1], [64, 1]],
        "Concrete Inputs": ["", ""],
    }
    kernels = tuple(("kernel", name) for name in names)
    return traced_points(read_trace(written(tmp_path / "t.json", "aten::mm", args | change, kernels)), H200)


REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>"
UNTOLD = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<X>>"


@pytest.mark.parametrize(
    ("dtype", "names", "expected"),
    [
        ("c10::BFloat16", (UNTOLD,), ("bf16", 2)),
        ("c10::BFloat16", (REDUCE, "nvjet_sm90_tst_64x64_64x8_1x1_h_bz_splitK_NNT"), ("bf16", 2)),
        ("float", ("ampere_sgemm_128x64_nn",), ("fp32", 4)),
        ("float", (REDUCE, "cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4"), ("tf32", 4)),
        ("float", (UNTOLD,), None),  # float32 or TF32
        ("double", ("cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1",), None),  # no roof is known
        ("c10::complex<float>", ("ampere_cgemm_64x32_nn",), None),
        ("int", ("ampere_sgemm_128x64_nn",), None),
    ],
)
def test_a_product_is_of_its_inputs_type(tmp_path, dtype, names, expected):
    """Past bugs: fp64 under the roof of fp32, bf16 at twice its bytes, complex numbers at half of them."""
    points, unplaced = product(tmp_path, dtype, *names)
    if expected is None:
        assert (points, len(unplaced)) == ([], 1)
    else:
        (point,) = points
        assert (point.dtype, point.n_bytes) == (expected[0], expected[1] * (2 * 64 * 4096 + 64 * 64))
        assert point.bytes_are == ""


def test_a_product_without_types_is_told_by_its_kernel(tmp_path):
    nothing = {key: [] for key in ("Input type", "Input Strides", "Concrete Inputs")}
    (point,), _ = product(tmp_path, "", "nvjet_sm90_tst_64x64_64x8_1x1_h_bz_NNT", **nothing)
    assert (point.dtype, point.n_bytes, point.bytes_are) == ("bf16", 2 * (2 * 64 * 4096 + 64 * 64), "about")
    assert product(tmp_path, "", UNTOLD, **nothing)[0] == []


HUGE = 1 << 39
JOINS = "CatArrayBatchedCopy<OpaqueType<4u>, unsigned int, 3, 64, 64>"


@pytest.mark.parametrize(
    ("op", "dims", "types", "values", "kernel"),
    [
        ("aten::bmm", [[HUGE] * 30 + [4, 4]] * 2, ["float"] * 2, ["", ""], "ampere_sgemm_128x64_nn"),
        ("aten::mm", [[HUGE, HUGE]] * 2, ["float"] * 2, ["", ""], "ampere_sgemm_128x64_nn"),
        ("aten::mm", [[HUGE, HUGE]] * 2, [], [], "ampere_sgemm_128x64_nn"),
        ("aten::cat", [[[(1 << 48) - 1] * 40] * 2, []], ["TensorList", "Scalar"], ["", "0"], JOINS),
        ("aten::native_layer_norm", [[64, 64], []], ["float", "ScalarList"], ["", "[0]"], "ln"),
        ("aten::native_layer_norm", [[64, 64], []], ["float", "ScalarList"], ["", "[-64]"], "ln"),
        ("triton_poi_x", [[64, 64], []], ["float", "Scalar"], ["", "9" * 5000], "triton_poi_x"),
        (
            "aten::_cudnn_attention_forward",
            [[1, 2, 3, 4], [1, 2, 3, 4], [], [1, 2, 3, 4], *[[]] * 9],
            ["c10::BFloat16"] * 4 + ["Scalar"] * 9,
            [""] * 10 + ["True", "", ""],
            "fa",
        ),
        (
            "aten::addmm",
            [[4, 4]] * 3 + [[], []],
            ["float"] * 3 + ["Scalar"] * 2,
            ["", "", "", "x", "1"],
            "ampere_sgemm_x",
        ),
    ],
)
def test_hostile_inputs_have_no_point_and_break_nothing(tmp_path, op, dims, types, values, kernel):
    strides = [
        [[1] * len(one) for one in size] if size and isinstance(size[0], list) else [1] * len(size) for size in dims
    ]
    args = {"Input Dims": dims, "Input type": types, "Input Strides": strides, "Concrete Inputs": values}
    points, (one,) = traced_points(read_trace(written(tmp_path / "t.json", op, args, (("kernel", kernel),))), H200)
    assert (points, one.ns) == ([], 10e3)
    assert one.why
