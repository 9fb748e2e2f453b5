"""Classes of the kernels in traces of real machines: known shares, and next to nothing without a class."""

import polars as pl
import pytest
from tests.public_traces import FILES, public_trace

from flopwise.trace.attribute import attribute
from flopwise.trace.read import read_trace


def shares(path) -> dict[str, float]:
    table = attribute(read_trace(path)).table
    total = table["duration_ns"].sum()
    by_class = table.group_by("class").agg(pl.col("duration_ns").sum() / total)
    return dict(by_class.iter_rows())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("path", FILES or [None], ids=lambda path: path.name if path else "none")
def test_nearly_all_gpu_time_has_a_class(path):
    if path is None:
        pytest.skip("no public traces here")
    assert shares(path).get("other", 0.0) < 0.03


def test_products_with_an_epilogue_are_matmuls():
    assert 0.85 < shares(public_trace("tl_vllm_prefilldecode_piecewise"))["matmul"] < 0.95


@pytest.mark.parametrize(("rank", "with_gemm_in_its_name", "embedding"), [(0, 0.258, 0.57), (1, 0.327, 0.68)])
def test_fbgemm_is_embedding_work(rank, with_gemm_in_its_name, embedding):
    """Of the time whose kernels have 'gemm' in their names, arguments included, this much is fbgemm's and no product."""
    found = shares(public_trace(f"hta_trace_filter_sampled_rank-{rank}"))
    assert found["matmul"] == pytest.approx(with_gemm_in_its_name * (1 - embedding), abs=0.005)
    assert found["embedding/index"] > 0.15


def test_names_are_shown_as_people_write_them():
    names = read_trace(public_trace("tl_sglang_decode_sglang")).names
    assert not [name for name in names if name.startswith("_Z")]
    assert any(name.startswith("void aiter::add_rmsnorm_quant_kernel<__bf16, __bf16, 256,") for name in names)
