"""The work of one call of an op: its tensors reduced to shapes and dtypes, and put to the catalogue."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from flopwise.spec.dtypes import DTYPES, dtype_name, from_torch, item_bytes
from flopwise.torch_private import OpOverload, overload_packet, schema
from flopwise.work import catalogue
from flopwise.work.operation import ATTENTION, COPY, ELEMENTWISE, MATMUL, OTHER
from flopwise.work.tensor import TensorMeta


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is true of every call of an op."""

    name: str
    shown: str  # flopwise's own ops with their namespace, which sets them apart from torch's
    kind: str
    op: catalogue.Op
    is_view: bool
    written: tuple[int, ...]  # positions of the arguments that it changes in place
    formula: Callable[..., int] | None  # torch's, of FLOPs that the catalogue does not have
    causal: tuple[int, str] | None  # of fused attention: the argument that says so, its position and name

    @property
    def over_lists(self) -> bool:
        """Whether it walks lists of tensors: foreach, fused optimizers."""
        return self.op.over_lists


@cache
def facts(func: OpOverload) -> OpFacts:
    """What the op's schema, the catalogue and torch's FLOP registry say of it."""
    full_name = schema(func).name
    namespace, _, name = full_name.partition("::")
    op, is_view = catalogue.operation(full_name), _is_view(func, name)
    pointwise = op.kind == OTHER and torch.Tag.pointwise in func.tags
    return OpFacts(
        name=name,
        shown=full_name if namespace == "flopwise" else name,
        kind=COPY if is_view else ELEMENTWISE if pointwise else op.kind,
        op=op,
        is_view=is_view,
        written=_written_arguments(func, name),
        formula=flop_registry.get(overload_packet(func)) if op.flops is None else None,
        causal=_causal_argument(func) if op.kind == ATTENTION else None,
    )


def _causal_argument(func: OpOverload) -> tuple[int, str] | None:
    arguments = enumerate(schema(func).arguments)
    return next(((place, one.name) for place, one in arguments if one.name in ("is_causal", "causal")), None)


def _is_view(func: OpOverload, name: str) -> bool:
    """Whether its results are its inputs' memory. Those of `lift` (`torch.tensor(...)`) are new, whatever its schema says."""
    returns = [r.alias_info for r in schema(func).returns]
    aliases = bool(returns) and all(r is not None and not r.is_write for r in returns)
    return aliases and not name.startswith("lift")


def _written_arguments(func: OpOverload, name: str) -> tuple[int, ...]:
    """Positions of those that it changes. Fused Adam would change gradients only by a loss scale."""
    skipped = "grads" if name.startswith("_fused_adam") else None
    arguments = enumerate(schema(func).arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write and a.name != skipped)


@cache
def _name(dtype: torch.dtype) -> str:
    known = from_torch(dtype)
    return known.name if known else dtype_name(dtype)


def described(tensor: Tensor) -> TensorMeta:
    """A tensor's shape, dtype and memory order."""
    strides = None if tensor.is_contiguous() else tensor.stride()
    return TensorMeta(tuple(tensor.shape), _name(tensor.dtype), strides)


class Call:
    """One call: its tensors described, each once however often it is given."""

    def __init__(self, fact: OpFacts, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.fact = fact
        self._metas = {id(tensor): described(tensor) for tensor in (*inputs, *outputs)}
        self.args = [self._described(value) for value in args]
        self.inputs = [self._metas[key] for key in dict.fromkeys(map(id, inputs))]
        self.outputs = [self._metas[id(tensor)] for tensor in outputs]
        self.shapes = tuple(self._metas[id(tensor)].shape for tensor in inputs)

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._metas[id(value)]
        if isinstance(value, list | tuple):
            return [self._metas.get(id(each)) if isinstance(each, Tensor) else each for each in value]
        return value

    @property
    def launches(self) -> int:
        """Of an op that walks no lists."""
        return 0 if self.fact.is_view else catalogue.launches(self.fact.op, self.args)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Read and written; of an op that works in place, what it changes is written."""
        changed = [one for i in self.fact.written if i < len(self.args) for one in _listed(self.args[i])]
        return catalogue.moved_bytes(self.fact.op, self.args, self.inputs, changed or self.outputs)

    @property
    def dtype(self) -> str:
        """What it computes in: of a matmul its inputs' dtype (or TF32), else the widest floating dtype that it touches."""
        if self.fact.kind in (MATMUL, ATTENTION) and self.inputs:
            first = self.inputs[0].dtype
            name = next(
                (one.dtype for one in self.inputs if _precision(one.dtype) == "fp8"), first
            )  # beside what it keeps
            return "tf32" if name == "fp32" and self.fact.kind == MATMUL and tf32_allowed() else _precision(name)
        dtypes = {one.dtype for one in (*self.inputs, *self.outputs)}
        floating = [one for one in dtypes if _floating(one)]
        return _precision(max(floating or dtypes or {"fp32"}, key=lambda one: (item_bytes(one, 1), one)))

    @property
    def strided(self) -> bool:
        """Whether an input is broadcast or not contiguous."""
        return not all(one.contiguous for one in self.inputs)

    @property
    def mixed(self) -> bool:
        """Whether the inputs have several floating dtypes."""
        return len({one.dtype for one in self.inputs if one.shape and _floating(one.dtype)}) > 1


def _listed(value: Any) -> list[TensorMeta]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, TensorMeta)]


def _floating(name: str) -> bool:
    return name in DTYPES and DTYPES[name].floating


def _precision(name: str) -> str:
    return DTYPES[name].precision if name in DTYPES else name


def tf32_allowed() -> bool:
    """Whether fp32 matmuls run as TF32."""
    return torch.get_float32_matmul_precision() != "highest"


def flops_of(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs by the catalogue; else as torch's FlopCounterMode counts them, a user's own formulas included."""
    if call.fact.formula is not None:
        return int(call.fact.formula(*args, **kwargs, out_val=out))
    return catalogue.flops(call.fact.op, call.args)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, lists and tuples opened."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def lists_of(fact: OpFacts, args: tuple[Any, ...]) -> int:
    """How many lists a kernel over many tensors walks: the arguments', and the results' unless it works in place."""
    if fact.name.startswith("_fused_adam"):
        return 5 if args[4] else 4  # parameters, gradients, two moments, the largest second moment of amsgrad
    lists = sum(isinstance(a, list | tuple) and bool(a) and isinstance(a[0], Tensor) for a in args)
    return lists if fact.written else lists + 1
