"""Functions of the files in which a model's classes are written: replaced for that model's modules, and for no other's."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from flopwise.patch.checked import Forward, forward_of, put_forward
from flopwise.patch.patched import Patched
from flopwise.torch_private import saved_tensor_hook

Function = Callable[..., Any]


class _Stand:
    """What stands in a file's globals for a function: each model's own replacement while its modules run, else the original."""

    def __init__(self, original: Function) -> None:
        self.original, self.users, self._running = original, 0, threading.local()

    @contextmanager
    def using(self, replacement: Function) -> Iterator[None]:
        before = getattr(self._running, "now", None)
        self._running.now = replacement, saved_tensor_hook()
        try:
            yield
        finally:
            self._running.now = before

    def function(self) -> Function:
        def stand(*args: Any, **kwargs: Any) -> Any:
            now = None if torch.compiler.is_compiling() else getattr(self._running, "now", None)
            if now is None or saved_tensor_hook() is not now[1]:
                return self.original(*args, **kwargs)  # also in a checkpoint inside of the module, which knows no other
            return now[0](*args, **kwargs)

        return stand


_STANDS: dict[Function, _Stand] = {}  # by the function that stands in a file's globals


def written_functions(model: nn.Module) -> Iterator[tuple[ModuleType, str, Function]]:
    """The plain functions that the files of a model's classes can call by name; of torch's files, none."""
    files = {type(module).__module__: None for module in model.modules()}
    for name in files:
        file = sys.modules.get(name)
        if file is not None and not name.startswith("torch."):
            for attribute, one in list(vars(file).items()):
                if isinstance(one, FunctionType):
                    original = _STANDS[one].original if one in _STANDS else one
                    if not (original.__module__ or "torch.").startswith("torch."):  # None: the compiler's own
                        yield file, attribute, original


def callers(model: nn.Module, file: ModuleType, name: str) -> list[nn.Module]:
    """The modules whose class, written in this file, names the function in one of its methods."""
    return [
        module for module in model.modules() if type(module).__module__ == file.__name__ and _names(type(module), name)
    ]


def _names(kind: type, name: str) -> bool:
    written = [one for base in kind.__mro__ if not base.__module__.startswith("torch.") for one in vars(base).values()]
    return any(name in names_in(unwrap(one).__code__) for one in written if isinstance(one, FunctionType))


def names_in(code: CodeType) -> set[str]:
    """The names that a function's code uses, also in the functions inside of it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for one in inner for name in names_in(one))}


def replace_function(
    file: ModuleType, name: str, modules: list[nn.Module], replacement: Function, patched: Patched
) -> None:
    """While one of these modules runs, the file's function of this name is the replacement."""
    standing = vars(file)[name]
    if standing not in _STANDS:
        stand = _Stand(standing)
        standing = stand.function()
        _STANDS[standing] = stand
        setattr(file, name, standing)
    stand = _STANDS[standing]
    stand.users += 1

    def leave() -> None:
        stand.users -= 1
        if not stand.users:
            _STANDS.pop(standing, None)
            if vars(file).get(name) is standing:
                setattr(file, name, stand.original)

    patched.on_undo(leave)
    for module in modules:
        put_forward(module, _forward(forward_of(module), stand, replacement), patched)


def _forward(original: Forward, stand: _Stand, replacement: Function) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        with stand.using(replacement):
            return original(self, *args, **kwargs)

    return forward


def modules_that_use(model: nn.Module, word: str, classes: tuple[type, ...]) -> list[nn.Module]:
    """Modules of classes that are not torch's and whose code names a function of torch, or that hold a module of `classes`.

    Also those that hold a small module which does so, one without parameters: its caller does the rest.
    """
    own = [one for one in model.modules() if not type(one).__module__.startswith("torch.")]
    using = {
        one for one in own if _uses(type(one), word) or any(isinstance(child, classes) for child in one.children())
    }
    small = {one for one in using if not any(True for _ in one.parameters())}
    return [one for one in own if one in using or any(child in small for child in one.children())]


def _uses(kind: type, word: str) -> bool:
    written = [one for base in kind.__mro__ if not base.__module__.startswith("torch.") for one in vars(base).values()]
    return any(_calls(one, word, 2) for one in written if isinstance(one, FunctionType))


def _calls(function: FunctionType, word: str, depth: int) -> bool:
    """Whether a function names the word, or a function of that name, or calls one that does."""
    function = unwrap(function)
    names = names_in(function.__code__)
    if word in names:
        return True
    reached = [function.__globals__.get(name) for name in names]
    if any(getattr(one, "__name__", "") == word for one in reached):
        return True
    return depth > 0 and any(_calls(one, word, depth - 1) for one in reached if isinstance(one, FunctionType))
