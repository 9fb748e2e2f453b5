"""Fake tensors that know whole numbers which no data decides, so that code which asks for them takes its usual path."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from flopwise.torch_private import ITEM, FakeTensor, FakeTensorMode, no_dispatch

_aten: Any = torch.ops.aten
_RANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_FILLED = (_aten.ones.default, _aten.zeros.default)
_WHOLE = (torch.int32, torch.int64, torch.bool)
_MOST_KNOWN = 2**22  # elements


class KnowingFakeMode(FakeTensorMode):
    """Fake tensors, of which whole numbers that no data decides (positions, masks) have values, so that code may ask.

    A number that is read from any other is taken as 1, and counted.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.guessed = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func in _RANGES or func in _FILLED) and _is_known(func, args, kwargs or {}):
            with no_dispatch():
                made = func(*args, **(kwargs or {}))
            return self.fake_tensor_converter.from_real_tensor(self, made, make_constant=True)
        if func is ITEM and isinstance(args[0], FakeTensor) and args[0].constant is None:
            self.guessed += 1
            return True if args[0].dtype is torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        return super().dispatch(func, types, args, kwargs or {})

    def may_turn_const(self, t: Tensor) -> bool:
        small = t.numel() <= _MOST_KNOWN if t.dtype in _WHOLE else t.numel() <= 1
        return small and not t.is_sparse and type(t) is Tensor and t.device.type != "meta"


def _is_known(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a range, ones or zeros are whole numbers, and not too many."""
    dtype, device = kwargs.get("dtype"), torch.device(kwargs.get("device") or "cpu")
    if func in _RANGES:
        whole = dtype in (None, *_WHOLE) and all(type(number) is int for number in args)
        count = max(map(abs, args), default=0) * 2 if whole else 0
    else:
        whole, count = dtype in _WHOLE, prod(args[0])
    return whole and count <= _MOST_KNOWN and device.type == "cpu"
