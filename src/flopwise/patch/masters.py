"""Weights and gradients in bf16, with exact fp32 weights: the model holds their upper halves, the optimizer what they lack.

The model's `state_dict` has the fp32 weights as before, and one that is loaded sets both parts. Our optimizer updates both parts
at once; around any other, the weights are fp32 for the length of its step.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flopwise import torch_private
from flopwise.errors import Unsupported
from flopwise.patch.patched import Patched


class ExactWeights:
    """The fp32 weights of a model that was cast to bf16. `ours`: the optimizers are, and their states hold the rests."""

    def __init__(self, root: nn.Module, optimizers: Sequence[Optimizer], patched: Patched, *, ours: bool) -> None:
        from flopwise.kernels.adamw_kernels import LOW

        self.root, self._low, self._loading, self._ours = root, LOW, dict[str, Tensor](), ours
        self._rests: dict[Tensor, dict[str, Any]] = {}  # of weights whose optimizer is not ours
        held = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self.weights: dict[Tensor, Optimizer] = {
            p: held[p] for p in root.parameters() if p.dtype == torch.float32 and p in held
        }
        if not self.weights:
            hint = "it is for fp32 weights that an optimizer of the step trains"
            raise Unsupported("precision = 'bf16-master' found no fp32 weights to keep exactly", hint)
        self._narrow_all()
        patched.on_undo(self._widen)
        for optimizer in dict.fromkeys(() if ours else self.weights.values()):
            # By its own hooks, so that the casts count as a part of its step wherever that is watched.
            patched.on_undo(optimizer.register_step_pre_hook(lambda one, *_: self._widen(one)).remove)
            patched.on_undo(optimizer.register_step_post_hook(lambda *_: self._narrow_all()).remove)
            patched.set(optimizer, "step", torch_private.in_place_of_step(self._narrowed(optimizer.step), optimizer))
            # A loaded state takes the weights' dtype.
            patched.on_undo(optimizer.register_load_state_dict_pre_hook(lambda *_: self._widen()).remove)
            patched.on_undo(optimizer.register_load_state_dict_post_hook(lambda *_: self._narrow_all()).remove)
        hooks = [
            root.register_state_dict_post_hook(lambda *args: self._exact_state_dict(*args)),
            root.register_load_state_dict_pre_hook(self._before_loading),
            root.register_load_state_dict_post_hook(self._after_loading),
        ]
        for hook in hooks:
            patched.on_undo(hook.remove)
        patched.done.append(f"precision: {len(self.weights)} weights in bf16, their fp32 rest in the optimizer")

    def _kept(self, p: Tensor) -> dict[str, Any]:
        """Where the rest of a weight is."""
        return self.weights[p].state[p] if self._ours else self._rests.setdefault(p, {})

    def _narrowed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that leaves the weights in bf16, also where it fails before its last hook."""

        def narrowed(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self._narrow_all()

        return narrowed

    def _narrow_all(self) -> None:
        for p in self.weights:
            if p.dtype == torch.float32:
                self._narrow(p)

    @torch.no_grad()
    def _narrow(self, p: Tensor) -> None:
        exact, narrow = p.detach(), torch.empty_like(p, dtype=torch.bfloat16)
        low = torch.empty_like(narrow, dtype=torch.int16)
        split_exactly(exact, narrow, low)
        gradient = p.grad
        p.grad, p.data = None, narrow
        p.grad = None if gradient is None else gradient.to(torch.bfloat16)
        self._kept(p)[self._low] = low

    def exact(self, p: Tensor) -> Tensor:
        """A weight in fp32."""
        from flopwise.kernels.adamw import joined

        low = self._kept(p).get(self._low)
        return p.detach().float() if low is None else joined(p.detach(), low)

    @torch.no_grad()
    def _widen(self, only: Optimizer | None = None) -> None:
        for p, optimizer in self.weights.items():
            if only not in (None, optimizer) or p.dtype == torch.float32:
                continue
            exact, gradient = self.exact(p), p.grad
            p.grad, p.data = None, exact
            p.grad = None if gradient is None else gradient.float()
            self._kept(p).pop(self._low, None)

    def _exact_state_dict(self, root: nn.Module, saved: dict[str, Any], prefix: str, _: Any) -> None:
        for name, p in root.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            if p in self.weights and name in saved:
                saved[name] = self.exact(p)

    def _before_loading(self, _: nn.Module, loaded: dict[str, Any], prefix: str, *__: Any) -> None:
        self._loading = {name: value for name, value in loaded.items() if name.startswith(prefix)}
        self._prefix = prefix

    @torch.no_grad()
    def _after_loading(self, root: nn.Module, _: Any) -> None:
        for name, p in root.named_parameters(self._prefix.removesuffix("."), remove_duplicate=False):
            value = self._loading.get(name)
            if p in self.weights and value is not None and value.shape == p.shape:
                low = self._kept(p).setdefault(self._low, torch.zeros_like(p, dtype=torch.int16))
                split_exactly(value.to(p.device, torch.float32), p.detach(), low)
        self._loading = {}


def exact_weight(p: Tensor, optimizers: Iterable[Optimizer]) -> Tensor:
    """A weight with the rest that an optimizer keeps of it; of others, the weight itself."""
    from flopwise.kernels.adamw import joined
    from flopwise.kernels.adamw_kernels import LOW

    for optimizer in optimizers:
        if p in optimizer.state and LOW in optimizer.state[p] and p.dtype == torch.bfloat16:
            return joined(p.detach(), optimizer.state[p][LOW])
    return p.detach()


def split_exactly(weight: Tensor, p: Tensor, low: Tensor) -> None:
    """Write an fp32 weight as a bf16 parameter and the difference, to the last bit: its lower half, as a signed number.

    What is left without it is a number of bf16, the nearest one; of two, the larger.

    >>> weight = torch.tensor([1.00390625])  # between two numbers of bf16
    >>> p, low = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int16)
    >>> split_exactly(weight, p, low)
    >>> p.item(), low.item()
    (1.0078125, -32768)
    """
    bits = weight.view(torch.int32)
    low.copy_(bits)
    p.copy_((bits - low).view(torch.float32))
    p.masked_fill_(weight.isnan(), float("nan"))  # of whose bits nothing else may be left
