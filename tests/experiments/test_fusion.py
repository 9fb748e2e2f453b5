"""fusion: bytes and operations are counted exactly, and the verdict follows the times."""

import pytest
import torch
from made_rows import measured, on_the_wall, timed

from flopwise.experiments.claims.fusion import (
    EXPERIMENT,
    GELU,
    ON_GPU,
    SINES,
    TRITON,
    UNFUSED,
    operations,
    sines,
    with_gains,
)
from flopwise.kernels.gelu import gelu_manual, gelu_torch
from flopwise.records.experiment import Place

CPU, GPU = Place(device="cpu"), Place(device="cuda:0")
N = 2**20


def made(fused_ns=200.0, **of_triton):
    """Rows of a GPU on which the unfused chains take 1.1 µs and 1.8 µs; `of_triton`: fields that only our kernels have so."""
    rows = []
    for chain, tensors in ((SINES, 11), (GELU, 18)):
        for way in (UNFUSED, *ON_GPU[chain]):
            ns, moved = (100.0 * tensors, tensors) if way == UNFUSED else (fused_ns * (1 if way == TRITON else 1.2), 2)
            kernels = (tensors - 1) // 2 if way == UNFUSED else 1
            about = {"chain": chain, "way": way, "n": N, "off": 0.0, "kernels": kernels, "peak_bytes": 4 * N}
            clocks = timed(ns, wall_ns=ns + 50, wall_high_ns=ns + 90)
            rows.append({**about, "moved_bytes": moved * 4 * N, **clocks, **(of_triton if way == TRITON else {})})
    return rows


@pytest.mark.parametrize(("chain", "count", "tensors"), [(sines, 5, 11), (gelu_manual, 8, 18), (gelu_torch, 1, 2)])
def test_what_an_eager_chain_moves_is_counted_exactly(chain, count, tensors):
    x = torch.randn(1000)
    moved = [sizes for _, sizes in operations(chain, x)]
    assert len(moved) == count
    assert sum(map(sum, moved)) == tensors * x.nbytes


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "5.5 times as fast with 5.5 times fewer bytes" in yes.why
    assert pure(EXPERIMENT, made(fused_ns=900.0), GPU).word == "refuted here"  # arithmetic, not memory, takes the time
    assert pure(EXPERIMENT, made(fused_ns=20.0), GPU).word == "refuted here"  # nor is it the bytes that make it so fast
    assert pure(EXPERIMENT, [row for row in made() if row["way"] == UNFUSED], GPU).word == "inconclusive"
    part = [row for row in made() if row["chain"] == GELU or row["way"] == UNFUSED]
    assert "No fused form was measured of: sin² + cos²" in pure(EXPERIMENT, part, CPU).why


def test_one_slow_kernel_of_ours_refutes(pure):
    slow = pure(EXPERIMENT, made(gpu_ns=20_000.0), GPU)
    assert slow.word == "refuted here"
    assert "Not about as many times as the bytes say: sin² + cos², ours, Triton, GeLU, ours, Triton" in slow.why


@pytest.mark.parametrize(
    ("of_triton", "said"),
    [
        ({"off": 1e9}, "wrong results: sin² + cos², ours, Triton"),
        ({"kernels": 8}, "Not one kernel: sin² + cos², ours, Triton (8"),
    ],
)
def test_what_is_wrong_or_not_fused_is_no_evidence(pure, of_triton, said):
    left = pure(EXPERIMENT, made(**of_triton), GPU)
    assert left.word == "inconclusive"
    assert said in left.why


def test_a_form_that_is_missing_leaves_it_open(pure):
    left = pure(EXPERIMENT, made()[:-1], GPU)
    assert left.word == "inconclusive"
    assert "No fused form was measured of: GeLU, ours, CUDA C++" in left.why


def test_unsteady_times_on_a_cpu_decide_nothing(pure):
    rows = [on_the_wall(row, samples=2) for row in made()]
    assert "in 2 samples" in pure(EXPERIMENT, rows, CPU).why
    assert pure(EXPERIMENT, rows, CPU).word == "inconclusive"


def test_the_bytes_predict_the_time_where_the_bandwidth_is_one():
    for row in with_gains(EXPERIMENT.read(made())):
        if row["way"] == TRITON:
            assert row["times_faster"] == pytest.approx(row["times_fewer"])
            assert row["rate_bytes_per_s"] == pytest.approx(8 * N / 200 * 1e9)


def test_its_pictures_and_tables_are_of_its_rows():
    rows = EXPERIMENT.read(made())
    bars, points = EXPERIMENT.draw(rows, GPU)
    assert len(bars.rows) == 8
    assert len(points.rows) == 12
    assert "gpu_ns" in EXPERIMENT.tabulate(rows, GPU)[0].keys


def test_a_quick_run_on_the_cpu(pure):
    rows = measured(EXPERIMENT)
    assert {(row["chain"], row["kernels"]) for row in rows if row["way"] == UNFUSED} == {(SINES, 5), (GELU, 8)}
    assert all(row["off"] < 1e-5 for row in rows)
    assert pure(EXPERIMENT, rows, CPU).word in ("inconclusive", "refuted here")
