"""What is tried first on a user's step: all at once, less of it where that is refused, then nothing more."""

import msgspec
import pytest

from flopwise.advice.bundles import BEST, PLAIN, SAFER, next_bundle
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
