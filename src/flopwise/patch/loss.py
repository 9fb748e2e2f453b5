"""The head and the cross entropy as one, of models that compute logits first: the logits wait until someone needs them.

The head returns `DeferredLogits`: it knows its shape and dtype, and the hidden states behind it. Views, slices over tokens and
casts stay deferred; a cross entropy of it becomes `linear_cross_entropy`, which never holds all logits. Whatever else is done
to it computes the ordinary logits first. So a step reads the same numbers, whatever it does with them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise import torch_private
from flopwise.errors import Unsupported
from flopwise.lm.own_kernels import needs_triton
from flopwise.patch.blocks import blocks_of
from flopwise.patch.patched import Patched

_IGNORED = -100  # of `linear_cross_entropy`
_CHECKED_ROWS = 64
_CLOSE = 0.02  # of the gradient's size: bf16's rounding of both
_CASTS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}
_SHAPES = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)
_SAME = (Tensor.contiguous, Tensor.clone, torch.clone)
_TURNS = (Tensor.transpose, torch.transpose, Tensor.permute, torch.permute)
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "requires_grad")
_METADATA = (
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.ndimension,
)


def find_head(roots: Sequence[nn.Module]) -> nn.Linear:
    """The one bias-free nn.Linear from a width to the vocabulary of an embedding of that width."""
    modules = [module for root in roots for module in root.modules()]
    tables = {tuple(module.weight.shape) for module in modules if isinstance(module, nn.Embedding)}
    inside = {id(module) for block in blocks_of(roots) for module in block.modules()}
    heads = {
        id(module): module
        for module in modules
        if type(module) is nn.Linear and tuple(module.weight.shape) in tables and id(module) not in inside
    }
    if len(heads) != 1:
        found = f"{len(heads)} modules" if heads else "no module"
        hint = "it looks for one nn.Linear whose weight has the shape of an nn.Embedding's"
        raise Unsupported(f"loss = 'fused' finds {found} that could be the head", hint)
    (head,) = heads.values()
    if dict(head.named_parameters()).get("bias") is not None:
        raise Unsupported("loss = 'fused' cannot use a head with a bias", "omit loss")
    return head


def fuse_loss(head: nn.Linear, patched: Patched) -> None:
    """Let the head's output wait for its cross entropy."""
    with needs_triton("loss = 'fused'"):
        from flopwise.kernels.cross_entropy import linear_cross_entropy
    original, source = head.forward, _Head(linear_cross_entropy, patched)

    def forward(hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or hidden.dim() < 2:
            return original(hidden)
        if torch_private.has_backward_hooks(head):  # which no backward pass of the head would meet
            return original(hidden)
        given = _Given(head.weight, source)
        return DeferredLogits(given, hidden, _narrow(hidden) or hidden.dtype, partial(given.logits, hidden))

    patched.set(head, "forward", forward)
    patched.done.append(f"loss: the head ({head.in_features} → {head.out_features:,}) waits for its cross entropy")


class _Head:
    """What all deferred logits of one head share."""

    def __init__(self, fused: Callable[[Tensor, Tensor, Tensor], Tensor], patched: Patched) -> None:
        self.fused, self.patched = fused, patched
        self.checked = False

    def check(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        """The first rows of the first batch, both ways."""
        self.checked = True
        count = min(_CHECKED_ROWS, len(targets))
        rows, some, weight = hidden.detach()[:count], targets[:count], weight.detach()
        found = []
        for one in (self.fused, lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t)):
            leaf = rows.clone().requires_grad_()
            with torch.enable_grad():
                loss = one(leaf, weight, some)
            found.append((loss.detach().double(), torch.autograd.grad(loss, leaf)[0].double()))
        (loss, gradient), (true_loss, true_gradient) = found
        off = (gradient - true_gradient).norm() > _CLOSE * true_gradient.norm()
        if off or (loss - true_loss).abs() > _CLOSE * true_loss.abs():  # of rows without a target, NaN is not greater
            raise Unsupported("loss = 'fused' disagrees with F.cross_entropy on this model's head", "omit loss")


class _Given:
    """The head's weight at one call: nobody may read logits of another."""

    def __init__(self, weight: Tensor, head: _Head) -> None:
        self.weight, self.head, self._narrow = weight, head, _narrow(weight)
        self.fused = False  # whether a loss was computed without the logits
        self._before = torch_private.version_of(weight), head.patched.updates

    @property
    def vocabulary(self) -> int:
        return len(self.weight)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        self._still_there()
        self.fused = True
        narrow = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
        cast = dtype != self.weight.dtype or dtype != hidden.dtype
        with torch.autocast(hidden.device.type, dtype=narrow, enabled=cast):
            if not self.head.checked:
                self.head.check(hidden, self.weight, targets)
            return self.head.fused(hidden, self.weight, targets)

    def logits(self, hidden: Tensor) -> Tensor:
        """All of them, as the head would have given them."""
        self._still_there()
        with torch.autocast(hidden.device.type, dtype=self._narrow or torch.bfloat16, enabled=self._narrow is not None):
            return F.linear(hidden, self.weight)

    def _still_there(self) -> None:
        if (torch_private.version_of(self.weight), self.head.patched.updates) != self._before:
            raise Unsupported(
                "loss = 'fused': the logits are read after the weights were updated, and were not kept",
                "read them before backward() and step(), or omit loss",
                ("loss",),
            )


class DeferredLogits(Tensor):
    """Logits [..., V] of hidden states [..., D], or with classes in the second place [B, V, T]."""

    def __new__(
        cls, head: _Given, hidden: Tensor, dtype: torch.dtype, make: Callable[[], Tensor], turned: bool = False
    ) -> Any:
        lead, v = list(hidden.shape[:-1]), head.vocabulary
        shape = [lead[0], v, *lead[1:]] if turned else [*lead, v]
        return torch_private.wrapper_tensor(cls, shape, dtype, hidden.device, requires_grad=True)

    def __init__(
        self, head: _Given, hidden: Tensor, dtype: torch.dtype, make: Callable[[], Tensor], turned: bool = False
    ) -> None:
        self.head, self.hidden, self.make, self.turned = head, hidden, make, turned
        self.head_dtype = _narrow(hidden) or hidden.dtype  # of the head's matmul
        self.computed: Tensor | None = None

    def plain(self) -> Tensor:
        """The logits themselves, computed once."""
        if self.computed is None:
            self.computed = self.make()
        return self.computed

    def derived(self, hidden: Tensor, then: Callable[[Tensor], Tensor], **changes: Any) -> "DeferredLogits":
        """The same logits seen otherwise; `then` does it to those that were computed."""
        options: dict[str, Any] = {"dtype": self.dtype, "turned": self.turned} | changes
        made = DeferredLogits(self.head, hidden, make=lambda: then(self.plain()), **options)
        made.head_dtype = self.head_dtype
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in _METADATA:
            if name == "__get__" and not _of_metadata(func):
                return func(*_plain(args), **kwargs)
            with torch_private.as_plain_tensor():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            _refuse_gradients(kwargs.get("inputs", args[1] if len(args) > 1 else ()))
        deferred = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if deferred is not None and deferred.computed is None:
            found = _deferred(func, deferred, args[1:], kwargs)
            if found is not None:
                return found
        return func(*_plain(args), **_plain(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What comes without Python's knowledge, from inside another operation."""
        return func(*_plain(args), **_plain(kwargs or {}))


def _refuse_gradients(inputs: Any) -> None:
    """Of logits that a loss never saw: there are none."""
    asked = inputs if isinstance(inputs, tuple | list) else (inputs,)
    if any(isinstance(one, DeferredLogits) and one.head.fused for one in asked):
        raise Unsupported(
            "loss = 'fused': the gradient of the logits is asked for, and the loss was computed without them",
            "omit loss; or call logits.retain_grad() before the loss, which keeps them",
            ("loss",),
        )


def _plain(value: Any) -> Any:
    """The same arguments with logits that are there."""
    if isinstance(value, DeferredLogits):
        return value.plain()
    if type(value) in (tuple, list):
        return type(value)(_plain(one) for one in value)
    return {name: _plain(one) for name, one in value.items()} if type(value) is dict else value


def _of_metadata(getter: Any) -> bool:
    owner = getattr(getter, "__self__", None)
    return getattr(owner, "__name__", "") in _ATTRIBUTES


def _narrow(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _deferred(func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a call gives without the logits; None: it needs them."""
    if func is F.cross_entropy:
        return _fused(logits, *args, **kwargs)
    if func in _CASTS or func is Tensor.to or func is Tensor.type:
        dtype = _CASTS.get(func) or _cast_to(logits, args, kwargs)
        return None if dtype is None else logits.derived(logits.hidden, lambda x: func(x, *args, **kwargs), dtype=dtype)
    if func in _SAME:
        return logits.derived(logits.hidden, lambda x: func(x, *args, **kwargs))
    if func in _TURNS:
        return _turned(func, logits, args, kwargs)
    if logits.turned:
        return None
    if func in _SHAPES:
        return _reshaped(func, logits, args, kwargs)
    return _indexed(logits, args[0]) if func is Tensor.__getitem__ else None


def _cast_to(logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The floating dtype that `to` asks for; None where it asks for another device, or something else."""
    values = [*args, *kwargs.values()]
    devices = [torch.device(v) for v in values if isinstance(v, str | torch.device)]
    here = {logits.device, torch.device(logits.device.type)}
    if any(device not in here for device in devices) or any(isinstance(v, Tensor) for v in values):
        return None
    dtypes = [v for v in values if isinstance(v, torch.dtype)]
    dtype = dtypes[0] if dtypes else logits.dtype
    return dtype if dtype.is_floating_point else None


def _reshaped(func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if len(shape) < 2 or shape[-1] != logits.head.vocabulary:
        return None
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return logits.derived(hidden, lambda x: func(x, *args, **kwargs))


def _turned(func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Classes from the last place to the second: [B, T, V] to [B, V, T]."""
    n = logits.dim()
    order = func(torch.empty(tuple(range(2, n + 2)), device="meta"), *args, **kwargs).shape
    if n < 3 or logits.turned or list(order) != [2, n + 1, *range(3, n + 1)]:
        return None
    return logits.derived(logits.hidden, lambda x: func(x, *args, **kwargs), turned=True)


def _indexed(logits: DeferredLogits, index: Any) -> Tensor | None:
    """Some of the tokens, all of the words."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not parts or not all(isinstance(p, int | slice | Tensor) or p is Ellipsis or p is None for p in parts):
        return None
    to_the_end = any(p is Ellipsis for p in parts[:-1]) or sum(map(_dims, parts)) >= logits.dim()
    if to_the_end and not _is_whole(parts[-1], logits.head.vocabulary):
        return None
    if to_the_end:
        parts[-1] = slice(None)  # of the hidden state, which is as wide as it is
    hidden = logits.hidden[tuple(parts)]
    return logits.derived(hidden, lambda x: x[index]) if hidden.dim() > 1 else None


def _is_whole(part: Any, length: int) -> bool:
    return isinstance(part, slice) and part.indices(length) == (0, length, 1)


def _dims(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _fused(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = _IGNORED,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    whole = isinstance(target, Tensor) and target.dtype in (torch.int64, torch.int32)
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    flat = logits.dim() == 2 or logits.turned
    if not (whole and plain and flat and reduction in ("mean", "sum") and target.shape == logits.hidden.shape[:-1]):
        return None
    targets = target.flatten()
    if ignore_index != _IGNORED:
        targets = torch.where(targets == ignore_index, _IGNORED, targets)
    loss = logits.head.cross_entropy(logits.hidden.flatten(0, -2), targets, logits.head_dtype)
    if reduction == "sum":
        loss = loss * (targets != _IGNORED).sum()
    autocast = _narrow(logits.hidden) is not None
    return loss if autocast else loss.to(logits.dtype)
