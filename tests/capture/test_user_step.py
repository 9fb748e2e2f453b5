"""What a step of the user's own returns, and what is taken of it."""

import pytest
import torch

from flopwise.capture.user_step import ReturnedLoss

LOSS = torch.tensor(0.5, requires_grad=True)


@pytest.mark.parametrize(
    "made",
    [
        LOSS,
        LOSS.view(1),
        torch.full((1, 1), 0.5),
        0.5,
        (LOSS, torch.ones(3)),
        [0.5],
        {"loss": LOSS},
        {"logits": torch.ones(3), "loss": 0.5},
        {"first": LOSS, "other": 7.0},
    ],
    ids=str,
)
def test_a_single_number_is_the_loss_alone_or_first(made):
    returned = ReturnedLoss()
    assert returned.from_phase(lambda: made)() is made
    assert returned.loss().item() == 0.5
    assert not returned.loss().requires_grad


@pytest.mark.parametrize(
    "made",
    [
        None,
        "0.5",
        True,
        3,
        torch.ones(3),
        torch.ones(3)[0],
        (),
        [],
        {},
        ("x", 0.5),
        ((0.5,),),
        {"loss": None, "x": 0.5},
    ],
    ids=str,
)
def test_anything_else_is_ignored(made):
    returned = ReturnedLoss()
    assert returned.from_phase(lambda: made)() is made
    assert returned.loss() is None


def test_a_phase_that_returns_nothing_leaves_the_loss_of_the_one_before():
    returned = ReturnedLoss()
    for made in (0.5, None):
        returned.from_phase(lambda made=made: made)()
    assert returned.loss().item() == 0.5
