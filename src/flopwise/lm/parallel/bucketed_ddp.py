"""Data parallelism that overlaps in larger messages: gradients are averaged bucket by bucket."""

from torch import nn

from flopwise.lm.parallel.averaging import Finish, average_flat
from flopwise.lm.parallel.ddp import DDP, Group


class BucketedDDP(DDP):
    """Starts an all-reduce for every `bucket_mb` of gradients as soon as the last of them is ready.

    Small buckets pay a latency each; large ones begin late, and the last has nothing left to hide behind. Buckets are
    filled from the last parameter to the first. A parameter that is larger than a bucket has one to itself.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layers = [torch.nn.Linear(10, 10, bias=False) for _ in range(5)]  # 400 bytes each
    >>> wrap = BucketedDDP(torch.nn.Sequential(*layers), bucket_mb=0.001)
    >>> [len(bucket) for bucket in wrap.groups]
    [2, 2, 1]
    >>> dist.destroy_process_group()
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25) -> None:
        self.bucket_bytes = bucket_mb * 2**20  # as PyTorch counts them
        super().__init__(module)

    def grouped(self) -> list[Group]:
        buckets: list[list[nn.Parameter]] = []
        room = 0.0
        for p in self.trained:
            if p.nbytes > room:
                buckets.append([])
                room = self.bucket_bytes
            buckets[-1].append(p)
            room -= p.nbytes
        return list(buckets)

    def average(self, group: Group) -> Finish:
        return average_flat([p.grad for p in group])  # type: ignore[misc]
