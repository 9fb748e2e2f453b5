"""Stacks: stored once, and shortened to the user's own frames."""

import re
from collections.abc import Sequence
from typing import Any

from flopwise.errors import one_line
from flopwise.snapshot.rows import cut, invalid, rows_of
from flopwise.snapshot.snapshot import Frame

# Not the user's code: torch and Python themselves, C++ and generated code, and what records the step.
_FOREIGN_FILE = re.compile(
    r"(^|/)(torch|torchvision|triton|accelerate|transformers|lightning|pytorch_lightning|deepspeed|numpy)/"
    r"|/lib/python3[^/]*/(?!site-packages|dist-packages)|^<|^\?\?|^$|^none$|\.(c|cc|cpp|cu|cuh|h|hpp|so)(\.\d+)*$"
    r"|runpy\.py$|importlib|(^|/)flopwise/(predict/dry/|worker/|torch_private\.py)"
    r"|(^|/)flopwise/capture/(watch/|memory_|trials|ranges|isolate|build|user_step|factories|step\.py)"
)
# On the stack of every op, also on the thread of autograd's engine.
_RECORDER = re.compile(r"(^|/)flopwise/(capture/(watch/|dry/|memory_)|predict/dry/|torch_private\.py)")
AUTOGRAD = "autograd"
_WIDTH = 160  # of a stack as it is shown
_CPP_NAME = re.compile(r"::|^_?Py[A-Z]\w*_|^c10|^at_|^__libc|^_start$|^clone3?$")


class StackTable:
    """Numbers stacks as the snapshot has them; number 0 is the stack without frames.

    torch writes every frame once and refers to it; so frames and whole lists are recognised by identity, and only new ones
    are looked at. The lists must outlive this table, or identities could be reused.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.stacks: list[tuple[int, ...]] = [()]
        self._frame_numbers: dict[Frame, int] = {}
        self._frame_by_id: dict[int, int] = {}
        self._stack_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._stack_by_id: dict[int, int] = {}
        self._stack_by_ids: dict[tuple[int, ...], int] = {}

    def number(self, frames: Any) -> int:
        """The number of a list of frame dicts; None is no stack."""
        if frames is None:
            return 0
        known = self._stack_by_id.get(id(frames))
        if known is None:
            known = self._stack_by_id[id(frames)] = self._listed(frames)
        return known

    def _listed(self, frames: Any) -> int:
        if type(frames) is not list:
            raise invalid("'frames'", f"is {type(frames).__name__}, not a list")
        ids = tuple(map(id, frames))
        known = self._stack_by_ids.get(ids)
        if known is None:
            numbers = tuple([self._frame(frame) for frame in rows_of(frames, "'frames'")])
            known = self._stack_numbers.setdefault(numbers, len(self.stacks))
            if known == len(self.stacks):
                self.stacks.append(numbers)
            self._stack_by_ids[ids] = known
        return known

    def _frame(self, raw: dict[Any, Any]) -> int:
        known = self._frame_by_id.get(id(raw))
        if known is None:
            file, line, name = raw.get("filename", ""), raw.get("line", 0), raw.get("name", "")
            if type(file) is not str or type(line) is not int or type(name) is not str:
                raise invalid("a frame's filename, line or name", "is not text, a number, text")
            frame = Frame(cut(file), max(0, min(line, 2**31)), cut(name))
            known = self._frame_numbers.setdefault(frame, len(self.frames))
            if known == len(self.frames):
                self.frames.append(frame)
            self._frame_by_id[id(raw)] = known
        return known


def is_users(frame: Frame) -> bool:
    """Whether the user may have written it.

    >>> is_users(Frame("/venv/lib/python3.11/site-packages/torch/nn/functional.py", 9, "linear"))
    False
    >>> is_users(Frame("/home/me/train.py", 9, "step"))
    True
    """
    return not _FOREIGN_FILE.search(frame.file) and not _CPP_NAME.search(frame.name)


def short(stack: Sequence[Frame], most: int = 3) -> str:
    """The user's own frames, innermost first; without any, the innermost that has a name.

    Where only flopwise's recorder is on the stack, no Python called it: that is the thread of autograd's engine.

    >>> frames = [Frame("/x/torch/nn/functional.py", 9, "linear"), Frame("/me/gpt.py", 31, "forward"),
    ...           Frame("/me/train.py", 12, "step")]
    >>> short(frames)
    'gpt.py:31 forward < train.py:12 step'
    >>> short([Frame("/x/torch/_ops.py", 865, "__call__"), Frame("/x/flopwise/capture/watch/tracker.py", 9, "_record")])
    'autograd'
    """
    chosen = [frame for frame in stack if is_users(frame)][:most]
    if not chosen and any(_RECORDER.search(frame.file) for frame in stack):
        return AUTOGRAD
    chosen = chosen or [frame for frame in stack if frame.name and not frame.name.startswith("??")][:1]
    files = [frame.file.rpartition("/")[2] for frame in chosen]
    places = [
        f"{file}:{frame.line} " if file not in ("", "??") else "" for file, frame in zip(files, chosen, strict=True)
    ]
    return one_line(" < ".join(place + frame.name for place, frame in zip(places, chosen, strict=True)), _WIDTH)
