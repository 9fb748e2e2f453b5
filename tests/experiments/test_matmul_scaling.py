"""matmul-scaling: the verdict follows the rates; a precision that is not there is left out and said."""

import pytest
from made_rows import measured, on_the_wall, timed

from flopwise.experiments.claims.matmul_scaling import EXPERIMENT, draw, tabulate, with_peak
from flopwise.records.experiment import Place
from flopwise.records.run import Environment, Gpu

CPU = Place(device="cpu")
H200 = Place(
    device="cuda:0",
    environment=Environment(
        flopwise="0", python="3", torch="2",
        gpu=Gpu(name="NVIDIA H200", memory_bytes=0, sm_count=132, l2_bytes=0, capability="9.0"),
    ),
)  # fmt: skip


def made(**tflops):
    """Rates at 1024 and 16384, in TFLOP/s, by precision; at 4096 nearly the last one's."""
    rows = []
    for precision, rates in tflops.items():
        for n, rate in zip((1024, 16384, 4096), (*rates, 0.99 * rates[-1]), strict=False):
            ns = 2e-3 * n**3 / rate
            about = {"precision": precision, "n": n, "work_flops": 2 * n**3, "note": ""}
            rows.append({**about, "rate_flops_per_s": rate * 1e12, "device_ns": ns, **timed(ns)})
    return rows


GOOD = {"fp32": (30, 50), "tf32": (150, 400), "bf16": (300, 700), "fp16": (310, 690), "fp8": (400, 1300)}


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(**GOOD), H200)
    assert yes.word == "confirmed"
    assert "700 TFLOP/s at best, at 16384 (71 % of its peak)" in yes.why
    flat = pure(EXPERIMENT, made(**GOOD | {"fp32": (50, 50)}), H200)
    assert flat.word == "refuted here"  # the small one has the full rate already
    assert pure(EXPERIMENT, made(**GOOD | {"bf16": (200, 390)}), H200).word == "refuted here"  # no faster than TF32
    assert pure(EXPERIMENT, made(fp32=(30, 50), bf16=(300,)), H200).word == "inconclusive"


def test_fp16_counts_too(pure):
    assert pure(EXPERIMENT, made(**GOOD | {"fp16": (0.3, 0.7)}), H200).word == "refuted here"


def test_a_part_of_the_evidence_is_left_open(pure):
    two = [row for row in made(**GOOD) if row["precision"] in ("fp32", "tf32") and row["n"] != 4096]
    assert pure(EXPERIMENT, two, H200).word == "inconclusive"
    for without in GOOD:
        left = pure(EXPERIMENT, [row for row in made(**GOOD) if row["precision"] != without], H200)
        assert left.word == "inconclusive"
        assert f"{without} not at all of them" in left.why
    cut = [row for row in made(**GOOD) if row["precision"] != "fp8" or row["n"] < 16384]
    assert pure(EXPERIMENT, cut, H200).word == "inconclusive"


def test_unsteady_times_decide_nothing(pure):
    noted = [{"precision": name, "n": 1024, "note": "none"} for name in ("tf32", "fp16", "fp8")]
    rows = made(fp32=(30, 50), bf16=(300, 700))
    assert pure(EXPERIMENT, [*rows, *noted], CPU).word == "confirmed"
    shaky = [on_the_wall(row, samples=2) for row in rows]
    left = pure(EXPERIMENT, [*shaky, *noted], CPU)
    assert left.word == "inconclusive"
    assert "Too uncertain to tell: fp32 of 1024" in left.why


def test_what_is_missing_is_said(pure):
    verdict = pure(
        EXPERIMENT,
        [
            *made(fp32=(30, 50), bf16=(300, 700), fp16=(300, 700)),
            *({"precision": name, "n": 1024, "note": "none"} for name in ("tf32", "fp8")),
        ],
        CPU,
    )
    assert verdict.word == "confirmed"
    assert verdict.why.endswith("Not measured here: tf32, fp8.")
    rows = [*made(fp32=(30, 50)), {"precision": "fp8", "n": 1024, "note": "this chip has no fp8 matmul"}]
    assert "fp8 from 1024 on: this chip has no fp8 matmul" in tabulate(EXPERIMENT.read(rows), CPU)[0].notes


def test_the_peak_is_the_chips_and_of_the_precision():
    rows = EXPERIMENT.read(made(**GOOD))
    found = {row["precision"]: row for row in with_peak(rows, H200)}
    assert found["bf16"]["peak_flops_per_s"] == pytest.approx(989.4e12)
    assert found["tf32"]["peak_share"] == pytest.approx(400 / 494.7)
    assert len(draw(rows, H200)) == 3
    assert len(draw(rows, CPU)) == 2  # no peak is known of a CPU


def test_a_quick_run_on_the_cpu(pure, monkeypatch):
    monkeypatch.setattr("flopwise.experiments.claims.matmul_scaling.CPU_SIZES", (16, 64))
    rows = measured(EXPERIMENT)
    assert {row["precision"] for row in rows if row.get("work_flops") == 2 * 64**3} >= {"fp32"}
    assert [row["note"] for row in rows if row["precision"] == "tf32"] == ["TF32 needs a GPU"]
    assert pure(EXPERIMENT, rows, CPU).why
