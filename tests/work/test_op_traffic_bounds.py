"""Bytes by hand where the first count was wrong: strides, results given with out=, tensors that may be one, parts of tensors."""

import json
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from flopwise.analysis.traced_points import _NONSENSE
from flopwise.work.op_traffic import TRACED, op_traffic
from flopwise.work.product_traffic import product
from flopwise.work.recorded import BETWEEN
from flopwise.work.recorded import recorded as given
from flopwise.work.sized import ATTENTIONS, MATMULS
from flopwise.work.traffic import Traffic, sensible

FLOAT, HALF, LONG, BOOL, SCALAR, NONE = "float", "c10::BFloat16", "long int", "bool", "Scalar", ""
N, ALONG = [64, 32], [32, 1]
COMPLEX = "c10::complex<float>"
CAT = "CatArrayBatchedCopy<OpaqueType<4u>, 3>"
ADDCMUL = "multi_tensor_apply_kernel<TensorListMetadata<3>, PointwiseOpScalarFunctor<float, 3, 3, 0>>"


def traffic(op: str, *inputs: tuple[str, Any, Any, str], kernel: str = "") -> Traffic | None:
    """Of inputs as (type, sizes, strides, value)."""
    lists = ([one[place] for one in inputs] for place in (1, 0, 2, 3))
    found = given(BETWEEN.join(json.dumps(one) for one in lists))
    if found is None:
        return None
    return product(op, found, kernel) if op in MATMULS else op_traffic(op, found, kernel)


def t(dtype: str, dims: list[int] = N, strides: list[int] = ALONG) -> tuple[str, Any, Any, str]:
    return dtype, dims, strides, ""


def v(value: Any = "", kind: str = SCALAR) -> tuple[str, Any, Any, Any]:
    return kind, [], [], value


n = 64 * 32
LIST = ("TensorList", [N, N], [ALONG, ALONG], "")


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        # windows and expanded tensors: what lies in memory
        ("aten::neg", [t(FLOAT, [1000, 16], [1, 1])], (4 * (1015 + 16000), "")),
        ("aten::neg", [t(FLOAT, N, [0, 1])], (4 * (32 + n), "")),
        # two that look the same may be one
        ("aten::mul", [t(FLOAT), t(FLOAT)], (12 * n, "at most")),
        ("aten::mul", [t(FLOAT), t(FLOAT, N, [1, 64])], (12 * n, "")),
        ("aten::addcmul_", [t(FLOAT), t(FLOAT), t(FLOAT), v("1")], (16 * n, "at most")),
        ("aten::native_layer_norm", [t(FLOAT, [640, 320], [320, 1]), v("[320]", "ScalarList"), t(FLOAT, [320], [1]),
                                     t(FLOAT, [320], [1])], (4 * (2 * 204800 + 640 + 1280), "")),
        # a type that is not known
        ("aten::mul", [t(FLOAT), t(COMPLEX)], None),
        ("aten::where", [t(BOOL), t(COMPLEX), t(COMPLEX)], None),
        ("aten::add", [t(HALF), t("c10::Float8_e8m0fnu"), v("1")], None),
        ("aten::mul", [t(FLOAT), t(COMPLEX, [], [])], None),
        # numbers that are no text
        ("aten::sum", [t(FLOAT), v([0], "ScalarList"), v("False"), v("", NONE)], None),
        # results that are given
        ("aten::add", [t(HALF), t(HALF, N, [1, 64]), v("1"), t(FLOAT)], (8 * n, "")),
        ("aten::eq", [t(FLOAT), v("1"), t(FLOAT)], (8 * n, "")),
        ("aten::logical_not", [t(BOOL), t(BOOL)], (2 * n, "")),
        ("aten::sum", [t(HALF), v("[0]", "ScalarList"), v("False"), v("", NONE), t(FLOAT, [32], [1])], (2 * n + 128, "")),
        ("aten::_softmax", [t(HALF), v("1"), v("False"), t(FLOAT)], None),
        ("aten::cumsum", [t(FLOAT), v("1"), v("", NONE)], (8 * n, "")),
        ("aten::cumsum", [t(HALF), v("1"), v("6")], None),
        # parts of tables
        ("aten::index_select", [t(FLOAT, [2, 32], ALONG), v("0"), t(LONG, [64], [1])], (4 * 64 + 8 * 64 + 4 * n, "at most")),
        ("aten::gather", [t(FLOAT, N, [0, 1]), v("1"), t(LONG), v("False")], (4 * 32 + 12 * n, "at most")),
        ("aten::gather", [t(FLOAT), v("1"), t(LONG), v("False"), t("double")], None),
        ("aten::scatter_", [t(FLOAT), v("1"), t(LONG, [64, 1], [1, 1]), t(FLOAT)], (64 * 16, "at most")),
        ("aten::scatter_", [t(FLOAT), v("1"), t(LONG, [64, 1], [1, 1]), t(FLOAT), v("add")], None),
    ],
)  # fmt: skip
def test_bytes_by_hand(op, inputs, expected):
    found = traffic(op, *inputs)
    assert (found and (found.n_bytes, found.bytes_are)) == expected


def test_lists_by_hand():
    expanded = ("TensorList", [N, N], [[0, 1], ALONG], "")
    assert traffic("aten::cat", expanded, v("0"), kernel=CAT).n_bytes == 4 * (32 + n + 2 * n)
    found = traffic("aten::_foreach_addcmul_", LIST, LIST, LIST, v("1"), kernel=ADDCMUL)
    assert (found.n_bytes, found.bytes_are) == (4 * 4 * 2 * n, "at most")
    assert traffic("aten::_foreach_addcmul_", LIST, expanded, LIST, v("1"), kernel=ADDCMUL) is None


A, B, SQUARE = t(HALF, [16, 32], [32, 1]), t(HALF, [32, 64], [64, 1]), t(HALF, [16, 64], [64, 1])


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("aten::mm", [A, B], 2 * (512 + 2048 + 1024)),
        ("aten::mm", [A, B, t(FLOAT, [16, 64], [64, 1])], 2 * (512 + 2048) + 4 * 1024),
        ("aten::mm", [A, B, v("6")], 2 * (512 + 2048) + 4 * 1024),
        ("aten::mm", [A, B, v("99")], None),
        ("aten::mm", [A, t(FLOAT, [32, 64], [64, 1])], None),
        ("aten::addmm", [SQUARE, A, B, v("1"), v("1")], 2 * (512 + 2048 + 2 * 1024)),
        ("aten::addmm", [SQUARE, A, B, v("0"), v("1")], 2 * (512 + 2048 + 1024)),
        ("aten::addmm", [t(HALF, [64], [1]), A, B, v("1"), v("1")], 2 * (512 + 2048 + 64 + 1024)),
        ("aten::addmm", [SQUARE, A, B, v("6"), v("0"), v("1")], 2 * (512 + 2048) + 4 * 1024),
        ("aten::addmm", [t(HALF, [63], [1]), A, B, v("1"), v("1")], None),
        ("aten::bmm", [t(HALF, [8, 16, 32], [512, 32, 1]), t(HALF, [8, 32, 64], [0, 64, 1])],
         2 * (8 * 512 + 2048 + 8 * 1024)),
    ],
)  # fmt: skip
def test_products_by_hand(op, inputs, expected):
    found = traffic(op, *inputs)
    assert (found and found.n_bytes) == expected
    assert found is None or found.dtype == "bf16"


def attend(op: str, changed: dict[int, Any]) -> Traffic | None:
    q = t(HALF, [1, 256, 4, 64], [65536, 256, 64, 1])
    inputs = [q, t(HALF, [1, 256, 4, 64], [65536, 64, 16384, 1]), t(HALF, [1, 256, 4, 64], [65536, 1, 1, 256])]
    return traffic(op, *[changed.get(i, inputs[i] if i < 3 else v("", NONE)) for i in range(15)])


def test_which_attention_is_causal():
    whole = 4 * 4 * 64 * 256 * 256
    for flag, flops in (("0", whole), ("1", whole * 257 / 512), ("2", whole * 257 / 512)):
        assert attend("aten::_efficient_attention_forward", {9: v(flag)}).flops == flops
    assert attend("aten::_efficient_attention_forward", {9: v("3")}) is None
    assert attend("aten::_efficient_attention_forward", {9: v("1"), 13: v("128")}) is None
    assert attend("aten::_efficient_attention_forward", {9: v("1"), 4: t("int", [3], [1])}) is None
    assert attend("aten::_flash_attention_forward", {8: v("True")}).flops == whole * 257 / 512
    assert attend("aten::_flash_attention_forward", {8: v("True"), 11: v("-1"), 12: v("-1")}) is not None
    assert attend("aten::_flash_attention_forward", {8: v("True"), 11: v("128"), 12: v("0")}) is None
    assert attend("aten::_flash_attention_forward", {8: v("yes")}) is None


X = t(HALF, [4, 512, 4096], [2097152, 4096, 1])


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("triton_poi_fused_mul_0", [X, X, v("8388608")], "about"),  # what is updated in place is not told
        ("triton_poi_fused__to_copy_0", [X, X, v("8388608")], ""),
        ("triton_poi_fused_expand_select_0", [X, X, v("8388608")], "about"),
        (
            "triton_poi_fused_mul_0",
            [X, t(FLOAT, [131072, 64], [64, 1]), X, v("8388608")],
            None,
        ),  # a table for the longest context
        ("triton_poi_fused_mul_0", [X, *[t(FLOAT, [131072, 64], [64, 1])] * 2, X, v("8388608")], None),
        ("triton_poi_fused_mul_0", [X, t(BOOL, [8192, 8192], [8192, 1]), X, v("8388608")], None),
        ("triton_poi_fused_mul_0", [X, t(FLOAT, [1000, 1000], [1000, 1]), X, v("8388608")], None),
        ("triton_poi_fused_mul_0", [X, t(FLOAT, [512, 2048], [2048, 1]), X, v("8388608")], "about"),
        ("triton_poi_fused_mul_0", [X, t(COMPLEX, [4096], [1]), X, v("8388608")], None),
    ],
)
def test_compiled_kernels_by_hand(op, inputs, expected):
    found = traffic(op, *inputs)
    assert (found if found is None else found.bytes_are) == expected


OPS = [
    *(f"aten::{name}{end}" for name in sorted(TRACED) for end in ("", "_")),
    *sorted(MATMULS | ATTENTIONS), "aten::_foreach_add_", "aten::_fused_adamw_", "triton_poi_x", "triton_red_x",
    "triton_per_x", "triton_", "",
]  # fmt: skip
SIZE = st.integers(-2, 6) | st.sampled_from([64, 1 << 24, 1 << 39, (1 << 48) - 1, 1 << 63, 10**400])
SIZES = st.lists(SIZE, max_size=5)
VALUE = st.sampled_from(
    [
        "",
        "0",
        "1",
        "-1",
        "[0]",
        "[-1]",
        "[1, 2]",
        "True",
        "False",
        "[True, False, True]",
        "1e400",
        "nan",
        "x",
        "9" * 5000,
        "²",
        3,
    ]
)
KIND = st.sampled_from([FLOAT, HALF, LONG, BOOL, "double", SCALAR, "ScalarList", "TensorList", NONE, COMPLEX, "?"])
ONE = st.one_of(
    st.tuples(KIND, SIZES, SIZES, VALUE),
    st.tuples(KIND, SIZES, SIZES, VALUE).map(lambda one: (one[0], one[1], [1] * len(one[1]), one[3])),
    st.tuples(st.just("TensorList"), st.lists(SIZES, max_size=3), st.lists(SIZES, max_size=3), VALUE),
)


@settings(max_examples=1500)
@drawn(st.lists(ONE, max_size=20), st.sampled_from(OPS), st.sampled_from(["", "fp32", "tf32", CAT, ADDCMUL]))
def test_garbage_raises_nothing_but_what_the_guard_knows(inputs, op, kernel):
    try:
        found = traffic(op, *inputs, kernel=kernel)
    except _NONSENSE:
        return
    assert found is None or not sensible(found) or found.flops / found.n_bytes > 0
