"""Which weights come next: what came next in the step before."""

from collections.abc import Sequence

import torch

from flopwise.lm.parallel.shards import Unit


class GatherAhead:
    """Keeps two units at most: the one in use, and the one after it, which is gathered meanwhile.

    The order of use is remembered from the step before, forward and backward alike: a backward pass visits units in
    reverse, tied weights come twice, checkpointed blocks are computed again. A step that goes another way is right as well;
    from there on it gathers without looking ahead.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> units = [Unit([torch.nn.Parameter(torch.ones(2))], None) for _ in range(3)]
    >>> ahead = GatherAhead(units)
    >>> for unit in units:
    ...     ahead.use(unit)
    >>> ahead.start_over()
    >>> ahead.use(units[0])
    >>> ahead.coming is units[1]
    True
    >>> dist.destroy_process_group()
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.used: list[Unit] = []  # in this step, in order
        self.before: dict[bool, list[Unit]] = {True: [], False: []}  # in a step with gradients, and in one without
        self.gradients = False
        self.start_over()

    def start_over(self) -> None:
        """A forward pass begins, or weights are about to change: nothing that was gathered is kept."""
        if self.used:
            self.before[self.gradients] = self.used
        for unit in self.units:
            unit.free()
        self.used = []
        self.gradients = torch.is_grad_enabled()
        self.expected = self.before[self.gradients]
        self.current: Unit | None = None
        self.coming: Unit | None = None

    def use(self, unit: Unit) -> None:
        """Gather the unit, unless it is there; free those before it; start to gather the next."""
        if unit is self.current:
            return
        unit.gather()
        self.used.append(unit)
        done = len(self.used)
        as_before = self.expected[done - 1 : done] == [unit]
        following = self.expected[done : done + 1] if as_before else []
        for old in (self.current, self.coming):
            if old is not None and old is not unit and old not in following:
                old.free()
        self.current, self.coming = unit, following[0] if following else None
        if self.coming is not None:
            self.coming.start_gather()
