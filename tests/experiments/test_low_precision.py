"""low-precision: half the bytes should be half the time, and that because of memory."""

import pytest
from made_rows import measured, on_the_wall, timed

from flopwise.experiments.claims.low_precision import EXPERIMENT, compared, largest
from flopwise.records.experiment import Place

CPU, GPU = Place(device="cpu"), Place(device="cuda:0")
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}


def made(half=1.0, relu_share=0.95, cache=60 * 2**20, slowed="fp16"):
    """ReLU at this share of a copy's 4 TB/s; `half` times the time that fp16, or another format, should take."""
    rows = []
    for n in (2**16, 2**28):
        for name, item in ITEM.items():
            moved = 2 * n * item
            for kind, share in (("relu", relu_share), ("copy", 1.0)):
                ns = moved / (4e3 * share) * (half if name == slowed and kind == "relu" else 1.0)
                about = {"part": kind, "format": name, "n": n, "moved_bytes": moved, "cache_bytes": cache}
                rows.append({**about, "device_ns": ns, "rate_bytes_per_s": 1e9 * moved / ns, **timed(ns)})
    return rows


def test_it_can_be_confirmed_and_refuted(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "fp32 (0.125 FLOP/B): 537 µs predicted, 565 µs measured" in yes.why
    assert "bf16 is 2.00 and fp16 is 2.00 times as fast as fp32" in yes.why
    assert pure(EXPERIMENT, made(half=1.5), GPU).word == "refuted here"  # fp16 gains too little
    slow = pure(EXPERIMENT, made(relu_share=0.3), GPU)  # halves, but not because of memory
    assert slow.word == "refuted here"
    assert "not limited by memory alone" in slow.why


def test_what_lies_in_the_cache_proves_nothing(pure):
    assert pure(EXPERIMENT, made(cache=2**30), GPU).word == "inconclusive"
    assert pure(EXPERIMENT, [row for row in made() if row["format"] == "fp32"], GPU).word == "inconclusive"


@pytest.mark.parametrize("slowed", ["bf16", "fp16"])
def test_both_half_precisions_count(pure, slowed):
    assert pure(EXPERIMENT, made(half=50.0, slowed=slowed), GPU).word == "refuted here"
    assert pure(EXPERIMENT, made(half=0.1, slowed=slowed), GPU).word == "refuted here"


def test_a_part_of_the_evidence_is_left_open(pure):
    for without in ITEM:
        assert pure(EXPERIMENT, [row for row in made() if row["format"] != without], GPU).word == "inconclusive"
    for end in (2, len(made()) // 2, -2):  # cut short: small vectors alone, or the largest of some formats
        assert pure(EXPERIMENT, made(cache=None)[:end], CPU).word == "inconclusive"


def test_unsteady_times_decide_nothing(pure):
    left = pure(EXPERIMENT, [on_the_wall(row, 0.5, 2.0) for row in made(cache=None)], CPU)
    assert left.word == "inconclusive"
    assert "Too uncertain to tell: " in left.why


def test_intensity_is_flops_over_bytes():
    rows = EXPERIMENT.read(made())
    intensity = {name: row["intensity"] for name, row in largest(rows).items()}
    assert intensity == {"fp32": 0.125, "bf16": 0.25, "fp16": 0.25}
    assert compared(rows)[-1]["predicted_ns"] == pytest.approx(2 * 2**28 * 2 / 4e3)


def test_a_quick_run_on_the_cpu(pure, monkeypatch):
    monkeypatch.setattr("flopwise.experiments.claims.low_precision.CPU_QUICK", (6, 10))
    rows = measured(EXPERIMENT)
    assert len(rows) == 2 * 3 * 2
    assert {row["moved_bytes"] for row in rows if row["n"] == 1024 and row["format"] == "fp16"} == {4096}
    assert pure(EXPERIMENT, rows, CPU).why
