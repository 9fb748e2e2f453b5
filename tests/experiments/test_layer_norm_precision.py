"""layer-norm-precision: what a CPU measures, and the verdict on rows that say otherwise."""

import pytest
import torch
from made_rows import measured

from flopwise.experiments.claims.layer_norm_precision import EXPERIMENT, INSIDE, SEQUENTIAL, written_out
from flopwise.records.experiment import Place

CPU = Place(device="cpu")


@pytest.fixture(scope="module")
def rows():
    return measured(EXPERIMENT)


def test_it_holds_on_a_cpu_too(rows, pure):
    found = pure(EXPERIMENT, rows, CPU)
    assert found.word == "confirmed"
    assert "bf16 holds at all sizes, fp16 is lost from 512 on." in found.why


@pytest.mark.parametrize(
    "other",
    [
        lambda row: {"error": 0.001} if row["format"] == "fp16" else {},  # fp16 never overflows
        lambda row: {"error": 1.0} if row["format"] == "bf16" and row["scale"] > 1000 else {},  # bf16 does
        lambda row: {"error": 0.004} if row["way"] == SEQUENTIAL else {},  # sums do not need the bits
        lambda row: {"error": 0.05} if row["way"] == INSIDE else {},  # fp32 inside is not enough
    ],
)
def test_each_part_of_the_claim_can_be_refuted(rows, pure, other):
    assert pure(EXPERIMENT, [row | other(row) for row in rows], CPU).word == "refuted here"


def test_one_sweep_is_not_enough(rows, pure):
    assert pure(EXPERIMENT, [row for row in rows if row["sweep"] == "scale"], CPU).word == "inconclusive"


def test_written_out_it_is_a_layer_norm():
    x = torch.randn(4, 32, dtype=torch.float64)
    right = torch.nn.functional.layer_norm(x, (32,))
    torch.testing.assert_close(written_out(x, lambda x: x.mean(-1, keepdim=True)), right)
