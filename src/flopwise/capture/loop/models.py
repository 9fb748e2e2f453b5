"""The models that a loop trains, found from the weights its optimizer updates."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flopwise import torch_private


def namable(roots: list[nn.Module]) -> list[nn.Module]:
    """Modules whose names a trace can have: a hook inside of what is compiled as a function would compile it again."""
    known = [one for one in roots if next(one.children(), None) is not None]
    compiled = torch_private.compiled_graphs() > 0
    seen = any(torch_private.compiled_call(module) is not None for root in known for module in root.modules())
    return known if seen or not compiled else []


def trained_models(weights: list[torch.Tensor]) -> list[nn.Module]:
    """The outermost modules of this process that hold one of these weights.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> trained_models([model[0].weight]) == [model]
    True
    """
    wanted = {id(weight) for weight in weights}
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]  # no property of a stranger is read
    holding = [one for one in modules if any(id(weight) in wanted for weight in one.parameters())]
    inside = {id(part) for one in holding for part in one.modules() if part is not one}
    return [one for one in holding if id(one) not in inside]


@contextmanager
def before_forward(roots: list[nn.Module], tell: Callable[[], None]) -> Iterator[None]:
    """While open, `tell` is called as a call of one of these models begins; not of one inside of a compiled function."""
    hooked = roots if not torch_private.compiled_graphs() else [one for one in roots if torch_private.is_compiled(one)]
    in_place = {one: call for one in roots if (call := torch_private.compiled_call(one)) is not None}

    def told(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            tell()
            return call(*args, **kwargs)

        return run

    handles = [one.register_forward_pre_hook(lambda *_: tell()) for one in hooked if one not in in_place]
    for one, call in in_place.items():
        torch_private.set_compiled_call(one, told(call))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for one, call in in_place.items():
            torch_private.set_compiled_call(one, call)
