"""What was changed on a user's objects, so that it can be undone: the one way in which this room changes anything."""

from collections.abc import Callable
from typing import Any

NO_VALUES = "a dry run, whose tensors have neither values nor addresses, cannot tell; run the step"
_MISSING = object()


class Patched:
    """Changes in the order they were made, with what was done and what could not be.

    >>> class Thing: size = 1
    >>> thing, patched = Thing(), Patched()
    >>> patched.set(thing, "size", 2)
    >>> thing.size
    2
    >>> patched.undo()
    >>> thing.size, vars(thing)
    (1, {})
    """

    def __init__(self) -> None:
        self.done: list[str] = []  # one line each
        self.refused: list[str] = []  # what could not be done, and why
        self.updates = 0  # of weights by an optimizer of ours, whose kernels change no tensor's version
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the object itself; undone, it has what it had, or none of its own."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self.on_undo(lambda: delattr(owner, name) if before is _MISSING else setattr(owner, name, before))

    def on_undo(self, action: Callable[[], object]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        """Give back what was there, the last change first."""
        while self._undo:
            self._undo.pop()()
