"""A function of this process as a workload, named so that the process that measures finds it. No torch here."""

import atexit
import functools
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.scratch import Scratch
from flopwise.spec import fields
from flopwise.spec.user_step import is_plain
from flopwise.spec.workload import UserStep, Workload, workload

ALLOWED = "a preset ('small'), 'hf:PATH', 'file.py:factory', 'op:NAME', a function, or what flopwise.workload returns"
Target = str | Workload | Callable[..., object]

# Environment variables: what the process that measures is told beyond its requests.
LOADING = "FLOPWISE_LOADING_STEP"  # set there while the user's code is loaded: no flopwise is to run inside
PATH = "FLOPWISE_STEP_PATH"  # where this process finds modules
PICKLES = "FLOPWISE_STEP_PICKLES"  # the folder of functions that no name leads to
NODE = "FLOPWISE_NODE"  # the name of the cluster's node that it runs on

_MOST_BYTES = 16 * 2**20
_BY_NAME = "write it as a module-level function, or save the cell to a file (file.py:name); or pip install cloudpickle"


def as_workload(target: Target, options: dict[str, Any]) -> Workload:
    """The workload that a target means: a name, a factory or a step as a function, or a workload as it is."""
    if isinstance(target, Workload):
        return target
    if isinstance(target, str):
        return workload(target, **options)
    if not callable(target):
        raise FlopwiseError(f"target = {fields.show(target)} is not allowed", f"allowed: {ALLOWED}")
    if hasattr(target, "named_parameters"):
        hint = "write a function that builds model and optimizer and returns the step: docs/reference/own-step.md"
        raise FlopwiseError(f"a model ({type(target).__name__}) is not a step", hint)
    function, arguments = _without_arguments(target)
    os.environ[PATH] = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    by_name, pickles = _named(function), _cloudpickle()
    plain = all(is_plain(value) for name, value in arguments.items() if name != "device")
    if by_name is not None and (plain or pickles is None):
        return workload(by_name, **options | {"set": arguments | (options.get("set") or {})})
    name = re.sub(r"\W", "", getattr(function, "__qualname__", type(function).__name__).rpartition(".")[2])
    if pickles is None:
        raise FlopwiseError(f"{name}: the process that measures cannot import it by name", _BY_NAME)
    digest = _pickled(pickles, target, name)
    made = workload(f"py:{getattr(function, '__module__', None) or '__main__'}:{name}", **options)
    assert isinstance(made.subject, UserStep)
    return msgspec.structs.replace(made, subject=msgspec.structs.replace(made.subject, pickled=digest))


def _without_arguments(target: Callable[..., object]) -> tuple[Callable[..., object], dict[str, Any]]:
    """Of a `functools.partial` its function, and the arguments by name.

    >>> _without_arguments(functools.partial(sorted, reverse=True))
    (<built-in function sorted>, {'reverse': True})
    """
    if not isinstance(target, functools.partial):
        return target, {}
    names: list[str] = []
    if target.args:
        parameters = inspect.signature(target.func).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][: len(target.args)]
    if len(names) < len(target.args):
        return target, {}
    return target.func, dict(zip(names, target.args, strict=True)) | target.keywords


def _named(function: Callable[..., object]) -> str | None:
    """The target that leads to the function in another process; None if none does."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    home = sys.modules.get(module or "")
    found: object = home
    for part in path.split("."):
        found = getattr(found, part, None)
    if home is None or not path or found != function:
        return None
    if module != "__main__":
        return f"py:{module}:{path}"
    if home.__spec__ is not None:  # python -m package.script
        return f"py:{home.__spec__.name}:{path}"
    file = getattr(home, "__file__", None) or ""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not file.endswith(".py") or (code is not None and os.path.abspath(code.co_filename) != os.path.abspath(file)):
        return None  # a notebook's cell
    near = os.path.relpath(file)
    return f"{os.path.abspath(file) if near.startswith('..') else near}:{path}"


def _cloudpickle() -> ModuleType | None:
    """The package, where the user has it."""
    try:
        import cloudpickle
    except ImportError:
        return None
    found: ModuleType = cloudpickle
    return found


def _pickled(pickles: ModuleType, function: Callable[..., object], name: str) -> str:
    """Write the function where the process that measures reads it; returns its hash."""
    try:
        text: bytes = pickles.dumps(function)
    except Exception as error:  # noqa: BLE001  whatever the user's objects raise
        raise FlopwiseError(f"{name} cannot be pickled: {type(error).__name__}: {error}", _BY_NAME) from None
    if len(text) > _MOST_BYTES:
        hint = "build the model in the function; or write it as a module-level function"
        raise FlopwiseError(f"{name} holds {units.size(len(text))} of data that would have to be copied", hint)
    digest = hashlib.sha256(text).hexdigest()
    (_folder() / f"{digest}.pickle").write_bytes(text)
    return digest


@functools.cache
def _folder() -> Path:
    scratch = Scratch()
    atexit.register(scratch.close)
    os.environ[PICKLES] = str(scratch.path)
    return scratch.path


def refuse_inside_a_step() -> None:
    """Raise where a user's file is being imported for a measurement, and measures itself."""
    if reference := os.environ.get(LOADING):
        hint = 'put the call under `if __name__ == "__main__":`, so that the file can be imported'
        raise FlopwiseError(f"flopwise was called while {reference} was loaded to be measured", hint)
