"""sparsity-int8: formats hold what they should; the verdict follows rates and errors."""

import msgspec
import pytest
import torch
from made_rows import StandIn, measured, timed

from flopwise.errors import Unsupported
from flopwise.experiments.claims import sparsity_int8
from flopwise.experiments.claims.sparsity_int8 import EXPERIMENT, FORMATS, PRUNED, hold, named, prune, relative_error
from flopwise.records.experiment import Place

GPU = Place(device="cuda:0")


def made(rates=None, errors=None):
    """bf16 at 800 TFLOP/s; half the bits and half the weights double that."""
    work = 2 * 8192**3
    rows = []
    for sparse in (False, True):
        for name in PRUNED if sparse else FORMATS:
            rate = 8e14 * {"fp32": 0.0625, "bf16": 1.0}.get(name, 2.0) * (2 if sparse else 1)
            rate = (rates or {}).get(named(name, sparse), rate)
            error = (errors or {}).get(named(name, sparse), 0.3 if sparse else 0.01)
            row = {"part": "product", "format": name, "sparse": sparse, "side": 8192, "work_flops": work}
            rows.append(
                row | {"rate_flops_per_s": rate, "error": error, "own_error": 0.002, **timed(1e9 * work / rate)}
            )
    return rows


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "int8, 2:4: 3.20 PFLOP/s, 4.00 times bf16, error 30.00 %." in yes.why
    no = pure(EXPERIMENT, made(rates={"bf16, 2:4": 9e14}), GPU)
    assert (no.word, "Not about twice the dense rate: bf16, 2:4." in no.why) == ("refuted here", True)
    assert pure(EXPERIMENT, made(rates={"int8": 8e14, "int8, 2:4": 1.6e15}), GPU).word == "refuted here"
    assert "Another error than claimed: fp8." in pure(EXPERIMENT, made(errors={"fp8": 0.2}), GPU).why
    skipped = {"part": "skipped", "format": "fp8", "sparse": True, "note": "no"}
    left = pure(EXPERIMENT, [*made()[:-1], skipped], GPU)
    assert (left.word, "Not measured: fp8, 2:4." in left.why) == ("inconclusive", True)
    wrong = [row | {"own_error": 0.5} if row["format"] == "int8" else row for row in made()]
    assert "not the product of the numbers held: int8, int8, 2:4." in pure(EXPERIMENT, wrong, GPU).why


def test_pruning_keeps_the_two_largest_of_four():
    found = prune(torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.5, 0.0, -0.125, 0.25]]))
    assert found.tolist() == [[0.0, -4.0, 3.0, 0.0, 0.5, 0.0, 0.0, 0.25]]


@pytest.mark.parametrize(("name", "most"), [("fp32", 1e-7), ("bf16", 0.003), ("int8", 0.02), ("fp8", 0.04)])
def test_a_format_holds_numbers_to_its_precision(name, most):
    weights = torch.randn(64, 64)
    held = hold(name, weights, torch.eye(64))
    product = held.weights.double() @ held.inputs.double().T * held.scale
    assert relative_error(product, weights.double()) < most


def test_what_would_run_on_a_gpu(monkeypatch):
    """On a CPU without cuSPARSELt every sparse row says why it is missing; the dense products are right."""
    monkeypatch.setattr(sparsity_int8, "GPU_QUICK_SIDE", 64)
    rows = msgspec.to_builtins(list(EXPERIMENT.measure(StandIn())))
    assert [row["note"] for row in rows if row["sparse"]] == ["this torch has no cuSPARSELt"] * 3
    right = {row["format"]: row["own_error"] for row in rows if row["part"] == "product"}
    assert {"fp32", "bf16", "int8"} <= set(right)
    assert max(right.values()) < 0.01
    with pytest.raises(Unsupported, match="needs a GPU"):
        measured(EXPERIMENT)
