"""Put a recipe that `tune` found onto the model and the optimizer of your own script."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.recipe import Recipe, levers_to_apply, read_toml, recipe_from

if TYPE_CHECKING:
    from flopwise.patch.applied import Applied


def apply(
    model: Any, optimizer: Any = None, *, recipe: str | Path | Recipe | Mapping[str, Any], quiet: bool = False
) -> "Applied":
    """Put a recipe onto a model and its optimizer (or lists of them), in place; says on stderr what it did and could not.

    `recipe`: a file that `flopwise tune … --save FILE.toml` wrote, or levers by name. `state_dict` keys and values stay, of the
    model and of the optimizer, so that checkpoints from before and after fit both ways. `.undo()` gives back the
    originals. Where the recipe has a CUDA graph, give your training step to `.step()` and call what it returns.

    >>> applied = flopwise.apply(model, optimizer, recipe="fast.toml")     # doctest: +SKIP
    >>> train_step = applied.step(train_step)                               # doctest: +SKIP
    """
    from flopwise.patch.applied import Applied, say

    models, optimizers = _listed(model), _listed(optimizer)
    _check("model", models, "parameters", "an nn.Module, or a list of them")
    _check("optimizer", optimizers, "param_groups", "a torch.optim.Optimizer, a list of them, or none")
    found, named = _recipe(recipe)
    # SDPA is what a recipe has by default: only one that names it asks for it.
    written = Recipe(attention="naive") if "attention" in named and found.attention == "sdpa" else Recipe()
    applied = Applied(models, optimizers, levers_to_apply(found, written))
    if not quiet:
        say(applied)
    return applied


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _check(what: str, found: list[Any], has: str, allowed: str) -> None:
    wrong = next((one for one in found if not hasattr(one, has)), None)
    if wrong is not None or (what == "model" and not found):
        raise FlopwiseError(f"{what} = {fields.show(type(wrong).__name__)} is not allowed", f"allowed: {allowed}")


def _recipe(given: Any) -> tuple[Recipe, set[str]]:
    """The recipe, and the levers that it names."""
    if isinstance(given, Recipe):
        return given, set(given.changed())
    if not isinstance(given, str | Path | Mapping):
        hint = "allowed: a file that `flopwise tune --save` wrote, a Recipe, or levers by name"
        raise FlopwiseError(f"recipe = {fields.show(given)} is not allowed", hint)
    named = read_toml(given, "a recipe") if isinstance(given, str | Path) else dict(given)
    return recipe_from(named), set(named)
