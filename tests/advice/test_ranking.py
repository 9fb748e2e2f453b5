"""Which lever `tune` takes up next."""

import math

import msgspec
import pytest

from flopwise.advice.constants import WORTH_TRYING
from flopwise.advice.facts import Facts
from flopwise.advice.moves import moves
from flopwise.advice.ranking import MoveRanking
from flopwise.predict.constants import SHALLOW_LAYERS
from flopwise.spec.workload import workload

from .made import known

FEW = {"n_layers": 4}  # predictions of deep models take long, and say the same


def ranking(*args, layers=FEW, **options):
    facts = known(*args, set=layers, **options)
    return MoveRanking(facts), moves(facts.workload)


def named(open_moves, name):
    return next(move for move in open_moves if move.name == name)


def test_where_launches_set_the_pace_a_graph_comes_first():
    seen, open_moves = ranking(batch=1, context=128, attention="naive", norm="eager", precision="bf16")
    assert seen.choose(open_moves, 0.0).name == "graph = on"


def test_where_they_would_after_the_best_lever_too():
    seen, open_moves = ranking(batch=4, context=512, attention="naive", norm="eager", optimizer="flopwise")
    best = seen.largest(open_moves, 0.0)
    then = seen.change(best).then
    assert best.lever == "precision"
    assert then.host_ns > 0.75 * then.gpu_ns
    assert seen.choose(open_moves, WORTH_TRYING * seen.start.now.wall_ns).name == "graph = on"


def test_where_the_gpu_sets_it_the_largest_saving_does():
    seen, open_moves = ranking("medium", batch=16, context=1024, attention="naive")
    assert seen.choose(open_moves, 0.0).name == "precision = bf16"


def test_a_graph_that_is_predicted_to_cost_time_waits():
    """In a graph foreach divides tensor by tensor: with that many weights it costs more than the launches do."""
    seen, open_moves = ranking("2.7B", batch=8, context=512, attention="naive", precision="bf16")
    graph = named(open_moves, "graph = on")
    assert seen.saving_ns(graph) < 0
    assert seen.choose(open_moves, 0.0) != graph


def test_what_only_seems_to_save_much_does_not_come_first(monkeypatch):
    """A rough estimate may say much of a lever that saves little: the exact one is asked for before it is taken."""
    seen, open_moves = ranking("medium", precision="bf16", attention="flash", norm="eager", graph="on")
    overlap = named(open_moves, "overlap = on")
    rough = seen.rough_ns
    monkeypatch.setattr(seen, "rough_ns", lambda move: 1e12 if move is overlap else rough(move))
    best = seen.largest(open_moves, 0.0)
    assert best is not overlap
    assert seen.saving_ns(best) > 10 * seen.saving_ns(overlap) > 0


def test_the_pauses_of_the_first_step_hold_for_the_next():
    seen, _ = ranking("tiny")
    limits = msgspec.structs.replace(seen.start.limits, pause_ns=1600.0)
    seen.start = msgspec.structs.replace(seen.start, limits=limits)
    after = seen.after(seen.facts.point)
    assert after.start.limits.pause_ns == 1600.0
    assert after.after(seen.facts.point).start.limits.pause_ns == 1600.0


def test_nothing_that_is_worth_it_is_nothing():
    seen, open_moves = ranking(precision="bf16")
    assert seen.choose(open_moves, math.inf) is None


def test_what_cannot_be_predicted_is_tried_the_quickest_first():
    """On the CPU there are no ceilings; a short budget is not to be spent on the compiler alone."""
    chosen = MoveRanking(Facts()).choose(moves(workload("tiny"), on_gpu=False), 0.0)
    assert chosen.workload.recipe.compile == "off"


@pytest.mark.parametrize("graph", ["on", "off"])
def test_shallow_models_rank_the_levers_of_a_deep_one(graph):
    deep = {"n_layers": 12}
    seen, open_moves = ranking("large", layers=deep, precision="bf16", attention="naive", norm="eager", graph=graph)
    assert len(seen.shallow) == len(SHALLOW_LAYERS)
    step_ns = seen.start.now.wall_ns
    for name in ("attention = sdpa", "norm = triton", "optimizer = fused", "loss = fused"):
        move = named(open_moves, name)
        assert seen.rough_ns(move) == pytest.approx(seen.saving_ns(move), abs=0.02 * step_ns), name
    assert ranking("tiny")[0].shallow == []
