"""A GPU's allocation history, recorded by PyTorch: started, stopped, and matched with the tensors it was for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flopwise import torch_private
from flopwise.records.memory import BEFORE, OP

MAX_EVENTS = 2_000_000  # a 2.7B training step makes about 30,000


def start(stacks: str, clear: bool = True) -> None:
    """Record from now on, with the stacks of allocations: Python's, C++'s too, or none; forget what was recorded."""
    torch.cuda.init()  # before it there is no allocator that could be told to record
    torch_private.record_memory_history(
        enabled="all",
        context=None if stacks == "off" else "alloc",
        stacks="all" if stacks == "all" else "python",
        max_entries=MAX_EVENTS,
        clear_history=clear,
        global_record_annotations=True,
    )


def stop() -> None:
    torch_private.record_memory_history(enabled=None)


def matched(
    trace: Sequence[Mapping[str, Any]], tensors: Mapping[int, tuple[int, int]], before: Mapping[int, int]
) -> dict[int, tuple[int, int]]:
    """The (event, address) of each storage: by the op that made it and its address.

    `tensors`: number -> (op, address) of what was made while recording; `before`: number -> address of what was there. Of several
    allocations of one op at one address the last is the tensor: the others were the kernel's own, and are gone.

    >>> trace = [{"action": "alloc", "addr": 512, "user_metadata": "flopwise.op:7"}]
    >>> matched(trace, {3: (7, 512), 4: (7, 1024)}, {1: 2048})
    {1: (-1, 2048), 3: (0, 512)}
    """
    made = {
        (int(word.removeprefix(OP)), entry["addr"]): i
        for i, entry in enumerate(trace)
        if entry["action"] == "alloc" and (word := entry.get("user_metadata", "")).startswith(OP)
    }
    found = {number: (BEFORE, address) for number, address in before.items()}
    for number, place in tensors.items():
        if place in made:
            found[number] = (made[place], place[1])
    return found
