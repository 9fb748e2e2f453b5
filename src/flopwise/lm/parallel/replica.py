"""What every data-parallel wrapper shares: equal weights at the start, and what to do about missing gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Replica(nn.Module):
    """The module on this rank, equal to rank 0's when it is wrapped: parameters and buffers are broadcast.

    A subclass makes gradients equal too: after `finish_gradient_synchronization()` each is the mean over the ranks, which
    is the gradient of the mean loss over all ranks' batches.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        # The backward pass reaches the last layer first: this is about the order in which gradients are ready.
        self.trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """After the backward pass, before the optimizer's step: returns when gradients may be read."""
        raise NotImplementedError

    def finish_gradient_synchronisation(self) -> None:
        """The same, in British spelling."""
        self.finish_gradient_synchronization()

    @contextmanager
    def zeros_for_missing(self) -> Iterator[None]:
        """Inside, every parameter has a gradient, so that all ranks exchange the same tensors in the same order.

        A parameter may have got none here and one on another rank. What no rank has used is without one again afterwards:
        an optimizer leaves such a parameter alone, and would decay one with a gradient of zero.
        """
        missing = [number for number, p in enumerate(self.trained) if p.grad is None]
        for p in self.trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        yield
        if self.trained:
            uses = torch.ones(len(self.trained), device=self.trained[0].device)
            for number in missing:
                uses[number] = 0
            dist.all_reduce(uses)
            for number in missing:  # a GPU is waited for only where something is missing
                if not uses[number]:
                    self.trained[number].grad = None
