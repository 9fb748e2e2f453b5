"""One kernel in one configuration that is shipped: what `resources` compiles."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One kernel in one shipped configuration. Pointers are taken as divisible by 16 bytes, as torch allocates them."""

    name: str  # 'rms_norm forward bf16 4096'
    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]  # of each argument that is not constexpr: '*bf16', 'i32', 'fp32', in any order
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()  # integer arguments that are multiples of 16 in what is shipped
    archs: tuple[int, ...] = (80, 90, 100)  # where this configuration is the one chosen
    spills: Mapping[int, int] = {}  # by architecture, bytes a thread that are known and stay
