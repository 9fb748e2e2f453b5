"""A replacement compared with the original on its real inputs, forward and backward, once for each kind of module and input."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from flopwise.errors import FlopwiseError, one_line
from flopwise.patch.patched import Patched
from flopwise.torch_private import current_autograd_node, in_fake_mode, parameter_slots, version_of

Function = Callable[..., Tensor | Sequence[Tensor]]
Forward = Callable[..., Any]  # of a module: forward(self, …)
Errors = tuple[float, float]  # of one result: the largest, and the root of their mean square

MORE_ERROR = 4.0  # the replacement may be so many times further from the exact result than the original is
ROUNDINGS, ROUNDINGS_OF_16_BITS = 16.0, 1.0  # and this many roundings of the result besides
NOISE_RUNS = (
    8  # of the original, on inputs a rounding away: one run may be exact by luck, as differences of few numbers are
)
# Of what flows back. By a usual seed it could be the input itself, for which the gradient of a norm is nothing but rounding.
UNUSUAL_SEED = 761_838_257
# What a kernel says of inputs that it does not take. Anything else is a fault, and is raised.
_REFUSALS = (FlopwiseError, RuntimeError, ValueError, TypeError, NotImplementedError)

_HERE = threading.local()


class Kind:
    """What is replaced alike (all LlamaRMSNorm of a model): checked once for each sort of input, and given up together."""

    def __init__(self, lever: str, name: str, how: str, patched: Patched) -> None:
        self.lever, self.name, self.how = lever, name, how
        self.given_up = False
        self.members = 0
        self._patched, self._agreed, self._line = patched, set[Hashable](), ""

    def count(self) -> None:
        """One more of this kind is replaced."""
        self.members += 1
        if self._line:
            self._patched.done.remove(self._line)
        self._line = f"{self._who()} {self.how}"
        self._patched.done.append(self._line)

    def give_up(self, why: str) -> None:
        """All of this kind run the original from now on."""
        self.given_up = True
        if self._line in self._patched.done:
            self._patched.done.remove(self._line)
        self._patched.refused.append(f"{self._who()}: {why}")

    def _who(self) -> str:
        return f"{self.lever}: {self.members} {self.name}" if self.members else f"{self.lever}: {self.name}"

    def leave(self, why: str) -> None:
        """Say, once, that some calls run as they are written."""
        line = f"{self._who()}: some calls run as written: {why}"
        if line not in self._patched.refused:
            self._patched.refused.append(line)

    def allows(
        self,
        sort: Hashable,
        original: Function,
        replacement: Function,
        tensors: Sequence[Tensor],
        exact: Function | None = None,
    ) -> bool:
        """Whether the replacement may run: true once it has agreed with the original on this sort of input.

        Nothing is compared while a compiler traces or a CUDA graph is captured: what has not been checked before then runs
        as the original.
        """
        if self.given_up or sort in self._agreed:
            return not self.given_up
        if not can_check():
            return False
        if not in_fake_mode():
            why = disagreement(original, replacement, tensors, exact or original)
            if why is not None:
                self.give_up(why)
                return False
        self._agreed.add(sort)
        return True


def can_check() -> bool:
    """Whether a result may be read here and now, and gradients be had of it."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class FirstStep:
    """A module whose first call ran as written: so does what a checkpoint computes again for that call's backward pass."""

    def __init__(self) -> None:
        self._over = False

    def goes_on(self) -> bool:
        if not getattr(_HERE, "checking", False):  # a module around this one may be compared before the step is over
            self._over = self._over or current_autograd_node() is None
        return not self._over


def disagreement(original: Function, replacement: Function, tensors: Sequence[Tensor], exact: Function) -> str | None:
    """How the replacement differs from the original by more than rounding; None where it does not.

    Both are compared with `exact`, the original on the same inputs in twice the precision. What seems too far is judged
    again by what rounding does to the original: its largest error on inputs that are one rounding away.
    """
    with _undisturbed(tensors):
        try:
            plain, upstream = _results(original, tensors, None)
            new, _ = _results(replacement, tensors, upstream)
        except torch.OutOfMemoryError:
            return "too little memory is left to check the replacement"
        except _REFUSALS as error:
            return f"cannot be compared: {one_line(str(error), 100)}"
        true = _precise(exact, tensors, upstream)
        why = _difference(plain, new, true, None)
        if why is None or true is None:
            return why
        return _difference(plain, new, true, _noise_of(original, exact, tensors, upstream))


def _noise_of(original: Function, exact: Function, tensors: Sequence[Tensor], upstream: list[Tensor]) -> list[Errors]:
    """The original's largest errors, result by result, on inputs one rounding away from these."""
    largest: list[Errors] = []
    for seed in range(NOISE_RUNS):
        near = [_rounded(x, seed) for x in tensors]
        true = _precise(exact, near, upstream)
        if true is None:
            break
        pairs = zip(_results(original, near, upstream)[0], true, strict=True)
        found = [(0.0, 0.0) if one is None or not one.numel() else _errors(one, wide) for one, wide in pairs]
        largest = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(largest or found, found, strict=True)]
    return largest


def _rounded(x: Tensor, seed: int) -> Tensor:
    """Each number one rounding up, down, or as it is."""
    if not x.is_floating_point():
        return x
    generator = torch.Generator(x.device).manual_seed(seed)
    away = torch.randint(-1, 2, x.shape, generator=generator, device=x.device).to(x.dtype)
    return (x.detach() * (1 + away * torch.finfo(x.dtype).eps)).requires_grad_(x.requires_grad)


@contextmanager
def _undisturbed(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Leave no trace: random numbers are drawn as if nothing had run, and no checkpoint sees what is saved here."""
    devices = sorted({x.device.index for x in tensors if x.is_cuda})
    before, _HERE.checking = getattr(_HERE, "checking", False), True
    try:
        with torch.random.fork_rng(devices=devices), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            yield
    finally:
        _HERE.checking = before


def _same(x: Tensor) -> Tensor:
    return x


def _results(
    function: Function, tensors: Sequence[Tensor], upstream: list[Tensor] | None
) -> tuple[list[Any], list[Tensor]]:
    """Outputs, then the gradients of the inputs that have one, and the upstream gradient that was used."""
    wanted = torch.is_grad_enabled()
    inputs = [x.detach().requires_grad_(wanted and x.requires_grad) for x in tensors]
    made = function(*inputs)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    if upstream is None:
        upstream = [_upstream(y) for y in outputs]
    leaves = [x for x in inputs if x.requires_grad]
    reached = [(y, g.to(y.dtype)) for y, g in zip(outputs, upstream, strict=True) if y.requires_grad]
    gradients: tuple[Any, ...] = ()
    if leaves and reached:
        ys, gs = zip(*reached, strict=True)
        gradients = torch.autograd.grad(ys, leaves, gs, allow_unused=True)
    return [*(y.detach() for y in outputs), *gradients], upstream


def _upstream(like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(UNUSUAL_SEED)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32)


def _precise(function: Function, tensors: Sequence[Tensor], upstream: list[Tensor]) -> list[Any] | None:
    """The results in twice the precision; None where the function cannot run in it, or does not fit into memory."""
    inputs = [x.detach().to(_wider(x.dtype)).requires_grad_(x.requires_grad) for x in tensors]
    with ExitStack() as stack:
        for kind in {x.device.type for x in tensors if x.device.type != "meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            return _results(function, inputs, upstream)[0]
        except _REFUSALS:  # of memory as well
            return None


def _wider(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return dtype
    return torch.float64 if dtype.itemsize >= 4 else torch.float32


def _difference(plain: list[Any], new: list[Any], exact: list[Any] | None, noise: list[Errors] | None) -> str | None:
    for place, (old, other) in enumerate(zip(plain, new, strict=True)):
        if (old is None) != (other is None):
            return "differs from the original: one has a gradient that the other has not"
        if old is None:
            continue
        if old.shape != other.shape or old.dtype != other.dtype:
            given = f"{list(other.shape)} {other.dtype} for {list(old.shape)} {old.dtype}"
            return f"differs from the original: {given}"
        error = _excess(old, other, exact[place] if exact else None, noise[place] if noise else (0.0, 0.0))
        if error is not None:
            return f"differs from the original by {error:.2g} of its result"
    return None


def _excess(old: Tensor, new: Tensor, exact: Tensor | None, noise: Errors) -> float | None:
    """How far, relative to the largest value, the new result is from the exact one; None where that is rounding.

    `noise`: errors of the original that are known besides the one of `old`.
    """
    if not old.numel():
        return None
    usual = torch.isfinite(old)
    if not torch.equal(usual, torch.isfinite(new)):
        return float("inf")
    rounding = torch.finfo(old.dtype).eps * (ROUNDINGS if old.dtype.itemsize >= 4 else ROUNDINGS_OF_16_BITS)
    if exact is None:
        exact, rounding = old.to(_wider(old.dtype)), 4 * rounding
    size = torch.where(usual, exact, 0).abs()
    sizes, by_new = (float(size.max()), float(_rms(size))), _errors(new, exact)
    by_old = map(max, _errors(old, exact), noise)
    if all(e <= MORE_ERROR * n + rounding * s for e, n, s in zip(by_new, by_old, sizes, strict=True)):
        return None
    return by_new[0] / (sizes[0] or 1.0)


def _errors(result: Tensor, exact: Tensor) -> Errors:
    """The largest and the mean square distance from the exact values, of those that are finite."""
    off = torch.where(torch.isfinite(result), result.to(exact.dtype) - exact, 0).abs_()
    return float(off.max()), float(_rms(off))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


# --- Modules: their forward replaced, their parameters as arguments.


def forward_of(module: nn.Module) -> Forward:
    """The forward that a module has now, as a function of the module: what a copy of the module runs too."""
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__
    return lambda self, *args, **kwargs: own(*args, **kwargs)


def put_forward(module: nn.Module, forward: Forward, patched: Patched) -> None:
    """Replace a module's forward. It is bound to the module, so that a deep copy has its own."""
    patched.set(module, "forward", MethodType(forward, module))


def only_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The one floating-point tensor that a module was called with; None if it got anything else.

    >>> only_tensor((), {"x": torch.ones(1)}), only_tensor((torch.ones(1), 2), {})
    (tensor([1.]), None)
    """
    given = (*args, *kwargs.values())
    if len(given) == 1 and isinstance(given[0], Tensor) and given[0].is_floating_point():
        return given[0]
    return None


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """While open, a module computes with these tensors in place of its own parameters of those names."""
    slots: dict[str, Any] = parameter_slots(module)
    before = {name: slots[name] for name in tensors}
    slots.update(tensors)
    try:
        yield
    finally:
        slots.update(before)


@contextmanager
def holding_in(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While open, a module and those in it compute with their parameters in this dtype."""
    with ExitStack() as stack:
        for one in module.modules():
            own = {name: p for name, p in parameter_slots(one).items() if p is not None and p.is_floating_point()}
            stack.enter_context(holding(one, {name: p.detach().to(dtype) for name, p in own.items()}))
        yield


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """While open, nothing is drawn; after it, its buffers (counts, running means) are what they were."""
    before = {one: one.training for one in module.modules()}
    buffers = [_kept_buffer(one, name) for one in module.modules() for name, _ in one.named_buffers(recurse=False)]
    module.eval()
    try:
        yield
    finally:
        for one, training in before.items():
            one.training = training
        for restore in buffers:
            restore()


def _kept_buffer(module: nn.Module, name: str) -> Callable[[], None]:
    """What gives a buffer back; one that was not changed is left alone, as a backward pass may need it."""
    buffer = module.get_buffer(name)
    value, version = buffer.detach().clone(), version_of(buffer)

    def restore() -> None:
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)
        if version_of(buffer) != version:
            with torch.no_grad():
                buffer.copy_(value)

    return restore
