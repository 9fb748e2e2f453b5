"""Collectives as workloads: their ranks, their bytes, and what is refused."""

from pathlib import Path

import pytest

from flopwise.errors import FlopwiseError
from flopwise.spec.operations import COLLECTIVES, message_bytes
from flopwise.spec.sweep import read_sweep
from flopwise.spec.workload import Sampling, Trial, varied, workload

SWEEPS = Path(__file__).parents[2] / "sweeps"
REFUSED = {
    "bytes = 0 ": {"set": {"bytes": 0}},
    "bytes = 1000000000000 ": {"set": {"bytes": "1TB"}},
    "less than one element for each of 3 ranks": {"set": {"bytes": 11}, "ranks": 3},
    "impl = 'mpi'": {"impl": "mpi"},
    "ranks = 0": {"ranks": 0},
    "graph = 'on'": {"graph": "on"},
    "phase = 'backward'": {"phase": "backward"},
    "parallel = 'ddp'": {"parallel": "ddp"},
    "'x' is not a size": {"set": {"bytes": "x"}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused_by_name(said):
    with pytest.raises(FlopwiseError, match=said):
        workload("op:all-gather", **REFUSED[said])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_ranks_are_two_unless_given(name):
    one = workload(f"op:{name}", impl="gloo", set={"bytes": "1MB"})
    assert one.recipe.ranks == 2
    assert one.many
    assert one.label() == f"op:{name} gloo bytes=1000000 ranks=2"
    alone = workload(f"op:{name}", ranks=1)
    assert alone.many
    assert varied(alone, set={"bytes": 512}).recipe.ranks == 1


def test_other_operations_run_in_one_process_and_take_no_ranks():
    assert not workload("op:gelu").many
    assert not workload("tiny").many
    assert workload("tiny", parallel="ddp").many
    with pytest.raises(FlopwiseError, match="ranks = 2 means nothing"):
        workload("op:gelu", ranks=2)


def test_an_operation_keeps_its_key():
    assert Trial(workload=workload("op:gelu"), sampling=Sampling()).key() == "3859721bb7c1ecff"


@pytest.mark.parametrize(
    ("name", "ranks", "item", "sent"),
    [("all-reduce", 6, 4, 1_000_000), ("all-gather", 6, 4, 999_984), ("all-to-all", 7, 2, 999_992)],
)
def test_a_message_is_rounded_down_to_whole_elements_of_every_rank(name, ranks, item, sent):
    assert message_bytes(workload(f"op:{name}", set={"bytes": 1_000_001}).subject, ranks, item) == sent


def test_the_course_s_table_is_a_sweep():
    trials = read_sweep(SWEEPS / "collectives.toml").trials
    rows = {(t.workload.backend, t.workload.recipe.ranks, t.workload.subject.dims["bytes"]) for t in trials}
    assert rows == {(b, n, 10**e) for b in ("gloo", "nccl") for n in (2, 4, 6) for e in (6, 7, 8, 9)}


def test_the_quick_sweep_has_sizes_to_fit_every_collective():
    trials = read_sweep(SWEEPS / "collectives-quick.toml").trials
    assert {t.workload.subject.name for t in trials} == set(COLLECTIVES)
    assert all(t.device == "cpu" for t in trials)
    assert len(trials) == 3 * len(COLLECTIVES)
