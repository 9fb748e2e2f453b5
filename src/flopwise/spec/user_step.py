"""How a user's own step is named: `path/file.py:factory` or `py:module:factory`, and what its factory is given."""

import ast
import os
import re
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields

_FILE = re.compile(r"(?:py:)?((.+\.py):[\w.]+)")
_MODULE = re.compile(r"py:([\w.]+:[\w.]+)")


def is_user_step(target: str) -> bool:
    """Whether a target means code of the user's own, well formed or not.

    >>> [is_user_step(word) for word in ("py:my.steps:make", "train.py:make", "train.py", "small", "hf:a.py")]
    [True, True, True, False, False]
    """
    return target.startswith("py:") or (not target.startswith(("hf:", "op:")) and bool(re.search(r"\.py(:|$)", target)))


def reference_in(target: str) -> str:
    """`module:factory` or `path/file.py:factory`; the file has to be there.

    >>> reference_in("py:my.steps:make")
    'my.steps:make'
    """
    if named := _FILE.fullmatch(target):
        _check_file(named[2])
        return named[1]
    if named := _MODULE.fullmatch(target):
        return named[1]
    if target.endswith(".py"):
        place = target.removeprefix("py:")
        _check_file(place)
        functions = _functions(place)
        step = f"; a function that makes a step: {place}:{[*functions, 'make_step'][0]}" if functions else ""
        raise FlopwiseError(f"'{target}' names no factory", f"the script as it is: flopwise run {place}{step}")
    hint = "for example py:my_project.steps:make_step, or steps.py:make_step"
    raise FlopwiseError(f"{fields.show(target)} is not py:module:factory", hint)


def check_arguments(target: str, given: dict[str, Any]) -> dict[str, Any]:
    """The factory's keyword arguments; which it has is known only where it is loaded."""
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name == "device":
            hint = "--device says where it runs" if name == "device" else "a name and a value, like n_layers=2"
            raise FlopwiseError(f"{fields.show(name)} cannot be an argument of {target}", hint)
        if not is_plain(value):
            hint = "allowed: text, numbers, true, false, and lists and tables of them"
            raise FlopwiseError(f"{name} = {fields.show(value)} is not allowed", hint)
    return given


def is_plain(value: object) -> bool:
    """Whether a value can be stored and read back as it is.

    >>> is_plain([1, 2.5, "x", None, True]), is_plain((1, 2)), is_plain(float("nan")), is_plain({1, 2})
    (True, False, False, False)
    """
    try:
        return bool(msgspec.json.decode(msgspec.json.encode(value)) == value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return False


def _check_file(place: str) -> None:
    path = os.path.expanduser(place)
    if os.path.isfile(path):
        return
    folder, name = os.path.split(path)
    try:
        others = sorted(other for other in os.listdir(folder or ".") if other.endswith(".py"))
    except (OSError, ValueError):
        others = []
    near = fields.did_you_mean(name, others) or f"Python files there: {', '.join(others[:5]) or 'none'}; "
    raise FlopwiseError(f"there is no file {fields.show(place)}", f"{near}a step is path/file.py:factory")


def _functions(place: str) -> list[str]:
    """The functions that a file defines at its top; none where it cannot be read."""
    try:
        with open(os.path.expanduser(place), "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")][:5]
