"""The work of one call of an op, from its arguments and results: FLOPs, bytes, dtype, launches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from flopwise.capture.watch.op_flops import formula_of
from flopwise.capture.watch.scatters import reads_touched, touched
from flopwise.torch_private import OpOverload, schema
from flopwise.work.op_table import OWN_ADAMW, kind_of, launches, launches_over
from flopwise.work.operation import ATTENTION, COPY, MATMUL

DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip

# Results that are written without reading what was there.
_OVERWRITES = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
    "_foreach_copy_",
}
# Ops that read as much of their first argument as they write, not all of it.
_GATHERS = {"embedding", "index_select", "gather", "index", "take", "nll_loss_forward"}


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is true of every call of an op."""

    name: str
    kind: str
    is_view: bool
    many: bool  # it walks lists of tensors: foreach, fused optimizers
    written: tuple[int, ...]  # positions of the arguments that it changes in place
    flops: Callable[..., int] | None
    namespace: str = "aten"

    @property
    def shown(self) -> str:
        """The name as told: of flopwise's own ops with their namespace, which tells them from torch's."""
        return f"flopwise::{self.name}" if self.namespace == "flopwise" else self.name


@cache
def facts(func: OpOverload) -> OpFacts:
    """What the op's schema, torch's FLOP registry and our own tables say of it."""
    name = schema(func).name.partition("::")[2]
    returns = [r.alias_info for r in schema(func).returns]
    arguments = schema(func).arguments
    is_view = bool(returns) and all(r is not None and not r.is_write for r in returns)
    is_view = is_view and not name.startswith("lift")  # `torch.tensor(...)`: new, whatever the schema says
    written = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    if name.startswith("_fused_adam"):
        written = tuple(i for i in written if arguments[i].name != "grads")  # only a loss scale would change them
    return OpFacts(
        name=name,
        kind=COPY if is_view else kind_of(name, pointwise=torch.Tag.pointwise in func.tags),
        is_view=is_view,
        many=name == OWN_ADAMW
        or name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")),
        written=written,
        flops=formula_of(func),
        namespace=func.namespace,
    )


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, lists and tuples opened."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def flops_of(fact: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs as torch's FlopCounterMode counts them; grouped attention, which it refuses, by its query heads."""
    if fact.kind == ATTENTION and fact.name.startswith("_scaled_dot_product"):
        if fact.name.endswith("_backward"):
            grad, q, k, v = (tuple(t.shape) for t in args[:4])
            return int(sdpa_backward_flop_count(grad, q, _per_query(q, k), _per_query(q, v)))
        q, k, v = (tuple(t.shape) for t in args[:3])
        return int(sdpa_flop_count(q, _per_query(q, k), _per_query(q, v)))
    if fact.flops is None:
        return 0
    return int(fact.flops(*args, **kwargs, out_val=out))


def _per_query(q: tuple[int, ...], x: tuple[int, ...]) -> tuple[int, ...]:
    return (x[0], q[1], *x[2:])


def bytes_of(
    fact: OpFacts, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor], kernels: int
) -> tuple[int, int]:
    """Bytes read and written: every input once, every result once; of a broadcast tensor what is really there."""
    if not kernels:
        return 0, 0
    if fact.name == "scale_":  # flopwise's own: by 1, as a step without loss scaling does, it moves nothing
        return 4, 0
    if fact.written and (count := touched(fact.name, args)) is not None:
        moved = count * inputs[0].element_size()
        given = {id(t): min(_nbytes(t), count * t.element_size()) for t in inputs[1:]}
        return sum(given.values()) + (moved if reads_touched(fact.name, args) else 0), moved
    changed = tensors_in(args[i] for i in fact.written if i < len(args))
    written = sum(map(_nbytes, changed if changed else outputs))
    if fact.name in _GATHERS:
        return sum(map(_nbytes, inputs[1:])) + written, written
    if fact.name == "nll_loss_backward":  # of the log probabilities it takes the shape
        inputs = [t for t in inputs if t is not args[1]]
    read = {id(t): _nbytes(t) for t in inputs}
    if fact.name in _OVERWRITES:
        for t in changed:
            read.pop(id(t), None)
    return sum(read.values()), written


def _nbytes(t: Tensor) -> int:
    nbytes = t.numel() * t.element_size()
    if 0 in t.stride():  # broadcast: the same bytes again and again
        nbytes = min(nbytes, t.untyped_storage().nbytes())
    return nbytes


def dtype_of(fact: OpFacts, inputs: list[Tensor], outputs: list[Tensor]) -> str:
    """What the op computes in: of a matmul its inputs' dtype (or TF32), else the widest floating dtype that it touches."""
    if fact.kind in (MATMUL, ATTENTION) and inputs:
        name = DTYPES.get(inputs[0].dtype, str(inputs[0].dtype).removeprefix("torch."))
        tf32 = fact.kind == MATMUL and name == "fp32" and torch.get_float32_matmul_precision() != "highest"
        return "tf32" if tf32 else name
    dtypes = {t.dtype for t in inputs} | {t.dtype for t in outputs}
    floating = [d for d in dtypes if d.is_floating_point]
    widest = max(floating or dtypes or {torch.float32}, key=lambda d: (d.itemsize, str(d)))
    return DTYPES.get(widest, str(widest).removeprefix("torch."))


def lists_of(fact: OpFacts, args: tuple[Any, ...]) -> int:
    """How many lists a kernel over many tensors walks: the arguments', and the results' unless it works in place."""
    if fact.name.startswith("_fused_adam"):
        return 5 if args[4] else 4  # parameters, gradients, two moments, the largest second moment of amsgrad
    lists = sum(isinstance(a, list | tuple) and bool(a) and isinstance(a[0], Tensor) for a in args)
    return lists if fact.written else lists + 1


def launches_of(fact: OpFacts, args: tuple[Any, ...], inputs: list[Tensor], sizes: tuple[int, ...], lists: int) -> int:
    """Kernels of this call; `sizes`: of the tensors in each of an op's `lists`."""
    if fact.many:
        return launches_over(fact.name, sizes, lists)
    listed = len(args[0]) if args and isinstance(args[0], list | tuple) else 1
    if fact.name == "cat" and inputs and inputs[0].dim() > 4:
        return listed  # the kernel for many inputs knows four dimensions: a copy each
    return launches(fact.name, fact.is_view, inputs[-1].numel() if inputs else 0, listed)
