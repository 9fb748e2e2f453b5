"""Where the host of a training loop waits: for data, for copies to and from the GPU, for a checkpoint, in an evaluation."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from flopwise import torch_private

DATA, CHECKPOINT, EVALUATION = "data loading", "checkpoint", "evaluation"
TO_DEVICE, FROM_DEVICE = "host-to-device copies", "reading results (.item(), .cpu())"
APART = (EVALUATION, CHECKPOINT)  # no part of a step: every so often, or after each, the loop does something else
_TOLD = (DATA, *APART)
_READS = ("item", "tolist", "__float__")  # of a tensor on a GPU they wait for all work before them
_MOVES = ("to", "cuda", "cpu")


class Waits:
    """While open, adds up the host's time by cause; `take()` gives it and begins anew. The outermost cause counts.

    `tell` is told the cause as data loading, an evaluation or a checkpoint begins (True) and ends.
    """

    def __init__(self, tell: Callable[[str, bool], None] = lambda cause, begins: None) -> None:
        self._tell = tell
        self._ns: dict[str, int] = {}
        self.workers: int | None = None  # of the data loader, once a batch was loaded
        self._open = 0
        self._evaluating: tuple[int, nn.Module] | None = None  # since when, and the model that went into evaluation

    def take(self) -> dict[str, int]:
        """At the end of a step: what was updated is trained, so an evaluation that goes on is none."""
        found, self._ns, self._evaluating = self._ns, {}, None
        return found

    @property
    def evaluated(self) -> nn.Module | None:
        """The model that went into evaluation, until it trains again."""
        return self._evaluating[1] if self._evaluating is not None else None

    def training_begins(self) -> None:
        """A model's forward pass is differentiated: an evaluation has ended, if its model was set to train by other means."""
        if self._evaluating is not None and self._evaluating[1].training:
            self._end_evaluation()

    @contextmanager
    def open(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._wrap(stack, torch, "save", CHECKPOINT)
            for kind in torch_private.data_loader_iterators():
                self._wrap(stack, kind, "__next__", DATA)
            for name in _READS:
                self._wrap(stack, torch.Tensor, name, _read)
            for name in _MOVES:
                self._wrap(stack, torch.Tensor, name, _moved)
            train = nn.Module.train
            stack.callback(setattr, nn.Module, "train", train)
            nn.Module.train = self._around_train(train)  # type: ignore[method-assign]
            yield

    def _wrap(self, stack: ExitStack, holder: Any, name: str, cause: str | Callable[[Any, Any], str]) -> None:
        """`cause` may be found from the first argument and the result; '' is none."""
        original = getattr(holder, name)
        own = name in vars(holder)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._open or self._evaluating:
                return original(*args, **kwargs)
            if cause == DATA:
                self.workers = max(self.workers or 0, torch_private.loader_workers(args[0]))
            if cause in _TOLD:
                self._tell(str(cause), True)
            self._open, began, result = 1, time.perf_counter_ns(), None
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                self._open = 0
                if found := cause if isinstance(cause, str) else cause(args[0] if args else None, result):
                    self.add(found, time.perf_counter_ns() - began)
                if cause in _TOLD:
                    self._tell(str(cause), False)

        if own:
            stack.callback(setattr, holder, name, original)
        else:
            stack.callback(delattr, holder, name)
        setattr(holder, name, timed)

    def add(self, cause: str, ns: int) -> None:
        self._ns[cause] = self._ns.get(cause, 0) + ns

    def _around_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """From `model.eval()` until the same model trains again."""

        @functools.wraps(train)
        def switched(module: nn.Module, mode: bool = True) -> Any:
            if self._evaluating is None and not mode and module.training and _has_children(module):
                self._evaluating = time.perf_counter_ns(), module
                self._tell(EVALUATION, True)
            elif self._evaluating is not None and mode and self._evaluating[1] is module:
                self._end_evaluation()
            return train(module, mode)

        return switched

    def _end_evaluation(self) -> None:
        assert self._evaluating is not None
        self.add(EVALUATION, time.perf_counter_ns() - self._evaluating[0])
        self._evaluating = None
        self._tell(EVALUATION, False)


def _read(tensor: Any, number: Any) -> str:
    """What lies in the host's memory is there already: an optimizer that reads its own count of steps waits for nothing.

    >>> _read(torch.ones(1), 1.0), _read(torch.ones(1, device="meta"), 1.0)
    ('', 'reading results (.item(), .cpu())')
    """
    return "" if tensor.device.type == "cpu" else FROM_DEVICE


def _moved(before: Any, after: Any) -> str:
    """Which way a tensor went; '' where it stayed on its device."""
    if not isinstance(after, torch.Tensor) or before.device == after.device:
        return ""
    return TO_DEVICE if before.device.type == "cpu" else FROM_DEVICE if after.device.type == "cpu" else ""


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
