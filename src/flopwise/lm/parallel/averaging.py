"""Tensors become their mean over the ranks. Both ways start at once and return what waits for the end."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Finish = Callable[[], object]


def average_in_place(tensor: Tensor) -> Finish:
    """All-reduce the tensor where it lies: nothing is copied, and a small tensor costs as much latency as a large one.

    Divided before it is summed: fp16 sums of many ranks would overflow. Gloo has no mean of its own.
    """
    tensor.div_(dist.get_world_size())
    work = dist.all_reduce(tensor, async_op=True)
    return work.wait  # type: ignore[no-any-return]


def average_flat(tensors: Sequence[Tensor]) -> Finish:
    """All-reduce a copy of all tensors, end to end in one: one latency, for two copies."""
    if not tensors:
        return lambda: None
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    average = average_in_place(flat)

    def copy_back() -> None:
        average()
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    return copy_back
