"""The phases of a step that is one callable: every part has its name, in the order it ran."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwise.capture.boundaries import BACKWARD, FORWARD, OPTIMIZER, REST, MarkedStep
from flopwise.capture.clock import clock_for
from flopwise.records.run import STEP

CPU = torch.device("cpu")
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
UPDATE = torch.optim.SGD(MODEL.parameters(), lr=0.1)
X = torch.ones(2, 4, requires_grad=True)


def usual():
    MODEL(X).sum().backward()
    UPDATE.step()
    UPDATE.zero_grad()


def accumulates():
    for _ in range(2):
        MODEL(X).sum().backward()
    nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0)
    UPDATE.step()


def with_closure():
    def closure():
        loss = MODEL(X).sum()
        loss.backward()
        return loss

    UPDATE.step(closure)


def recomputes():
    checkpoint(MODEL, X, use_reentrant=True).sum().backward()
    UPDATE.step()


def without_optimizer():
    torch.autograd.backward(MODEL(X).sum())


def by_grad():
    torch.autograd.grad(MODEL(X).sum(), list(MODEL.parameters()))


@pytest.mark.parametrize(
    ("step", "parts"),
    [
        (usual, [FORWARD, BACKWARD, OPTIMIZER, OPTIMIZER, OPTIMIZER]),
        (accumulates, [FORWARD, BACKWARD, FORWARD, BACKWARD, OPTIMIZER, OPTIMIZER, OPTIMIZER]),
        (with_closure, [FORWARD, FORWARD, BACKWARD, OPTIMIZER, OPTIMIZER]),
        (recomputes, [FORWARD, BACKWARD, OPTIMIZER, OPTIMIZER, OPTIMIZER]),
        (without_optimizer, [FORWARD, BACKWARD, REST]),
        (by_grad, [FORWARD, BACKWARD, REST]),
        (lambda: MODEL(X), []),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_parts_of_a_step(step, parts):
    found = MarkedStep(step).run(itertools.count().__next__)
    assert [name for name, _, _ in found] == parts
    assert all(begin < end for _, begin, end in found)
    assert not hasattr(torch.autograd.backward, "__wrapped__")  # nothing is left behind
    assert not hasattr(torch.autograd.grad, "__wrapped__")


def test_phases_are_timed_in_runs_of_their_own_and_only_in_the_first_samples():
    runs = []
    clock = clock_for({STEP: lambda: (runs.append(1), usual())}, CPU, single_op=False, find_phases=True)
    assert set(clock.sample()) == {STEP}  # without warm-up nothing is known of it
    clock.once()
    clock.once()
    runs.clear()
    samples = [clock.sample() for _ in range(12)]
    assert [set(one) for one in samples] == [{STEP, FORWARD, BACKWARD, OPTIMIZER}] * 10 + [{STEP}] * 2
    assert len(runs) == 22


def test_a_step_without_a_backward_pass_runs_once_a_sample():
    runs = []
    clock = clock_for({STEP: lambda: runs.append(1)}, CPU, single_op=False, find_phases=True)
    for _ in range(3):
        clock.once()
    assert [set(clock.sample()) for _ in range(3)] == [{STEP}] * 3
    assert len(runs) == 6
