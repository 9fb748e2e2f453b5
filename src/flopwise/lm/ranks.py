"""The processes that share a step: started by torchrun, joined by torch.distributed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flopwise.errors import FlopwiseError, Unsupported
from flopwise.spec.operations import GLOO, NCCL

_PATIENCE = timedelta(hours=2)  # the first process may prepare a corpus for long
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """This process among all."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int = 1  # on this machine

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

    def gathered(self, value: _T) -> list[_T]:
        """What every process has, in every process, by rank."""
        if self.world == 1:
            return [value]
        found: list[_T | None] = [None] * self.world
        dist.all_gather_object(found, value)
        return cast("list[_T]", found)

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


ALONE = Ranks()


def ranks_here() -> Ranks:
    """As torchrun's variables say; one process without them."""
    number = {name: int(os.environ.get(name, default)) for name, default in _VARIABLES.items()}
    return Ranks(number["RANK"], number["LOCAL_RANK"], number["WORLD_SIZE"], number["LOCAL_WORLD_SIZE"])


_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def own_device(ranks: Ranks, asked: torch.device) -> torch.device:
    """A GPU for each process of this machine; where there are fewer, some share one."""
    if asked.type != "cuda":
        return asked
    return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())


def backend_named(ranks: Ranks, device: torch.device, asked: str = "") -> str:
    """As asked; else NCCL between GPUs, Gloo between processes on the CPU, and on one GPU, which NCCL refuses."""
    return asked or (GLOO if device.type != "cuda" or ranks.local_world > torch.cuda.device_count() else NCCL)


def check_backend(asked: str, local_world: int, device: torch.device) -> None:
    """Refuse NCCL where it cannot run, before anything waits for it."""
    if asked != NCCL:
        return
    if device.type != "cuda":
        raise Unsupported(f"impl = 'nccl' needs NVIDIA GPUs; this device is '{device.type}'", "--impl gloo", ("impl",))
    if local_world > (there := torch.cuda.device_count()):
        gpus = f"{there} GPU{'s' if there > 1 else ''}"
        raise Unsupported(
            f"impl = 'nccl' needs a GPU for each of {local_world} ranks; this machine has {gpus}",
            f"--ranks {there}, or --impl gloo",
            ("impl", "ranks"),
        )


@contextmanager
def joined(ranks: Ranks, device: torch.device, alone: bool = False, asked: str = "") -> Iterator[None]:
    """Inside, the processes can exchange tensors; `alone`: also one that is the only one; `asked`: by which backend."""
    if ranks.world == 1 and not alone:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    name = backend_named(ranks, device, asked)
    dist.init_process_group("cpu:gloo,cuda:nccl" if name == NCCL else name, timeout=_PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()
