"""backprop-memory: what autograd keeps, and what the lecture's programs load and store."""

import pytest
import torch
from made_rows import measured

from flopwise.experiments.claims.backprop_memory import (
    AGAIN,
    EXPERIMENT,
    INPUT,
    KEPT,
    NOTHING,
    OUTPUT,
    Memory,
    keeping,
    recomputing,
)
from flopwise.records.experiment import Place

CPU = Place(device="cpu")


@pytest.fixture(scope="module")
def rows():
    return measured(EXPERIMENT)


def test_it_holds_and_can_be_refuted(rows, pure):
    yes = pure(EXPERIMENT, rows, CPU)
    assert yes.word == "confirmed"
    assert "8 accesses (fused, kept) and 5 accesses (fused, computed again)" in yes.why
    assert "gradient is [6, 12]." in yes.why
    for edit in (
        lambda row: {"what": INPUT} if row.get("operation") == "sigmoid" else {},
        lambda row: {"tensors": 2} if row.get("way") == KEPT else {},
        lambda row: {"reads": 4} if row.get("way") == "fused, computed again" else {},
        lambda row: {"backward": [6.0, 11.0]} if row.get("node") == "w" else {},
    ):
        assert pure(EXPERIMENT, [row | edit(row) for row in rows], CPU).word == "refuted here"
    wrong = [row | {"off": 0.1} if row.get("way") == AGAIN else row for row in rows]
    assert "wrong gradients of three sigmoids: eager, computed again" in pure(EXPERIMENT, wrong, CPU).why
    assert pure(EXPERIMENT, rows[:8], CPU).word == "inconclusive"


def test_what_is_kept_is_what_the_gradient_needs(rows):
    kept = {row["operation"]: row["what"] for row in rows if row["part"] == "kept"}
    assert {name for name, what in kept.items() if what == NOTHING} == {"add", "scale"}
    assert {"exp", "tanh", "softmax"} <= {name for name, what in kept.items() if what == OUTPUT}
    assert {"sin", "log", "GeLU", "linear"} <= {name for name, what in kept.items() if what == INPUT}


def test_the_lectures_graph(rows):
    nodes = {row["node"]: (row["forward"], row["backward"]) for row in rows if row["part"] == "gradient"}
    assert nodes["loss"] == ([9.0], [1.0])
    assert nodes["residual"] == ([3.0], [6.0])
    assert nodes["w"] == ([3.0, 1.0], [6.0, 12.0])


@pytest.mark.parametrize(("program", "counts"), [(keeping, (4, 4)), (recomputing, (3, 2))])
def test_a_program_computes_the_gradient_with_so_many_accesses(program, counts):
    x, dy = torch.randn(16, dtype=torch.float64, requires_grad=True), torch.randn(16, dtype=torch.float64)
    memory = Memory(x=x.detach(), dy=dy)
    program(memory)
    assert (memory.reads, memory.writes) == counts
    torch.testing.assert_close(memory.there["dx"], torch.autograd.grad(x.sigmoid().sigmoid().sigmoid(), x, dy)[0])
