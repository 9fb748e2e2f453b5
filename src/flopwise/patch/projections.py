"""Linear layers that read the same input (q/k/v, gate/up), run as one matmul.

Which ones do shows at the first call of the module that holds them. Their parameters stay what they are, under their names;
they become neighbouring parts of one storage, which one product can read. Where that is no longer so, after `model.to(…)` for
example, each runs alone again.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise.kernels.dispatch import autocast_dtype
from flopwise.patch.checked import (
    FirstStep,
    Forward,
    Kind,
    can_check,
    forward_of,
    holding,
    holding_in,
    put_forward,
    without_dropout,
)
from flopwise.patch.deferred import leaves
from flopwise.patch.patched import NO_VALUES, Patched
from flopwise.torch_private import in_fake_mode, parameter_slots, use_counts, version_of

OWN_USES = 2  # of a parameter's storage: by the parameter, and by the question
Joint = tuple[nn.Linear, ...]


def replace(model: nn.Module, patched: Patched) -> int:
    """Join the linear layers that get the same input. How many modules may hold such: their first call decides."""
    kinds: dict[type, Kind] = {}
    own = [one for one in model.modules() if not type(one).__module__.startswith("torch.") and len(_linears(one)) > 1]
    holders = [one for one in own if len(_candidates(one)) > 1]
    moored = dict.fromkeys(type(one).__name__ for one in own if one not in holders)
    why = NO_VALUES if in_fake_mode() else "its parameters share memory or are changed by others"
    patched.refused += [f"projections: {name}: {why}" for name in moored]
    for module in holders:
        if type(module) not in kinds:
            kinds[type(module)] = Kind("projections", type(module).__name__, "run linear layers as one matmul", patched)
        put_forward(module, _forward(forward_of(module), kinds[type(module)], patched), patched)
    return len(holders)


def _candidates(module: nn.Module) -> Joint:
    """Its own linear layers that may be joined: torch's class, plain parameters that nobody else has, and no hooks."""
    return tuple(one for one in _linears(module) if "forward" not in vars(one) and _is_plain(one))


def _linears(module: nn.Module) -> Joint:
    return tuple(one for one in module.children() if type(one) is nn.Linear)


def _is_plain(linear: nn.Linear) -> bool:
    own = [p for p in parameter_slots(linear).values() if p is not None]
    return all(type(p) is nn.Parameter and p.is_contiguous() and _has_memory_of_its_own(p) for p in own)


def _has_memory_of_its_own(p: Tensor) -> bool:
    """Whether it may be moved: an optimizer that keeps all parameters in one buffer, for example, would not see it go."""
    if p.device.type == "meta" or in_fake_mode():
        return False
    return p.untyped_storage().nbytes() == p.numel() * p.element_size() and use_counts(p)[1] <= OWN_USES


def _forward(original: Forward, kind: Kind, patched: Patched) -> Forward:
    """The forward of a module that holds linear layers: its first call finds those that can be joined, and joins them."""
    groups: list[Group] | None = None
    first = FirstStep()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal groups
        if kind.given_up or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        if groups is None:
            if not can_check():
                return original(self, *args, **kwargs)
            output, found = _seen(self, lambda: original(self, *args, **kwargs))
            groups = [Group(joint) for joint in found]
            if groups:
                for group in groups:
                    group.join(kind, patched)
                kind.count()
                _check(self, kind, groups, original, args, kwargs)
                for group in groups:
                    group.off = True  # until the next call: a checkpoint may compute this one again
            return output
        for group in groups:
            group.off = first.goes_on()
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:  # code that needs each result by itself in memory; a fault of its own comes again
            kind.give_up(f"its code needs each result apart: {error}")
            return original(self, *args, **kwargs)
        finally:
            for group in groups:
                group.forget()

    return forward


def _seen(module: nn.Module, call: Callable[[], Any]) -> tuple[Any, list[Joint]]:
    """What a call returns, and which linear layers of the module got the same tensor in it, each of them once."""
    calls: list[tuple[nn.Linear, Tensor, int]] = []
    hooks = [
        one.register_forward_pre_hook(lambda linear, given: calls.append((linear, given[0], version_of(given[0]))))
        for one in _candidates(module)
    ]
    try:
        output = call()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[Any, list[nn.Linear]] = {}
    for linear, x, version in calls:
        if [one for one, _, _ in calls].count(linear) == 1:
            weight, bias = linear.weight, linear.bias
            sort = weight.dtype, weight.device, weight.requires_grad, None if bias is None else bias.requires_grad
            groups.setdefault((id(x), version, sort), []).append(linear)
    shared = [p for linear, _, _ in calls for p in linear.parameters()]
    alone = len({id(p) for p in shared}) == len(shared)
    return output, [tuple(group) for group in groups.values() if len(group) > 1 and alone]


class Group:
    """Linear layers that are joined: the first that is called computes for all."""

    def __init__(self, linears: Joint) -> None:
        self.linears, self.off = linears, False
        self._x: Tensor | None = None
        self._under: Any = None
        self._ready: dict[int, Tensor] = {}

    def join(self, kind: Kind, patched: Patched) -> None:
        for name in ("weight", "bias"):
            parts = [getattr(linear, name) for linear in self.linears]
            if parts[0] is not None:
                _lay_side_by_side(parts)
                patched.on_undo(partial(_lay_apart, parts))
        for place, linear in enumerate(self.linears):
            put_forward(linear, self._forward(place, forward_of(linear), kind), patched)

    def forget(self) -> None:
        self._x, self._ready = None, {}

    def _forward(self, place: int, original: Forward, kind: Kind) -> Forward:
        def forward(self_: nn.Linear, *args: Any, **kwargs: Any) -> Any:
            x = args[0] if len(args) == 1 and not kwargs else None
            usual = self.off or kind.given_up or torch.compiler.is_compiling() or self.linears[place] is not self_
            if usual or not isinstance(x, Tensor) or not self._is_joined():
                return original(self_, *args, **kwargs)
            return self._output(place, x)

        return forward

    def _is_joined(self) -> bool:
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        return _side_by_side([linear.weight for linear in self.linears]) and (not biases or _side_by_side(biases))

    def _output(self, place: int, x: Tensor) -> Tensor:
        under = version_of(x), torch.is_grad_enabled(), autocast_dtype(x)
        if self._x is not x or self._under != under or place not in self._ready:
            weights = [linear.weight for linear in self.linears]
            biases = [linear.bias for linear in self.linears if linear.bias is not None]
            given = x, autocast_dtype(x) or x.dtype, len(weights), *weights, *biases
            made: tuple[Tensor, ...] = _Joined.apply(*given)  # type: ignore[no-untyped-call]
            self._x, self._under, self._ready = x, under, dict(enumerate(made))
        return self._ready.pop(place)


class _Joined(torch.autograd.Function):
    """x Wᵀ + b of weights that lie side by side, as one product; backward one for x, and one for all weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, count: int, *parts: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parts[:count], parts[count:]
        weight = _whole(weights).to(dtype)
        ctx.save_for_backward(x.to(dtype), *weights)
        ctx.dtypes, ctx.sizes = (x.dtype, [part.dtype for part in parts]), [len(one) for one in weights]
        with torch.autocast(x.device.type, enabled=False):
            y = F.linear(x.to(dtype), weight, _whole(biases).to(dtype) if biases else None)
        parts_of_y: tuple[Tensor, ...] = y.split(ctx.sizes, -1)
        return parts_of_y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        of_x, of_parts = ctx.dtypes
        dy = torch.cat(gradients, -1)
        needed = ctx.needs_input_grad
        weight = _whole(weights) if _side_by_side(weights) else torch.cat(weights)
        with torch.autocast(x.device.type, enabled=False):
            dx = (dy @ weight.to(dy.dtype)).to(of_x) if needed[0] else None
            rows = dy.reshape(-1, dy.shape[-1])
            parts: list[Tensor | None] = [None] * len(of_parts)
            if any(needed[3 : 3 + len(weights)]):
                dw = rows.t() @ x.reshape(-1, x.shape[-1])
                parts[: len(weights)] = dw.to(of_parts[0]).split(ctx.sizes)
            if any(needed[3 + len(weights) :]):
                parts[len(weights) :] = rows.sum(0).to(of_parts[-1]).split(ctx.sizes)
        return dx, None, None, *parts


# --- Parameters in one storage.


def _lay_side_by_side(parts: list[Tensor]) -> None:
    """Their values stay; their memory becomes one."""
    whole = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = place


def _lay_apart(parts: list[Tensor]) -> None:
    for part in parts:
        part.data = part.data.clone()


def _side_by_side(parts: Sequence[Tensor]) -> bool:
    first, at = parts[0], parts[0].data_ptr()
    storage, dtype = first.untyped_storage().data_ptr(), first.dtype
    for part in parts:
        if part.data_ptr() != at or part.dtype != dtype or part.untyped_storage().data_ptr() != storage:
            return False
        at += part.numel() * part.element_size()
    return all(part.is_contiguous() for part in parts)


def _whole(parts: Any) -> Tensor:
    """The one tensor of which these are neighbouring parts."""
    first: Tensor = parts[0].detach()
    shape = sum(len(part) for part in parts), *first.shape[1:]
    return first.as_strided(shape, first.stride(), first.storage_offset())


# --- The check: the whole module, alone and joined.


def _check(
    module: nn.Module, kind: Kind, groups: list[Group], original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    linears = [linear for group in groups for linear in group.linears]
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
    slots = [(linear, name) for linear in linears for name, p in parameter_slots(linear).items() if p is not None]
    tensors = [*given, *(getattr(linear, name) for linear, name in slots)]

    def run(joined: bool) -> Callable[..., Any]:
        def call(*new: Tensor) -> Any:
            for group in groups:
                group.off = not joined
            try:
                return _module_output(new)
            finally:
                for group in groups:
                    group.off = False
                    group.forget()

        return call

    def _module_output(new: tuple[Tensor, ...]) -> Any:
        exchanged = {id(old): one for old, one in zip(given, new, strict=False)}
        named = {name: exchanged.get(id(one), one) for name, one in kwargs.items() if "past" not in name}
        held = dict(zip(slots, new[len(given) :], strict=True))
        with ExitStack() as stack:
            if new[-1].dtype != tensors[-1].dtype:  # in twice the precision
                stack.enter_context(holding_in(module, new[-1].dtype))
            for (linear, name), tensor in held.items():
                stack.enter_context(holding(linear, {name: tensor}))
            made = original(module, *(exchanged.get(id(one), one) for one in args), **named)
        return [one for one in leaves(made) if isinstance(one, Tensor) and one.is_floating_point()]

    with without_dropout(module):
        kind.allows((tuple(x.dtype for x in tensors), torch.is_grad_enabled()), run(False), run(True), tensors)
