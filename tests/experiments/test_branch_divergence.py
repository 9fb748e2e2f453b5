"""branch-divergence: the verdict follows the times by branches; the results are checked against the formula."""

import msgspec
import pytest
from made_rows import StandIn, measured, timed

from flopwise.errors import Unsupported
from flopwise.experiments.claims.branch_divergence import (
    BETWEEN,
    EXPERIMENT,
    PATHS,
    SPLITS,
    STEPS,
    WITHIN,
    relative_error,
)
from flopwise.records.experiment import Place

GPU = Place(device="cuda:0")


def made(within=lambda k: k, between=lambda k: 1.0, off=0.0):
    rows = []
    for split, times in ((WITHIN, within), (BETWEEN, between)):
        rows += [{"part": "branches", "split": split, "paths": k, "off": off, **timed(1e5 * times(k))} for k in PATHS]
        rows.append({"part": "loops", "split": split, "off": off, **timed(2e5 if split == WITHIN else 1e5)})
    return rows


def test_it_can_be_confirmed_and_refuted(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "32 take 32.0 times as long" in yes.why
    assert "2.00 times as long mixed in each warp as sorted (1.94 if" in yes.why
    no = pure(EXPERIMENT, made(within=lambda k: 1.0), GPU)
    assert (no.word, "Not about k times: 2, 4, 8, 16, 32" in no.why) == ("refuted here", True)
    assert pure(EXPERIMENT, made(between=lambda k: k), GPU).word == "refuted here"


def test_a_part_or_a_wrong_result_is_left_open(pure):
    assert pure(EXPERIMENT, made()[:-1], GPU).word == "inconclusive"
    assert "off by 0.5" in pure(EXPERIMENT, made(off=0.5), GPU).why


def test_the_formula_is_what_the_steps_give():
    x = 1.0
    for _ in range(STEPS):
        x = x * (0.999 - 0.001 * 3) + 0.5
    assert relative_error(x, [(3, STEPS)]) < 1e-9
    assert relative_error(2 * x, [(3, STEPS)]) == pytest.approx(1.0)


def test_what_would_run_on_a_gpu():
    rows = msgspec.to_builtins(list(EXPERIMENT.measure(StandIn())))
    assert [(row["split"], row.get("paths")) for row in rows] == [(s, k) for s in SPLITS for k in (*PATHS, None)]
    with pytest.raises(Unsupported, match="needs a GPU"):
        measured(EXPERIMENT)
