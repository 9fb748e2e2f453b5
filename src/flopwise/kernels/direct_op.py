"""Custom ops whose kernels are short: in eager mode they are called without torch's dispatcher.

What `torch.library.custom_op` does around a call takes the host time that a short kernel does not hide. It is needed where
torch has to see the op: under a compiler, in a mode that follows ops, in a profile.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flopwise.torch_private import ops_are_followed, profiler_is_on

_PLAIN = (Tensor, nn.Parameter)


class DirectOp:
    """A custom op without mutated arguments; its first argument is a tensor."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function, self.op = function, torch.library.custom_op(name, function, mutates_args=())
        self.register_fake = self.op.register_fake
        self.node: type[torch.autograd.Function] | None = None

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        self.op.register_autograd(backward, setup_context=setup_context)
        methods = {"forward": self.function, "setup_context": setup_context, "backward": backward}
        static = {name: staticmethod(method) for name, method in methods.items()}
        self.node = type(self.function.__name__, (torch.autograd.Function,), static)

    def __call__(self, *args: Any) -> Any:
        if type(args[0]) not in _PLAIN or torch.compiler.is_compiling() or ops_are_followed() or profiler_is_on():
            return self.op(*args)
        return self.function(*args) if self.node is None else self.node.apply(*args)


def direct_op(name: str) -> Callable[[Callable[..., Any]], DirectOp]:
    """As a decorator.

    >>> @direct_op("flopwise::doubled")
    ... def doubled(x: Tensor) -> Tensor:
    ...     return 2 * x
    >>> doubled(torch.ones(1))
    tensor([2.])
    """
    return lambda function: DirectOp(name, function)
