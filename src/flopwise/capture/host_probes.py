"""The host's time to launch a step: small models, eager and compiled, whose kernels take next to no time."""

import gc
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flopwise.capture.build import build_step
from flopwise.records.ceilings import COMPILED, HostCounts, Probe
from flopwise.spec.workload import Workload, workload

_UNFUSED = {"attention": "naive", "norm": "eager", "activation": "eager"}
# Deep and shallow, with casts and without: a fit can separate the cost of a phase, of an operation and of a cast.
Steps = tuple[tuple[int, str, dict[str, Any]], ...]  # layers, phase, levers
CountsOf = Callable[[Workload], dict[str, HostCounts]]  # what a step launches by phase, the loss counted with forward
STEPS: Steps = (
    (2, "train", {"precision": "bf16", "optimizer": "adamw-loop"}),
    (8, "train", {"precision": "bf16", "optimizer": "foreach"}),
    (2, "train", {"optimizer": "foreach"}),
    (8, "train", {"optimizer": "adamw-loop"}),
    (5, "train", {"precision": "bf16", "optimizer": "foreach", **_UNFUSED}),
    (2, "forward", {"precision": "bf16"}),
    (8, "forward", {"precision": "bf16"}),
    (8, "forward", {}),
    (5, "forward", _UNFUSED),
    (2, "train", {"precision": "bf16", "optimizer": "foreach", "checkpoint": 1}),
    (8, "train", {"precision": "bf16", "optimizer": "foreach", "checkpoint": 1}),
)
_WARMUP, _SAMPLES = 3, 5  # steps, and steps of a round
_LAYERS, _COMPILED_CALLS = (2, 12), 60


class HostTimer:
    """Times the launches of a few small steps, in rounds: a host's speed varies, and its usual speed is wanted."""

    def __init__(self, device: torch.device, steps: Steps = STEPS) -> None:
        self.device = device
        self.workloads = [_workload(*step) for step in steps]
        self.phases = [build_step(chosen, device).phases for chosen in self.workloads]
        self.times_ns: list[dict[str, list[int]]] = [{phase: [] for phase in phases} for phases in self.phases]
        self._run(_WARMUP, keep=False)

    def round(self) -> None:
        """Every step a few times."""
        self._run(_SAMPLES, keep=True)

    def _run(self, repeats: int, keep: bool) -> None:
        gc.collect()
        gc.disable()  # as while a step is measured
        try:
            for phases, times in zip(self.phases, self.times_ns, strict=True):
                for _ in range(repeats):
                    for phase, run in phases.items():
                        ns = _launch_ns(run, self.device)
                        times[phase] += [ns] * keep
        finally:
            gc.enable()

    def probes(self, counts_of: CountsOf) -> Iterator[Probe]:
        """The medians of the rounds, by phase."""
        for chosen, seen in zip(self.workloads, self.times_ns, strict=True):
            counts, ns = counts_of(chosen), {phase: median(times) for phase, times in seen.items()}
            ns["forward"] += ns.pop("loss", 0.0)
            for phase, name in _names(chosen).items():
                yield Probe(what=f"host:{name}", shape=tuple(counts[phase]), ns=float(ns[phase]))


def host_probe_count(steps: Steps = STEPS) -> int:
    """How many probes a `HostTimer` will give."""
    return sum(len(_names(_workload(*step))) for step in steps)


def _workload(layers: int, phase: str, levers: dict[str, Any]) -> Workload:
    return workload("tiny", batch=1, context=16, phase=phase, set={"n_layers": layers}, **levers)


def _names(chosen: Workload) -> dict[str, str]:
    """The phases of a step that are probes, with the probes' names."""
    recipe = chosen.recipe
    if chosen.phase == "forward":
        return {"forward": "inference"}
    if recipe.checkpoint:
        return {"forward": "checkpointed"}
    return {
        "forward": "forward",
        "backward": "backward",
        "optimizer": "optimizer" if recipe.optimizer == "adamw-loop" else "lists",
    }


def _launch_ns(run: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - begun


def probe_compiled(device: torch.device) -> Iterator[Probe]:
    """The host's time to call compiled graphs, forward and backward; nothing where torch.compile cannot run.

    Chains of products: few layers with a weight each, many with a weight each, and many with one weight that needs no
    gradient. A fit can then separate the call, the kernels and the tensors that are passed.
    """
    short, long = _LAYERS
    shapes = ((short, short), (long, long), (long, 1))  # layers and weights
    x = torch.rand(32, 32, device=device)
    chains = []
    for layers, n_weights in shapes:
        frozen = n_weights == 1
        weights = [torch.rand(32, 32, device=device, requires_grad=not frozen) for _ in range(n_weights)]
        chains.append((torch.compile(_chain(layers), dynamic=False), x.clone().requires_grad_(frozen), weights))
    try:
        # In rounds: a host's pace changes from second to second, and must not be taken for a difference between chains.
        rounds = [[_forward_backward_ns(*chain, device) for chain in chains] for _ in range(_COMPILED_CALLS)]
    except Exception:  # noqa: BLE001  (no compiler on this machine, for example: only this probe is lost)
        return
    for number, (layers, n_weights) in enumerate(shapes):
        times = [one[number] for one in rounds[_COMPILED_CALLS // 4 :]]
        forward = HostCounts(ops=2 * layers, views=0, kernels=0, listed=1 + n_weights)
        products = layers if n_weights == 1 else 2 * layers - 1
        kept = layers + n_weights + 1  # the products' results, the weights and the gradient
        backward = HostCounts(ops=layers + products, views=0, kernels=0, listed=kept)
        yield Probe(what=f"{COMPILED} forward", shape=tuple(forward), ns=float(median(ns for ns, _ in times)))
        yield Probe(what=f"{COMPILED} backward", shape=tuple(backward), ns=float(median(ns for _, ns in times)))


def _chain(layers: int) -> Callable[..., Tensor]:
    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for layer in range(layers):
            x = torch.mm(x, weights[layer % len(weights)]).sin()
        return x

    return chain


def _forward_backward_ns(
    run: Callable[..., Tensor], x: Tensor, weights: list[Tensor], device: torch.device
) -> tuple[int, int]:
    for tensor in (x, *weights):
        tensor.grad = None
    out: list[Tensor] = []
    forward_ns = _launch_ns(lambda: out.append(run(x, *weights)), device)
    gradient = torch.ones_like(out[0])
    return forward_ns, _launch_ns(lambda: out[0].backward(gradient), device)
