"""Updating within the backward pass, on a stream of its own: the same losses and weights, without most of the gradients."""

import functools
import gc

import pytest
import torch
from torch import Tensor

from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.step import GRAPH_WARMUPS, Step, synchronise
from flopwise.spec.workload import workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

STEPS = 12
SIZE = {"batch": 4, "context": 256}
OPTIMIZERS = ("foreach", "fused", "flopwise", "flopwise-bf16")
MODES = {
    "eager": {},
    "graph": {"graph": "on"},
    "blocks": {"compile": "blocks"},
    "blocks and graph": {"compile": "blocks", "graph": "on"},
    "compiled whole, and graph": {"compile": "default", "graph": "on"},
    "checkpointed, and graph": {"checkpoint": 2, "graph": "on"},
    "tied, loss and projections fused, and graph": {
        "loss": "fused",
        "projections": "fused",
        "graph": "on",
        "tied": True,
    },
}


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    torch._dynamo.reset()


def trained(steps: int = STEPS, **levers: object) -> tuple[list[float], Tensor]:
    """The losses from the fourth step on, which is a graph's first replay, and all weights in the end."""
    fields = {"n_layers": 8, "tied": bool(levers.pop("tied", False))}
    step = build_step(workload("small", set=fields, **SIZE, **levers), resolve_device("auto"))  # type: ignore[arg-type]
    done = GRAPH_WARMUPS if levers.get("graph") == "on" else 0
    losses = []
    for number in range(done, steps):
        once(step)
        loss = step.loss()
        assert loss is not None
        if number >= GRAPH_WARMUPS:
            losses.append(float(loss))
    assert step.trained is not None
    return losses, torch.cat([p.detach().double().flatten() for p in step.trained.parameters()])


def once(step: Step) -> None:
    for run in step.phases.values():
        run()


@functools.cache
def beginning(tied: bool) -> Tensor:
    return trained(0, tied=tied)[1]


def assert_same(precision: str, **levers: object) -> None:
    """fp32 differs by the order of its sums alone, of which AdamW makes the most where a gradient is nearly zero."""
    start = beginning(bool(levers.get("tied", False))) if precision != "bf16-master" else None
    losses, weights = trained(precision=precision, overlap="on", **levers)
    expected_losses, expected = trained(precision=precision, **levers)
    assert losses == pytest.approx(expected_losses, rel=1e-4 if precision == "fp32" else 5e-3)
    assert losses[-1] < losses[0]
    if start is not None:
        gone = float((expected - start).norm())
        assert float((weights - expected).norm()) < (0.02 if precision == "fp32" else 0.2) * gone


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("graph", ["off", "on"])
def test_every_optimizer_comes_to_the_same_weights(optimizer: str, graph: str) -> None:
    assert_same("fp32", optimizer=optimizer, graph=graph)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_mode_comes_to_the_same_weights(mode: str, precision: str) -> None:
    assert_same(precision, optimizer="flopwise", **MODES[mode])


@pytest.mark.parametrize("graph", ["off", "on"])
def test_masters_come_to_the_same_losses(graph: str) -> None:
    assert_same("bf16-master", optimizer="flopwise", compile="blocks", graph=graph)


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("optimizer", ["fused", "flopwise"])
def test_the_peak_falls_by_most_of_the_gradients(optimizer: str, graph: str) -> None:
    """In fp32: autocast's copies of the weights are as large as half the gradients, and gone when these are there."""
    peaks = {overlap: _peak_bytes(optimizer=optimizer, graph=graph, overlap=overlap) for overlap in ("off", "on")}
    gradients = 4 * workload("medium").subject.parameters()  # type: ignore[union-attr]
    assert peaks["off"] - peaks["on"] > 0.75 * gradients


def _peak_bytes(**levers: str) -> int:
    device = resolve_device("auto")
    gc.collect()  # of the steps before
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    step = build_step(workload("medium", batch=1, context=64, **levers), device)
    if levers["graph"] == "on":
        return step.captured_peak_bytes - before
    for _ in range(2):
        once(step)
    torch.cuda.reset_peak_memory_stats(device)
    once(step)
    synchronise(device)
    return torch.cuda.max_memory_allocated(device) - before


def test_updates_run_beside_the_backward_pass() -> None:
    """Some of the optimizer's kernels begin before the last of backward's have ended, on another stream."""
    step = build_step(
        workload("medium", batch=4, context=512, precision="bf16", optimizer="flopwise", overlap="on"),
        resolve_device("auto"),
    )
    for _ in range(3):
        once(step)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        once(step)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    updates = [e for e in kernels if "adamw_update" in e.name]
    others = [e for e in kernels if "adamw" not in e.name]
    assert len(updates) > 24
    last = max(e.time_range.end for e in others)
    assert sum(e.time_range.start < last for e in updates) > 20
