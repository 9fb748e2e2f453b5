"""A model's blocks: the like layers that a Transformer repeats, found from outside, and what is done to each of them."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def blocks_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """The members of the longest list of like modules (nn.ModuleList or nn.Sequential, all of one class); [] if none is.

    A list inside another's members is not looked at: a block's own layers are no blocks. Of two as long, the one with
    more parameters counts.

    >>> blocks_of([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))])[2]
    Linear(in_features=2, out_features=2, bias=True)
    >>> blocks_of([nn.Linear(2, 2)])
    []
    """
    found = [listed for root in roots for listed in _lists(root)]
    return max(found, key=lambda blocks: (len(blocks), _parameters(blocks)), default=[])


def compile_blocks(blocks: Sequence[nn.Module], **options: Any) -> None:
    """Compile each in place. They share their code, so that the compiler makes one graph and all like blocks use it."""
    for block in blocks:
        block.compile(**options)


def _lists(module: nn.Module) -> Iterable[list[nn.Module]]:
    members = list(module.children())
    alike = len({type(member) for member in members}) == 1
    if alike and isinstance(module, nn.ModuleList | nn.Sequential) and (len(members) > 1 or _is_block(members[0])):
        yield members
        return
    for member in members:
        yield from _lists(member)


def _is_block(module: nn.Module) -> bool:
    """Of a list of one: whether that is a layer, and no list or wrapper of lists itself."""
    return not any(isinstance(inner, nn.ModuleList) for inner in module.modules())


def _parameters(blocks: Sequence[nn.Module]) -> int:
    return sum(p.numel() for block in blocks for p in block.parameters())
