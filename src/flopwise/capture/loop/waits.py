"""Where the host of a training loop waits between its steps: for data, for a checkpoint to be written, in an evaluation."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from flopwise import torch_private

DATA, CHECKPOINT, EVALUATION = "data loading", "checkpoint", "evaluation"


class Waits:
    """While open, adds up the host's time by cause; `take()` gives it and begins anew. The outermost cause counts."""

    def __init__(self) -> None:
        self._ns: dict[str, int] = {}
        self._open = 0
        self._evaluating: tuple[int, nn.Module] | None = None  # since when, and the model that went into evaluation

    def take(self) -> dict[str, int]:
        """At the end of a step: what was updated is trained, so an evaluation that goes on is none."""
        found, self._ns, self._evaluating = self._ns, {}, None
        return found

    @contextmanager
    def open(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._wrap(stack, torch, "save", CHECKPOINT)
            for kind in torch_private.data_loader_iterators():
                self._wrap(stack, kind, "__next__", DATA)
            train = nn.Module.train
            stack.callback(setattr, nn.Module, "train", train)
            nn.Module.train = self._around_train(train)  # type: ignore[method-assign]
            yield

    def _wrap(self, stack: ExitStack, holder: Any, name: str, cause: str) -> None:
        original = getattr(holder, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._open or self._evaluating:
                return original(*args, **kwargs)
            self._open, began = 1, time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._open = 0
                self.add(cause, time.perf_counter_ns() - began)

        stack.callback(setattr, holder, name, original)
        setattr(holder, name, timed)

    def add(self, cause: str, ns: int) -> None:
        self._ns[cause] = self._ns.get(cause, 0) + ns

    def _around_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """From `model.eval()` until the same model trains again."""

        @functools.wraps(train)
        def switched(module: nn.Module, mode: bool = True) -> Any:
            if self._evaluating is None and not mode and module.training and _has_children(module):
                self._evaluating = time.perf_counter_ns(), module
            elif self._evaluating is not None and mode and self._evaluating[1] is module:
                self.add(EVALUATION, time.perf_counter_ns() - self._evaluating[0])
                self._evaluating = None
            return train(module, mode)

        return switched


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
