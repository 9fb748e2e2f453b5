"""Data parallelism at its simplest: after the backward pass, one all-reduce per parameter."""

from flopwise.lm.parallel.averaging import average_in_place
from flopwise.lm.parallel.replica import Replica


class NaiveDDP(Replica):
    """Averages gradients one after the other. The GPU computes nothing meanwhile, and every parameter costs a latency.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> wrap = NaiveDDP(torch.nn.Linear(2, 1))
    >>> wrap(torch.ones(3, 2)).mean().backward()
    >>> wrap.finish_gradient_synchronization()
    >>> wrap.module.weight.grad
    tensor([[1., 1.]])
    >>> dist.destroy_process_group()
    """

    def finish_gradient_synchronization(self) -> None:
        with self.zeros_for_missing():
            for p in self.trained:
                average_in_place(p.grad)()  # type: ignore[arg-type]
