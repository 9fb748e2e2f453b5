"""Time by operator: as the profiler itself counts it, on the host and on the GPU."""

from pathlib import Path

import pytest

from cpu_traces import written
from flopwise.analysis.explanation import explain_trace
from flopwise.analysis.host_activity import waits
from flopwise.analysis.operators import NO_OP
from flopwise.trace.read import read_trace

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
NAIVE = "h200-small-fp32-naive-2steps"


@pytest.fixture(scope="module")
def naive():
    files = (f"{NAIVE}.kineto.json.gz", f"{NAIVE}.nsys.sqlite.gz")
    return [explain_trace(read_trace(FIXTURES / file)) for file in files]


def test_a_product_as_the_profiler_s_own_table_has_it(tmp_path):
    """matmul calls mm, which launches a kernel; another kernel is launched by a call outside every op."""
    launch = ("correlation", 7), ("External id", 1)
    trace = written(
        tmp_path / "matmul.json",
        ("cpu_op", "aten::matmul", 1, 0, 100),
        ("cpu_op", "aten::mm", 1, 10, 90),
        ("cuda_runtime", "cudaLaunchKernel", 1, 20, 30, *launch),
        ("cuda_runtime", "cudaLaunchKernel", 1, 110, 114, ("correlation", 8)),
        ("cuda_runtime", "cudaDeviceSynchronize", 1, 120, 300, ("correlation", 9)),
        ("kernel", "ampere_sgemm_128x64_nn", 7, 50, 250, ("correlation", 7), ("device", 0), ("stream", 7)),
        ("kernel", "lonely", 7, 260, 270, ("correlation", 8), ("device", 0), ("stream", 7)),
    )
    explained = explain_trace(read_trace(trace))
    found = {one.name: one for one in explained.operators}
    times = {
        name: tuple(round(ns / 1e3) for ns in (o.host_self_ns, o.host_total_ns, o.gpu_self_ns, o.gpu_total_ns))
        for name, o in found.items()
    }
    assert times == {
        "aten::matmul": (20, 100, 0, 200),
        "aten::mm": (70, 80, 200, 200),
        "cudaLaunchKernel": (14, 14, 0, 0),
        "cudaDeviceSynchronize": (180, 180, 0, 0),
        NO_OP: (0, 0, 10, 10),
    }
    assert found["cudaLaunchKernel"].calls == 2
    assert found["aten::mm"].gpu_share == pytest.approx(200 / 210)
    assert found["aten::mm"].host_share == pytest.approx(70 / 284)


def test_a_copy_that_waits_is_one_call_and_one_wait(tmp_path):
    """A past bug: cudaMemcpy launches a copy and waits for it, and was counted once for each."""
    trace = read_trace(
        written(
            tmp_path / "memcpy.json",
            ("cpu_op", "aten::copy_", 1, 0, 300),
            ("cuda_runtime", "cudaMemcpy", 1, 10, 290, ("correlation", 7)),
            ("cuda_runtime", "cudaLaunchKernel", 1, 400, 410, ("correlation", 8)),
            (
                "gpu_memcpy",
                "Memcpy DtoH (Device -> Pageable)",
                7,
                200,
                280,
                ("correlation", 7),
                ("device", 0),
                ("bytes", 64),
            ),
            ("kernel", "lonely", 7, 420, 430, ("correlation", 8), ("device", 0), ("stream", 7)),
        )
    )
    found = next(one for one in explain_trace(trace).operators if one.name == "cudaMemcpy")
    assert (found.calls, found.host_total_ns) == (1, 280_000)
    (wait,) = waits(trace).iter_rows(named=True)
    assert (wait["call"], wait["end_ns"] - wait["start_ns"]) == ("cudaMemcpy", 280_000)


def test_self_times_add_up(naive):
    for e in naive:
        assert sum(one.gpu_self_ns for one in e.operators) == pytest.approx(e.gpu_ns, rel=1e-12)
        assert sum(one.gpu_share for one in e.operators) == pytest.approx(1.0)
        assert sum(one.host_share for one in e.operators) == pytest.approx(1.0)
        assert all(one.host_total_ns >= one.host_self_ns >= 0 for one in e.operators)
        assert all(one.gpu_total_ns >= one.gpu_self_ns >= 0 for one in e.operators)


def test_two_profilers_count_the_same_ops(naive):
    kineto, nsys = ({one.name: one for one in e.operators} for e in naive)
    ops = {name for name in kineto if name.startswith("aten::")}
    assert len(ops) > 40
    for name in ops:
        assert kineto[name].calls == nsys[name].calls
        assert kineto[name].gpu_self_ns == pytest.approx(nsys[name].gpu_self_ns, rel=0.05, abs=3e4), name
    assert kineto["MmBackward0"].gpu_self_ns == 0
    assert kineto["MmBackward0"].gpu_total_ns > 0.6 * kineto["aten::mm"].gpu_self_ns
