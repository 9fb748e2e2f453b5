"""What a user's code raised, in one line: where, what, and its message."""

import os
import sysconfig
import traceback
from functools import cache
from pathlib import Path

import torch

from flopwise.errors import one_line


def describe_error(error: BaseException) -> str:
    """`train.py:42 in make_step: ValueError: bad size`: the innermost frame that is the user's own, if there is one.

    >>> describe_error(ValueError("bad\\nsize")), describe_error(AssertionError())
    ('ValueError: bad size', 'AssertionError')
    """
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    place = where(error)
    return one_line(f"{place}: {text}" if place else text)


def where(error: BaseException) -> str:
    """`train.py:42 in make_step`: the innermost frame that is the user's own; '' where none is."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f"{_near(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""


def is_own(file: str) -> bool:
    """Whether a file is the user's: not Python's, not installed, not flopwise's, not made while running.

    >>> is_own("/home/me/train.py"), is_own(torch.__file__), is_own(os.__file__), is_own("<string>"), is_own(__file__)
    (True, False, False, False, False)
    """
    path = Path(file)
    made = any(part.startswith("torchinductor_") for part in path.parts)
    if made or file.startswith("<") or {"site-packages", "dist-packages", ".triton"} & set(path.parts):
        return False
    return not any(path.is_relative_to(root) or path.resolve().is_relative_to(root) for root in _others())


@cache
def _others() -> tuple[Path, ...]:
    cache_folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    packages = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    places = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *packages, cache_folder]
    return tuple(Path(place).resolve() for place in places if place)


def _near(file: str) -> str:
    """The path from the working directory on, if it lies below; else from the home directory on."""
    for root, start in ((Path.cwd(), ""), (Path.home(), "~/")):
        if Path(file).is_relative_to(root):
            return f"{start}{Path(file).relative_to(root)}"
    return file
