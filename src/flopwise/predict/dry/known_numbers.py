"""Fake tensors that know whole numbers which no data decides, so that code which asks for them takes its usual path."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from flopwise.errors import FlopwiseError
from flopwise.torch_private import ITEM, FakeTensor, FakeTensorMode, no_dispatch

_aten: Any = torch.ops.aten
_RANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_FILLED = (_aten.ones.default, _aten.zeros.default)
_WHOLE = (torch.int32, torch.int64, torch.bool)
_MOST_KNOWN = 2**22  # elements
_MOST_GUESSES = 10_000
_TRUTH = "flopwise_truth"  # of a fake tensor of bools: what they are taken as


class KnowingFakeMode(FakeTensorMode):
    """Fake tensors, of which whole numbers that no data decides (positions, masks) have values, so that code may ask.

    All other numbers are taken as 1 where code reads one, and so is what follows from comparing them: nothing overflows, and
    `while (x > 2).any()` ends. Such readings are counted.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.guessed = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func in _RANGES or func in _FILLED) and _is_known(func, args, kwargs):
            with no_dispatch():
                made = func(*args, **kwargs)
            return self.fake_tensor_converter.from_real_tensor(self, made, make_constant=True)
        if func is ITEM and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._guess(args[0])
        out = super().dispatch(func, types, args, kwargs)
        if isinstance(out, FakeTensor) and out.dtype is torch.bool and out.constant is None:
            setattr(out, _TRUTH, _truth(func, args, kwargs))
        return out

    def _guess(self, tensor: Tensor) -> bool | int | float:
        self.guessed += 1
        if self.guessed > _MOST_GUESSES:
            hint = "leave out the loop over numbers that are read from tensors"
            raise FlopwiseError("a dry run has no values, and the code reads them over and over", hint)
        if tensor.dtype is torch.bool:
            return bool(getattr(tensor, _TRUTH, True))
        return 1.0 if tensor.dtype.is_floating_point else 1

    def may_turn_const(self, t: Tensor) -> bool:
        small = t.numel() <= _MOST_KNOWN if t.dtype in _WHOLE else t.numel() <= 1
        return small and not t.is_sparse and type(t) is Tensor and t.device.type != "meta"


def _truth(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """What an op makes of ones; where it is about shapes, what it was given."""
    try:
        with no_dispatch():
            return bool(func(*map(_one, args), **kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return all(getattr(one, _TRUTH, True) for one in args)


def _one(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (torch.ones if getattr(value, _TRUTH, True) else torch.zeros)((), dtype=value.dtype)


def _is_known(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a range, ones or zeros are whole numbers, and not too many."""
    dtype, device = kwargs.get("dtype"), torch.device(kwargs.get("device") or "cpu")
    if func in _RANGES:
        whole = dtype in (None, *_WHOLE) and all(type(number) is int for number in args)
        count = max(map(abs, args), default=0) * 2 if whole else 0
    else:
        whole, count = dtype in _WHOLE, prod(args[0])
    return whole and count <= _MOST_KNOWN and device.type == "cpu"
