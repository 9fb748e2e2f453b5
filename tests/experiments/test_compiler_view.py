"""compiler-view: the graph is what Dynamo sees, the launches are what the generated code calls."""

import msgspec
import pytest
import torch
from made_rows import measured, timed

from flopwise.experiments.bench import Bench
from flopwise.experiments.claims import compiler_view
from flopwise.experiments.claims.compiler_view import (
    CHAINS,
    COMPILED,
    EAGER,
    EXPERIMENT,
    generated_launches,
    graph_nodes,
    softmax,
)
from flopwise.experiments.claims.fusion import sines
from flopwise.records.experiment import Place

CPU, GPU = Place(device="cpu"), Place(device="cuda:0")


def made(kernels=1, moved=2.0):
    rows = []
    for chain in CHAINS:
        about = {"chain": chain, "n": 2**20, "graph": "sin, cos", "least_bytes": 2 * 2**22, "off": 0.0}
        for way, count, size in ((EAGER, 5, 11.0), (COMPILED, kernels, moved)):
            launch = {
                "part": "launch",
                "chain": chain,
                "way": way,
                "kernel": "k",
                "moved_bytes": int(size / count * 2**22),
            }
            rows += [launch | {"position": n} for n in range(count)]
            total = {"launches": count, "chain_bytes": int(size * 2**22)}
            rows.append({"part": "chain", "way": way, **about, **total, **timed(1e5 * count)})
    return rows


def test_it_can_be_confirmed_and_refuted(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "softmax: 5 launches and 44.0 MiB become 1 and 8.00 MiB, 500 µs become 100 µs." in yes.why
    assert "Not one kernel: sin² + cos², GeLU, softmax." in pure(EXPERIMENT, made(kernels=2), GPU).why
    assert pure(EXPERIMENT, made(moved=3.0), GPU).word == "refuted here"
    wrong = [row | {"off": 0.1} if row["part"] == "chain" else row for row in made()]
    assert pure(EXPERIMENT, wrong, GPU).word == "inconclusive"


def test_the_graph_of_the_lecture():
    assert graph_nodes(sines, torch.randn(4)) == ["sin", "pow_1", "cos", "pow_2", "add"]


def test_the_softmax_is_one():
    x = torch.randn(3, 8)
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))


def test_launches_of_two_kernels_and_a_buffer_that_is_reused():
    code = """
    assert_size_stride(arg0_1, (2, 4), (4, 1), 'input')
    buf0 = empty_strided_cpu((2, 1), (1, 2), torch.float32)
    buf1 = empty_strided_cpu((2, 4), (4, 1), torch.bfloat16)
    cpp_fused_amax_0(arg0_1, buf0, buf1)
    buf2 = buf1; del buf1  # reuse
    triton_red_fused_div_1.run(buf2, buf0, 2, 4, stream=stream0)
    """
    assert generated_launches(code) == [("cpp_fused_amax_0", 32 + 8 + 16), ("triton_red_fused_div_1", 16 + 8)]


def test_a_quick_run_on_the_cpu_has_the_graphs(pure):
    rows = measured(EXPERIMENT)
    assert [row["launches"] for row in rows if row["part"] == "chain"] == [5, 8, 5]
    assert {row["note"] for row in rows if row["part"] == "skipped"} == {
        "quick mode on a CPU leaves the C++ compiler out"
    }
    assert pure(EXPERIMENT, rows, CPU).word == "inconclusive"


@pytest.mark.slow
def test_the_generated_code_is_read_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler_view, "_chains", lambda: {CHAINS[2]: softmax})
    bench = Bench(torch.device("cpu"), folder=tmp_path)
    rows = msgspec.to_builtins(list(EXPERIMENT.measure(bench)))
    (after,) = (row for row in rows if row["part"] == "chain" and row["way"] == COMPILED)
    assert after["launches"] == 1
    assert after["least_bytes"] <= after["chain_bytes"] <= 1.05 * after["least_bytes"]
    assert "cpp_fused" in (tmp_path / "0.py").read_text()


@pytest.mark.slow
def test_what_the_compiler_raises_is_a_row(tmp_path, monkeypatch):
    def fails(function, x):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(compiler_view, "_compiled", fails)
    rows = msgspec.to_builtins(list(EXPERIMENT.measure(Bench(torch.device("cpu"), folder=tmp_path))))
    assert {row["note"] for row in rows if row["part"] == "skipped"} == {"RuntimeError: no compiler at all"}
