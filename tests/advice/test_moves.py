from itertools import pairwise

import pytest

from flopwise.advice.moves import ROUNDED, moves, reference_of, to_fit, with_levers
from flopwise.advice.pytorch_lines import LINES, lines_by_lever, recipe_toml
from flopwise.lm.optimizer import BETAS
from flopwise.predict.prediction import peak_bytes
from flopwise.spec.gpu import gpu
from flopwise.spec.recipe import CHOICES, Recipe, recipe_from
from flopwise.spec.workload import workload


def names(found):
    return [move.name for move in found]


@pytest.mark.parametrize("own", [{}, {"activation": "triton", "rope": "triton"}])
def test_a_move_changes_what_it_names_and_nothing_else(own):
    start = workload("small", batch=2, set={"n_layers": 2}, precision="bf16", **own)
    for move in moves(start):
        was, now = start.recipe, move.workload.recipe
        changed = {f: str(getattr(now, f)) for f in was.__struct_fields__ if getattr(was, f) != getattr(now, f)}
        assert changed == move.levers
        assert (move.workload.batch, move.workload.changes) == (2, {"n_layers": 2})


def test_a_compiler_is_tried_with_our_kernels_and_without():
    start = workload("small", norm="triton", rope="triton")
    found = [move for move in moves(start) if move.lever == "compile" and move.value == "blocks"]
    assert [move.name for move in found] == ["compile = blocks", "compile = blocks, norm = torch, rope = eager"]
    assert names(moves(workload("small"))).count("compile = blocks") == 1
    assert all(
        move.also == {} for move in moves(workload("small", compile="blocks", norm="triton")) if move.value == "off"
    )


def test_graphs_by_the_compiler_are_tried_where_one_graph_cannot_be():
    by_compiler = "compile = reduce-overhead"
    assert by_compiler not in names(moves(workload("small")))
    assert by_compiler not in names(moves(workload("small", graph="on")))
    assert by_compiler in names(moves(workload("small", precision="fp16")))  # its loss scaling asks the host
    assert by_compiler in names(moves(workload("py:a:b")))
    assert by_compiler not in names(moves(workload("py:a:b"), on_gpu=False))
    assert "graph = on, compile = default" in names(moves(workload("py:a:b", compile="reduce-overhead")))


def test_exact_moves_leave_the_precision_alone():
    start = workload("small")
    assert "precision = bf16" in names(moves(start))
    assert not [name for name in names(moves(start, keep_exact=True)) if name.startswith("precision")]


def test_fp8_is_tried_only_where_it_is_allowed_by_name():
    start = workload("small", precision="bf16-master", optimizer="flopwise")
    fp8 = {"precision = fp8"}
    assert not fp8 & set(names(moves(start)))
    assert fp8 <= set(names(moves(start, allow=["fp8"])))
    assert not fp8 & set(names(moves(start, allow=["fp8"], on_gpu=False)))
    assert not fp8 & set(names(moves(workload("small", optimizer="fused"), allow=["fp8"])))  # keeps no masters


def test_moves_that_the_model_does_not_allow_are_not_there():
    assert "norm = triton" in names(moves(workload("small")))
    assert "norm = triton" not in names(moves(workload("gpt2")))
    assert "graph = on" not in names(moves(workload("small", phase="backward")))
    assert "graph = on" not in names(moves(workload("small", precision="fp16")))
    assert with_levers(workload("gpt2"), {"rope": "triton"}) is None


def test_checkpointing_is_offered_where_memory_is_short_and_taken_back_where_it_is_not():
    assert "checkpoint = 1" in names(moves(workload("small"), smaller=True))
    assert "checkpoint = 1" not in names(moves(workload("small")))
    assert "checkpoint = 0" in names(moves(workload("small", checkpoint=2)))


def test_the_reference_is_the_same_step_by_hand_in_fp32():
    start = workload("small", batch=3, precision="bf16", compile="default", graph="on", checkpoint=2)
    found = reference_of(start)
    assert found.recipe == Recipe(attention="naive", norm="eager", activation="eager")
    assert (found.batch, found.subject) == (3, start.subject)


@pytest.mark.parametrize("lever", list(LINES))
def test_every_value_has_its_lines_or_is_the_plainest(lever):
    silent = set(CHOICES[lever]) - set(LINES[lever])
    assert silent <= {"fp32", "naive", "eager", "full", "adamw-loop", "off", "separate"}


def test_a_recipe_as_lines_and_as_a_file():
    recipe = Recipe(precision="bf16", optimizer="fused", checkpoint=2)
    assert len(lines_by_lever(recipe)) == 3
    assert lines_by_lever(recipe, recipe) == {}
    import tomllib

    assert recipe_from(tomllib.loads(recipe_toml(recipe))) == recipe
    assert tomllib.loads(recipe_toml(Recipe())) == {}


def test_on_the_cpu_nothing_is_tried_that_needs_a_gpu():
    here = names(moves(workload("small", precision="bf16"), on_gpu=False))
    assert {"compile = default", "optimizer = fused", "loss = chunked"} <= set(here)
    assert not set(here) & {"graph = on", "norm = triton", "attention = sdpa-cudnn", "optimizer = flopwise"}


def test_backends_without_fp32_kernels_wait_for_half_precision():
    assert "attention = sdpa-flash" not in names(moves(workload("small")))
    assert "attention = sdpa-flash" in names(moves(workload("small", precision="bf16")))


def test_the_line_for_bf16_states_has_the_betas_that_were_measured():
    """With AdamW's default β₂ of 0.999 a second moment in bf16 never decays."""
    (line,) = lines_by_lever(Recipe(optimizer="flopwise-bf16")).values()
    assert f"betas={BETAS}" in line


@pytest.mark.parametrize("share", [0.8, 0.5])
@pytest.mark.parametrize("keep_exact", [False, True])
def test_moves_that_make_a_step_fit_get_it_there_and_no_further(share, keep_exact):
    h200 = gpu("h200")
    by_hand = {"attention": "naive", "norm": "eager", "activation": "eager"}
    start = workload("large", batch=4, context=1024, set={"n_layers": 6}, **by_hand)
    room = share * peak_bytes(start, h200)
    path = to_fit(start, h200, room, keep_exact=keep_exact)
    peaks = [peak_bytes(start, h200), *(peak_bytes(move.workload, h200) for move in path)]
    assert all(after < before for before, after in pairwise(peaks))
    assert peaks[-1] <= room < peaks[-2]
    if keep_exact:
        assert all(move.value not in ROUNDED.get(move.lever, ()) for move in path)


def test_what_fits_is_left_alone_and_what_cannot_fit_has_no_way():
    small = workload("small", set={"n_layers": 2})
    assert to_fit(small, gpu("h200"), 1e12) == to_fit(small, gpu("h200"), 1e6) == []


def test_the_lighter_reference_is_in_fp32_and_smaller():
    start = workload("2.7B", batch=16, context=1024, precision="bf16", compile="blocks", optimizer="flopwise-bf16")
    lighter = reference_of(start, lighter=True)
    assert (lighter.recipe.precision, lighter.recipe.optimizer, lighter.recipe.checkpoint) == ("fp32", "foreach", 1)
    assert peak_bytes(lighter, gpu("h200")) < gpu("h200").memory_bytes < peak_bytes(reference_of(start), gpu("h200"))
