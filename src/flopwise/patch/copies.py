"""Copies of a patched model, by `copy.deepcopy` or `torch.save(model)`, are of the original: with its classes, its forward, and
exact weights.

A replaced forward is a function that knows the model it was made for: in a copy it would go on to run the weights of the first.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from flopwise.patch.patched import Patched

Exact = Callable[[Tensor], Tensor]


def let_copies_be_originals(root: nn.Module, exact: Exact, patched: Patched) -> None:
    """From now on, until the patch is undone. `exact` gives a weight with what is kept of it elsewhere."""

    def deepcopied(memo: dict[int, Any]) -> nn.Module:
        return original_copy(root, exact, memo)

    def reduced(protocol: Any) -> Any:
        return original_copy(root, exact, {}).__reduce_ex__(protocol)

    patched.set(root, "__deepcopy__", deepcopied)
    patched.set(root, "__reduce_ex__", reduced)


@torch.no_grad()
def original_copy(root: nn.Module, exact: Exact, memo: dict[int, Any]) -> nn.Module:
    """A copy without anything that was put onto the model."""
    with _as_written(root):
        made = copy.deepcopy(root, memo)
    for old, new in zip(root.parameters(), made.parameters(), strict=True):
        value = exact(old)
        if value.dtype != new.dtype:
            gradient = new.grad
            new.grad, new.data = None, value.clone()
            new.grad = gradient.to(value.dtype) if gradient is not None else None
    return made


@contextmanager
def _as_written(root: nn.Module) -> Iterator[None]:
    """While open, the modules have neither our functions nor our hooks."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in root.modules():
            own = vars(module)
            for name, value in list(own.items()):
                if _is_ours(value):
                    before.append((own, name, own.pop(name)))
                elif isinstance(value, OrderedDict) and any(map(_is_ours, value.values())):
                    before.append((own, name, value))
                    own[name] = OrderedDict((key, one) for key, one in value.items() if not _is_ours(one))
        yield
    finally:
        for own, name, value in before:
            own[name] = value


def _is_ours(value: Any) -> bool:
    """
    >>> _is_ours(let_copies_be_originals), _is_ours(partial(_is_ours, 1)), _is_ours(len), _is_ours(nn.Linear(1, 1).forward)
    (True, True, False, False)
    """
    if isinstance(value, partial):
        return _is_ours(value.func)
    if isinstance(value, MethodType):
        held = type(value.__self__).__module__ or ""
        return _is_ours(value.__func__) or held.startswith("flopwise.patch")
    return callable(value) and (getattr(value, "__module__", None) or "").startswith("flopwise.patch")
