"""A user's optimizer moved into the backward pass. The first step shows whether nothing looks at gradients in between."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flopwise import torch_private
from flopwise.errors import Unsupported
from flopwise.lm.overlap import UpdateInBackward, parameter_groups
from flopwise.patch.optimizer import OwnUpdate
from flopwise.patch.patched import Patched

_LEVERS = ("overlap",)
_HINT = "overlap = off: gradients must go from one backward pass straight to the optimizer"


class OverlappedUpdate:
    """After its first step, weights are updated as soon as their gradients are there, and `optimizer.step()` waits for that."""

    def __init__(self, root: nn.Module, blocks: Sequence[nn.Module], update: OwnUpdate, patched: Patched) -> None:
        self.update = update
        mine = {id(p) for group in update.optimizer.param_groups for p in group["params"]}
        groups = parameter_groups(root, blocks)
        self.groups = [chosen for group in groups if (chosen := [p for p in group if id(p) in mine])]
        if sum(map(len, self.groups)) != len(mine):
            raise Unsupported("overlap = 'on': the optimizer trains weights that are not the model's", _HINT, _LEVERS)
        self.inside: UpdateInBackward | None = None
        self._seen: dict[Tensor, tuple[int, int, int]] = {}  # how often a gradient came, where it lies, its version
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for group in self.groups for p in group]
        self._updated: list[int] = []  # groups, since the last step
        patched.set(update.optimizer, "step", torch_private.in_place_of_step(self.step, update.optimizer))
        patched.on_undo(self._detach)

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise Unsupported("overlap = 'on' cannot step with a closure", _HINT, _LEVERS)
        if self.inside is not None:
            self.inside.finish()
            self._updated.clear()
            return None
        self._check_first()
        self.update.step()
        self._detach()
        numbered = iter(range(len(self.groups)))
        self.inside = UpdateInBackward(self.groups, lambda some: self._part(some, next(numbered)))
        self._hooks = self.inside.hooks
        return None

    def ahead(self) -> AbstractContextManager[None]:
        """Around a step: its own work goes before the updates."""
        return nullcontext() if self.inside is None else self.inside.ahead()

    def _part(self, parameters: Sequence[nn.Parameter], number: int) -> Optimizer:
        part = self.update.part(parameters)
        own_step = part.step

        def step(closure: Any = None) -> Any:
            if number in self._updated:
                raise Unsupported("overlap = 'on': there were two backward passes before a step", _HINT, _LEVERS)
            self._updated.append(number)
            return own_step(closure)

        part.step = step  # type: ignore[method-assign]
        return part

    def _arrived(self, p: Tensor) -> None:
        if p.grad is not None:
            times = self._seen.get(p, (0, 0, 0))[0] + 1
            self._seen[p] = (times, p.grad.data_ptr(), torch_private.version_of(p.grad))

    def _check_first(self) -> None:
        for p, (times, address, version) in self._seen.items():
            if times > 1:
                text = f"overlap = 'on': gradients are summed over {times} backward passes before a step"
                raise Unsupported(text, _HINT, _LEVERS)
            if p.grad is None or (p.grad.data_ptr(), torch_private.version_of(p.grad)) != (address, version):
                text = "overlap = 'on': gradients are changed between backward and step (clipping, unscaling)"
                raise Unsupported(text, _HINT, _LEVERS)

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
