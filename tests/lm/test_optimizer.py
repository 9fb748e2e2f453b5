"""AdamW written out follows torch.optim.AdamW."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from flopwise.lm.optimizer import AdamWLoop, make_optimizer
from flopwise.spec.recipe import Recipe

HYPERPARAMETERS = [
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 1e-2, "betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.0},
    {"lr": 1e-2, "betas": (0.0, 0.99), "eps": 1e-4, "weight_decay": 1.0},
]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((5, 7), (11,), ())]


def walk(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 100) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for i, p in enumerate(params):  # gradients differ in size and direction from step to step, and one is missing
            gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 5 - 3) + p.detach()
            p.grad = None if i == 1 and step % 10 == 0 else gradient.to(p.dtype)
        optimizer.step()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("hyper", HYPERPARAMETERS)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_follows_torch_over_100_steps(hyper: dict, capturable: bool, tensor_lr: bool, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    lr = torch.tensor(hyper["lr"], dtype=torch.float64) if tensor_lr else hyper["lr"]
    walk(AdamWLoop(ours, **{**hyper, "lr": lr}, capturable=capturable), ours)
    walk(torch.optim.AdamW(theirs, **hyper, foreach=False), theirs)
    # The device's step count is fp32, so that βᵗ is too.
    tolerance = 1e-5 if dtype == torch.float32 or capturable else 1e-12
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def first_step(gradient: float, **given: bool) -> float:
    """The length of the first update, in learning rates."""
    p = nn.Parameter(torch.zeros((), dtype=torch.float64))
    p.grad = torch.full_like(p, gradient)
    AdamWLoop([p], lr=1.0, weight_decay=0.0, **given).step()
    return -p.item()


def test_epsilon_inside_the_root_follows_the_lectures_formula() -> None:
    (p,) = (nn.Parameter(torch.tensor(0.5, dtype=torch.float64)),)
    optimizer = AdamWLoop([p], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, eps_inside=True)
    theta, m, v = 0.5, 0.0, 0.0
    for t in range(1, 50):
        g = 1e-4 * math.sin(t)
        p.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        theta -= 1e-2 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / math.sqrt(v + 1e-8)
    assert p.item() == pytest.approx(theta, abs=1e-12)


def test_the_page_says_how_far_the_two_are_apart() -> None:
    """docs/appendix/course-tables.md has the first steps of small gradients."""
    page = (Path(__file__).parents[2] / "docs" / "appendix" / "course-tables.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (1e-\d) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for gradient, outside, inside in rows:
        assert float(outside) == pytest.approx(first_step(float(gradient)), rel=5e-3)
        assert float(inside) == pytest.approx(first_step(float(gradient), eps_inside=True), rel=5e-3)


def test_the_decay_never_enters_the_moments() -> None:
    for decay in (0.0, 0.5):
        (p,) = (nn.Parameter(torch.ones(3)),)
        optimizer = AdamWLoop([p], lr=0.1, weight_decay=decay)
        p.grad = torch.zeros(3)
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 0.1 * decay))
        assert optimizer.state[p]["exp_avg"].abs().max() == 0


def test_capturable_counts_on_the_device_and_reads_a_changed_learning_rate() -> None:
    params = parameters()
    lr = torch.tensor(1e-2)
    optimizer = AdamWLoop(params, lr=lr, capturable=True)
    walk(optimizer, params, steps=3)
    assert isinstance(optimizer.state[params[0]]["step"], torch.Tensor)
    assert optimizer.state[params[0]]["step"] == 3
    lr.zero_()
    before = params[0].detach().clone()
    walk(optimizer, params, steps=1)
    assert torch.equal(before, params[0].detach())


@pytest.mark.parametrize("capturable", [False, True])
def test_resumed_equals_uninterrupted(capturable: bool) -> None:
    straight, resumed = parameters(), parameters()
    optimizer = AdamWLoop(straight, capturable=capturable)
    walk(optimizer, straight, 5)
    walk(optimizer, straight, 5)
    first, second = (AdamWLoop(resumed, capturable=capturable) for _ in range(2))
    walk(first, resumed, 5)
    second.load_state_dict(first.state_dict())
    walk(second, resumed, 5)
    torch.testing.assert_close(straight, resumed, atol=0, rtol=0)


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = AdamWLoop([p], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert p.detach().max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_takes_the_same_steps(dtype: torch.dtype) -> None:
    ends = []
    for form in ("adamw-loop", "foreach", "fused"):
        params = parameters(dtype)
        walk(make_optimizer(params, Recipe(optimizer=form), 1e-2, graph=False), params, 20)
        ends.append(params)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for other in ends[1:]:
        torch.testing.assert_close(ends[0], other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", ["adamw-loop", "foreach", "fused"])
def test_for_a_graph_the_rate_is_a_tensor_beside_the_parameters(form: str) -> None:
    optimizer = make_optimizer(parameters(), Recipe(optimizer=form), 1e-2, graph=True)
    (group,) = optimizer.param_groups
    assert group["capturable"]
    assert torch.is_tensor(group["lr"])
    assert group["lr"].device == group["params"][0].device
    assert group["lr"].item() == pytest.approx(1e-2)
    eager = make_optimizer(parameters(), Recipe(optimizer=form), 1e-2, graph=False)
    assert eager.param_groups[0]["lr"] == 1e-2
    assert not eager.param_groups[0]["capturable"]
    if form != "adamw-loop":
        assert eager.param_groups[0][form]
