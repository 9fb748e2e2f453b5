"""Fully sharded data parallelism (ZeRO-3, Rajbhandari et al. 2020): every rank keeps its part of every weight.

Reading `linear.weight` gathers it. One idea then does it all: a weight is there when somebody reads it, in whatever module
and however often; the next one is on its way meanwhile; the one before is freed. Autograd would keep weights for the
backward pass: instead it keeps a note which weight it was, and reading the note gathers the weight again.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from flopwise.lm.parallel.averaging import average_flat
from flopwise.lm.parallel.gather_ahead import GatherAhead
from flopwise.lm.parallel.replica import Replica
from flopwise.lm.parallel.shards import Unit

_Note = tuple[Unit, torch.Size, tuple[int, ...], int]  # a view of a unit's whole: its size, stride and offset


class FSDP(Replica):
    """Shards every matrix, and what belongs to its module; vectors (norms) are small and stay whole on every rank.

    A unit of gathering is a block (what an nn.ModuleList holds) or, outside of blocks, a module with a matrix: a linear
    layer, an embedding. With `compute_dtype`, weights are gathered and used in that dtype, and floating-point inputs cast
    to it; the parts, their gradients and the optimizer's state stay as they were. All ranks must use the same units in
    every step. Give the optimizer the parameters of the wrapper, after wrapping.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> wrap = FSDP(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)))
    >>> wrap(torch.ones(3, 4)).mean().backward()
    >>> wrap.finish_gradient_synchronization()
    >>> {name: len(p) for name, p in wrap.module.named_parameters() if p.grad is not None}
    {'0.weight': 16, '0.bias': 4, '1.weight': 4, '1.bias': 4, '2.weight': 4, '2.bias': 1}
    >>> wrap.full_state_dict()["0.weight"].shape
    torch.Size([4, 4])
    >>> dist.destroy_process_group()
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__(module)
        self.compute_dtype = compute_dtype
        self.units = [Unit(parameters, compute_dtype) for parameters in sharded_together(module)]
        self.ahead = GatherAhead(self.units)
        self.place = {p: (unit, number) for unit in self.units for number, p in enumerate(unit.parameters)}
        self.trained = [p for p in self.trained if p not in self.place]
        self._reducing: list[Any] = []  # at most one: what waits for the gradients that are under way
        for owner in module.modules():
            self._gather_when_read(owner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, on weights gathered one unit at a time."""
        self.ahead.start_over()
        with saved_tensors_hooks(self._note, self._fetch):
            return self.module(*map(self._cast, args), **{name: self._cast(value) for name, value in kwargs.items()})

    def finish_gradient_synchronization(self) -> None:
        """As of every replica; and gathered weights are freed, since the optimizer changes them."""
        with self.zeros_for_missing():
            finish = average_flat([p.grad for p in self.trained])  # type: ignore[misc]
            self._finish_reducing()
            finish()
        self.ahead.start_over()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's `state_dict()` as if it had never been sharded, on every rank."""
        full: dict[Tensor, Tensor] = {}
        for unit in self.units:
            full.update(zip(unit.parameters, unit.full_parameters(), strict=True))
        state = self.module.state_dict(keep_vars=True)
        return {name: full[value] if value in full else value.detach().clone() for name, value in state.items()}

    gather_full_params = full_state_dict  # as courses call it

    def _gather_when_read(self, owner: nn.Module) -> None:
        """`owner.weight` is the whole weight from now on; `owner.parameters()` still has this rank's part."""
        named = owner.named_parameters(recurse=False, remove_duplicate=False)
        places = {name: self.place[p] for name, p in named if p in self.place}
        if places:
            reading = {name: property(partial(self._whole, *place)) for name, place in places.items()}
            owner.__class__ = type(type(owner).__name__, (type(owner),), reading)

    def _whole(self, unit: Unit, number: int, _: nn.Module) -> Tensor:
        self.ahead.use(unit)
        return unit.read(number, self._reduce)

    def _reduce(self, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        """Gradients of one unit are on their way while those of the next are computed; not more, or memory would fill."""
        self._finish_reducing()
        self._reducing.append(unit.start_reduce(gradients))

    def _finish_reducing(self) -> None:
        while self._reducing:
            self._reducing.pop()()

    def _note(self, saved: Tensor) -> Tensor | _Note:
        """What autograd keeps for the backward pass: for a gathered weight, only which one it is."""
        unit = self.ahead.current
        if unit is None or unit.whole is None or unit.whole.dtype != saved.dtype:
            return saved
        if unit.whole.untyped_storage().data_ptr() != saved.untyped_storage().data_ptr():
            return saved
        return unit, saved.shape, saved.stride(), int(saved.storage_offset())

    def _fetch(self, kept: Tensor | _Note) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        unit, size, stride, offset = kept
        self.ahead.use(unit)
        assert unit.whole is not None
        return torch.as_strided(unit.whole, size, stride, offset)

    def _cast(self, value: Any) -> Any:
        if self.compute_dtype is not None and isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value


def sharded_together(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The parameters to shard, by unit: a block's, or a single module's. A tied one belongs to the first that has it.

    >>> blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)) for _ in range(3))
    >>> model = nn.Sequential(nn.Embedding(4, 2), blocks, nn.LayerNorm(2), nn.Linear(2, 4))
    >>> [len(parameters) for parameters in sharded_together(model)]
    [1, 4, 4, 4, 2]
    """
    seen: set[nn.Parameter] = set()
    for modules in _units(module):
        owners = [m for m in modules if any(p.dim() > 1 for p in m.parameters(recurse=False))]
        own = dict.fromkeys(p for m in owners for p in m.parameters(recurse=False) if p.is_floating_point())
        new = [p for p in own if p not in seen and p.dtype == next(iter(own)).dtype]
        seen.update(new)
        if new:
            yield new


def _units(module: nn.Module) -> Iterator[list[nn.Module]]:
    yield [module]
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ([*block.modules()] for block in child)
        else:
            yield from _units(child)
