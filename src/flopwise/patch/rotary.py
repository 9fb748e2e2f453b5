"""Rotary positions written out in a function (`apply_rotary_pos_emb(q, k, cos, sin)`), run as one kernel.

The kernel turns all rows of a batch by one table of angles. Whether a call has one table shows in the shape of cos: what is
given for each row of a batch is left to the original. That both halves of a table are alike is the code's doing, not the
data's, so it is checked at the first call and not in every step.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from flopwise.kernels.dispatch import autocast_dtype
from flopwise.lm.own_kernels import needs_triton
from flopwise.patch.checked import Kind, can_check
from flopwise.patch.functions import callers, replace_function, written_functions
from flopwise.patch.patched import NO_VALUES, Patched
from flopwise.torch_private import in_fake_mode, version_of

WORDS = ("rotary", "rope")
Angles = tuple[Tensor, Tensor]


def replace(model: nn.Module, value: str, patched: Patched) -> int:
    """Turn queries and keys by our kernel in the modules that call such a function; how many modules do."""
    with needs_triton("rope = 'triton'"):
        from flopwise.kernels import rope
    replaced = 0
    for file, name, function in written_functions(model):
        if not any(word in name.lower() for word in WORDS) or not (modules := callers(model, file, name)):
            continue
        turned = _turned(function)
        if turned is None:
            where = f"rope: {len(modules)} {type(modules[0]).__name__}"
            patched.refused.append(f"{where}: {name} does not take cos and sin")
            continue
        kind = Kind("rope", type(modules[0]).__name__, f"turn by one kernel in place of {name}", patched)
        replace_function(file, name, modules, _Turn(function, turned, kind, rope), patched)
        for _ in modules:
            kind.count()
        replaced += len(modules)
    return replaced


def _turned(function: Callable[..., Any]) -> int | None:
    """How many tensors come before cos and sin; None for a function of other arguments.

    >>> _turned(lambda q, k, cos, sin, unsqueeze_dim=1: None), _turned(lambda x, angles: None)
    (2, None)
    """
    names = list(inspect.signature(function).parameters)
    if "cos" not in names or "sin" not in names:
        return None
    turned = names.index("cos")
    return turned if turned in (1, 2) and names[turned + 1 : turned + 2] == ["sin"] else None


@dataclass(frozen=True)
class Way:
    """How a function's code turns its tensors."""

    positions: int  # the dimension along which they lie
    sign: float  # of the angle
    dtype: torch.dtype  # of the result


class _Turn:
    """A replaced function: the kernel where it was found to give what the original gives, else the original."""

    def __init__(self, original: Callable[..., Any], turned: int, kind: Kind, kernels: Any) -> None:
        self.original, self.turned, self.kind, self.kernels = original, turned, kind, kernels
        self.signature = inspect.signature(original)
        self._ways: dict[Any, Way | None] = {}  # of a sort of input
        self._tables = WeakIdKeyDictionary()  # cos -> sin and the table that was made of them: all layers share it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind.given_up:
            return self.original(*args, **kwargs)
        values = list(self.signature.bind(*args, **kwargs).arguments.values())
        x, (cos, sin), rest = values[: self.turned], values[self.turned : self.turned + 2], values[self.turned + 2 :]
        why = _why_not(x, cos, sin, rest)
        if why:
            self.kind.leave(why)
            return self.original(*args, **kwargs)
        shapes = tuple(one.shape[1:] for one in x)
        sort = shapes, cos.shape, x[0].dtype, cos.dtype, tuple(rest), autocast_dtype(x[0]), torch.is_grad_enabled()
        if sort not in self._ways and can_check():
            self._ways[sort] = self._way(sort, x, cos, sin, lambda *xs: self.original(*xs, cos, sin, *rest))
        way = self._ways.get(sort)
        if way is None:
            return self.original(*args, **kwargs)
        return self._turn(x, self._table(cos, sin, x[0].shape[-1], way), way)

    def _way(self, sort: Any, x: list[Tensor], cos: Tensor, sin: Tensor, original: Any) -> Way | None:
        """Try along which dimension the positions lie, and which way round the angle goes; None if the code does neither."""
        half, positions = x[0].shape[-1] // 2, cos.numel() // cos.shape[-1]
        alike = all(one.shape[-1] == half or torch.equal(one[..., :half], one[..., half:]) for one in (cos, sin))
        with torch.no_grad():
            expected = _as_list(original(*(one.detach() for one in x)))
            dims = [dim for dim in (2, 1) if alike and all(one.shape[dim] == positions for one in x)]
            ways = [Way(dim, sign, expected[0].dtype) for dim in dims for sign in (1.0, -1.0)]
            near = [way for way in ways if _near(self._turn(x, self._table(cos, sin, 2 * half, way), way), expected)]
        if not near:
            self.kind.give_up("does not turn the halves of a head, x[i] with x[i + D/2]")
            return None
        table = self._table(cos, sin, 2 * half, near[0])
        agreed = self.kind.allows(sort, original, lambda *xs: self._turn(xs, table, near[0]), x)
        return near[0] if agreed else None

    def _table(self, cos: Tensor, sin: Tensor, columns: int, way: Way) -> Angles:
        """[T, D/2] in fp32 of either."""
        made, now = self._tables.get(cos), (way.sign, version_of(cos), version_of(sin))
        if made is None or made[0] is not sin or made[1] != now:
            both = [
                one.detach().reshape(-1, one.shape[-1])[:, : columns // 2].float().contiguous() for one in (cos, sin)
            ]
            made = self._tables[cos] = (sin, now, (both[0], both[1] if way.sign > 0 else -both[1]))
        table: Angles = made[2]
        return table

    def _turn(self, x: Sequence[Tensor], table: Angles, way: Way) -> Any:
        """Turn [B, H, T, D], or [B, T, H, D] where the positions are dimension 1."""
        given = [one.to(way.dtype) for one in x]
        along = [one if way.positions == 2 else one.transpose(1, 2) for one in given]
        if len(along) == 2 and along[0].shape[0] == along[1].shape[0]:
            turned = self.kernels.rope_pair(*along, *table)
        else:
            turned = [self.kernels.rope(one, *table) for one in along]
        back = [one if way.positions == 2 else one.transpose(1, 2) for one in turned]
        return tuple(back) if len(back) > 1 else back[0]


def _why_not(x: list[Any], cos: Any, sin: Any, rest: list[Any]) -> str:
    """Why the kernel cannot serve a call; '' if it can."""
    if not all(isinstance(one, Tensor) and one.is_floating_point() for one in (*x, cos, sin)):
        return "cos and sin are not real numbers"
    if not all(one is None or isinstance(one, int | float | str) for one in rest):
        return "the function picks the positions itself"
    if cos.requires_grad or sin.requires_grad:
        return "the angles are learned"
    if in_fake_mode():
        return NO_VALUES
    if cos.shape != sin.shape or any(one.dim() != 4 or one.dtype != x[0].dtype for one in x):
        return "queries and keys are not [B, H, T, D] of one dtype"
    return _why_no_table(cos, x[0].shape[-1] // 2)


def _why_no_table(cos: Tensor, half: int) -> str:
    """Why cos is not one table for all rows of the batch; '' if it is."""
    columns, positions = cos.shape[-1], max(cos.shape[:-1], default=1)
    if columns not in (half, 2 * half):
        return "only a part of each head is turned"
    one_table = cos.numel() == columns * positions and (cos.dim() == 2 or cos.shape[0] == 1)
    return "" if one_table and positions > 1 else "each row of the batch has its own positions"


def _as_list(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def _near(made: Any, expected: list[Tensor]) -> bool:
    """Whether two results are alike but for rounding: the exact comparison follows."""
    pairs = zip(_as_list(made), expected, strict=True)
    return all(a.shape == b.shape and bool((a.float() - b.float()).norm() <= 0.02 * b.float().norm()) for a, b in pairs)
