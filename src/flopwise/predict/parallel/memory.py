"""The memory of a layout's fullest GPU by owner, in closed formulas: no operation is gone through.

The moments that can be the fullest are a few: the loss, the backward pass of a stage's last layer and of its first, and the
optimizer. Each is a sum of what lasts, what micro-batches under way keep, and what is there for a moment.
"""

from functools import cache
from typing import NamedTuple

from flopwise.predict.parallel import constants as fitted
from flopwise.predict.parallel.activations import LayerBytes, Ranks, layer_bytes
from flopwise.predict.shapes.step import workspace_bytes
from flopwise.records.planned import PlannedMemory
from flopwise.spec.gpu import find_gpu
from flopwise.spec.layout import Job, Layout
from flopwise.spec.planned_model import PlannedModel
from flopwise.spec.software import Software, software
from flopwise.work.operation import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    INPUTS,
    LOGITS,
    OPTIMIZER_STATE,
    PARAMETERS,
    SCORES,
    TEMPORARY,
    WORKSPACE,
)

# What no tensor holds: `torch.cuda.memory_reserved` counts the first, `nvidia-smi` all of them.
FRAGMENTS, NCCL, CONTEXT = "allocator fragments", "NCCL buffers", "CUDA context"
OUTSIDE = (NCCL, CONTEXT)
_PASSING = (ACTIVATIONS, SCORES, LOGITS, TEMPORARY, GATHERED)  # comes and goes within a step, and leaves fragments


class Numbers(NamedTuple):
    """The bytes of a parameter, and of a token's logits for each word of the vocabulary."""

    weight: float
    gradient: float
    state: float  # moments, and the master copy where weights are in half precision
    loss: float  # logits, what the loss makes of them, and their gradients, at the fullest moment
    own_gradients: bool = True  # they last from step to step, in a buffer of their own


# Megatron-Core's guide, 'Distributed Optimizer': bf16 weights, fp32 gradients: 6 + 12/d; fp16 both: 4 + 16/d. Its loss makes an
# fp32 copy of the logits and works in place (core/tensor_parallel/cross_entropy.py); that of 2021 made one more.
_MEGATRON = Numbers(weight=2, gradient=4, state=12, loss=6)
_MEGATRON_FP16 = Numbers(weight=2, gradient=2, state=16, loss=10)
# PyTorch: fp32 weights, gradients and moments; half precision by autocast or FSDP's MixedPrecisionPolicy. log_softmax's fp32
# output, its gradient and the logits' are there at once; torchtitan's loss over tensor ranks has one more
# (torch/distributed/tensor/parallel/loss.py).
_PYTORCH = Numbers(weight=4, gradient=4, state=8, loss=12, own_gradients=False)
_LOSS_OVER_RANKS = 16
_FUSED_LOSS = _PYTORCH._replace(loss=4)  # logits and their gradients in bf16: flash-attn's loss, as llm-foundry has it
_OF = {
    "megatron": _MEGATRON,
    "megatron-overlap": _MEGATRON,
    "megatron-2021": _MEGATRON_FP16,
    "deepspeed-2021": _MEGATRON_FP16,
    "llm-foundry": _FUSED_LOSS,
}
# Weights as low-precision matmuls read them: by rows and by columns, scales included. Megatron keeps no others on the GPU beside
# the optimizer's (`--fp8-param-gather`), for nvfp4 also those in bf16.
_LOW_WEIGHTS = {"fp8": 2.0, "mxfp8": 2 + 2 / 32, "nvfp4": 2 + 1 + 2 / 16}
_AHEAD = 2  # blocks that FSDP gathers at the same time: the one that runs and the next
_TOKEN_IDS = 16  # inputs and labels, int64


class _Weights(NamedTuple):
    """Parameters of a rank: of a plain layer, of a layer with experts (without and of them), and of the embedding or the head."""

    dense: float
    sparse: float
    experts: float
    table: float
    positions: float


class _Stage(NamedTuple):
    """One pipeline rank: its layers, how much of its forward work is kept at once, and what else it has."""

    dense: int
    sparse: int
    under_way: float  # micro-batches that its layers keep
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        return self.dense + self.sparse


def planned_memory(job: Job) -> PlannedMemory:
    """Who holds how much on the fullest GPU at its fullest moment; owners add up to the peak.

    >>> from flopwise.spec.cluster import cluster
    >>> from flopwise.spec.model import preset
    >>> model = PlannedModel(spec=preset("llama3-8b"))
    >>> sharded = Layout(data=8, sharded="weights", software="torchtitan", recompute="full")
    >>> found = planned_memory(Job(model=model, cluster=cluster("h100"), layout=sharded, batch=8, context=8192))
    >>> found.peak_bytes == sum(found.owners.values())
    True
    """
    ranks = _Rank(job)
    fullest = max(
        (owners for place in ranks.places() for owners in ranks.moments(place)), key=lambda one: sum(one.values())
    )
    owners = {name: round(size) for name, size in fullest.items() if round(size)}
    return PlannedMemory(peak_bytes=sum(owners.values()), owners=owners)


@cache
def _weights(model: PlannedModel, tensor: int, expert: int, expert_tensor: int) -> _Weights:
    spec, e, a = model.spec, model.experts, model.latent
    norms = 2 * spec.d_model * (2 if spec.norm_kind == "layer" else 1)
    narrow = spec.d_model * (a.q_rank + a.kv_rank + a.rope_dim) if a else 0  # every tensor rank has these whole
    attention = (model.attention_parameters() - narrow) / tensor + narrow
    dense = attention + norms + model.mlp_parameters(spec.d_ff) / tensor
    sparse = experts = 0.0
    if e is not None:
        sparse = attention + norms + model.mlp_parameters(e.shared_d_ff) / tensor + spec.d_model * e.count
        experts = model.expert_parameters() / expert / expert_tensor
    positions = spec.max_context * spec.d_model if spec.positions == "learned" else 0
    return _Weights(dense, sparse, experts, spec.vocab * spec.d_model / tensor, positions)


def _numbers(layout: Layout, program: Software) -> Numbers:
    known = _OF.get(program.name, _PYTORCH)
    if known is _MEGATRON_FP16 and layout.precision != "fp16":
        known = _MEGATRON._replace(loss=_MEGATRON_FP16.loss)
    if known is _PYTORCH and program.passes == "compiled" and layout.tensor > 1:
        return known._replace(loss=_LOSS_OVER_RANKS)
    if not known.own_gradients:
        return known
    return known._replace(weight=_LOW_WEIGHTS.get(layout.precision, known.weight))


class _Rank:
    """The ranks of a job: what each holds, stage by stage and moment by moment."""

    def __init__(self, job: Job) -> None:
        self.job, self.layout, self.model = job, job.layout, job.model
        one, spec = job.layout, job.model.spec
        self.program = software(one.software)
        self.numbers = _numbers(one, self.program)
        self.pytorch = not self.numbers.own_gradients
        self.whole = one.sharded in ("none", "optimizer")  # every data rank has all weights
        self.autocast = self.pytorch and self.whole
        self.shares = (one.shard_ranks or one.data) * one.context
        replicas = one.data // (one.shard_ranks or one.data)
        apart = one.data * one.context * one.tensor // (one.expert * one.expert_tensor * replicas)
        self.expert_shares = max(1, apart)
        self.weights = _weights(job.model, one.tensor, one.expert, one.expert_tensor)
        self.tokens = one.micro_batch * job.context / one.context
        self.vocab = spec.vocab / one.tensor

    def places(self) -> tuple[_Stage, ...]:
        """Pipeline ranks of which one is the fullest: the ends, and those beside the first."""
        p = self.layout.pipeline
        return tuple(self._stage(place) for place in sorted({0, min(1, p - 1), min(2, p - 1), p - 1}))

    def _stage(self, place: int) -> _Stage:
        """Layers that do not divide go to the inner parts first: the ends have the embedding and the head."""
        one, spec, e = self.layout, self.model.spec, self.model.experts
        p, parts = one.pipeline, one.pipeline * one.virtual
        each, rest = divmod(spec.n_layers, parts)
        layers = plain = 0
        for part in range(place, parts, p):
            count = each + (1 <= part <= rest)
            before = part * each + min(max(0, part - 1), rest)
            layers += count
            plain += count if e is None else min(count, max(0, e.dense_layers - before))
        return _Stage(plain, layers - plain, self._under_way(place), place == 0, place == p - 1)

    def _under_way(self, place: int) -> float:
        """Micro-batches that went forward on a rank and not yet back, at most: as many of all its layers."""
        one, m = self.layout, self.job.micro_batches
        p, v = one.pipeline, one.virtual
        if p == 1:
            return 1
        if one.schedule == "interleaved" or v > 1:
            return (min(m * v - 1, 2 * (p - place - 1) + (v - 1) * p) + 1) / v
        return min(m, p if one.schedule == "zero-bubble" else p - place)

    # --- what lasts

    def _parameters(self, stage: _Stage) -> tuple[float, float]:
        """Of a stage: those that data ranks share, and those that expert ranks have apart."""
        w = self.weights
        tables = stage.first + (stage.last and not (self.model.spec.tied and stage.first))
        plain = stage.dense * w.dense + stage.sparse * w.sparse + tables * w.table + stage.first * w.positions
        return plain, stage.sparse * w.experts

    def _shared(self, plain: float, experts: float, sharded: bool) -> float:
        return plain / self.shares + experts / self.expert_shares if sharded else plain + experts

    def _lasting(self, stage: _Stage) -> dict[str, float]:
        """Weights, their state and the buffers."""
        one, n, spec = self.layout, self.numbers, self.model.spec
        plain, experts = self._parameters(stage)
        in_parts = one.sharded == "weights" or (self.pytorch and not self.whole)
        return {
            PARAMETERS: n.weight * self._shared(plain, experts, in_parts),
            OPTIMIZER_STATE: 0.0 if one.offload else n.state * self._shared(plain, experts, one.sharded != "none"),
            INPUTS: _TOKEN_IDS * self.tokens * self.job.micro_batches,
            BUFFERS: 4 * spec.head_dim * self.job.context if spec.positions == "rope" else 0.0,
            WORKSPACE: 2.0 * workspace_bytes(find_gpu(self.job.cluster.gpu)),
            CONTEXT: fitted.CONTEXT_BYTES,
            NCCL: fitted.NCCL_BYTES * self._groups(),
        }

    def _groups(self) -> int:
        """Communicators: of all ranks, and for each way of sharing that has several."""
        one = self.layout
        ways = (one.gpus, one.data * one.context, one.tensor, one.context, one.pipeline, one.expert)
        return sum(ranks > 1 for ranks in ways)

    def _gradients(self, stage: _Stage, all_there: bool) -> float:
        """At the end of the backward pass (`all_there`), and at the loss."""
        one, n = self.layout, self.numbers
        plain, experts = self._parameters(stage)
        sharded = one.sharded in ("gradients", "weights") and not self._accumulates_whole
        lasts = n.own_gradients or self.job.micro_batches > 1 or (self.whole and one.data > 1)
        return n.gradient * self._shared(plain, experts, sharded) if all_there or lasts else 0.0

    @property
    def _accumulates_whole(self) -> bool:
        """FSDP in a pipeline reduces gradients once, after the last micro-batch (torch/distributed/pipelining/stage.py)."""
        return self.pytorch and not self.whole and self.layout.pipeline > 1 and self.job.micro_batches > 1

    def _gathered(self, stage: _Stage) -> tuple[float, float]:
        """Weights of other ranks while layers run, or casts of one's own; and gradients on their way to the others."""
        one, w, n = self.layout, self.weights, self.numbers
        plain, experts = self._parameters(stage)
        root = plain - stage.dense * w.dense - stage.sparse * w.sparse
        item = 2.0 if self.pytorch else n.weight  # torchtitan gathers in float8 only where asked to
        block = max(w.dense * (stage.dense > 0), (w.sparse + w.experts) * (stage.sparse > 0))
        if self.autocast:  # a cast of each weight of a matmul, the head's included; an embedding is read as it is
            layers = block if one.recompute == "full" else plain - root + experts
            return 2.0 * (layers + w.table * stage.last), 0.0
        if self.whole or (one.sharded == "gradients" and not self.pytorch):
            return 0.0, 0.0
        if self.program.gathers_apart:  # matrix by matrix
            block = self.model.spec.d_model * max(self.model.spec.d_ff, self.model.spec.d_model) / one.tensor
        on_its_way = (2 + n.gradient) * block
        # FSDP in a pipeline gathers once a step (torchtitan: `reshard_after_forward` is off there).
        keeps = one.sharded == "gradients" or (self.pytorch and one.pipeline > 1)
        blocks = plain - root + experts if keeps else min(_AHEAD, stage.layers) * block
        return item * blocks + 2 * root, on_its_way

    # --- what comes and goes

    def _layer(self, sparse: bool) -> LayerBytes:
        one = self.layout
        ranks = Ranks(one.tensor, one.sequence, one.context, one.context_way, one.expert_tensor)
        return layer_bytes(self.model, sparse, ranks, self.program, one.precision, self.autocast)

    def _saved(self, stage: _Stage) -> tuple[float, float, LayerBytes]:
        """Of one token in all layers of a stage: activations, scores; and its largest layer."""
        kept = scores = 0.0
        layers = [
            (count, self._layer(sparse)) for count, sparse in ((stage.dense, False), (stage.sparse, True)) if count
        ]
        for count, one in layers or [(0, self._layer(False))]:
            activations, written = one.saved(self.layout.recompute, self.job.context)
            kept, scores = kept + count * activations, scores + count * written
        return kept, scores, max((one for _, one in layers), key=lambda one: one.kept, default=self._layer(False))

    def _loss(self, stage: _Stage) -> tuple[float, float, float]:
        """At the loss, the logits and all that is made of them; what stays of them afterwards; hidden states beside them."""
        if not stage.last:
            return 0.0, 0.0, 0.0
        one, words = self.layout, self.tokens * self.vocab
        # Outputs of PyTorch's last stage stay until the step ends (its issue 159251).
        stays = 4 * words * self.job.micro_batches if self.pytorch and one.pipeline > 1 else 0.0
        hidden = self.model.spec.d_model * (4 if one.sequence and one.tensor > 1 else 2)
        return self.numbers.loss * words + stays, stays, hidden * self.tokens

    def moments(self, stage: _Stage) -> tuple[dict[str, float], ...]:
        """The owners at each moment that can be a stage's fullest."""
        n, keys, lasting = self.tokens, self.job.context, self._lasting(stage)
        gathered, on_its_way = self._gathered(stage)
        kept, scores, layer = self._saved(stage)
        logits, stays, hidden = self._loss(stage)
        at_loss = lasting | {
            GRADIENTS: self._gradients(stage, False),
            GATHERED: gathered,
            ACTIVATIONS: n * stage.under_way * kept,
            SCORES: n * stage.under_way * scores,
            LOGITS: logits,
            TEMPORARY: hidden,
        }
        mine = layer.saved(self.layout.recompute, keys)
        again = n * (layer.kept - mine[0]), n * (layer.scores * keys - mine[1])  # of a layer that is computed once more
        passing = n * (layer.working + layer.score_gradients * keys) + on_its_way
        if self.layout.pipeline > 1:
            passing += 2 * n * layer.stream  # what comes from a neighbour, and goes to one
        top = at_loss | {LOGITS: stays, TEMPORARY: passing}
        top |= {ACTIVATIONS: at_loss[ACTIVATIONS] + again[0], SCORES: at_loss[SCORES] + again[1]}
        bottom = top | {
            GRADIENTS: self._gradients(stage, True),
            GATHERED: gathered / max(1, stage.layers) if self.autocast else gathered,
            ACTIVATIONS: top[ACTIVATIONS] - n * max(0.0, kept - mine[0]),
            SCORES: top[SCORES] - n * max(0.0, scores - mine[1]),
        }
        return tuple(_with_fragments(one) for one in (at_loss, top, bottom, self._update(stage, lasting)))

    def _update(self, stage: _Stage, lasting: dict[str, float]) -> dict[str, float]:
        """AdamW over lists of tensors has √v of all of them for a moment; a fused one has not."""
        plain, experts = self._parameters(stage)
        foreach = self.program.passes == "eager" and not self.layout.offload
        roots = 4 * self._shared(plain, experts, self.layout.sharded != "none") if foreach else 0.0
        n, one = self.numbers, self.layout
        sharded = one.sharded in ("gradients", "weights")
        return lasting | {GRADIENTS: n.gradient * self._shared(plain, experts, sharded), TEMPORARY: roots}


def _with_fragments(owners: dict[str, float]) -> dict[str, float]:
    return owners | {FRAGMENTS: fitted.FRAGMENT_SHARE * sum(owners.get(name, 0.0) for name in _PASSING)}
