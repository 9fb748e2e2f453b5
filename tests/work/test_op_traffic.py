"""The bytes of an op from what the profiler wrote of its inputs: by hand, and nothing where the text is garbled."""

import json
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from flopwise.work.op_traffic import op_traffic
from flopwise.work.recorded import BETWEEN
from flopwise.work.recorded import recorded as given

FLOAT, HALF, LONG, BOOL, SCALAR, NONE, MANY = (
    "float", "c10::BFloat16", "long int", "bool", "Scalar", "", "TensorList"
)  # fmt: skip
ADAM = (
    "multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>>"
)
MUL = "multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOpScalarFunctor<c10::BFloat16, 1, 1, 0>, std::multiplies<float>>"


def text(*inputs: tuple[str, Any, str] | tuple[str, Any]) -> str:
    """Inputs as (type, sizes, value), contiguous."""
    types, dims = [one[0] for one in inputs], [one[1] for one in inputs]
    values = [one[2] if len(one) > 2 else "" for one in inputs]
    return BETWEEN.join(json.dumps(part) for part in (dims, types, [strides(size) for size in dims], values))


def strides(dims: list[Any]) -> list[Any]:
    if dims and isinstance(dims[0], list):
        return [strides(one) for one in dims]
    return list(accumulate([1, *reversed(dims[1:])], lambda a, b: a * b))[::-1] if dims else []


def n_bytes(op: str, *inputs: Any, kernel: str = "") -> int | None:
    found = given(text(*inputs))
    assert found is not None
    traffic = op_traffic(op, found, kernel)
    return None if traffic is None else traffic.n_bytes


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("aten::add", [(FLOAT, [4, 8]), (FLOAT, [4, 8]), (SCALAR, [], "1")], 3 * 32 * 4),
        ("aten::add_", [(HALF, [4, 8]), (FLOAT, [8]), (SCALAR, [], "1")], 2 * 32 * 2 + 8 * 4),
        ("aten::mul", [(HALF, [4, 8]), (FLOAT, [])], 2 * 32 * 2 + 4),  # one number does not widen a tensor
        ("aten::mul", [(HALF, [4, 8]), (FLOAT, [4, 1])], 32 * 2 + 4 * 4 + 32 * 4),
        ("aten::mul", [(FLOAT, [4, 1]), (FLOAT, [8]), (FLOAT, [4, 8])], (4 + 8 + 32) * 4),  # the result is given, too
        ("aten::mul", [(LONG, [4]), (SCALAR, [], "0.5")], None),  # becomes a float, or not
        ("aten::add", [(FLOAT, [4]), (FLOAT, [3])], None),
        ("aten::add_", [(FLOAT, [1]), (FLOAT, [3])], None),
        ("aten::gt", [(FLOAT, [4, 8]), (SCALAR, [], "0")], 32 * 5),
        ("aten::where", [(BOOL, [8]), (FLOAT, [4, 8]), (SCALAR, [], "0")], 8 + 2 * 32 * 4),
        ("aten::copy_", [(HALF, [4, 8]), (FLOAT, [4, 8]), (SCALAR, [], "False")], 32 * 6),
        ("aten::fill_", [(HALF, [4, 8]), (SCALAR, [], "0")], 32 * 2),
        ("aten::native_dropout", [(HALF, [4, 8]), (SCALAR, [], "0.1"), (SCALAR, [], "True")], 32 * 5),
        ("aten::_softmax", [(HALF, [4, 8]), (SCALAR, [], "-1"), (SCALAR, [], "True")], 32 * 6),
        ("aten::_softmax_backward_data", [(FLOAT, [4, 8]), (FLOAT, [4, 8]), (SCALAR, [], "1"), (SCALAR, [], "15")], 320),
        ("aten::sum", [(FLOAT, [4, 8]), ("ScalarList", [], "[-1]"), (SCALAR, [], "True"), (NONE, [])], 36 * 4),
        ("aten::sum", [(HALF, [4, 8]), ("ScalarList", [], "[0]"), (SCALAR, [], "True"), (SCALAR, [], "6")], 64 + 32),
        ("aten::sum", [(HALF, [4, 8]), (NONE, [])], 33 * 2),
        ("aten::sum", [(FLOAT, [4, 8]), ("ScalarList", [], "[2]"), (SCALAR, [], "True"), (NONE, [])], None),
        ("aten::max", [(FLOAT, [4, 8]), (SCALAR, [], "1"), (SCALAR, [], "True")], 32 * 4 + 4 * 12),
        ("aten::max", [(FLOAT, [4, 8])], 33 * 4),
        ("aten::argmax", [(FLOAT, [4, 8]), (SCALAR, [], "1"), (SCALAR, [], "True")], 32 * 4 + 4 * 8),
        (
            "aten::native_layer_norm",
            [(HALF, [4, 8]), ("ScalarList", [], "[8]"), (HALF, [8]), (HALF, [8]), (SCALAR, [], "1e-5")],
            (2 * 32 + 16) * 2 + 2 * 4 * 4,
        ),
        (
            "aten::native_layer_norm_backward",
            [(HALF, [4, 8]), (HALF, [4, 8]), ("ScalarList", [], "[8]"), (FLOAT, [4, 1]), (FLOAT, [4, 1]), (HALF, [8]),
             (HALF, [8]), ("ScalarList", [], "[True, True, False]")],
            3 * 64 + 2 * 16 + 16 + 16,
        ),
        ("aten::_fused_rms_norm", [(FLOAT, [4, 8]), ("ScalarList", [], "[8]"), (FLOAT, [8]), (NONE, [])], (2 * 32 + 8 + 4) * 4),
        ("aten::index_select", [(FLOAT, [100, 8]), (SCALAR, [], "0"), (LONG, [5])], 5 * 8 + 2 * 5 * 8 * 4),
        ("aten::view", [(FLOAT, [4, 8]), ("ScalarList", [], "[32]")], None),
    ],
)  # fmt: skip
def test_bytes_by_hand(op, inputs, expected):
    assert n_bytes(op, *inputs) == expected


def test_what_is_expanded_is_read_once():
    lines = ("[[4, 8], [4, 8]]", '["float", "float"]', "[[8, 1], [1, 0]]", '["", ""]')
    found = given(BETWEEN.join(lines))
    assert found is not None
    traffic = op_traffic("aten::mul", found)
    assert traffic is not None
    assert traffic.n_bytes == 4 * (32 + 4 + 32)


def test_lists_take_their_type_from_the_kernel():
    many = (MANY, [[10, 3], [7]])
    assert n_bytes("aten::_fused_adamw_", *[many] * 6, kernel=ADAM) == 7 * 37 * 4
    assert n_bytes("aten::_foreach_mul_", many, (SCALAR, [], "2."), kernel=MUL) == 2 * 37 * 2
    assert n_bytes("aten::_foreach_mul_", many, (SCALAR, [], "2."), kernel="no functor") is None
    assert n_bytes("aten::_fused_adamw_", *[(MANY, [])] * 6, kernel=ADAM) is None  # too many for the profiler
    assert n_bytes("aten::cat", many, (SCALAR, [], "0"), kernel="CatArrayBatchedCopy<OpaqueType<2u>, 4>") == 2 * 37 * 2


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("triton_poi_fused_add_0", [(HALF, [4, 8]), (FLOAT, [32]), (SCALAR, [], "32")], 32 * 6),
        ("triton_poi_fused_slice_0", [(HALF, [4, 16]), (FLOAT, [32]), (SCALAR, [], "32")], None),  # half of it is read
        ("triton_poi_fused_embedding_0", [(HALF, [4, 8]), (FLOAT, [32]), (SCALAR, [], "32")], None),
        ("triton_red_fused_sum_0", [(HALF, [4, 8]), (FLOAT, [4]), (SCALAR, [], "4"), (SCALAR, [], "8")], 32 * 2 + 16),
        ("triton_red_fused_sum_0", [(HALF, [4, 8]), (FLOAT, [4]), (SCALAR, [], "32")], None),
        ("triton_poi_fused_add_0", [(HALF, [4, 8]), ("c10::Secret", [4, 8]), (SCALAR, [], "32")], None),
        ("triton_tem_fused_mm_0", [(HALF, [4, 8]), (SCALAR, [], "32")], None),
    ],
)
def test_compiled_kernels_by_hand(op, inputs, expected):
    assert n_bytes(op, *inputs) == expected


WHOLE = ("[[2, 3], []]", '["float", "Scalar"]', "[[3, 1], []]", '["", "2"]')


@pytest.mark.parametrize(
    ("line", "garbled"),
    [
        (0, "[[2, 3]]"),
        (0, "[[2, -3], []]"),
        (0, "[[2, 3.5], []]"),
        (0, "[[true, 3], []]"),
        (0, "[[2, [3]], []]"),
        (0, "[[2, 300000000000000000000], []]"),
        (0, "[[0, 3], []]"),
        (0, '["2, 3", []]'),
        (0, '{"2": 3}'),
        (0, "[" * 2000),
        (1, '["float"]'),
        (1, "[4, 5]"),
        (1, '[["float"], "Scalar"]'),
        (1, '["float", "Scalar"'),
        (1, ""),
        (2, "[[3], []]"),
        (2, "[[-3, 1], []]"),
        (2, ""),
        (3, '["", "2", "3"]'),
    ],
)
def test_garbled_inputs_are_no_inputs(line, garbled):
    assert given(BETWEEN.join(WHOLE)) is not None
    assert given(BETWEEN.join([*WHOLE[:line], garbled, *WHOLE[line + 1 :]])) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([FLOAT, HALF, MANY, SCALAR, "32", "[1]"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)
OPS = ["aten::add_", "aten::where", "aten::sum", "aten::max", "aten::native_layer_norm_backward", "aten::gather",
       "aten::cat", "aten::_foreach_add_", "aten::_cudnn_attention_forward", "aten::index_select", "triton_red_x",
       "aten::_flash_attention_backward", "aten::scatter_", "aten::linalg_vector_norm", "aten::copy_"]  # fmt: skip


@drawn(
    st.lists(JSON, max_size=6).map(json.dumps),
    st.lists(st.lists(JSON, max_size=6), min_size=3, max_size=3),
    st.sampled_from(OPS),
)
def test_no_text_breaks_a_rule(dims, others, op):
    found = given(BETWEEN.join([dims, *map(json.dumps, others)]))
    if found is not None:
        traffic = op_traffic(op, found, MUL)
        assert traffic is None or traffic.n_bytes > 0


SIZES = st.lists(st.integers(1, 5), max_size=5)
INPUT = st.tuples(
    st.sampled_from([FLOAT, HALF, LONG, BOOL, SCALAR, NONE]), SIZES, st.sampled_from(["", "1", "[0]", "True"])
)


@drawn(st.lists(INPUT, max_size=16), st.sampled_from(OPS))
def test_whatever_an_op_is_given_the_bytes_are_a_number_or_none(inputs, op):
    found = given(text(*inputs))
    if found is not None:
        traffic = op_traffic(op, found, MUL)
        assert traffic is None or traffic.n_bytes > 0
