"""Weights that are cut up, gathered and freed together: a unit of FSDP."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Unit:
    """Parameters of which this rank keeps an equal part each; the last ranks' parts are filled up with zeros.

    Afterwards `parameter.data` is this rank's part, flat. `whole` has all parameters end to end, in `dtype`, while they are
    gathered; n is the length of all this rank's parts together, W the number of ranks.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = nn.Parameter(torch.ones(2, 3))
    >>> unit = Unit([weight], torch.bfloat16)
    >>> unit.gather()
    >>> weight.shape, unit.whole.shape, unit.weights()[0].shape
    (torch.Size([6]), torch.Size([6]), torch.Size([2, 3]))
    >>> dist.destroy_process_group()
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.parameters = list(parameters)
        self.shapes = [p.shape for p in parameters]
        self.dtype = dtype or parameters[0].dtype
        self.ranks = dist.get_world_size()
        self.lengths = [-(-p.numel() // self.ranks) for p in parameters]  # of one rank's part
        for p in parameters:
            p.data = self._parts(p.detach())[dist.get_rank()].clone()
        self.whole: Tensor | None = None
        self._arriving: tuple[dist.Work, Tensor] | None = None  # the gather that was started, and where it writes
        self._read: tuple[bool, tuple[Tensor, ...]] | None = None  # whether autograd records, and the weights

    def _parts(self, full: Tensor) -> Tensor:
        """The tensor cut into one row for each rank, [W, its length / W]."""
        flat = full.flatten()
        return F.pad(flat, (0, -len(flat) % self.ranks)).view(self.ranks, -1)

    def start_gather(self) -> None:
        """All-gather in the background; nothing if it is whole, or was started before."""
        if self.whole is None and self._arriving is None:
            self._arriving = self._all_gather(self.dtype)

    def gather(self) -> None:
        """`whole` is there afterwards."""
        self.start_gather()
        if self._arriving is not None:
            self.whole, self._arriving = self._joined(*self._arriving), None

    def _all_gather(self, dtype: torch.dtype) -> tuple[dist.Work, Tensor]:
        mine = torch.cat([p.detach() for p in self.parameters]).to(dtype)  # [n]
        rows = mine.new_empty(self.ranks, len(mine))
        return _all_gather(rows.view(-1), mine, async_op=True), rows

    def _joined(self, work: dist.Work, rows: Tensor) -> Tensor:
        """A rank's row has its part of every parameter; a parameter's parts belong together."""
        work.wait()
        parts = [part.flatten() for part in rows.split(self.lengths, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def free(self) -> None:
        if self._arriving is not None:
            self._arriving[0].wait()
        self.whole = self._arriving = self._read = None

    def weights(self) -> tuple[Tensor, ...]:
        """The parameters in their own shapes: views of `whole`."""
        assert self.whole is not None
        return self._shaped(self.whole)

    def full_parameters(self) -> tuple[Tensor, ...]:
        """The parameters in their own shapes and their own dtype: a copy."""
        return self._shaped(self._joined(*self._all_gather(self.parameters[0].dtype)))

    def _shaped(self, whole: Tensor) -> tuple[Tensor, ...]:
        spans = whole.split([self.ranks * length for length in self.lengths])
        return tuple(span[: shape.numel()].view(shape) for span, shape in zip(spans, self.shapes, strict=True))

    def read(self, number: int, reduce: Callable[["Unit", Sequence[Tensor | None]], None]) -> Tensor:
        """One of the weights, for autograd too: `reduce` gets their gradients when all of them are there."""
        if self._read is None or self._read[0] != torch.is_grad_enabled():
            weights: tuple[Tensor, ...] = _Whole.apply(self, reduce, *self.parameters)  # type: ignore[no-untyped-call]
            self._read = torch.is_grad_enabled(), weights
        return self._read[1][number]

    def start_reduce(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Reduce-scatter whole gradients in the background. Returns what waits, and adds this rank's part of the means.

        Behind the gradients goes one number for each: whether it was there. A rank that has none for a parameter thereby
        learns whether others have. Sums are made in the parameters' own dtype, whatever the gradients were computed in.
        """
        n, present = sum(self.lengths), [gradient is not None for gradient in gradients]
        rows = self.parameters[0].new_zeros(self.ranks, n + len(present))
        for part, gradient in zip(rows.split([*self.lengths, len(present)], dim=1), gradients, strict=False):
            if gradient is not None:
                part.copy_(self._parts(gradient))
        rows[:, n:] = 1
        for number in (number for number, there in enumerate(present) if not there):
            rows[:, n + number] = 0
        mine = rows.new_empty(rows.shape[1])
        work = _reduce_scatter(mine, rows.div_(self.ranks).view(-1), async_op=True)

        def add() -> None:
            work.wait()
            uses = mine[n:]
            for number, (p, mean) in enumerate(zip(self.parameters, mine[:n].split(self.lengths), strict=True)):
                if p.requires_grad and (present[number] or uses[number]):
                    p.grad = mean if p.grad is None else p.grad + mean

        return add


class _Whole(torch.autograd.Function):
    """From parts to weights. Backward, gradients leave autograd here: their sum over the ranks arrives later."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, reduce: Callable[..., None], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.reduce = unit, reduce
        ctx.set_materialize_grads(False)
        weights = unit.weights()
        ctx.mark_non_differentiable(*(w for w, part in zip(weights, parts, strict=True) if not part.requires_grad))
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.reduce(ctx.unit, gradients)
        return (None,) * (2 + len(gradients))
