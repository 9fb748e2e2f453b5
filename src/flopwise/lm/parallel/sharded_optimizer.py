"""ZeRO-1 (Rajbhandari et al. 2020): every rank keeps the optimizer's state of its share of the parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class ShardedOptimizer(Optimizer):
    """An optimizer of class `cls` over this rank's share; after a step every rank has all updated parameters.

    Gradients must be the same on all ranks, as data parallelism leaves them. Parameters are dealt whole, the largest
    first, each to the rank that has least. `state_dict()` holds all groups and this rank's states, numbered as in the
    unsharded optimizer: those of all ranks together are its state.

    >>> import torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = ShardedOptimizer([weight], torch.optim.SGD, lr=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 0.5000])
    >>> dist.destroy_process_group()
    """

    def __init__(self, params: Iterable[Any], cls: type[Optimizer], **kwargs: Any) -> None:
        self.cls, self.kwargs = cls, kwargs
        self.own: Optimizer | None = None  # that of this rank's share
        self.owner: dict[Tensor, int] = {}
        self.load = [0] * dist.get_world_size()  # elements dealt to each rank
        super().__init__(params, kwargs)  # adds the groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Deal the group's parameters; also in the middle of training."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in sorted(group["params"], key=Tensor.numel, reverse=True):
            self.owner[p] = self.load.index(min(self.load))
            self.load[self.owner[p]] += p.numel()
        share = {**group, "params": [p for p in group["params"] if self.owner[p] == dist.get_rank()]}
        if self.own is None:
            self.own = self.cls([share], **self.kwargs)
            self.state = self.own.state
        else:
            self.own.add_param_group(share)
        for name, value in self.own.param_groups[-1].items():
            group.setdefault(name, value)  # the class's own defaults, for schedulers and checkpoints

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's share, then send every parameter from its owner to all."""
        assert self.own is not None
        for group, share in zip(self.param_groups, self.own.param_groups, strict=True):
            share.update({**group, "params": share["params"]})  # a schedule has set the learning rate
        loss = self.own.step(closure)
        sent = [
            dist.broadcast(p.detach(), src=owner, async_op=True) for p, owner in self.owner.items() if p.requires_grad
        ]
        for work in sent:
            work.wait()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What this rank's `state_dict()` gave, or the unsharded optimizer's: every rank takes its share."""
        assert self.own is not None
        saved = state_dict["param_groups"]
        numbers = [number for group in saved for number in group["params"]]
        number_of = dict(zip((p for group in self.param_groups for p in group["params"]), numbers, strict=True))
        groups = []
        for group, share, old in zip(self.param_groups, self.own.param_groups, saved, strict=True):
            group.update({**old, "params": group["params"]})
            groups.append({**old, "params": [number_of[p] for p in share["params"]]})
        kept = {number for group in groups for number in group["params"]}
        states = {number: state for number, state in state_dict["state"].items() if number in kept}
        self.own.load_state_dict({"state": states, "param_groups": groups})
        self.state = self.own.state
