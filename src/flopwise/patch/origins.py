"""Where a tensor's values come from, as far as they cannot change from call to call: buffers, and pure functions of numbers."""

from collections.abc import Hashable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from flopwise.patch.deferred import Call
from flopwise.torch_private import version_of

# Functions whose result follows from their arguments alone.
_MADE = ("ones", "zeros", "full", "arange", "ones_like", "zeros_like", "full_like", "tril", "triu", "tril_", "triu_")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "bitwise_not")
_OPERATORS = (
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__invert__",
    "__and__",
    "__or__",
    "__getitem__",
)
_SHAPED = (
    "view",
    "reshape",
    "expand",
    "unsqueeze",
    "squeeze",
    "transpose",
    "contiguous",
    "to",
    "bool",
    "float",
    "type",
)
_ARITHMETIC = (
    "mul",
    "sub",
    "rsub",
    "__rsub__",
    "add",
    "masked_fill",
    "where",
    "detach",
    "clone",
    "int",
    "long",
    "half",
)
PURE = {*_MADE, *_COMPARED, *_OPERATORS, *_SHAPED, *_ARITHMETIC, "bfloat16"}


class Origins:
    """The origins of the tensors that one module's forward makes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Hashable]] = {}  # by id: the tensor, its version, its origin
        self._held: dict[int, Tensor] | None = None
        self._module: nn.Module | None = None
        self._kept: dict[int, Tensor] = {}  # so that no other tensor gets the id of one that an origin names
        self.causal: dict[Hashable, bool] = {}

    def start(self, module: nn.Module) -> None:
        self._known, self._held, self._module = {}, None, module

    def called(self, call: Call, made: Any) -> None:
        if call.name not in PURE or not isinstance(made, Tensor) or made.requires_grad:
            return
        origin = self._frozen((call.name, call.args, call.kwargs))
        if origin is not None:
            self._known[id(made)] = made, version_of(made), origin

    def of(self, tensor: Tensor) -> Hashable | None:
        """What a tensor's values follow from; None where they may be others at the next call."""
        made = self._known.get(id(tensor))
        if made is not None:
            return made[2] if made[1] == version_of(tensor) else None
        if self._held is None and self._module is not None:
            attributes = (one for module in self._module.modules() for one in vars(module).values())
            held = (one for one in chain(self._module.buffers(), attributes) if isinstance(one, Tensor))
            self._held = {id(one): one for one in held}
        if self._held is not None and id(tensor) in self._held and not tensor.requires_grad:
            self._kept[id(tensor)] = tensor
            return "held", id(tensor), version_of(tensor)
        return None

    def _frozen(self, value: Any) -> Hashable | None:
        """Something that is equal for equal arguments; None if one of them is of unknown origin."""
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, dict):
            value = [(key, one) for key, one in value.items()]
        if isinstance(value, tuple | list):
            parts = tuple(self._frozen(one) for one in value)
            return None if None in parts else parts
        if isinstance(value, slice):
            return "slice", value.start, value.stop, value.step
        if value is None or value is Ellipsis:
            return ("none", value is None)
        return value if isinstance(value, Hashable) else None
