"""What a user's factory builds, recorded while it builds: modules, optimizers, loss scalers."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class BuiltObjects:
    """The objects that were built and still exist, in the order they were made. They are referred to weakly."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, every module, optimizer and scaler of the process is recorded as it is made."""
        with ExitStack() as stack:
            for kind in (nn.Module, Optimizer, torch.amp.GradScaler):
                stack.enter_context(self._watching(kind))
            yield

    @contextmanager
    def _watching(self, kind: Any) -> Iterator[None]:
        original: Callable[..., None] = kind.__init__
        watching = True

        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            if watching:
                self._made.append(weakref.ref(made))
            original(made, *args, **kwargs)

        kind.__init__ = init
        try:
            yield
        finally:
            watching = False
            if kind.__init__ is init:  # torch.compile, first used meanwhile, may have wrapped this one
                kind.__init__ = original

    def _alive(self, kind: type[Any]) -> list[Any]:
        return list({id(made): made for ref in self._made if isinstance(made := ref(), kind)}.values())

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that are no other module's child."""
        modules: list[nn.Module] = self._alive(nn.Module)
        children = {id(child) for module in modules for child in module.children()}
        return [module for module in modules if id(module) not in children]

    @property
    def model(self) -> nn.Module | None:
        """The root with the most parameters, of those that an optimizer updates if there are any; None where none has any."""
        updated = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        found = [(list(root.parameters()), root) for root in self.roots]
        sizes = [(any(id(p) in updated for p in own), sum(p.numel() for p in own), root) for own, root in found]
        _, size, largest = max(sizes, key=lambda one: one[:2], default=(False, 0, None))
        return largest if size else None

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._alive(Optimizer)

    @property
    def scales_losses(self) -> bool:
        """Whether there is a loss scaler that is switched on."""
        return any(scaler.is_enabled() for scaler in self._alive(torch.amp.GradScaler))

    @property
    def loss_scale(self) -> float:
        """What that scaler multiplies losses by; 1 without one."""
        scales = (float(scaler.get_scale()) for scaler in self._alive(torch.amp.GradScaler) if scaler.is_enabled())
        return next(scales, 1.0)
