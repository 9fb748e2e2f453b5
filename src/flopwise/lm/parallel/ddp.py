"""Data parallelism that overlaps: gradients are averaged while the backward pass computes the next ones."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from flopwise.errors import FlopwiseError
from flopwise.lm.parallel.averaging import Finish, average_in_place
from flopwise.lm.parallel.replica import Replica

Group = Sequence[nn.Parameter]


class DDP(Replica):
    """Starts an all-reduce for every parameter as soon as its gradient is ready; `finish_…` waits for what is under way.

    Ranks match their collectives by order, so all of them keep to one order, whatever is ready first.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> wrap = DDP(torch.nn.Linear(2, 1))
    >>> wrap(torch.ones(3, 2)).mean().backward()
    >>> len(wrap.under_way)  # weight and bias
    2
    >>> wrap.finish_gradient_synchronization()
    >>> wrap.module.weight.grad
    tensor([[1., 1.]])
    >>> dist.destroy_process_group()
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.groups = self.grouped()  # what is averaged together, in order
        self.synchronizing = True
        self._start_over()
        for number, group in enumerate(self.groups):
            for p in group:
                p.register_post_accumulate_grad_hook(partial(self._ready, number))

    def grouped(self) -> list[Group]:
        return [[p] for p in self.trained]

    def average(self, group: Group) -> Finish:
        return average_in_place(group[0].grad)  # type: ignore[arg-type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own. A backward pass before it is finished first: the next one adds to its gradients."""
        if self.waiting_for != [len(group) for group in self.groups]:
            self.finish_gradient_synchronization()
        return super().forward(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last backward pass of an accumulated step: gradients add up here, and are sent once."""
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True

    def finish_gradient_synchronization(self) -> None:
        with self.zeros_for_missing():
            self.waiting_for = [0] * len(self.groups)
            self._start_those_ready()
            for finish in self.under_way:
                finish()
        self._start_over()

    def _start_over(self) -> None:
        self.waiting_for = [len(group) for group in self.groups]  # gradients that are not ready yet
        self.under_way: list[Finish] = []

    def _ready(self, number: int, _: Tensor) -> None:
        if not self.synchronizing:
            return
        self.waiting_for[number] -= 1
        if self.waiting_for[number] < 0:
            raise FlopwiseError(
                "a second backward pass began before the first one's gradients were synchronized",
                "call finish_gradient_synchronization() between them, or run the first under no_sync()",
            )
        self._start_those_ready()

    def _start_those_ready(self) -> None:
        while len(self.under_way) < len(self.groups) and not self.waiting_for[len(self.under_way)]:
            self.under_way.append(self.average(self.groups[len(self.under_way)]))
