"""The operations that can be a workload of their own: `op:matmul` and others, with their dimensions."""

import math
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.recipe import CHOICES
from flopwise.units import parse_size

MOST_ELEMENTS = 2**48  # of one matrix: more than any GPU's memory, and what sizes in bytes can still be computed of


class OpSpec(msgspec.Struct, frozen=True, kw_only=True, tag="op"):
    """One operation with its dimensions.

    >>> op("matmul", {"dim": 512}).dims
    {'m': 512, 'n': 512, 'k': 512}
    """

    name: str
    dims: dict[str, int]
    impl: str = ""  # one of the operation's implementations; '': as the levers say
    causal: bool = True  # of attention: a query sees no key after it

    @property
    def collective(self) -> bool:
        """Whether ranks do it together."""
        return self.name in COLLECTIVES


class _Op(msgspec.Struct, frozen=True):
    dims: dict[str, int]
    batch: int = 1
    context: int = 1
    phase: str = "forward"
    takes: tuple[str, ...] = ()  # of batch and context
    levers: tuple[str, ...] = ("precision", "compile", "graph")
    impls: tuple[str, ...] = ()
    impl: str = ""  # where none is given; '': then its levers decide
    ranks: int = 1  # where none are given


_MATRIX = {"rows": 4096, "cols": 4096}
WITH_IMPL = ("precision", "graph")  # levers that an implementation leaves open
_BOTH = ("batch", "context")
_IMPLS = ("manual", "torch", "compile", "triton")
_ATTENTIONS = ("naive", "sdpa", "sdpa-flash", "sdpa-cudnn", "flex", "tiled", "flash")
_LOSSES = ("full", "compile", "chunked", "fused")


def _levers(*own: str) -> tuple[str, ...]:
    return ("precision", *own, "compile", "graph")


# Which of the ranks' buffers have a part for each rank.
COLLECTIVES = {"all-reduce": False, "all-gather": True, "reduce-scatter": True, "all-to-all": True, "send-recv": False}
BACKENDS = NCCL, GLOO = "nccl", "gloo"
MOST_BYTES = 2**36
_COLLECTIVE = _Op({"bytes": 2**20}, levers=("precision", "ranks"), impls=BACKENDS, ranks=2)


OPS = {
    "matmul": _Op({"m": 4096, "n": 4096, "k": 4096}),
    # The lecture's MLP: linear and GeLU, four times, and `steps` forward and backward passes on one batch.
    "mlp": _Op({"dim": 256, "layers": 4, "steps": 2}, 256, 1, "backward", ("batch",), _levers("activation")),
    # Attention as the course measures it: one head, `dim` wide; causal unless `causal=off` is set.
    "attention": _Op({"dim": 64}, 8, 1024, "backward", _BOTH, _levers("attention"), _ATTENTIONS),
    "gelu": _Op(_MATRIX, levers=_levers("activation"), impls=("manual", "torch", "compile", "cuda", "triton")),
    "softmax": _Op(_MATRIX, levers=_levers("norm"), impls=_IMPLS),
    "rms_norm": _Op(_MATRIX, levers=WITH_IMPL, impls=_IMPLS, impl="torch"),
    "swiglu": _Op(_MATRIX, levers=WITH_IMPL, impls=_IMPLS, impl="torch"),
    "rope": _Op(
        {"heads": 16, "dim": 128}, 4, 2048, "forward", _BOTH, WITH_IMPL, ("manual", "compile", "triton"), "manual"
    ),
    # Of hidden states through the head's weight.
    "cross_entropy": _Op(
        {"rows": 4096, "dim": 1024, "vocab": 32_000}, 1, 1, "backward", (), WITH_IMPL, _LOSSES, "full"
    ),
    # One update of `tensors` weights.
    "adamw": _Op(
        {"tensors": 100, "rows": 1024, "cols": 1024}, 1, 1, "forward", (), WITH_IMPL, CHOICES["optimizer"], "foreach"
    ),
    **dict.fromkeys(COLLECTIVES, _COLLECTIVE),
}


def op(name: str, dims: dict[str, Any], impl: str = "") -> OpSpec:
    """An operation by name; `dims` replaces its defaults (`dim` sets all three sides of a matmul).

    >>> op("attention", {"dim": 16, "causal": "off"})
    OpSpec(name='attention', dims={'dim': 16}, impl='', causal=False)
    """
    if name not in OPS:
        raise FlopwiseError(
            f"there is no operation {fields.show('op:' + name)}",
            f"{fields.did_you_mean(name, OPS)}operations: op:{', op:'.join(OPS)}",
        )
    given = dict(dims)
    causal = fields.switch("causal", given.pop("causal", True)) if name == "attention" else True
    if name == "matmul" and "dim" in given:
        given = dict.fromkeys("mnk", given.pop("dim")) | given
    given = _checked(name, given)
    if impl and not OPS[name].impls:
        raise FlopwiseError(f"impl = {fields.show(impl)} means nothing to op:{name}", "it has one implementation")
    if impl:
        fields.one_of("impl", impl, OPS[name].impls)
    return OpSpec(name=name, dims=OPS[name].dims | given, impl=impl or OPS[name].impl, causal=causal)


def _checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The dimensions that are given, as numbers that the operation can have."""
    fields.known(f"op:{name}", given, OPS[name].dims)
    if isinstance(given.get("bytes"), str):
        given["bytes"] = parse_size(given["bytes"])
    for field, value in given.items():
        fields.whole(field, value, 1, MOST_BYTES if name in COLLECTIVES else 2**31)
    largest = sorted((OPS[name].dims | given).items(), key=lambda one: one[1])[-2:]
    if math.prod(value for _, value in largest) > MOST_ELEMENTS:
        sizes = ", ".join(f"{field} = {value}" for field, value in largest)
        raise FlopwiseError(f"no memory holds op:{name} with {sizes}", "give smaller sizes")
    if name == "rope" and given.get("dim", 0) % 2:
        raise FlopwiseError(f"dim = {given['dim']} is odd, and op:rope turns pairs", "give an even dim")
    return given


def message_bytes(op: OpSpec, ranks: int, item: int) -> int:
    """Of a collective: the larger of a rank's two buffers, rounded down to whole elements, as many for each rank.

    >>> message_bytes(op("all-gather", {"bytes": 1_000_000}), ranks=6, item=4)
    999984
    """
    return op.dims["bytes"] // (part := least_bytes(op, ranks, item)) * part


def least_bytes(op: OpSpec, ranks: int, item: int) -> int:
    """Of a collective: one element of `item` bytes; for each rank, where each has a part of its own."""
    return item * (ranks if COLLECTIVES[op.name] else 1)
