"""Runs a script as `python script.py` would, in this process, and tells when it has imported torch. No torch here."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from flopwise.errors import FlopwiseError


class Program:
    """A script or a module that can be run as the main program."""

    def __init__(self, name: str, arguments: Sequence[str], *, module: bool = False) -> None:
        self.name, self.arguments = name, list(arguments)
        self._code, self._main, self.path = _of_module(name) if module else _of_file(name)

    @contextmanager
    def as_main(self) -> Iterator[None]:
        """While open, this is the main program: its arguments, its folder for imports, its `__main__`.

        Data workers that are spawned import `__main__` again by its file or its name, as they would without flopwise.
        """
        before = sys.argv, sys.path[:], sys.modules.get("__main__")
        sys.argv = [self._main.__file__ or self.name, *self.arguments]
        sys.path[0:1] = [self.path]
        sys.modules["__main__"] = self._main
        try:
            yield
        finally:
            sys.argv, sys.path[:] = before[0], before[1]
            if before[2] is not None:
                sys.modules["__main__"] = before[2]

    def run(self) -> None:
        """Until its end. What it raises comes out, SystemExit too."""
        exec(self._code, self._main.__dict__)

    def show_error(self, error: BaseException) -> None:
        """As Python would: the script's own frames only."""
        own: TracebackType | None = error.__traceback__
        while own is not None and own.tb_frame.f_code is not self._code:
            own = own.tb_next
        traceback.print_exception(type(error), error, own or error.__traceback__)


def _of_file(name: str) -> tuple[CodeType, types.ModuleType, str]:
    path = Path(name)
    if path.is_dir() and (path / "__main__.py").is_file():
        path = path / "__main__.py"
    if not path.is_file():
        made = f"a step that a function makes: flopwise bench {name}; a script: flopwise run {name.partition(':')[0]}"
        stored = "give the path of a Python file, or -m MODULE; what was measured before: flopwise runs"
        raise FlopwiseError(f"there is no script {name!r}", made if ".py:" in name else stored)
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise FlopwiseError(f"{name}{place}: {why}", "is it a Python file?") from None
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=__builtins__, __spec__=None)
    return code, main, str(path.parent.resolve())


def _of_module(name: str) -> tuple[CodeType, types.ModuleType, str]:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise FlopwiseError(
            f"the module {name!r} cannot be imported: {error}", "is it installed, or in this folder?"
        ) from None
    loader = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and isinstance(loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None:
        raise FlopwiseError(f"there is no module {name!r} to run", "is it installed, or in this folder?")
    main = types.ModuleType("__main__")
    package = spec.name.rpartition(".")[0]
    main.__dict__.update(__file__=spec.origin, __builtins__=__builtins__, __spec__=spec, __package__=package)
    return code, main, here


def after_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` once the module `name` has been imported, now if it has; what is returned forgets it.

    So that a script that sets variables for torch before it imports it finds torch not imported yet.
    """
    if name in sys.modules:
        then()
        return lambda: None
    finder = _Waiting(name, then)
    sys.meta_path.insert(0, finder)

    def forget() -> None:
        with suppress(ValueError):
            sys.meta_path.remove(finder)

    return forget


class _Waiting(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            run = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                with suppress(AttributeError):
                    del loader.exec_module  # what lay on the instance
                run(module)
                self.then()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
