"""The experiments there are: every file in `claims/`. No torch here."""

import importlib
import pkgutil
from functools import cache
from typing import Any

from flopwise.errors import FlopwiseError
from flopwise.experiments import claims as folder
from flopwise.experiments.experiment import Experiment
from flopwise.spec.fields import did_you_mean

ALL = "all"


@cache
def experiments() -> dict[str, Experiment[Any]]:
    """Every experiment by its name, in the order of their numbers."""
    found = [_load(module.name) for module in pkgutil.iter_modules(folder.__path__)]
    return {one.name: one for one in sorted(found, key=lambda one: (one.number, one.name))}


def _load(module: str) -> Experiment[Any]:
    found: Experiment[Any] = importlib.import_module(f"{folder.__name__}.{module}").EXPERIMENT
    if found.name != module.replace("_", "-"):
        raise FlopwiseError(
            f"the experiment in {module}.py calls itself '{found.name}'", "a file is named as its experiment"
        )
    return found


def chosen(names: tuple[str, ...]) -> list[Experiment[Any]]:
    """The experiments of these names, each once, in the order given; `all` means all."""
    there = experiments()
    for name in names:
        if name != ALL and name not in there:
            raise FlopwiseError(
                f"there is no experiment '{name}'",
                f"{did_you_mean(name.lower(), (*there, ALL))}there are: {', '.join(there)}; or {ALL}",
            )
    wanted = dict.fromkeys(one for name in names for one in (there if name == ALL else (name,)))
    return [there[name] for name in wanted]
