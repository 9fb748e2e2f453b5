"""Updating within the backward pass changes when weights are updated, not what they become."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from flopwise.capture.build import build_step
from flopwise.capture.model_step import ModelStep
from flopwise.lm.overlap import UpdateInBackward, parameter_groups
from flopwise.lm.transformer import Transformer
from flopwise.patch.blocks import blocks_of
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import workload

from .reference import GPT2_LIKE, TINY

CPU = torch.device("cpu")
STEPS = 4
TIED = {"tied": True, "qk_norm": True, "n_kv_heads": 2, "n_layers": 3}
CASES = {
    "foreach": {},
    "fused": {"optimizer": "fused"},
    "written out": {"optimizer": "adamw-loop"},
    "our own": {"optimizer": "flopwise"},
    "our own, moments in bf16": {"optimizer": "flopwise-bf16"},
    "autocast": {"precision": "bf16", "optimizer": "fused"},
    "bf16 throughout": {"precision": "bf16-pure", "optimizer": "fused"},
    "fp32 masters": {"precision": "bf16-master", "optimizer": "flopwise"},
    "tied weights": {"set": TIED},
    "tied weights, loss in chunks": {"set": TIED, "loss": "chunked"},
    "fused loss and projections": {"set": TIED, "loss": "fused", "projections": "fused"},
    "checkpoint": {"checkpoint": 1},
    "checkpoint of two blocks of three, autocast": {"checkpoint": 2, "set": {"n_layers": 3}, "precision": "bf16"},
}


def trained(**options: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps, and the weights after them."""
    torch.manual_seed(0)
    step = ModelStep(workload("tiny", batch=2, context=32, **options), CPU)  # type: ignore[arg-type]
    losses = []
    for _ in range(STEPS):
        for run in step.phases().values():
            run()
        assert step.loss is not None
        losses.append(float(step.loss))
    return losses, dict(step.model.named_parameters())


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (n > 1)) for n, c in enumerate(CASES)])
def test_losses_and_weights_are_the_same_to_the_bit(case: str) -> None:
    losses, weights = trained(**CASES[case], overlap="on")
    expected_losses, expected = trained(**CASES[case])
    assert losses == expected_losses
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("compile_", ["blocks", pytest.param("default", marks=pytest.mark.slow)])
def test_so_are_those_of_a_compiled_step(compile_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    losses, weights = trained(compile=compile_, overlap="on")
    torch.compiler.reset()
    expected_losses, expected = trained(compile=compile_)
    torch.compiler.reset()
    assert losses == expected_losses
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_group_is_a_block_and_every_other_weight_is_one() -> None:
    model = Transformer(TINY, Recipe(), 32)
    groups = parameter_groups(model, blocks_of([model]))
    sizes = [len(list(block.parameters())) for block in model.blocks]
    assert [len(group) for group in groups] == [*sizes, 1, 1, 1]  # embedding, last norm, head
    assert sorted(id(p) for group in groups for p in group) == sorted(map(id, model.parameters()))


def test_a_tied_weight_is_one_group_and_is_updated_once_after_both_uses() -> None:
    model = Transformer(GPT2_LIKE, Recipe(), 32)
    counted: list[int] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: counted.append(1))
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert counted == [1]
    groups = parameter_groups(model, blocks_of([model]))
    assert sum(any(p is model.head.weight for p in group) for group in groups) == 1


def test_gradients_are_never_there_together() -> None:
    """A block's are dropped when the next block's have arrived; nothing is left at the end."""
    torch.manual_seed(0)
    step = ModelStep(workload("tiny", batch=1, context=16, overlap="on", set={"n_layers": 6}), CPU)
    assert step.overlapped is not None
    there: list[int] = []

    def look(_: torch.Tensor) -> None:
        there.append(sum(p.grad is not None for p in step.model.parameters()))

    for p in step.model.parameters():
        p.register_post_accumulate_grad_hook(look)
    for run in step.phases().values():
        run()
    of_a_block = len(list(step.model.blocks[0].parameters()))  # type: ignore[arg-type,index,union-attr]
    assert max(there) < of_a_block  # the last one's hook runs after the update
    assert all(p.grad is None for p in step.model.parameters())
    assert not step.overlapped._held


def test_weights_without_a_gradient_do_not_hold_up_the_others() -> None:
    used, unused, alone = (nn.Parameter(torch.ones(1)) for _ in range(3))
    update = UpdateInBackward([[used, unused], [alone]], lambda params: torch.optim.SGD(params, lr=0.25))
    for _ in range(2):
        (2 * used).sum().backward()
        update.finish()
    assert [p.item() for p in (used, unused, alone)] == [0.0, 1.0, 1.0]
    assert used.grad is None


def test_every_group_follows_the_schedule() -> None:
    torch.manual_seed(0)
    step = ModelStep(workload("tiny", batch=1, context=16, overlap="on"), CPU)
    for _ in range(3):
        for run in step.phases().values():
            run()
    rates = {group["lr"] for optimizer in step.optimizers for group in optimizer.param_groups}
    assert rates == {3e-5}  # of the third of a hundred steps of warm-up


def test_the_record_says_that_it_ran_so() -> None:
    step = build_step(workload("tiny", batch=1, context=16, overlap="on", optimizer="fused"), CPU)
    for run in step.phases.values():
        run()
    assert step.ran().optimizer == "AdamW fused, in backward in 5 groups"
    assert list(step.phases) == ["forward", "loss", "backward", "optimizer"]


class Stream:
    """A CUDA stream's part in the order of things: who waits for what, written down."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self.events = name, said, 0

    def wait_stream(self, other: "Stream") -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.events += 1
        return f"{self.name}'s {self.events}"

    def wait_event(self, event: str) -> None:
        self.said.append(f"{self.name} waits for {event}")


def test_streams_wait_for_each_other_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    outer, model, updates = (Stream(name, said) for name in ("outer", "model", "updates"))
    current = [outer]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    update = UpdateInBackward([[layer.weight] for layer in layers], lambda params: torch.optim.SGD(params, lr=0.1))
    update.stream, update.model_stream = updates, model  # type: ignore[assignment]
    for number, optimizer in enumerate(update.optimizers):
        optimizer.register_step_pre_hook(
            lambda *_, number=number: said.append(f"{current[-1].name} updates {number}")  # type: ignore[misc]
        )
    with update.ahead():
        layers(torch.ones(1, 2)).sum().backward()
    update.finish()
    assert said == [
        "model waits for outer",
        *("updates waits for model", "updates updates 2"),
        *("updates waits for model", "updates updates 1", "model waits for updates's 1"),  # 2's gradients may go
        *("updates waits for model", "updates updates 0", "model waits for updates's 2"),
        "outer waits for model",
        "outer waits for updates's 3",  # the last update, and so all
    ]
