"""softmax-vs-matmul: the verdict follows the rows; a GPU's trace and the CPU's are read to the same form."""

from pathlib import Path

import pytest
from made_rows import measured

from flopwise.analysis.explanation import explain_trace
from flopwise.experiments.claims.softmax_vs_matmul import (
    BACKWARD,
    EXPERIMENT,
    FORWARD,
    HEAD_DIM,
    ON_GPU,
    ONE_KERNEL,
    WRITTEN_OUT,
    Attention,
    by_kernels,
)
from flopwise.records.experiment import Place
from flopwise.trace.read import read_trace

GPU = Place(device="cuda:0")
CPU = Place(device="cpu")
TRACE = Path(__file__).parents[1] / "trace" / "fixtures" / "h200-small-fp32-naive-2steps.kineto.json.gz"


def made(written_ns=4e6, one_ns=1e6, sizes=True, wider=2.0):
    """Two types at two contexts; in bf16 the matmuls take 1 ms at the longer one, in fp32 all takes so many times as long.
    Backward's FLOPs are not told."""
    rows = []
    for dtype in ("bf16", "fp32"):
        for context in (1024, 4096):
            scores, part = 16 * context**2, (context / 4096) ** 2 * (wider if dtype == "fp32" else 1)
            for how, softmax_ns in ((WRITTEN_OUT, written_ns), (ONE_KERNEL, one_ns)):
                about = {"how": how, "dtype": dtype, "batch": 16, "context": context, "head_dim": 64, "source": ON_GPU}
                about |= {"scores_bytes": 2 * scores, "matmul_kernels": dtype}
                for phase in (FORWARD, BACKWARD):
                    flops = {"softmax_flops": 5 * scores if sizes and phase == FORWARD else None}
                    flops |= {"matmul_flops": 4 * scores * 64}
                    times = {"softmax_ns": softmax_ns * part, "matmul_ns": 1e6 * part, "rest_ns": 5e5 * part}
                    rows.append({**about, "phase": phase, **times, **flops})
    return rows


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "1.9 % of the FLOPs and takes 80 % of the time" in yes.why
    assert "context 4096" in yes.why
    assert pure(EXPERIMENT, made(one_ns=3e6), GPU).word == "inconclusive"  # fewer bytes help a little
    same = pure(EXPERIMENT, made(one_ns=3.6e6), GPU)  # fewer bytes do not help: the limit is something else
    assert same.word == "refuted here"
    assert "not because of the bytes" in same.why
    assert (
        pure(EXPERIMENT, made(written_ns=4e4, one_ns=1e4), GPU).word == "refuted here"
    )  # a share like that of the FLOPs
    assert pure(EXPERIMENT, made(written_ns=2e5, one_ns=6e4), GPU).word == "inconclusive"
    assert pure(EXPERIMENT, made(sizes=False), GPU).word == "inconclusive"
    as_long = pure(EXPERIMENT, made(wider=1.1), GPU)  # twice the bytes of a score take about as long
    assert as_long.word == "inconclusive"
    assert "1.1 times as long written out and 1.1 times as long as one kernel" in as_long.why


def test_a_missing_variant_leaves_it_open(pure):
    rows = [row for row in made() if row["how"] == WRITTEN_OUT]
    assert pure(EXPERIMENT, rows, GPU).word == "inconclusive"


def test_its_pictures_and_tables_are_of_its_rows():
    rows = EXPERIMENT.read(made())
    shares, rates = EXPERIMENT.draw(rows, GPU)
    assert shares.column == rates.column == "dtype"
    assert {row["what"] for row in rates.rows} == {"matmuls", "softmax, written out", "softmax, one kernel"}
    assert len(EXPERIMENT.tabulate(rows, GPU)[0].rows) == len(rows)
    assert rows[1].flops_share is None  # backward


def test_the_trace_of_a_gpu_tells_both_directions():
    forward, backward = by_kernels(read_trace(TRACE))
    assert (forward["phase"], backward["phase"]) == (FORWARD, BACKWARD)
    assert forward["matmul_kernels"].startswith("fp32")
    sizes = {"batch": 1, "context": 1, "head_dim": 64, "scores_bytes": 4 * forward["softmax_flops"] / 5}
    row = Attention(how=WRITTEN_OUT, dtype="fp32", **sizes, **forward)
    assert row.flops_share == pytest.approx(5 / (5 + 4 * 64))
    assert row.time_share > 0.5
    assert backward["softmax_ns"] > forward["softmax_ns"]
    assert forward["rest_ns"] > 0
    mean = explain_trace(read_trace(TRACE)).attention  # of two steps, as the median of two is
    assert forward["softmax_ns"] == pytest.approx(mean.softmax_ns)
    assert forward["matmul_ns"] == pytest.approx(mean.matmul_ns)


def test_a_quick_run_on_the_cpu(pure, tmp_path):
    rows = measured(EXPERIMENT, folder=tmp_path)
    assert [row["how"] for row in rows] == [WRITTEN_OUT, ONE_KERNEL] * 2
    for row in rows:
        assert row["softmax_flops"] == 5 * row["context"] ** 2
        assert row["matmul_flops"] == 4 * row["context"] ** 2 * HEAD_DIM
        assert min(row["softmax_ns"], row["matmul_ns"], row["rest_ns"]) > 0
    assert pure(EXPERIMENT, rows, CPU).why
    assert "matmul_kernels" not in EXPERIMENT.tabulate(EXPERIMENT.read(rows), CPU)[0].keys
