"""A layout: how a training step is shared among the GPUs of a cluster."""

import math
from collections.abc import Iterator
from itertools import chain

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.cluster import Cluster
from flopwise.spec.planned_model import PlannedModel

SHARDED = ("none", "optimizer", "gradients", "weights")  # among the data ranks: nothing, ZeRO-1, ZeRO-2, ZeRO-3 (FSDP)
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
RECOMPUTED = ("none", "selective", "full")  # selective: attention's inside, or norms and activations
CONTEXT_WAYS = ("ring", "ulysses")
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks by what they share. The product of data, tensor, context and pipeline is the number of GPUs.

    `expert` ranks share the experts of a layer; they are taken from the data, context and tensor ranks.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sharded: str = "none"
    shard_ranks: int = 0  # data ranks that share the weights (of a hybrid); 0: all of them
    sequence: bool = False  # tensor ranks also share what lies between the matmuls
    context_way: str = "ring"
    schedule: str = "1f1b"
    virtual: int = 1  # parts of the model that each pipeline rank has
    micro_batch: int = 1  # sequences that go through the model at once, of one data rank
    recompute: str = "none"
    precision: str = "bf16"
    software: str = "megatron"  # spec/software.py
    offload: bool = False  # the optimizer's state lies in the host's memory

    def __post_init__(self) -> None:
        for field in ("data", "tensor", "context", "pipeline", "expert", "expert_tensor", "virtual", "micro_batch"):
            fields.whole(field, getattr(self, field), 1, 10_000_000)
        fields.whole("shard_ranks", self.shard_ranks, 0, 10_000_000)
        fields.one_of("sharded", self.sharded, SHARDED)
        fields.one_of("schedule", self.schedule, SCHEDULES)
        fields.one_of("recompute", self.recompute, RECOMPUTED)
        fields.one_of("context_way", self.context_way, CONTEXT_WAYS)
        fields.one_of("precision", self.precision, PRECISIONS)

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One training step on a cluster. `batch`: sequences of the whole step."""

    model: PlannedModel
    cluster: Cluster
    layout: Layout
    batch: int
    context: int
    uneven: float = 1.0  # the tokens of the busiest expert rank, over the mean

    def __post_init__(self) -> None:
        fields.number("uneven", self.uneven, 1.0, 1_000.0)
        fields.whole("batch", self.batch, 1, 100_000_000)
        fields.whole("context", self.context, 1, 1_000_000_000)
        if (why := misfit(self.model, self.layout, self.batch, self.context)) is not None:
            raise FlopwiseError(*why)

    @property
    def micro_batches(self) -> int:
        """That go through the model one after the other in a step, on each data rank."""
        return self.batch // (self.layout.data * self.layout.micro_batch)

    @property
    def tokens(self) -> int:
        return self.batch * self.context


def misfit(model: PlannedModel, layout: Layout, batch: int, context: int) -> tuple[str, str] | None:
    """Why a model cannot be laid out so, and what could be done; None where it can."""
    return next(chain(_misfits(model, layout, batch, context), _expert_misfits(model, layout)), None)


def _misfits(model: PlannedModel, one: Layout, batch: int, context: int) -> Iterator[tuple[str, str]]:
    spec, tensor = model.spec, f"among {one.tensor} tensor ranks"
    if batch % (each := one.data * one.micro_batch):
        ranks = f"{one.data} data ranks with micro-batches of {one.micro_batch}"
        yield f"a batch of {batch} does not divide among {ranks}", f"a multiple of {each}"
    if spec.n_heads % one.tensor:
        yield f"{spec.n_heads} heads do not divide {tensor}", "fewer tensor ranks"
    if spec.d_ff % one.tensor:
        yield f"d_ff = {spec.d_ff} does not divide {tensor}", "fewer tensor ranks"
    if one.pipeline * one.virtual > spec.n_layers + 2:  # the embedding and the loss may have stages of their own
        yield f"{one.pipeline} × {one.virtual} stages are more than {spec.n_layers} layers", "fewer stages"
    if one.virtual > 1 and one.pipeline == 1:
        yield "several parts of the model on a rank need a pipeline", "--pp 2 or more"
    if one.context > 1 and context % (2 * one.context):
        yield f"a context of {context} does not divide among {one.context} ranks", "fewer context ranks"
    if one.sequence and (context // one.context) % one.tensor:
        tokens = f"{context // one.context} tokens of a sequence"
        yield f"{tokens} do not divide {tensor}, which share them", "another --context, or fewer tensor ranks"
    if one.context_way == "ulysses" and spec.n_heads % (one.context * one.tensor):
        yield f"{spec.n_heads} heads do not divide among {one.context} × {one.tensor} ranks", "--context-way ring"
    if one.shard_ranks and one.data % one.shard_ranks:
        yield f"groups of {one.shard_ranks} do not divide {one.data} data ranks", "a divisor of the data ranks"


def _expert_misfits(model: PlannedModel, one: Layout) -> Iterator[tuple[str, str]]:
    if model.experts is None:
        if one.expert > 1:
            yield f"{model.name} has no experts to share", "--ep 1"
        return
    if model.experts.count % one.expert:
        yield f"{model.experts.count} experts do not divide among {one.expert} ranks", "fewer expert ranks"
    if (one.data * one.context * one.tensor) % (one.expert * one.expert_tensor):
        ranks = f"{one.data} × {one.context} × {one.tensor} ranks"
        yield f"{one.expert} expert ranks do not divide {ranks}", "fewer expert ranks"


def divisors(number: int) -> tuple[int, ...]:
    """
    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))
