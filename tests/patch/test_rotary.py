"""Rotary positions by one kernel, where one table of angles serves the whole batch."""

import sys

import pytest
import torch

from flopwise.patch import rotary
from flopwise.patch.patched import Patched
from patch import models
from patch.models import OwnGPT, assert_alike, check_patch, hugging_face, loss_of


def replace(model, patched):
    return rotary.replace(model, "triton", patched)


def file_of(model):
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral", "Gemma2"])
def test_transformers_models_turn_by_one_kernel(name):
    model = hugging_face(name)
    original = file_of(model).apply_rotary_pos_emb
    patched = check_patch(model, replace)
    assert patched.done == [f"rope: 2 {name}Attention turn by one kernel in place of apply_rotary_pos_emb"]
    assert patched.refused == []
    assert file_of(model).apply_rotary_pos_emb is original


def test_angles_that_differ_by_row_are_left_to_the_original():
    positions = torch.stack([torch.arange(16), torch.arange(16).flip(0)])
    patched = check_patch(hugging_face("Llama"), replace, position_ids=positions)
    assert "each row of the batch has its own positions" in patched.refused[0]


def test_pairs_of_neighbours_are_refused_by_name():
    patched = check_patch(hugging_face("Cohere"), replace)
    assert patched.done == []
    assert "does not turn the halves of a head" in patched.refused[0]


def test_a_part_of_each_head_is_refused_by_name():
    model = hugging_face(
        "Phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    )
    assert "only a part of each head" in check_patch(model, replace).refused[0]


def test_a_function_in_one_file_that_turns_the_other_way():
    original = models.apply_rope
    patched = check_patch(OwnGPT(), replace)
    assert patched.done == ["rope: 2 OwnAttention turn by one kernel in place of apply_rope"]
    assert models.apply_rope is original


def test_models_of_one_file_are_patched_and_undone_apart():
    one, two, plain = (hugging_face("Llama") for _ in range(3))
    original, first, second = file_of(one).apply_rotary_pos_emb, Patched(), Patched()
    replace(one, first)
    replace(two, second)
    assert_alike(one, plain)
    first.undo()
    assert file_of(one).apply_rotary_pos_emb is not original
    assert_alike(two, plain)
    assert torch.equal(loss_of(one), loss_of(plain))
    second.undo()
    assert file_of(one).apply_rotary_pos_emb is original
