"""Data parallelism with one message: after the backward pass, all gradients in a single all-reduce."""

from flopwise.lm.parallel.averaging import average_flat
from flopwise.lm.parallel.replica import Replica


class FlatDDP(Replica):
    """Averages all gradients at once: one latency, for a copy of every gradient. Nothing is computed meanwhile.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> wrap = FlatDDP(torch.nn.Linear(2, 1))
    >>> wrap(torch.ones(3, 2)).mean().backward()
    >>> wrap.finish_gradient_synchronization()
    >>> wrap.module.bias.grad
    tensor([1.])
    >>> dist.destroy_process_group()
    """

    def finish_gradient_synchronization(self) -> None:
        with self.zeros_for_missing():
            average_flat([p.grad for p in self.trained])()  # type: ignore[misc]
