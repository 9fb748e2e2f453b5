"""The name of the module that an op belongs to: `blocks.0.attention.q`."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from flopwise.torch_private import buffer_slots, parameter_slots


class ModuleNames:
    """Learns who is whose child while modules are built, and follows which forward runs."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.known: weakref.WeakKeyDictionary[nn.Module, None] = (
            weakref.WeakKeyDictionary()
        )  # in the order they were made
        # The first that is still there counts: a slice of a ModuleList is a list of its own, for a moment.
        self._parents: weakref.WeakKeyDictionary[nn.Module, list[tuple[weakref.ref[nn.Module], str]]] = (
            weakref.WeakKeyDictionary()
        )
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While open, every module of the process is watched."""
        handles = [
            hooks.register_module_module_registration_hook(self._adopted),
            hooks.register_module_parameter_registration_hook(self._registered),
            hooks.register_module_buffer_registration_hook(self._registered),
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def current(self) -> str:
        """The innermost module whose forward is running; '' outside all."""
        return self.stack[-1] if self.stack else ""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with the name of its module."""
        for module in self.known:
            for parameter in parameter_slots(module).values():
                if parameter is not None:
                    yield self._name(module), parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer with the name of its module."""
        for module in self.known:
            for buffer in buffer_slots(module).values():
                if buffer is not None:
                    yield self._name(module), buffer

    def _adopted(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._add_parent(child, parent, name)
            self._names.clear()
            self._learn(child)
        self.known.setdefault(parent)

    def _learn(self, module: nn.Module) -> None:
        """A module and all below it: in a deep copy nothing is registered."""
        for below in module.modules():
            self.known.setdefault(below)
            for name, child in below.named_children():
                self._add_parent(child, below, name)

    def _add_parent(self, child: nn.Module, parent: nn.Module, name: str) -> None:
        there = [one for one in self._parents.get(child, ()) if one[0]() is not None]
        if not any(ref() is parent for ref, _ in there):
            there.append((weakref.ref(parent), name))
        self._parents[child] = there

    def _registered(self, module: nn.Module, name: str, tensor: object) -> None:
        self.known.setdefault(module)

    def _enter(self, module: nn.Module, args: object) -> None:
        if module not in self.known:
            self._learn(module)
        self.stack.append(self._name(module))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self.stack.pop()

    def _name(self, module: nn.Module) -> str:
        name = self._names.get(module)
        if name is None:
            there = ((ref(), known) for ref, known in self._parents.get(module, ()))
            parent, name = next(((parent, known) for parent, known in there if parent is not None), (None, ""))
            above = self._name(parent) if parent is not None else ""
            self._names[module] = name = f"{above}.{name}" if above else name
        return name
