"""The processes that train together: started by torchrun, joined by torch.distributed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flopwise.errors import FlopwiseError

_PATIENCE = timedelta(hours=2)  # the first process may prepare a corpus for long
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """This process among all."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def told(self, value: _T) -> _T:
        """What the first process has, in every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def first_does(self, work: Callable[[], _T]) -> _T:
        """What the first process makes, in every process; what is wrong with it is raised in all."""
        if self.world == 1:
            return work()
        made: _T | None = None
        wrong: tuple[str, str] | None = None
        if self.first:
            try:
                made = work()
            except FlopwiseError as error:
                wrong = error.message, error.hint
        made, wrong = self.told((made, wrong))
        if wrong is not None:
            raise FlopwiseError(*wrong)
        return cast("_T", made)

    def mean(self, value: Tensor) -> Tensor:
        """Of all processes, in every process."""
        if self.world > 1:
            dist.all_reduce(value)
            value /= self.world
        return value


def ranks_here() -> Ranks:
    """As torchrun's variables say; one process without them."""
    number = {name: int(os.environ.get(name, default)) for name, default in _VARIABLES.items()}
    return Ranks(number["RANK"], number["LOCAL_RANK"], number["WORLD_SIZE"])


_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@contextmanager
def joined(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Inside, the processes can exchange tensors."""
    if ranks.world == 1:
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()
