"""FLOPs of matmuls that torch's own registry leaves out."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from flopwise.torch_private import OpOverload, overload_packet, schema


def _vector(matrix: Any, vector: Any, **_: Any) -> int:
    return 2 * int(matrix.numel())


def _matrices(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Two matrices, or two stacks of them. A single one beside a stack is shared out among it: each row or column once."""
    stacked = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * int(stacked * a.shape[-2] * a.shape[-1] * b.shape[-1])


def _without_first(formula: Callable[..., int]) -> Callable[..., int]:
    return lambda added, *args, **kwargs: formula(*args, **kwargs)


_FORMULAS: dict[str, Callable[..., int]] = {
    "mv": _vector,
    "dot": _vector,
    "vdot": _vector,
    "addmv": _without_first(_vector),
    "addbmm": _without_first(_matrices),
    "_int_mm": _matrices,
    "_grouped_mm": _matrices,
    "_scaled_grouped_mm": _matrices,
}


def formula_of(func: OpOverload) -> Callable[..., int] | None:
    """The formula of an op's FLOPs; in place it is that of the op that is not."""
    found = flop_registry.get(overload_packet(func))
    if found is None and func.namespace == "aten":
        bare = schema(func).name.partition("::")[2].removesuffix("_")
        found = _FORMULAS.get(bare) or flop_registry.get(getattr(torch.ops.aten, bare, None))
    return found
