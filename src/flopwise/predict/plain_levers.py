"""The levers of plain PyTorch that save most time, one after the other, by predictions alone."""

from collections.abc import Callable

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.predict.constants import DEEP_LAYERS, LEVER_WORTH_NAMING, SHALLOW_LAYERS
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import Prediction, predict, predict_quickly
from flopwise.predict.recorded.step import RecordedStep
from flopwise.spec.recipe import Recipe, recipe_from
from flopwise.spec.workload import Workload

PLAIN = {"precision": "bf16", "optimizer": "fused", "attention": "sdpa", "compile": "default", "graph": "on"}

SavingNs = Callable[[dict[str, str]], float | None]  # of a step with these levers changed; None: it cannot be predicted


class LeverSaving(msgspec.Struct, frozen=True, kw_only=True):
    """A lever and what it saves after those before it."""

    lever: str
    value: str
    saving_ns: float


def best_levers(recipe: Recipe, step_ns: float, saving_ns: SavingNs) -> tuple[LeverSaving, ...]:
    """Levers worth naming, always next the one that saves most with those before it.

    >>> saves = {"graph": 5.0, "precision": 60.0}
    >>> found = best_levers(Recipe(), 100.0, lambda levers: sum(saves.get(one, 0.0) for one in levers))
    >>> [(one.lever, one.saving_ns) for one in found]
    [('precision', 60.0), ('graph', 5.0)]
    """
    left = {lever: value for lever, value in PLAIN.items() if _changes(recipe, lever)}
    chosen, found, saved_ns = dict[str, str](), list[LeverSaving](), 0.0
    while left:
        totals = {lever: ns for lever, value in left.items() if (ns := saving_ns(chosen | {lever: value})) is not None}
        best = max(totals, key=lambda lever: totals[lever], default="")
        if not best or totals[best] - saved_ns < LEVER_WORTH_NAMING * step_ns:
            break
        found.append(LeverSaving(lever=best, value=left[best], saving_ns=totals[best] - saved_ns))
        chosen, saved_ns = chosen | {best: left.pop(best)}, totals[best]
    return tuple(found)


def _changes(recipe: Recipe, lever: str) -> bool:
    """Whether plain PyTorch's best is more than the recipe has."""
    better = {
        "precision": recipe.compute not in ("bf16", "fp16"),
        "optimizer": recipe.optimizer in ("adamw-loop", "foreach"),
        "attention": recipe.attention == "naive",
    }
    return better[lever] if lever in better else bool(getattr(recipe, lever) == "off")


def recorded_levers(found: Prediction) -> tuple[LeverSaving, ...]:
    """Of a user's step that was recorded; none where it was not."""
    if found.recorded is None or found.time is None:
        return ()
    saving = _saving(found.workload, found.machine, found.recorded)
    return best_levers(found.workload.recipe, found.time.wall_ns, saving)


def predicted_levers(workload: Workload, machine: Machine, step_ns: float) -> tuple[LeverSaving, ...]:
    """Of a step that is predicted to take so long; none where it cannot be predicted in a moment.

    >>> from flopwise.predict.machine import machine_with
    >>> from flopwise.spec.gpu import gpu
    >>> from flopwise.spec.workload import workload
    >>> predicted_levers(workload("large"), machine_with(gpu("h200")), 3e8)[0].lever
    'precision'
    """
    spec = workload.own_model
    if spec is None:
        return ()

    def with_layers(n: int) -> SavingNs:
        return _saving(msgspec.structs.replace(workload, subject=msgspec.structs.replace(spec, n_layers=n)), machine)

    return best_levers(workload.recipe, step_ns, by_layers(with_layers, spec.n_layers))


def by_layers(with_layers: Callable[[int], SavingNs], layers: int) -> SavingNs:
    """The saving of a model with so many layers: of a deep one extrapolated from two with few.

    >>> by_layers(lambda n: lambda levers: 1.0 + n, 10)({})
    11.0
    """
    if layers <= DEEP_LAYERS:
        return with_layers(layers)
    first, second = SHALLOW_LAYERS
    few, more = with_layers(first), with_layers(second)

    def saving_ns(levers: dict[str, str]) -> float | None:
        low, high = few(levers), more(levers)
        return None if low is None or high is None else low + (high - low) / (second - first) * (layers - first)

    return saving_ns


def _saving(workload: Workload, machine: Machine, recorded: RecordedStep | None = None) -> SavingNs:
    now_ns = _step_ns(workload, machine, {}, recorded)

    def saving_ns(levers: dict[str, str]) -> float | None:
        then_ns = _step_ns(workload, machine, levers, recorded)
        return now_ns - then_ns if now_ns is not None and then_ns is not None else None

    return saving_ns


def _step_ns(
    workload: Workload, machine: Machine, levers: dict[str, str], recorded: RecordedStep | None
) -> float | None:
    try:
        changed = msgspec.structs.replace(
            workload, recipe=recipe_from(msgspec.structs.asdict(workload.recipe) | levers)
        )
        found = predict(changed, machine, recorded=recorded) if recorded else predict_quickly(changed, machine)
    except FlopwiseError:  # they do not go together, or nothing recorded says what comes of them
        return None
    return found.time.wall_ns if found is not None and found.time is not None else None
