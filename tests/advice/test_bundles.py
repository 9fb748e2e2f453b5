"""What is tried first on a user's step: all at once, less of it where that is refused, then nothing more."""

import msgspec
import pytest

from flopwise.advice.bundles import BEST, PLAIN, SAFER, fastest_together, next_bundle, worth_of_each
from flopwise.advice.moves import Move, moves, with_levers
from flopwise.records.tuning import Attempt
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import workload

STEP = workload("py:a:make")


def attempt(move, kept=False):
    return Attempt(lever=move.lever, value=move.value, also=move.also, before="", status="ok", kept=kept)


def written(**levers):
    subject = msgspec.structs.replace(STEP.subject, written=Recipe(**levers))
    return msgspec.structs.replace(STEP, subject=subject, recipe=Recipe(**levers))


def test_the_first_has_all_and_one_that_is_kept_ends_it():
    move = next_bundle(STEP, [], frozenset())
    assert move.levers == {name: value for name, value in BEST.items() if name != "attention"}
    assert next_bundle(move.workload, [attempt(move, kept=True)], frozenset()) is None


def test_what_is_refused_by_name_is_left_out_or_replaced():
    refused = frozenset({("overlap", "on"), ("compile", "blocks"), ("optimizer", "flopwise")})
    first = next_bundle(STEP, [], frozenset())
    second = next_bundle(STEP, [attempt(first)], refused)
    assert second.levers == {
        "precision": "bf16",
        "optimizer": "fused",
        "loss": "fused",
        "compile": "default",
        "graph": "on",
    }


def test_after_a_failure_without_a_name_safer_levers_are_tried_then_plain_pytorch_then_nothing():
    tried = []
    for expected in (BEST, SAFER, PLAIN):
        move = next_bundle(STEP, tried, frozenset())
        assert move.levers == {name: value for name, value in expected.items() if name != "attention"}
        tried.append(attempt(move))
    assert next_bundle(STEP, tried, frozenset()) is None


@pytest.mark.parametrize(
    ("levers", "without"),
    [
        ({"precision": "bf16-pure"}, {"precision"}),
        ({"compile": "default"}, {"compile", "loss", "overlap"}),
        ({"graph": "on"}, {"graph"}),
    ],
)
def test_what_the_code_does_already_is_not_in_it(levers, without):
    move = next_bundle(written(**levers), [], frozenset())
    assert not without & set(move.levers)


def test_attention_written_out_is_replaced():
    assert next_bundle(written(attention="naive"), [], frozenset()).levers["attention"] == "sdpa"


def test_exact_levers_alone_where_that_is_asked_for_and_none_for_our_own_model():
    assert "precision" not in next_bundle(STEP, [], frozenset(), keep_exact=True).levers
    assert next_bundle(workload("tiny"), [], frozenset()) is None


# --- flopwise's own models: what is predicted to be fastest together


def test_own_models_get_levers_that_save_beside_those_before_them():
    """`rope` saves only once norms are fused, and a graph only with our optimizer."""
    start = workload("tiny", attention="naive", norm="eager", activation="eager")
    saved = {"precision": 4.0, "attention": 2.0, "norm": 1.0, "loss": -1.0}

    def saving(move, graph_ns=-1.0):
        ns = sum(saved.get(lever, 0.0) for lever in move.levers) + 3.0 * ({"rope", "norm"} <= set(move.levers))
        return ns + ("graph" in move.levers) * (graph_ns if move.levers.get("optimizer") == "flopwise" else -1.0)

    assert set(fastest_together(start, moves, saving, 100.0).levers) == {"precision", "attention", "norm", "rope"}
    move = fastest_together(start, moves, lambda one: saving(one, 1.0), 100.0)
    assert {"graph", "optimizer"} <= set(move.levers)
    assert (move.lever, list(move.levers)[-1]) == ("precision", "graph")


def test_what_does_not_fit_or_does_not_save_is_no_bundle():
    start = workload("tiny")
    assert fastest_together(start, moves, lambda move: None, 100.0) is None
    assert fastest_together(start, moves, lambda move: 5.0 * (move.levers == {"norm": "triton"}) - 1.0, 100.0) is None


class Priced:
    """Levers that save so much each, and a pair that saves more than its parts."""

    def __init__(self, prices, together=0.0):
        self.prices, self.together = prices, together

    def change(self, move):
        return self

    def rough_ns(self, move):
        return sum(self.prices[lever] for lever in move.levers) + self.together * (len(move.levers) == len(self.prices))


def test_a_lever_of_a_bundle_is_worth_what_is_lost_without_it():
    start = workload("tiny")
    prices = {"precision": 3e6, "optimizer": 2e6, "graph": -1e6}
    move = bundle(start, precision="bf16", optimizer="fused", graph="on")
    assert worth_of_each(move, start, Priced(prices)) == prices
    shared = worth_of_each(move, start, Priced(prices, together=5e5))
    assert shared == {lever: ns + 5e5 for lever, ns in prices.items()}
    assert worth_of_each(bundle(start, graph="on"), start, Priced(prices)) == {}  # one is no bundle


def test_a_lever_that_another_needs_is_not_priced_alone():
    start = workload("tiny")
    move = bundle(start, precision="bf16", attention="sdpa-cudnn")  # which has no kernel for fp32
    assert worth_of_each(move, start, Priced({"precision": 2e6, "attention": 1e6})) == {"attention": 1e6}


def bundle(start, **levers):
    (lever, value), *rest = levers.items()
    return Move(lever=lever, value=value, workload=with_levers(start, levers), also=dict(rest))
