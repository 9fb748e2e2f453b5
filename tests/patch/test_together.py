"""All levers on one model, in the order in which they are put on."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flopwise.patch import attention, mlp, norms, projections, rotary
from flopwise.patch.applied import Applied
from flopwise.patch.patched import Patched
from patch.models import OwnBlock, OwnGPT, assert_alike, check_patch, gradients, hugging_face


def replace_all(model, patched):
    norms.replace(model, "triton", patched)
    mlp.replace(model, "triton", patched)
    rotary.replace(model, "triton", patched)
    attention.replace(model, "sdpa", patched)
    return projections.replace(model, patched)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Phi3", "GPT2", "Gemma2", "ViT"])
def test_every_lever_on_a_model_of_transformers(name):
    patched = check_patch(hugging_face(name, attn_implementation="eager"), replace_all, atol=1e-5)
    assert patched.done


def test_every_lever_on_a_model_in_one_file():
    patched = check_patch(OwnGPT(), replace_all)
    assert [line.split(":")[0] for line in patched.done].count("activation") == 2
    assert {line.split(":")[0] for line in patched.done} == {"norm", "activation", "rope", "attention", "projections"}
    assert patched.refused == []


def test_every_lever_under_a_checkpoint_of_each_block(monkeypatch):
    forward = OwnBlock.forward
    monkeypatch.setattr(OwnBlock, "forward", lambda self, x: checkpoint(forward, self, x, use_reentrant=False))
    patched = check_patch(OwnGPT(), replace_all)
    assert patched.refused[0].startswith("projections: 1 OwnBlock: cannot be compared")
    assert {line.split(":")[0] for line in patched.done} == {"norm", "rope", "attention"}


def test_every_lever_on_blocks_that_are_checkpointed_from_outside():
    """As the checkpoint lever does it, which is put on last."""
    model, plain, patched = OwnGPT(), OwnGPT(), Patched()
    replace_all(model, patched)
    for block in model.h:
        patched.set(block, "forward", lambda x, inner=block.forward: checkpoint(inner, x, use_reentrant=False))
    for _ in range(3):
        assert_alike(model, plain)
    patched.undo()


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_blocks_that_the_lever_recomputes_stop_early(name):
    """What ends a checkpoint's second forward is no fault of the code that it ends."""
    model, plain = (hugging_face(name, attn_implementation="eager").train() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters())
    levers = {"checkpoint": 1, "activation": "triton", "norm": "triton", "rope": "triton"}
    found = Applied([model], [optimizer], levers)
    for _ in range(3):
        assert_alike(model, plain)
    assert found.refused == []


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_half_precision_stays_as_near_to_fp32_as_it_was(name):
    exact, plain, model = (hugging_face(name, attn_implementation="eager") for _ in range(3))
    replace_all(model, patched := Patched())
    _, expected = gradients(exact)
    with torch.autocast("cpu", torch.bfloat16):
        (_, theirs), (_, _), (_, mine) = gradients(plain), gradients(model), gradients(model)
    assert patched.done
    patched.undo()
    for parameter, gradient in expected.items():
        error = (mine[parameter] - gradient).norm()
        assert error <= 2 * (theirs[parameter] - gradient).norm() + 1e-3 * gradient.norm(), parameter
