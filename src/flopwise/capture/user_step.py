"""The user's own step: `path/file.py:factory` or `py:module:factory`.

The factory is called once, in a process of its own, and returns either a callable (the whole step) or a mapping of
phase names to callables, run in that order. flopwise times, synchronises and repeats; the step only does the work.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flopwise.capture.applied_levers import AppliedLevers
from flopwise.capture.built_objects import BuiltObjects
from flopwise.capture.factories import made_phases
from flopwise.capture.seen_step import most_common_dtype
from flopwise.capture.step import Step
from flopwise.errors import Unsupported
from flopwise.lm.precision import autocast, fp32_matmul_probe
from flopwise.patch.levers import PatchedModel
from flopwise.records.run import STEP, Ran
from flopwise.spec.dtypes import dtype_name
from flopwise.spec.recipe import WHOLE, Recipe
from flopwise.spec.workload import UserStep, Workload
from flopwise.torch_private import base_of, compile_cache_hits, is_compiled


def user_step(workload: Workload, device: torch.device) -> Step:
    """Load the factory, call it, check what it returns, and apply the levers."""
    assert isinstance(workload.subject, UserStep)
    built = BuiltObjects()
    with built.watching():
        made = made_phases(workload.subject, device)
    levers = AppliedLevers(workload.recipe, built, device, workload.subject.written)
    returned = ReturnedLoss()
    phases = {name: returned.from_phase(run) for name, run in levers.apply(made).items()}
    named = _nameable(built.model, workload.recipe)
    return Step(
        phases,
        ran=lambda: _ran(levers),
        model=named,
        trained=built.model,
        weights=lambda: [p for root in built.roots for p in root.parameters()],
        loss=returned.loss,
        loss_scale=lambda: built.loss_scale,
        exact_weight=levers.model.exact_weight,
        one_callable=set(phases) == {STEP},
        linear="; ".join(levers.model.in_fp8),
    )


def refused_levers(workload: Workload, device: torch.device, levers: dict[str, str]) -> tuple[str, ...]:
    """Those that this step cannot have, as far as that shows before it runs; none of another workload's."""
    if not levers or not isinstance(workload.subject, UserStep):
        return ()
    built = BuiltObjects()
    with built.watching():
        kept = made_phases(workload.subject, device)
    try:
        PatchedModel(built.roots, built.optimizers, levers).install()
    except Unsupported as error:
        return error.levers
    finally:
        del kept  # until now it held what was built
    return ()


class ReturnedLoss:
    """The loss of a user's step: the last single number that a phase returned, alone or first of several."""

    def __init__(self) -> None:
        self._last: Tensor | float | None = None

    def loss(self) -> Tensor | None:
        return torch.tensor(self._last, dtype=torch.float64) if isinstance(self._last, float) else self._last

    def from_phase(self, run: Callable[[], object]) -> Callable[[], object]:
        def phase() -> object:
            made = run()
            if (loss := _loss_in(made)) is not None:
                self._last = loss
            return made

        return phase


def _loss_in(made: object) -> Tensor | float | None:
    """A single number, or the first of a tuple, list or mapping; a mapping's 'loss' before its first.

    >>> _loss_in(torch.ones(1)), _loss_in((0.5, "x")), _loss_in({"n": 1.0, "loss": 2.0}), _loss_in([[1.0]])
    (tensor([1.]), 0.5, 2.0, None)
    """
    if isinstance(made, Mapping):
        made = made["loss"] if "loss" in made else next(iter(made.values()), None)
    elif isinstance(made, tuple | list):
        made = next(iter(made), None)
    if isinstance(made, float):
        return made
    if not isinstance(made, Tensor) or made.numel() != 1:
        return None
    base = base_of(made)
    return made.detach() if base is None or base.numel() == 1 else None  # a view of more would keep all of it


def _nameable(model: nn.Module | None, recipe: Recipe) -> nn.Module | None:
    """The model whose modules a trace can name: compiled whole, it has none any more."""
    if model is None or recipe.compile in WHOLE or any(map(is_compiled, model.modules())):
        return None
    return model


def _ran(levers: AppliedLevers) -> Ran:
    """What ran, as far as it shows in what was built; what a step does is seen in `seen_step`."""
    recipe, device, model = levers.recipe, levers.device, levers.built.model
    parameters = list(model.parameters()) if model is not None else []
    return Ran(
        device=str(device),
        parameters=sum(p.numel() for p in parameters),
        weights=most_common_dtype(parameters),
        compute=_compute(recipe, device),
        fp32_matmul=fp32_matmul_probe(device),
        attention=levers.levers.get("attention", ""),
        optimizer=", ".join(dict.fromkeys(_optimizer_name(o) for o in levers.built.optimizers)),
        checkpointed=levers.checkpointed,
        linear="; ".join(levers.model.in_fp8),
        inductor_cache_hits=compile_cache_hits(),
    )


def _compute(recipe: Recipe, device: torch.device) -> str:
    """What autocast makes of fp32 matmuls; '' where the step's own code decides."""
    if recipe.precision not in ("bf16", "fp16"):
        return ""
    with torch.no_grad(), autocast(recipe, device.type):
        probe = torch.zeros(16, 16, device=device)
        return dtype_name((probe @ probe).dtype)


def _optimizer_name(optimizer: Optimizer) -> str:
    """Its class, and the form it runs in; one of no form that is known has its class alone."""
    group = optimizer.param_groups[0]
    name, capturable = type(optimizer).__name__, " capturable" if group.get("capturable") else ""
    if "foreach" not in group:
        return name + capturable
    # Where nobody says, torch's own optimizers take the foreach form on a GPU.
    listed = group["params"][0].device.type == "cuda" if group["foreach"] is None else group["foreach"]
    return f"{name} {'fused' if group.get('fused') else 'foreach' if listed else 'loop'}{capturable}"
