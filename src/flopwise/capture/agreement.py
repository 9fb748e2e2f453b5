"""Is a step still correct? The losses and gradients of a few steps, compared with those of a reference."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.ranges import run_phases
from flopwise.capture.step import GRAPH_WARMUPS, Step
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.lm.layers import JoinedLinear
from flopwise.records.events import AgreementRequest, AgreementResult
from flopwise.records.run import Agreement
from flopwise.spec.workload import Trial, Workload

FIRST_COMPARED = GRAPH_WARMUPS + 1  # the steps before it ran while a CUDA graph was captured
COMPARED = 3
MAX_VALUES = 1 << 14  # of one gradient, evenly spread

_INFINITE = 1e9  # the relative error of what should be zero; JSON has no infinity

Gradients = dict[
    str, tuple[npt.NDArray[np.float64], int]
]  # by weight: some of its gradient's values, and how many it has


class Results(NamedTuple):
    """What some steps computed."""

    losses: list[float]
    gradients: Gradients  # of the first compared step
    first_loss: float | None = None  # of the very first step, if it was seen

    def problem(self) -> str:
        """Why nothing can be compared with them; '' if something can.

        >>> Results([2.0, math.nan], {}).problem(), Results([2.0], {}).problem()
        ('the loss is not finite', '')
        """
        if not self.losses and not self.gradients:
            return "shows neither a loss nor gradients"
        if not all(math.isfinite(loss) for loss in self.losses):
            return "the loss is not finite"
        bad = next((name for name, (values, _) in self.gradients.items() if not np.isfinite(values).all()), "")
        return f"the gradient of {bad} is not finite" if bad else ""


def check_agreement(trial: Trial, request: AgreementRequest) -> Agreement:
    """Run the trial's workload from the seed on and compare; with `request.write` it becomes the reference itself."""
    workload = trial.workload
    step = build_step(workload, resolve_device(trial.device))
    before = _random_states()
    results = follow_steps(step, _steps_done(workload))
    if not results.losses and not results.gradients:
        hint = "a step of your own shows them if it returns its loss, or builds its model in the factory"
        raise Unsupported(f"{workload.target} shows neither a loss nor gradients", hint)
    if problem := results.problem():
        raise FlopwiseError(f"{workload.target}: {problem}, so nothing can be compared with it")
    if not request.write:
        return _with_reference(results, workload, request)
    _write(request.path, results)
    return msgspec.structs.replace(compare(results, results), draws=_random_states() != before)


def check_running_step(
    step: Step, workload: Workload, request: AgreementRequest, once: Callable[[], object]
) -> AgreementResult:
    """The same for a step that is built and will be measured afterwards; `once` runs it."""
    results = follow_steps(step, _steps_done(workload), once)
    if problem := results.problem():
        return AgreementResult(
            failed=problem if results.losses or results.gradients else f"{workload.target} {problem}"
        )
    return AgreementResult(agreement=_with_reference(results, workload, request))


def _random_states() -> list[bytes]:
    """The states of all global random generators that a step may draw from."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    return [*states, repr(random.getstate()).encode(), repr(np.random.get_state(legacy=False)["state"]).encode()]


def _steps_done(workload: Workload) -> int:
    return GRAPH_WARMUPS if workload.recipe.graph == "on" else 0


def _with_reference(results: Results, workload: Workload, request: AgreementRequest) -> Agreement:
    return compare(results, _read(request.path), any_scale=workload.recipe.precision == "fp16")


def follow_steps(step: Step, done: int = 0, once: Callable[[], object] | None = None) -> Results:
    """Run the step until enough were compared; `done` steps have run already."""
    losses: list[float] = []
    gradients: Gradients = {}
    first: float | None = None
    for number in range(done + 1, FIRST_COMPARED + COMPARED):
        (once or (lambda: run_phases(step.phases)))()
        loss = step.loss() if number == 1 or number >= FIRST_COMPARED else None
        if number == 1:
            first = float(loss) if loss is not None else None
        elif loss is not None:
            losses.append(float(loss))
        if number == FIRST_COMPARED and step.trained is not None:
            gradients = sample_gradients(step.trained)
    return Results(losses, gradients, first)


def sample_gradients(model: nn.Module) -> Gradients:
    """Up to MAX_VALUES values of every weight's gradient.

    >>> import torch
    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> sample_gradients(layer)["weight"][0].tolist()
    [1.0, 1.0]
    """
    sampled = {}
    for name, gradient in _gradients(model):
        flat = gradient.reshape(-1)
        stride = max(1, math.ceil(flat.numel() / MAX_VALUES))
        sampled[name] = (flat[::stride].double().cpu().numpy(), flat.numel())
    return sampled


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By weight; of projections joined into one matmul, by the names they have when separate."""
    joined = {name: module for name, module in model.named_modules() if isinstance(module, JoinedLinear)}
    for name, weight in model.named_parameters():
        if weight.grad is None:
            continue
        owner, _, kind = name.rpartition(".")
        if owner not in joined:
            yield name, weight.grad.detach()
            continue
        parent, module = owner.rpartition(".")[0], joined[owner]
        for separate, part in zip(module.names, weight.grad.detach().split(module.outs), strict=True):
            yield f"{parent}.{separate}.{kind}", part


def compare(results: Results, reference: Results, *, any_scale: bool = False) -> Agreement:
    """The errors; `any_scale`: the gradients still carry a loss scale, so only their directions are compared."""
    common = [name for name in reference.gradients if name in results.gradients]
    pairs = [(results.gradients[name][0], reference.gradients[name][0]) for name in common]
    scale = _scale(pairs) if any_scale else 1.0
    squared_error = squared_size = worst = 0.0
    worst_name = ""
    for name, (values, truth) in zip(common, pairs, strict=True):
        weight = results.gradients[name][1] / max(1, values.size)
        off, size = float(((values / scale - truth) ** 2).sum()), float((truth**2).sum())
        squared_error, squared_size = squared_error + weight * off, squared_size + weight * size
        error = math.sqrt(off / size) if size else (0.0 if not off else _INFINITE)
        if not error <= worst:  # a NaN is the worst
            worst, worst_name = error, name
    return Agreement(
        losses=tuple(results.losses),
        reference_losses=tuple(reference.losses),
        first_loss=reference.first_loss,
        gradient_error=math.sqrt(squared_error / squared_size) if squared_size else None,
        worst_error=worst,
        worst=worst_name,
        n_weights=len(common),
    )


def _scale(pairs: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]) -> float:
    along = sum(float((values * truth).sum()) for values, truth in pairs)
    size = sum(float((truth**2).sum()) for _, truth in pairs)
    return along / size if along and size else 1.0


def _write(path: str, results: Results) -> None:
    arrays: dict[str, Any] = {f"g:{name}": values for name, (values, _) in results.gradients.items()}
    arrays["sizes"] = np.array([numel for _, numel in results.gradients.values()], dtype=np.int64)
    arrays["first"] = np.array(math.nan if results.first_loss is None else results.first_loss)
    with open(path, "wb") as file:
        np.savez(file, losses=np.array(results.losses), **arrays)


def _read(path: str) -> Results:
    with np.load(path, allow_pickle=False) as stored:
        names = [name for name in stored.files if name.startswith("g:")]
        sizes = stored["sizes"].tolist()
        gradients = {name[2:]: (stored[name], size) for name, size in zip(names, sizes, strict=True)}
        first = float(stored["first"])
        return Results(stored["losses"].tolist(), gradients, first if math.isfinite(first) else None)
