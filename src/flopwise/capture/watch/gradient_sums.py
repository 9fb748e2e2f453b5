"""What autograd does in place, except under a dispatch mode, where it takes every tensor for a subclass.

Two gradients of one tensor are added in place where autograd holds the last reference to one of them
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`), and a gradient that is scattered goes straight into fresh
zeros (FunctionsManual.cpp). Under a mode each allocates one tensor more. The tape shows which references were the last:
an operand that is freed as soon as the sum is there was autograd's alone, and without a mode would hold the sum.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flopwise.torch_private import current_autograd_node, is_view

ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor

# Into fresh zeros, in a backward formula.
SCATTERS = {
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
}
ZEROS = ("zeros", "new_zeros", "zeros_like")


@dataclass(slots=True)
class GradientSum:
    """A sum of two gradients whose operands may be freed next."""

    op: int  # its number on the tape
    storage: int  # of the sum
    address: int  # of that storage
    operands: list[int | None]  # storages that could hold the sum, in autograd's order of preference; None: could not
    freed: set[int] = field(default_factory=set)

    @property
    def overwritten(self) -> int | None:
        """The storage that autograd would have written the sum into; None: neither."""
        return next((n for n in self.operands if n is not None and n in self.freed), None)


def adds_gradients(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a call is autograd's sum of two gradients of one tensor, and not an ordinary op."""
    if func is not ADD or kwargs or len(args) != 2 or torch.is_grad_enabled():
        return False
    old, new = args
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
        return False
    return current_autograd_node() is not None


def may_hold_sum(tensor: Tensor) -> bool:
    """Whether a sum fits over a tensor: every place of its memory is one element, and no base of a view has them too."""
    return not is_view(tensor) and bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
