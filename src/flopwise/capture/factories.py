"""Loads a user's factory by module, by file or from the process that made it, calls it, and checks what it returns."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flopwise.capture.functions import LOADING, PATH, PICKLES
from flopwise.errors import FlopwiseError, one_line
from flopwise.records.run import STEP
from flopwise.spec import fields
from flopwise.spec.workload import UserStep

Phases = dict[str, Callable[[], object]]

_HINT = "the factory takes the device and returns a callable, or {'forward': …, 'backward': …}; see docs/reference/own-step.md"
_NOT_RUN = (  # what a call of such a function only makes; its work is done by whoever uses that
    (inspect.iscoroutinefunction, "is an async function"),
    (inspect.isgeneratorfunction, "is a generator"),
    (inspect.isasyncgenfunction, "is an async generator"),
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def made_phases(subject: UserStep, device: torch.device) -> Phases:
    """Load the factory, call it once with the device and its arguments, and return the phases that it makes."""
    with _as_a_module(subject.reference):
        factory = _load(subject)
        arguments = _Call(factory, subject, device)
        made = factory(*arguments.positional, **arguments.named)
    name = _shown(subject)
    if not arguments.takes_device and not callable(made) and not _callables(made) and not _is_lazy(made):
        # It was the step itself: a function that needs nothing, has done its work, and returned no further function.
        return {STEP: lambda: factory(**arguments.named)} if arguments.named else {STEP: factory}
    return _phases(made, name)


@contextmanager
def _as_a_module(reference: str) -> Iterator[None]:
    """While open, the user's code is imported and called: it finds its neighbours, no command line, and no second flopwise."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    asked = os.environ.get(PATH, "").split(os.pathsep)
    sys.path += [place for place in asked if place and place not in sys.path]  # stays: a step may import while it runs
    words, sys.argv = sys.argv, [reference.rpartition(":")[0]]
    os.environ[LOADING] = reference
    try:
        yield
    finally:
        sys.argv = words
        del os.environ[LOADING]


def _load(subject: UserStep) -> Callable[..., object]:
    if subject.pickled:
        return _unpickled(subject.pickled)
    place, _, path = subject.reference.rpartition(":")
    module = _file(place) if place.endswith(".py") else _module(place)
    found: object = module
    for name in path.split("."):
        if not hasattr(found, name):
            there = [name for name, one in vars(module).items() if _defined_in(module, name, one)]
            hint = f"functions in it: {', '.join(there[:8])}" if there else _HINT
            raise FlopwiseError(f"'{place}' has no '{path}'", fields.did_you_mean(path, there) + hint)
        found = getattr(found, name)
    if not callable(found) or isinstance(found, nn.Module):
        what = "a model, and no factory or step" if isinstance(found, nn.Module) else "not callable"
        raise FlopwiseError(f"{_shown(subject)} is {what}", _HINT)
    for is_such, what in _NOT_RUN:
        if is_such(found):
            raise FlopwiseError(f"{_shown(subject)} {what}, and no factory or step", _HINT)
    return found


def _defined_in(module: ModuleType, name: str, one: object) -> bool:
    return inspect.isfunction(one) and one.__module__ == module.__name__ and not name.startswith("_")


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            hint = "run flopwise where it can be imported, or set PYTHONPATH; a file is named path/file.py:factory"
            raise FlopwiseError(f"there is no module '{name}'", hint) from None
        raise
    except SyntaxError as error:
        raise _syntax(error) from None


def _file(place: str) -> ModuleType:
    """The module that a file is: of its package, if it lies in one, else under its own name, next to its neighbours."""
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise FlopwiseError(f"there is no file '{place}'", "run flopwise in the folder that the path begins in")
    root, parts = file.parent, [] if file.name == "__init__.py" else [file.stem]
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        root, parts = root.parent, [root.name, *parts]
    sys.path.insert(0, str(root))
    try:
        if len(parts) > 1:
            module = importlib.import_module(".".join(parts))
            if module.__file__ is not None and Path(module.__file__).resolve() == file:
                return module
        return _by_path(file)
    except SyntaxError as error:
        raise _syntax(error) from None


def _by_path(file: Path) -> ModuleType:
    name = re.sub(r"\W", "_", file.stem)
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "/").resolve() == file:
        return known
    name = name if known is None and name not in sys.stdlib_module_names else f"{name}_of_step"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up while it is made
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _syntax(error: SyntaxError) -> FlopwiseError:
    at = f"{os.path.relpath(error.filename) if error.filename else 'the module'}:{error.lineno}"
    line = f": {error.text.strip()}" if error.text else ""
    return FlopwiseError(f"{at} cannot be read by Python: {error.msg}{line}", "correct the file")


def _unpickled(digest: str) -> Callable[..., object]:
    """A function that was pickled by the process that asks, and by no other."""
    try:
        text = (Path(os.environ.get(PICKLES, "")) / f"{digest}.pickle").read_bytes()
    except OSError:
        text = b""
    if hashlib.sha256(text).hexdigest() != digest:
        hint = "write it as a module-level function to run it again"
        raise FlopwiseError("this step was a function of a Python process that has ended", hint)
    found: Callable[..., object] = pickle.loads(text)
    return found


class _Call:
    """What a factory is called with, checked against its signature."""

    def __init__(self, factory: Callable[..., object], subject: UserStep, device: torch.device) -> None:
        self.positional: tuple[torch.device, ...]
        self.named: dict[str, Any] = dict(subject.arguments)
        try:
            parameters = inspect.signature(factory).parameters
        except (TypeError, ValueError):  # it is written in C
            self.positional, self.takes_device = (device,), True
            return
        self.positional = self._place(device, parameters)
        self.takes_device = bool(self.positional) or "device" in self.named
        left = list(parameters.values())
        self._check(_shown(subject), left[1:] if self.positional and left[0].kind in _POSITIONAL else left)

    def _place(self, device: torch.device, parameters: Mapping[str, inspect.Parameter]) -> tuple[torch.device, ...]:
        """By the name `device`; else in the place of the first parameter that needs a value and has none."""
        if "device" in parameters and parameters["device"].kind in _NAMED:
            self.named["device"] = device
            return ()
        for first in list(parameters.values())[:1]:
            needs = first.kind in _POSITIONAL and first.default is first.empty and first.name not in self.named
            if needs or first.kind is first.VAR_POSITIONAL:
                return (device,)
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            self.named["device"] = device
        return ()

    def _check(self, shown: str, left: list[inspect.Parameter]) -> None:
        """`left`: the parameters without the one that the device is given to by its place."""
        names = [one.name for one in left if one.kind in _NAMED]
        own = [name for name in names if name != "device"]
        unknown = [name for name in self.named if name not in names]
        if unknown and not any(one.kind is one.VAR_KEYWORD for one in left):
            has = f"arguments it has: {', '.join(own)}" if own else "it has no arguments that could be set"
            raise FlopwiseError(f"{shown} has no argument '{unknown[0]}'", fields.did_you_mean(unknown[0], own) + has)
        if missing := [name for name in _needed(left) if name not in self.named]:
            words = " ".join(f"--set {name}=…" for name in missing)
            raise FlopwiseError(f"{shown} needs {' and '.join(missing)}", f"give {words}; the device is given to it")


def _needed(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """The parameters that have no default."""
    return [one.name for one in parameters if one.default is one.empty and one.kind in (*_POSITIONAL, *_NAMED)]


def _phases(made: object, shown: str) -> Phases:
    phases = {STEP: made} if callable(made) else made
    if not isinstance(phases, Mapping) or not phases:
        hint = "a step is a callable; of a generator g: lambda: next(g)" if inspect.isgenerator(made) else _HINT
        raise FlopwiseError(f"{shown} returned {_kind(made)}", hint)
    for name, phase in phases.items():
        if not isinstance(name, str) or not name.isidentifier() or not callable(phase):
            text = f"returned a phase {one_line(repr(name), 60)} that is not a name with a callable"
            raise FlopwiseError(f"{shown} {text}", _HINT)
        if name == STEP and len(phases) > 1:
            hint = f"'{STEP}' means the whole; choose another name"
            raise FlopwiseError(f"{shown} names a phase '{STEP}' among others", hint)
        if problem := _not_a_phase(phase):
            raise FlopwiseError(f"{shown} returned a {name if name == STEP else f'phase {name}'} that {problem}", _HINT)
    return dict(phases)


def _not_a_phase(phase: Callable[..., object]) -> str:
    """Why a callable cannot be called as a phase is; '' if it can."""
    for is_such, what in _NOT_RUN:
        if is_such(phase):
            return f"{what}: calling it does no work"
    try:
        parameters = inspect.signature(phase.forward if isinstance(phase, nn.Module) else phase).parameters.values()
    except (TypeError, ValueError):
        return ""
    needed = _needed(parameters)
    what = "is a model and " if isinstance(phase, nn.Module) else ""
    return f"{what}needs {', '.join(needed)}, and a step takes nothing" if needed else ""


def _callables(made: object) -> bool:
    """Whether it is a mapping of phases: one of numbers is a step's result, such as its loss."""
    return isinstance(made, Mapping) and any(callable(one) for one in made.values())


def _is_lazy(made: object) -> bool:
    return inspect.isgenerator(made) or inspect.isawaitable(made) or inspect.isasyncgen(made)


def _kind(made: object) -> str:
    return "nothing" if made is None else f"{one_line(repr(type(made)))}, and no callable"


def _shown(subject: UserStep) -> str:
    place = subject.reference.rpartition(":")[0]
    return subject.reference if place.endswith(".py") else f"py:{subject.reference}"
