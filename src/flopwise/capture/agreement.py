"""Is it still right? A few steps of a workload, its losses and gradients, beside the same steps of a reference."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.step import GRAPH_WARMUPS, Step
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.lm.layers import JoinedLinear
from flopwise.records.events import Agreed, AgreeRequest
from flopwise.records.run import Agreement
from flopwise.spec.workload import Trial, Workload

FIRST = GRAPH_WARMUPS + 1  # the first step that is compared: capturing a graph has run those before it
COMPARED = 3
MOST = 1 << 14  # numbers of one gradient that are looked at, evenly spread

_NO_LIKENESS = 1e9  # the error of what should be zero; JSON has no infinity

Numbers = npt.NDArray[np.float64]
Gradients = dict[str, tuple[Numbers, int]]  # a weight's gradient at some places, and of how many


def agree(trial: Trial, request: AgreeRequest) -> Agreement:
    """Run the trial's workload from the seed on and compare; with `request.write` it is the reference itself."""
    workload = trial.workload
    step = build_step(workload, resolve_device(trial.device))
    before = _generators()
    losses, gradients, first = followed(step, _done(workload))
    if not losses and not gradients:
        raise Unsupported(
            f"{workload.target} shows neither a loss nor gradients",
            "a step of your own shows them if it returns its loss, or builds its model in the factory",
        )
    if what := not_finite(losses, gradients):
        raise FlopwiseError(f"{workload.target}: {what}, so that nothing can be compared with it")
    if request.write:
        _write(request.path, losses, gradients, first)
        itself = compared(losses, gradients, losses, gradients, first)
        return msgspec.structs.replace(itself, draws=_generators() != before)
    return _beside(losses, gradients, workload, request)


def _generators() -> list[bytes]:
    """Where every generator of random numbers stands that a step may draw from without having made it."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    return [*states, repr(random.getstate()).encode(), repr(np.random.get_state(legacy=False)["state"]).encode()]


def agreement_of(step: Step, workload: Workload, request: AgreeRequest, once: Callable[[], object]) -> Agreed:
    """The same of a step that is built and goes on afterwards; `once` runs it."""
    losses, gradients, _ = followed(step, _done(workload), once)
    if not losses and not gradients:
        return Agreed(failed=f"{workload.target} shows neither a loss nor gradients")
    if what := not_finite(losses, gradients):
        return Agreed(failed=what)
    return Agreed(agreement=_beside(losses, gradients, workload, request))


def not_finite(losses: list[float], gradients: Gradients) -> str:
    """Which of them is not a number, or infinite; '' if all are.

    >>> not_finite([2.0, math.nan], {}), not_finite([2.0], {})
    ('the loss is not finite', '')
    """
    if not all(math.isfinite(loss) for loss in losses):
        return "the loss is not finite"
    worst = next((name for name, (found, _) in gradients.items() if not np.isfinite(found).all()), "")
    return f"the gradient of {worst} is not finite" if worst else ""


def _done(workload: Workload) -> int:
    return GRAPH_WARMUPS if workload.recipe.graph == "on" else 0


def _beside(losses: list[float], gradients: Gradients, workload: Workload, request: AgreeRequest) -> Agreement:
    return compared(losses, gradients, *_read(request.path), any_scale=workload.recipe.precision == "fp16")


def followed(
    step: Step, done: int = 0, once: Callable[[], object] | None = None
) -> tuple[list[float], Gradients, float | None]:
    """The losses of some steps and the gradients of the first of them; `done` steps were run already. And the very first
    loss, if it was seen.
    """
    losses: list[float] = []
    gradients: Gradients = {}
    first: float | None = None
    for number in range(done + 1, FIRST + COMPARED):
        if once is not None:
            once()
        else:
            for phase in step.phases.values():
                phase()
        if 1 < number < FIRST:
            continue
        loss = step.loss()
        if number == 1:
            first = float(loss) if loss is not None else None
            continue
        losses += [float(loss)] if loss is not None else []
        if number == FIRST and step.trained is not None:
            gradients = sampled(step.trained)
    return losses, gradients, first


def sampled(model: nn.Module) -> Gradients:
    """Every weight's gradient at up to MOST places.

    >>> import torch
    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> sampled(layer)["weight"][0].tolist()
    [1.0, 1.0]
    """
    found = {}
    for name, gradient in _gradients(model):
        flat = gradient.reshape(-1)
        stride = max(1, math.ceil(flat.numel() / MOST))
        found[name] = (flat[::stride].double().cpu().numpy(), flat.numel())
    return found


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By the weights' names; those of projections that are one matmul by the names they have alone."""
    joined = {name: module for name, module in model.named_modules() if isinstance(module, JoinedLinear)}
    for name, weight in model.named_parameters():
        if weight.grad is None:
            continue
        owner, _, kind = name.rpartition(".")
        if owner not in joined:
            yield name, weight.grad.detach()
            continue
        above, one = owner.rpartition(".")[0], joined[owner]
        for alone, part in zip(one.names, weight.grad.detach().split(one.outs), strict=True):
            yield f"{above}.{alone}.{kind}", part


def compared(
    losses: list[float],
    gradients: Gradients,
    reference_losses: list[float],
    reference: Gradients,
    first: float | None = None,
    *,
    any_scale: bool = False,
) -> Agreement:
    """The errors; `any_scale`: the gradients still carry a loss scale, so that only their directions are compared."""
    common = [name for name in reference if name in gradients]
    scale = _scale(gradients, reference, common) if any_scale else 1.0
    off = size = worst = 0.0
    where = ""
    for name in common:
        (found, numel), truth = gradients[name], reference[name][0]
        weight = numel / max(1, found.size)
        wrong, right = float(((found / scale - truth) ** 2).sum()), float((truth**2).sum())
        off, size = off + weight * wrong, size + weight * right
        error = math.sqrt(wrong / right) if right else (0.0 if not wrong else _NO_LIKENESS)
        if not error <= worst:  # a NaN is the worst
            worst, where = error, name
    return Agreement(
        losses=tuple(losses),
        reference_losses=tuple(reference_losses),
        first_loss=first,
        gradient_error=math.sqrt(off / size) if size else None,
        worst_error=worst,
        worst=where,
        n_weights=len(common),
    )


def _scale(gradients: Gradients, reference: Gradients, common: list[str]) -> float:
    along = sum(float((gradients[name][0] * reference[name][0]).sum()) for name in common)
    size = sum(float((reference[name][0] ** 2).sum()) for name in common)
    return along / size if along and size else 1.0


def _write(path: str, losses: list[float], gradients: Gradients, first: float | None) -> None:
    arrays: dict[str, Any] = {f"g:{name}": values for name, (values, _) in gradients.items()}
    sizes = np.array([numel for _, numel in gradients.values()], dtype=np.int64)
    with open(path, "wb") as file:
        np.savez(
            file, losses=np.array(losses), first=np.array(math.nan if first is None else first), sizes=sizes, **arrays
        )


def _read(path: str) -> tuple[list[float], Gradients, float | None]:
    with np.load(path, allow_pickle=False) as stored:
        names = [name for name in stored.files if name.startswith("g:")]
        sizes = stored["sizes"].tolist()
        gradients = {name[2:]: (stored[name], size) for name, size in zip(names, sizes, strict=True)}
        first = float(stored["first"])
        return stored["losses"].tolist(), gradients, first if math.isfinite(first) else None
