"""Writes in place to some elements of a tensor: only those move, not the whole."""

from math import prod
from typing import Any

import torch
from torch import Tensor

_SOURCES = ("index_copy_", "index_add_", "index_reduce_")  # as many elements as the source has
_INDICES = ("scatter_", "scatter_add_", "scatter_reduce_")  # as many as there are indices
_PUTS = ("index_put_", "_index_put_impl_")
_ADDS = ("index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_")  # to what is there


def touched(name: str, args: tuple[Any, ...]) -> int | None:
    """How many elements of its first argument the op writes; None, if it is no scatter or the values decide.

    >>> touched("scatter_", (torch.empty(8, 100), 1, torch.zeros(8, 1, dtype=torch.long), 1.0))
    8
    """
    if name in _SOURCES:
        return int(args[3].numel())
    if name in _INDICES:
        return int(args[2].numel())
    if name == "index_fill_":
        return int(args[2].numel() * args[0].numel() // max(1, args[0].shape[args[1]] if args[0].dim() else 1))
    return _put(args[0], args[1]) if name in _PUTS else None


def _put(t: Tensor, indices: list[Tensor | None]) -> int | None:
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return None
    sliced = [size for i, size in enumerate(t.shape) if i >= len(indices) or indices[i] is None]
    return int(prod(torch.broadcast_shapes(*(index.shape for index in given))) * prod(sliced))


def reads_touched(name: str, args: tuple[Any, ...]) -> bool:
    """Whether it reads what it writes over."""
    return name in _ADDS or (name in _PUTS and len(args) > 3 and bool(args[3]))
