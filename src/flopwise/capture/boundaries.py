"""Where the phases of a step that is one callable begin and end, found while it runs.

The backward pass is what `backward()` and `torch.autograd.grad` do; the optimizer's step is what any optimizer's `step` does.
What lies before a backward pass is forward, what lies between it and the optimizer's step (clipping) is the optimizer's.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.optim import optimizer as optimizers

FORWARD, BACKWARD, OPTIMIZER, REST = "forward", "backward", "optimizer", "rest"
_CREATE_GRAPH = {"backward": 3, "grad": 4}  # the place of the argument `create_graph`

Tell = Callable[[str, bool], None]  # BACKWARD or OPTIMIZER, and whether it begins (else it ends)
T = TypeVar("T")


class Boundaries:
    """While open, tells of each backward pass and each optimizer step that lies in no backward pass; outermost calls only."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.creates_graph = False  # the backward pass that runs is differentiated itself: gradients are on in it
        self._open: list[str] = []  # the calls that are running, the innermost last
        self._calls = {
            name: self._around(getattr(torch.autograd, name), place) for name, place in _CREATE_GRAPH.items()
        }

    @property
    def innermost(self) -> str:
        """BACKWARD or OPTIMIZER; '' outside of both. An optimizer's step may hold a backward pass, and be inside of one."""
        return self._open[-1] if self._open else ""

    @property
    def running(self) -> tuple[str, ...]:
        """All calls that are running, the innermost last."""
        return tuple(self._open)

    @contextmanager
    def open(self) -> Iterator[None]:
        self._open.clear()
        with ExitStack() as stack:
            for name, call in self._calls.items():
                stack.callback(setattr, torch.autograd, name, getattr(torch.autograd, name))
                setattr(torch.autograd, name, call)
            stack.callback(optimizers.register_optimizer_step_pre_hook(self._update_begins).remove)
            stack.callback(optimizers.register_optimizer_step_post_hook(self._update_ends).remove)
            yield

    def _around(self, original: Callable[..., Any], place: int) -> Callable[..., Any]:
        """One wrapper for all time: to the compiler another one would be other code."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            outermost = BACKWARD not in self._open
            if outermost:
                self.creates_graph = bool(kwargs.get("create_graph", args[place] if len(args) > place else False))
                self._tell(BACKWARD, True)
            self._open.append(BACKWARD)
            try:
                return original(*args, **kwargs)
            finally:
                self._open.pop()
                if outermost:
                    self._tell(BACKWARD, False)

        return call

    def _update_begins(self, optimizer: object, args: object, kwargs: object) -> None:
        if not self._open:
            self._tell(OPTIMIZER, True)
        self._open.append(OPTIMIZER)

    def _update_ends(self, optimizer: object, args: object, kwargs: object) -> None:
        self._open.pop()
        if not self._open:
            self._tell(OPTIMIZER, False)


class MarkedStep:
    """Runs a step and takes a reading of some clock at every boundary.

    >>> clock, x = itertools.count(), torch.ones(2, requires_grad=True)
    >>> [(name, end - begin) for name, begin, end in MarkedStep(lambda: x.sum().backward()).run(clock.__next__)]
    [('forward', 1), ('backward', 1), ('rest', 1)]
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._step, self._boundaries = step, Boundaries(self._mark)
        self._read: Callable[[], Any] = lambda: None
        self._marks: list[tuple[str, Any]] = []
        self._last = ""  # what ended last
        self.has_backward = False  # of the last run

    def run(self, read: Callable[[], T]) -> list[tuple[str, T, T]]:
        """The parts in the order they ran, each with the readings at its begin and its end; none without a backward pass."""
        self._read = read
        with self.looking():
            self._marks.append(("", read()))
            self._step()
            self._marks.append((OPTIMIZER if self._last == OPTIMIZER else REST, read()))
        marks, self._marks = self._marks, []
        parts = itertools.pairwise(marks)
        return [(name, begin, end) for (_, begin), (name, end) in parts] if self.has_backward else []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While open, whatever runs shows whether it has a backward pass."""
        self.has_backward, self._last, self._marks = False, "", []
        with self._boundaries.open():
            yield

    def _mark(self, phase: str, begins: bool) -> None:
        self.has_backward = self.has_backward or phase == BACKWARD
        if begins:  # what ends here
            name = OPTIMIZER if phase == OPTIMIZER and self._last else FORWARD
        else:
            name = self._last = phase
        self._marks.append((name, self._read()))
