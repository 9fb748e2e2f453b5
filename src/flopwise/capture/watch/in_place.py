"""What autograd does in place, except under a dispatch mode, where it takes every tensor for a subclass.

Two gradients of one tensor are added in place where autograd holds the last reference to one of them
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`), and a gradient that is scattered goes straight into fresh
zeros (FunctionsManual.cpp). Under a mode each would allocate one tensor more. So the mode that watches does what autograd
would have done. Whether a reference is the last can be told by counting: a sum whose operands nobody else holds is made
once, to learn what the counts then are as seen from inside a dispatch mode.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from flopwise.torch_private import TorchDispatchMode, current_autograd_node, use_counts

ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor
Counts = tuple[int, int, int]

# Into fresh zeros, in a backward formula.
SCATTERS = {
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
}
ZEROS = ("zeros", "new_zeros", "zeros_like")


class InPlace:
    """Knows the ops that autograd would have done in place."""

    def __init__(self) -> None:
        """Learn the counts. The mode around must be the one that the step will run in (fake or real tensors)."""
        self.alone: Counts = (0, 0, 0)
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        product = (y * 3) * (y * 5)  # two fresh gradients of y meet
        with _Learn(self):
            product.sum().backward()

    def sum_of(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Tensor, Tensor] | None:
        """(the one to add to, the other), if autograd would add in place; None, if this is an ordinary op."""
        if func is not ADD or kwargs or len(args) != 2 or torch.is_grad_enabled():
            return None
        old, new = args
        if (
            not isinstance(old, Tensor)
            or not isinstance(new, Tensor)
            or old.shape != new.shape
            or old.dtype != new.dtype
        ):
            return None
        if current_autograd_node() is None:
            return None
        counts = [references(args, 0), references(args, 1)]
        for mine, other, count in ((old, new, counts[0]), (new, old, counts[1])):
            if count == self.alone and torch.ops.aten.is_non_overlapping_and_dense.default(mine):
                return mine, other
        return None


def references(args: tuple[Any, ...], position: int) -> Counts:
    """How often the tensor, its storage and its Python object are referred to."""
    tensor = args[position]
    return *use_counts(tensor), sys.getrefcount(tensor)


class _Learn(TorchDispatchMode):
    def __init__(self, in_place: InPlace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_place = in_place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ADD and current_autograd_node() is not None:
            self.in_place.alone = _as_in_operands(args)
        return func(*args, **(kwargs or {}))


def _as_in_operands(args: tuple[Any, ...]) -> Counts:
    """Counted with as many names for the tensor as `InPlace.sum_of` has."""
    old, new = args
    return references(args, 0) if old is not new else (0, 0, 0)
