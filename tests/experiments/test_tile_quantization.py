"""tile-quantization: the cliff is where the chip puts it; the kernel with a fixed tile is a matmul."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_rows import measured, timed

import flopwise
from flopwise.experiments.claims.tile_quantization import (
    DIVISORS,
    EXPERIMENT,
    FIXED,
    LIBRARY,
    cliff,
    largest_jump,
    tiles,
    times_by_size,
    waves,
    with_waves,
)
from flopwise.records.experiment import Place

CPU, GPU = Place(device="cpu"), Place(device="cuda:0")
H200 = 132


def made(sms=H200, wave_ns=30_000.0, odd=0.5, spread=False):
    """A chip whose time is its waves (or, spread, its tiles); K of odd size runs at this share of the speed."""
    around = {cliff(sms), cliff(sms) + 16, cliff(sms) + 1, cliff(sms, 2), cliff(sms, 2) + 16}
    sizes = sorted({*range(1536, 3072, 64), 1792, 1808} | around)
    rows = []
    for n in sizes:
        ns = wave_ns * (tiles(n) / sms if spread else waves(n, sms))
        about = {"part": "waves", "n": n, "sms": sms, "device_ns": ns, "rate_flops_per_s": 2e9 * n**3 / ns}
        rows += [{**about, **timed(ns), "how": how} for how in ((LIBRARY, FIXED) if n % 16 == 0 else (LIBRARY,))]
    rows += [{"part": "kernels", "n": n, "kernel": "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_NNN"} for n in sizes[:-1]]
    for divisor in DIVISORS:
        rate = 7e14 * (1.0 if divisor >= 8 else odd)
        about = {"part": "alignment", "k": 4096 + divisor, "divisor": divisor, "side": 4096, "dtype": "bfloat16"}
        rows.append({**about, "each_bytes": 2, "device_ns": 1.0, "rate_flops_per_s": rate, **timed(1.0)})
    return rows


def test_it_can_be_confirmed_and_refuted(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "the first jump must come after 2048 (128 tiles, then 153). The time grows × 2.00 after 2048" in yes.why
    assert "After the A100's 1792 there is no jump here (× 1.00)" in yes.why
    assert "at best 50 % of the speed" in yes.why
    assert pure(EXPERIMENT, made(spread=True), GPU).word == "refuted here"  # no waves: the time follows the tiles
    assert pure(EXPERIMENT, made(odd=0.95), GPU).word == "refuted here"  # alignment does not matter


def test_the_second_cliff_counts(pure):
    at = cliff(H200, 2)
    late = {"device_ns": 60_000.0, **timed(60_000.0)}
    flat = [{**row, **late} if row["part"] == "waves" and row["n"] > at else row for row in made()]
    assert pure(EXPERIMENT, flat, GPU).word == "refuted here"
    assert pure(EXPERIMENT, [row for row in made() if row.get("n") != at + 16], GPU).word == "inconclusive"


def test_a_gpu_that_waited_for_the_host_leaves_it_open(pure):
    rows = [{**row, "gpu_exact": False} if "gpu_exact" in row else row for row in made()]
    found = pure(EXPERIMENT, rows, GPU)
    assert found.word == "inconclusive"
    assert "waited for the host" in found.why


def test_the_lectures_chip_jumps_where_the_lecture_says(pure):
    yes = pure(EXPERIMENT, made(sms=108), GPU)
    assert yes.word == "confirmed"
    assert "after 1792 (98 tiles, then 120)" in yes.why
    assert largest_jump(times_by_size(EXPERIMENT.read(made(sms=108)), FIXED))[:2] == (1792, 1808)


@pytest.mark.parametrize("sms", [16, 58, 108, 114, 132, 148, 304])
def test_the_cliff_is_the_last_size_of_its_wave(sms):
    for wave in (1, 2, 3):
        at = cliff(sms, wave)
        assert waves(at, sms) <= wave < waves(at + 1, sms)


def test_a_librarys_tile_is_read_from_its_kernel():
    found = {(row["how"], row["n"]): row for row in with_waves(EXPERIMENT.read(made()))}
    assert found[LIBRARY, 2048]["tile"] == "128 × 256"
    assert (found[FIXED, 2064]["tiles"], found[FIXED, 2064]["waves"]) == (153, 2)
    assert found[FIXED, 2064]["last_share"] == pytest.approx((153 - 132) / 132)
    assert found[LIBRARY, 3008]["waves"] is None  # its kernel is not known


def test_without_the_fixed_tile_it_is_left_open(pure):
    rows = [row for row in made() if row.get("how") != FIXED]
    assert pure(EXPERIMENT, rows, GPU).word == "inconclusive"


def test_a_quick_run_on_the_cpu(pure, monkeypatch):
    monkeypatch.setattr("flopwise.experiments.claims.tile_quantization.CPU_LAYER", 64)
    rows = measured(EXPERIMENT)
    assert [row["k"] % row["divisor"] for row in rows] == [0] * len(DIVISORS)
    verdict = pure(EXPERIMENT, rows, CPU)
    assert verdict.word == "not measurable here"
    assert "FLOP/s" in verdict.why


INTERPRETED = """
import torch
from flopwise.experiments.claims.tile_quantization import fixed_tile_matmul
for n in (16, 48, 80):
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.full((n, n), float("nan"))
    fixed_tile_matmul(a, b, out, (32, 16, 16))
    torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-4)
"""


@pytest.mark.slow
def test_the_kernel_is_a_matmul():
    pytest.importorskip("triton")
    known = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(flopwise.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", INTERPRETED], env=known, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compilable")
def test_one_tile_fills_a_multiprocessor():
    """The waves are counted with one tile on a multiprocessor at a time: two must not fit."""
    pytest.importorskip("triton")
    from flopwise.experiments.claims.tile_quantization import STAGES, TILE_K, TILE_M, TILE_N, WARPS, tile_kernel
    from flopwise.kernels.resources import SHARED_BYTES, Case, resources

    kinds = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "n": "i32"}
    sides = {"M": TILE_M, "N": TILE_N, "K": TILE_K}
    found = resources(Case("tile", tile_kernel(), kinds, sides, WARPS, STAGES, divisible=("n",)), 90)
    assert found.spilled_bytes == 0
    assert 2 * found.registers * 32 * WARPS > 65536
    assert found.shared_bytes <= SHARED_BYTES[90] < 2 * found.shared_bytes
