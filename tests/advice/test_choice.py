"""Which lever `tune` takes up next."""

import math

import msgspec
import pytest

from flopwise.advice.moves import moves
from flopwise.api.tune_facts import Outlook

from .made import known


def outlook(*args, **options):
    facts = known(*args, **options)
    return Outlook(facts), moves(facts.account.workload)


def test_where_launches_set_the_pace_a_graph_comes_first():
    seen, open_moves = outlook(batch=1, context=128, attention="naive", norm="eager", precision="bf16")
    assert seen.choose(open_moves, 0.0).name == "graph = on"


def test_where_they_would_after_the_best_lever_too():
    seen, open_moves = outlook(batch=4, context=512, attention="naive", norm="eager", optimizer="flopwise")
    best = seen._best(open_moves, 0.0)
    then = seen._predicted(best).then
    assert best.lever == "precision"
    assert then.host_ns > 0.75 * then.gpu_ns
    assert seen.choose(open_moves, 0.003 * seen.here.now.wall_ns).name == "graph = on"


def test_where_the_gpu_sets_it_the_largest_saving_does():
    seen, open_moves = outlook("medium", batch=16, context=1024, attention="naive")
    assert seen.choose(open_moves, 0.0).name == "precision = bf16"


def test_a_graph_that_is_predicted_to_cost_time_waits():
    """In a graph foreach divides tensor by tensor: with that many weights it costs more than the launches do."""
    seen, open_moves = outlook("2.7B", batch=8, context=512, attention="naive", precision="bf16")
    graph = next(move for move in open_moves if move.lever == "graph")
    assert seen.saving_ns(graph) < 0
    assert seen.choose(open_moves, 0.0) != graph


def test_what_only_seems_to_save_much_does_not_come_first(monkeypatch):
    """Few layers may say much of a lever that saves little: it is looked at closely before it is taken."""
    seen, open_moves = outlook("medium", precision="bf16", attention="flash", norm="eager", graph="on")
    overlap = next(move for move in open_moves if move.lever == "overlap")
    rough = seen._rough_ns
    monkeypatch.setattr(seen, "_rough_ns", lambda move: 1e12 if move is overlap else rough(move))
    best = seen._best(open_moves, 0.0)
    assert best is not overlap
    assert seen.saving_ns(best) > 10 * seen.saving_ns(overlap) > 0


def test_the_pauses_of_the_first_step_hold_for_the_next():
    seen, _ = outlook("tiny")
    limits = msgspec.structs.replace(seen.here.limits, pause_ns=1600.0)
    seen.here = msgspec.structs.replace(seen.here, limits=limits)
    after = seen.after(seen.facts.point)
    assert after.here.limits.pause_ns == 1600.0
    assert after.after(seen.facts.point).here.limits.pause_ns == 1600.0


def test_nothing_that_is_worth_it_is_nothing():
    seen, open_moves = outlook(precision="bf16")
    assert seen.choose(open_moves, math.inf) is None


@pytest.mark.parametrize("graph", ["on", "off"])
def test_shallow_models_rank_the_levers_of_a_deep_one(graph):
    seen, open_moves = outlook("large", precision="bf16", attention="naive", norm="eager", graph=graph)
    assert len(seen.shallow) == 2
    step_ns = seen.here.now.wall_ns
    for move in (one for one in open_moves if one.lever in ("attention", "norm", "optimizer", "loss")):
        assert seen._rough_ns(move) == pytest.approx(seen.saving_ns(move), abs=0.02 * step_ns), move.name
    assert outlook("tiny")[0].shallow == []
