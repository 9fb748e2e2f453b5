"""What was done to attention's scores, and how `F.scaled_dot_product_attention` does the same."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwise.kernels.dispatch import autocast_dtype
from flopwise.patch.checked import can_check
from flopwise.patch.deferred import Call
from flopwise.patch.origins import Origins

NEVER = -1e4  # what is added to a score, or put in its place, to exclude a key: e^NEVER is 0 in every dtype
CASTS = ("float", "half", "bfloat16", "double", "type", "type_as", "to", "contiguous")
_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mask:
    """Added to the scores, or (`fill`) put in their place where it is true."""

    tensor: Tensor
    lead: Shape  # of the scores then: the dimensions before the last two
    fill: float | None = None
    inverted: bool = False  # false where it fills; or subtracted

    def excluded(self) -> Tensor:
        """Where it fills."""
        mask = self.tensor if self.tensor.dtype == torch.bool else self.tensor != 0
        return ~mask if self.inverted else mask

    def added(self) -> Tensor:
        return -self.tensor if self.inverted else self.tensor

    def is_causal(self, rows: int, columns: int, origins: Origins) -> bool:
        """Whether it excludes exactly the keys after each query; read once for each origin, and not taken on trust."""
        origin = origins.of(self.tensor)
        if origin is None or self.tensor.shape[-2:] != (rows, columns):
            return False
        known = (origin, self.fill, self.inverted)
        if known not in origins.causal:
            if not can_check():
                return False
            earlier = torch.ones(rows, columns, dtype=torch.bool, device=self.tensor.device).tril()
            if self.fill is None:
                added = self.added()
                fits = torch.where(earlier, added == 0, added <= NEVER)
            else:
                fits = self.excluded() != earlier
            origins.causal[known] = bool(fits.all())
        return origins.causal[known]


@dataclass(frozen=True)
class State:
    """What was done to the scores of q [lead, Tq, D] and k [lead, Tk, D] so far."""

    q: Tensor
    k: Tensor
    begun: Shape  # the leading dimensions of the product
    lead: Shape  # and now
    dtype: torch.dtype | None  # where it is known
    two: Shape | None = None  # batch and heads, where the code has shown them apart
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    soft: bool = False
    dropout: float = 0.0

    @property
    def shape(self) -> Shape:
        return *self.lead, self.q.shape[-2], self.k.shape[-2]


# --- One call further.


def advance(state: State, call: Call, scores: Any) -> State | None:
    """The state after a call with the scores among its arguments; None for what SDPA cannot do."""
    step = (_WEIGHTS if state.soft else _SCORES).get(call.name)
    return step(state, call, scores) if step is not None else None


def _number(value: Any) -> float | None:
    """A number, also one in a tensor that can be read without waiting for a GPU."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad:
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _scaled(state: State, call: Call, scores: Any, divide: bool) -> State | None:
    first = call.args[0] is scores
    other = call.get(1, "other") if first else call.args[0]
    if state.masks or (divide and (not first or call.kwargs.get("rounding_mode"))):
        return None
    number = _number(other)
    if number is not None and number != 0:
        return changed(state, scale=state.scale / number if divide else state.scale * number)
    if not isinstance(other, Tensor) or not _broadcasts(other, state.shape) or (other.dim() and other.shape[-1] != 1):
        return None
    return (
        changed(state, q=state.q / other if divide else state.q * other)
        if len(state.begun) == len(state.lead)
        else None
    )


def _broadcasts(x: Tensor, shape: Shape) -> bool:
    """Whether x can be combined with that shape and leaves it as it is."""
    sides = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.dim() <= len(shape) and all(one in (1, other) for one, other in sides)


def _added(state: State, call: Call, scores: Any, subtract: bool) -> State | None:
    first = call.args[0] is scores
    other = call.get(1, "other") if first else call.args[0]
    if "alpha" in call.kwargs or (subtract and not first):
        return None
    if _number(other) is not None:
        return state  # the softmax does not see it
    if not isinstance(other, Tensor) or other.dtype == torch.bool or not _broadcasts(other, state.shape):
        return None
    return changed(state, masks=(*state.masks, Mask(other, state.lead, inverted=subtract)))


def _filled(state: State, mask: Any, value: Any, inverted: bool) -> State | None:
    number = _number(value)
    if not isinstance(mask, Tensor) or number is None or number > NEVER or not _broadcasts(mask, state.shape):
        return None
    return changed(state, masks=(*state.masks, Mask(mask, state.lead, number, inverted)))


def _where(state: State, call: Call, scores: Any) -> State | None:
    """torch.where(keep, scores, value), torch.where(exclude, value, scores), scores.where(keep, value)."""
    if len(call.args) != 3:
        return None
    one, two, three = call.args
    if one is scores:
        return _filled(state, two, three, inverted=True)
    return _filled(state, one, three if two is scores else two, inverted=two is scores)


def _softmax(state: State, call: Call, scores: Any) -> State | None:
    if call.get(1, "dim") not in (-1, len(state.shape) - 1):
        return None
    dtype = call.kwargs.get("dtype") or (None if autocast_dtype(state.q) else state.dtype)
    return changed(state, soft=True, dtype=dtype)


def _cast(state: State, call: Call, scores: Any) -> State | None:
    if call.name in ("contiguous", *_DTYPES):
        return changed(state, dtype=_DTYPES.get(call.name, state.dtype))
    wanted = call.get(1, "other", call.kwargs.get("dtype", call.kwargs.get("tensor")))
    if isinstance(wanted, Tensor) and wanted.device == state.q.device:
        wanted = wanted.dtype
    known = isinstance(wanted, torch.dtype) and wanted.is_floating_point and len(call.args) + len(call.kwargs) == 2
    return changed(state, dtype=wanted) if known else None


def _viewed(state: State, call: Call, scores: Any) -> State | None:
    sizes = call.args[1:] if len(call.args) > 1 and isinstance(call.args[1], int) else call.get(1, "shape", ())
    if not isinstance(sizes, tuple | list) or not all(isinstance(size, int) for size in sizes):
        return None
    try:
        lead = tuple(torch.empty(state.shape, device="meta").view(*sizes).shape)
    except RuntimeError:
        return None
    if lead[-2:] != state.shape[-2:] or len(lead) < 3:
        return None
    return changed(state, lead=lead[:-2], two=lead[:-2] if len(lead) == 4 else state.two)


def _dropped(state: State, call: Call, scores: Any) -> State | None:
    share, training = call.get(1, "p", 0.5), call.get(2, "training", True)
    if state.dropout or not isinstance(share, int | float):
        return None
    return changed(state, dropout=float(share) if training else 0.0)


Step = Callable[[State, Call, Any], State | None]
_EITHER: dict[str, Step] = {**dict.fromkeys(CASTS, _cast), "view": _viewed, "reshape": _viewed}
_WEIGHTS: dict[str, Step] = {**_EITHER, "dropout": _dropped}
_SCORES: dict[str, Step] = {
    **_EITHER,
    "mul": lambda state, call, scores: _scaled(state, call, scores, divide=False),
    "div": lambda state, call, scores: _scaled(state, call, scores, divide=True),
    "add": lambda state, call, scores: _added(state, call, scores, subtract=False),
    "sub": lambda state, call, scores: _added(state, call, scores, subtract=True),
    "masked_fill": lambda state, call, scores: _filled(
        state, call.get(1, "mask"), call.get(2, "value"), inverted=False
    ),
    "where": _where,
    "softmax": _softmax,
}


# --- The whole of it as SDPA.


@dataclass(frozen=True)
class Plan:
    """How SDPA is called."""

    causal: bool
    filled: bool  # masks by which keys are excluded, with one value for all
    added: bool  # masks of which at least one is added

    @classmethod
    def of(cls, state: State, origins: Origins) -> "Plan | None":
        rows, columns = state.shape[-2:]
        masks = state.masks
        if masks and all(mask.is_causal(rows, columns, origins) for mask in masks):
            return cls(True, False, False)
        fills = {mask.fill for mask in masks if mask.fill is not None}
        added = any(mask.fill is None for mask in masks)
        # Where all keys of a query are excluded, the value tells what comes out: one for all, or minus infinity.
        if len(fills) > 1 or (added and fills - {-math.inf}):
            return None
        return cls(False, bool(masks) and not added, added)

    def sort(self, state: State, v: Tensor) -> Hashable:
        dtypes = state.q.dtype, state.k.dtype, v.dtype
        shapes = state.q.shape[-1], v.shape[-1], len(state.lead), tuple(mask.tensor.dim() for mask in state.masks)
        return self, dtypes, shapes, v.device.type

    def run(self, state: State, v: Tensor) -> Tensor:
        """[lead, Tq, D]."""
        two = state.two or (state.lead if len(state.lead) == 2 else _two(state.lead))
        dtype = autocast_dtype(v) or v.dtype
        q, k = (_four(x, state.begun, two).to(dtype) for x in (state.q, state.k))
        v = _four(v, state.lead, two).to(dtype)
        mask, none_left = self._mask(state, two, dtype)
        options: dict[str, Any] = {"dropout_p": state.dropout, "is_causal": self.causal, "scale": state.scale}
        y = F.scaled_dot_product_attention(q, k, v, mask, **options)
        if none_left is not None:  # the value stands in every place: all keys count alike
            y = torch.where(none_left, v.mean(-2, keepdim=True), y)
        return y.reshape(*state.lead, *y.shape[-2:])

    def _mask(self, state: State, two: Shape, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """SDPA's mask, and the queries for which no key is left, where that needs care."""
        excluded = [_fitting(mask.excluded(), mask.lead, two) for mask in state.masks if mask.fill is not None]
        kept = ~_any(excluded) if excluded else None
        if self.filled and kept is not None:
            if state.masks[0].fill == -math.inf:
                return kept, None
            none_left = ~kept.any(-1, keepdim=True)
            return kept | none_left, none_left
        if not self.added:
            return None, None
        least = torch.finfo(dtype).min
        added = [_fitting(mask.added(), mask.lead, two) for mask in state.masks if mask.fill is None]
        total = sum(added[1:], added[0])
        total = torch.where(total == -math.inf, total, total.clamp(min=least)).to(dtype)
        return (total if kept is None else total.masked_fill(~kept, -math.inf)), None


def _any(masks: list[Tensor]) -> Tensor:
    total = masks[0]
    for mask in masks[1:]:
        total = total | mask
    return total


def _two(lead: Shape) -> Shape:
    """Two leading dimensions of as many elements."""
    return (1, *lead) if len(lead) == 1 else (lead[0], math.prod(lead[1:]))


def _four(x: Tensor, lead: Shape, two: Shape) -> Tensor:
    """x of leading dimensions that may be expanded, with two of them."""
    last = x.shape[-2:]
    expanded = x if tuple(x.shape[:-2]) == lead else x.expand(*lead, *last)
    return expanded if lead == two else expanded.reshape(*two, *last)


def _fitting(mask: Tensor, lead: Shape, two: Shape) -> Tensor:
    """A mask for scores of these two leading dimensions."""
    last = mask.shape[-2:]
    if mask.dim() <= 2 or lead == two:
        return mask
    if mask.shape[:-2].numel() == 1:
        return mask.reshape(last)
    return mask.expand(*lead, *last).reshape(*two, *last)
