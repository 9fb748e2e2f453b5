"""What a look asks of the process it is in, and of the other ranks of a job."""

from typing import Any

import torch
from torch import distributed

from flopwise.capture.environment import environment
from flopwise.records.run import Environment


def gathered(told: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What every rank tells, by rank; of this one alone where there is no group of processes."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return {0: told}
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, told)
    return dict(enumerate(found))


def environment_of(device: str) -> Environment:
    return environment(torch.device(device))
