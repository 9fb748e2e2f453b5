"""The time of one training step of a layout: kernels of the busiest rank, what is exchanged and not hidden, and the bubble."""

import math
from typing import NamedTuple

from flopwise.predict.parallel import constants as fitted
from flopwise.predict.parallel.layer import (
    Both,
    Share,
    Times,
    attention_block,
    expert_block,
    head_block,
    limits,
    mlp_block,
    share_of,
)
from flopwise.predict.parallel.topology import Group, exchange_s
from flopwise.records import planned as parts
from flopwise.records.planned import PlannedStep
from flopwise.spec.gpu import gpu
from flopwise.spec.layout import Job
from flopwise.spec.planned_model import PlannedModel
from flopwise.spec.software import Software, software
from flopwise.work.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND_RECEIVE

_HALF, _SINGLE = 2, 4  # bytes


def model_flops(model: PlannedModel, batch: int, context: int) -> float:
    """Of one step, forward and backward, every score counted."""
    spec = model.spec
    tokens = batch * context
    weights = model.active_parameters() - spec.vocab * spec.d_model * (0 if spec.tied else 1)
    if spec.positions == "learned":
        weights -= spec.max_context * spec.d_model
    score = (
        2 * spec.head_dim
        if model.latent is None
        else model.latent.plain_dim + model.latent.rope_dim + model.latent.value_dim
    )
    return 6.0 * weights * tokens + 6.0 * tokens * context * spec.n_heads * score * spec.n_layers


class _Exchange(NamedTuple):
    """Seconds that one micro-batch of one layer exchanges, forward and backward."""

    forward: float = 0.0
    backward: float = 0.0


def planned_step(job: Job) -> PlannedStep:
    """The time of a step, by what takes it.

    >>> from flopwise.spec.cluster import cluster
    >>> from flopwise.spec.layout import Layout
    >>> from flopwise.spec.model import preset
    >>> model = PlannedModel(spec=preset("llama3-8b"))
    >>> laid = Layout(data=64, sharded="weights")
    >>> found = planned_step(Job(model=model, cluster=cluster("dgx-h100"), layout=laid, batch=64, context=8192))
    >>> abs(sum(found.parts.values()) / found.wall_s - 1) < 1e-9
    True
    """
    return _Step(job).planned()


class _Step:
    def __init__(self, job: Job) -> None:
        self.job, self.layout, self.cluster, self.model = job, job.layout, job.cluster, job.model
        self.software: Software = software(job.layout.software)
        self.share: Share = share_of(job.model, job.layout, job.cluster, job.context)
        self.parts: dict[str, float] = dict.fromkeys(parts.PARTS, 0.0)
        self.hidden: dict[str, float] = {}
        one = self.layout
        self.item = 2
        self.layers = job.model.spec.n_layers / one.pipeline
        # Ranks are numbered tensor first, then context, data, and pipeline.
        self.tensor = Group(one.tensor, 1)
        self.context = Group(one.context, one.tensor)
        self.data = Group(one.data * one.context, one.tensor)
        self.stages = Group(2, one.tensor * one.context * one.data)
        self.expert = Group(one.expert, one.expert_tensor)

    # --- what one micro-batch takes on one rank

    def block(self) -> Both:
        """The mean layer."""
        attention, plain = attention_block(self.share), mlp_block(self.share)
        share = self.model.expert_layers / self.model.spec.n_layers
        forward, backward = (
            attention.forward.plus(plain.forward, 1 - share),
            attention.backward.plus(plain.backward, 1 - share),
        )
        if share:
            experts = expert_block(self.share)
            forward, backward = forward.plus(experts.forward, share), backward.plus(experts.backward, share)
        return Both(forward, backward)

    def tensor_exchange(self) -> _Exchange:
        """Of a layer: twice forward, twice backward."""
        one = self.layout
        if one.tensor == 1:
            return _Exchange()
        n_bytes = self.share.tokens * self.model.spec.d_model * self.item
        wait_s = 1e-9 * fitted.WAIT_NS * (self.software.host == "checkpointed")
        if one.sequence:
            gather, scatter = (
                wait_s + exchange_s(kind, n_bytes, self.tensor, self.cluster) for kind in (ALL_GATHER, REDUCE_SCATTER)
            )
            # Backward gathers once more what the weights' gradient needs, which the shards of its input are.
            return _Exchange(2 * (gather + scatter), 2 * (gather + scatter) + 2 * gather)
        once = wait_s + exchange_s(ALL_REDUCE, n_bytes, self.tensor, self.cluster)
        return _Exchange(2 * once, 2 * once)

    def context_exchange(self, layer: Both) -> _Exchange:
        """Of a layer: what attention's own time does not hide."""
        one, spec = self.layout, self.model.spec
        if one.context == 1:
            return _Exchange()
        keys = -(-spec.n_kv_heads // one.tensor) * spec.head_dim
        if self.model.latent is not None:
            keys = spec.n_heads // one.tensor * (self.model.latent.plain_dim + self.model.latent.value_dim)
        n_bytes = 2 * self.share.tokens * keys * self.item
        if one.context_way == "ulysses":
            queries = spec.n_heads * spec.head_dim // one.tensor
            moved = 2 * self.share.tokens * (queries + keys) * self.item
            once = exchange_s(ALL_TO_ALL, moved, self.context, self.cluster)
            return _Exchange(once, once)
        ring = (one.context - 1) * exchange_s(SEND_RECEIVE, n_bytes, self._ring_hop(), self.cluster)
        self._hide(parts.CONTEXT, min(ring, layer.forward.attention) * self.layers * self.job.micro_batches)
        return _Exchange(max(0.0, ring - layer.forward.attention), max(0.0, 2 * ring - layer.backward.attention))

    def _ring_hop(self) -> Group:
        return Group(2, 1 if self.context.near(self.cluster) == self.context.ranks else self.cluster.domain)

    def expert_exchange(self) -> _Exchange:
        """Of a mean layer: tokens to their experts and back."""
        experts, one = self.model.experts, self.layout
        if experts is None or one.expert == 1:
            return _Exchange()
        tokens = self.share.tokens // (one.tensor if one.sequence else 1)
        n_bytes = tokens * experts.chosen * self.model.spec.d_model * self.item
        once = 2 * self._to_experts_s(n_bytes, experts.chosen)
        share = self.model.expert_layers / self.model.spec.n_layers
        return _Exchange(once * share, once * share)

    def _to_experts_s(self, n_bytes: float, chosen: int) -> float:
        """One way. Where a token goes to each host once, fewer bytes leave the host; within it, all its copies are made."""
        near = self.expert.near(self.cluster)
        hosts = self.expert.ranks // near
        if not self.software.once_a_host or hosts == 1:
            return exchange_s(ALL_TO_ALL, n_bytes, self.expert, self.cluster)
        met = hosts * (1 - (1 - 1 / hosts) ** chosen)
        out = exchange_s(ALL_TO_ALL, n_bytes * met / chosen, Group(hosts, self.cluster.domain), self.cluster)
        return max(out, exchange_s(ALL_TO_ALL, n_bytes, Group(near), self.cluster))

    def _hide(self, name: str, seconds: float) -> None:
        self.hidden[name] = self.hidden.get(name, 0.0) + seconds

    def _add(self, name: str, seconds: float) -> None:
        self.parts[name] += seconds

    # --- the step

    def planned(self) -> PlannedStep:
        layer = self.block()
        recomputed, exchanged = self._recomputed(layer), self._exchanged(layer)
        self._micro_batches(layer, recomputed, exchanged)
        self._data(layer, recomputed, exchanged)
        self._update()
        self._add(parts.SLOWED, fitted.SLOWED * sum(self.hidden.values()))
        wall = sum(self.parts.values())
        if self.layout.sharded == "weights":  # at every layer all data ranks wait for the last of them
            late = wall * fitted.JITTER * math.log2(max(1, self.layout.gpus // self.cluster.host))
            self._add(parts.DATA, late)
            wall += late
        flops = model_flops(self.model, self.job.batch, self.job.context)
        peaks = gpu(self.cluster.gpu).peaks
        return PlannedStep(
            wall_s=wall,
            parts=self.parts,
            model_flops=flops,
            mfu=flops / wall / self.layout.gpus / (peaks.get("bf16") or peaks["fp16"]),
            tokens_s_gpu=self.job.tokens / wall / self.layout.gpus,
            hidden_s=self.hidden,
            how=limits(self.cluster.gpu).how,
        )

    def _exchanged(self, layer: Both) -> dict[str, float]:
        """Seconds of a layer and micro-batch that nothing hides."""
        again = 1.0 if self.layout.recompute == "full" else 0.0
        found = {
            parts.TENSOR: self.tensor_exchange(),
            parts.CONTEXT: self.context_exchange(layer),
            parts.EXPERT: self.expert_exchange(),
        }
        seconds = {name: one.forward * (1 + again) + one.backward for name, one in found.items()}
        # Pieces of an exchange hide behind the products that make or use them, and tensor ranks' only within a domain.
        room = self._products(layer, again)
        near = self.tensor.near(self.cluster) == self.tensor.ranks
        hides = {parts.TENSOR: fitted.TENSOR_HIDDEN * (self.software.hides_tensor and near)}
        hides[parts.EXPERT] = fitted.EXPERTS_HIDDEN * self.software.hides_experts
        for name, share in hides.items():
            hidden = min(share * seconds[name], room)
            if hidden:
                self._hide(name, hidden * self.layers * self.job.micro_batches)
                seconds[name], room = seconds[name] - hidden, room - hidden
        return seconds

    @staticmethod
    def _products(layer: Both, again: float) -> float:
        return layer.forward.matmuls * (1 + again) + layer.backward.matmuls

    def _micro_batches(self, layer: Both, recomputed: Times, exchanged: dict[str, float]) -> None:
        """What a rank does for its micro-batches, one after the other, and the pipeline that they go through."""
        one, micro, head = self.layout, self.job.micro_batches, head_block(self.share)
        compute = layer.forward.plus(layer.backward)
        found = {
            parts.MATMULS: compute.matmuls,
            parts.ATTENTION: compute.attention,
            parts.PASSES: compute.passes,
            parts.RECOMPUTED: recomputed.seconds,
            parts.IMBALANCE: self._imbalance(exchanged[parts.EXPERT]),
            **exchanged,
        }
        for name, seconds in found.items():
            self._add(name, seconds * self.layers * micro)
        head_s = head.forward.seconds + head.backward.seconds
        accumulated, waited = self._accumulated_s(), self._waited_s(layer, recomputed, exchanged)
        self._add(parts.PASSES, accumulated * micro)
        self._add(parts.LOSS, head_s * micro / one.pipeline)
        self._add(parts.LAUNCHES, waited * micro)
        if one.pipeline > 1:
            mean_s = self.layers * sum(found.values()) + head_s / one.pipeline + accumulated + waited
            # The last stage has the head besides its layers.
            self._pipeline(mean_s, head_s * (1 - 1 / one.pipeline))

    def _imbalance(self, exchanged_s: float) -> float:
        """Of a mean layer: all wait for the rank whose experts are chosen most."""
        if self.model.experts is None or self.job.uneven == 1:
            return 0.0
        experts = expert_block(self.share)
        share = self.model.expert_layers / self.model.spec.n_layers
        return (self.job.uneven - 1) * (share * (experts.forward.seconds + experts.backward.seconds) + exchanged_s)

    def _recomputed(self, layer: Both) -> Times:
        if self.layout.recompute == "full":
            return layer.forward
        if self.layout.recompute == "selective":
            if self.software.flash:
                return Times(passes=layer.forward.passes, kernels=layer.forward.kernels / 4)
            return Times(attention=layer.forward.attention, kernels=layer.forward.kernels / 3)
        return Times()

    def _waited_s(self, layer: Both, recomputed: Times, exchanged: dict[str, float]) -> float:
        """Of a micro-batch: what the GPU waits for its host, by forward, recomputed and backward."""
        each = fitted.HOST_NS[self.software.host]
        share = sum(exchanged.values()) / (3 if recomputed.matmuls else 2)
        waited = 0.0
        for times, ns in zip((layer.forward, recomputed, layer.backward), each, strict=True):
            if times.seconds:
                waited += max(0.0, 1e-9 * ns * times.kernels - times.seconds - share)
        return self.layers * waited + 1e-9 * fitted.HOST_STEP_NS[self.software.host] * (waited > 0)

    def local_parameters(self) -> float:
        """Of one pipeline rank, after tensor ranks have their shares; experts by theirs."""
        one, spec = self.layout, self.model.spec
        all_experts = self.model.expert_layers * self.model.expert_parameters()
        rest = self.model.parameters() - all_experts
        table = spec.vocab * spec.d_model * (1 if spec.tied else 2)
        within = (rest - table) / one.tensor / one.pipeline + table / one.tensor / (
            1 if one.pipeline == 1 else 2 if not spec.tied else 1
        )
        return within + all_experts / one.expert / one.expert_tensor / one.pipeline

    def _accumulated_s(self) -> float:
        """Gradients are added up in fp32 where there are several micro-batches."""
        if self.job.micro_batches == 1:
            return 0.0
        return (
            8
            * self.local_parameters()
            / (limits(self.cluster.gpu).bandwidth_bytes_per_s * fitted.PASS_SHARES[self.software.passes])
        )

    def _pipeline(self, micro_s: float, head_s: float) -> None:
        """`micro_s`: of a micro-batch on a mean rank; `head_s`: by how much longer the last one has."""
        one, micro = self.layout, self.job.micro_batches
        bubble = (one.pipeline - 1) * micro_s
        if one.schedule == "interleaved":
            bubble /= one.virtual
        elif one.schedule == "zero-bubble":
            bubble /= 3  # the weights' gradients, a third of the work, fill the rest
        n_bytes = self.share.tokens * self.model.spec.d_model * self.item / (one.tensor if one.sequence else 1)
        sent = exchange_s(SEND_RECEIVE, n_bytes, self.stages, self.cluster)
        crossings = 2 * one.virtual * micro + 2 * (one.pipeline - 1)
        shown = sent * crossings * (1 - fitted.STAGE_HIDDEN if self.software.hides_gradients else 1.0)
        self._hide(parts.STAGES, sent * crossings - shown)
        self._add(parts.STAGES, shown)
        self._add(parts.BUBBLE, bubble + head_s * micro)

    def _data(self, layer: Both, recomputed: Times, exchanged: dict[str, float]) -> None:
        one = self.layout
        if self.data.ranks == 1:
            return
        if one.sharded == "weights":
            self._gathered(layer, recomputed, exchanged)
            return
        mine, item = self.local_parameters(), _SINGLE if self.software.flash else _HALF
        back = exchange_s(ALL_REDUCE if one.sharded == "none" else REDUCE_SCATTER, item * mine, self.data, self.cluster)
        ahead = 0.0 if one.sharded == "none" else exchange_s(ALL_GATHER, _HALF * mine, self.data, self.cluster)
        room = self.layers * (layer.backward.seconds + recomputed.seconds) * self.software.hides_gradients
        room_ahead = self.layers * layer.forward.seconds * self.software.hides_gathers
        # Gradients in shards are reduced with every micro-batch: nobody keeps them whole.
        times = self.job.micro_batches if one.sharded == "gradients" else 1
        for seconds, free, often in ((back, room, times), (ahead, room_ahead, 1)):
            hidden = min(seconds, free * fitted.ROOM)
            self._hide(parts.DATA, hidden * often)
            self._add(parts.DATA, (seconds - hidden) * often)

    def _gathered(self, layer: Both, recomputed: Times, exchanged: dict[str, float]) -> None:
        """Weights in shards: gathered before each layer, forward and backward; gradients scattered after it."""
        one, spec, mine = self.layout, self.model.spec, self.local_parameters()
        group = Group(one.shard_ranks, one.tensor) if one.shard_ranks else self.data
        if self.software.gathers_apart and group.near(self.cluster) < group.ranks:
            group = Group(group.ranks, max(group.stride, self.cluster.domain))
        each = (mine - spec.vocab * spec.d_model / one.tensor) / self.layers
        gather = exchange_s(ALL_GATHER, _HALF * each, group, self.cluster)
        item = _HALF if self.software.passes == "eager" else _SINGLE
        scatter = exchange_s(REDUCE_SCATTER, item * each, group, self.cluster)
        others = sum(exchanged.values())
        first = layer.forward.seconds + others / 3
        second = layer.backward.seconds + recomputed.seconds + others * 2 / 3
        shown = max(0.0, gather - first) * self.layers + gather
        shown += max(0.0, gather + scatter - second) * self.layers + scatter
        whole = (2 * gather + scatter) * self.layers
        if group.ranks < one.data:  # the groups add up their gradients
            rest = Group(one.data // group.ranks, one.tensor * group.ranks)
            shown += exchange_s(ALL_REDUCE, _SINGLE * mine / group.ranks, rest, self.cluster)
        times = self.job.micro_batches if one.pipeline == 1 else 1  # a pipeline's rank keeps them for the step
        self._add(parts.DATA, shown * times)
        self._hide(parts.DATA, max(0.0, whole - shown) * times)

    def _update(self) -> None:
        one, mine = self.layout, self.local_parameters()
        if one.sharded != "none":
            mine /= one.data * one.context
        bandwidth = limits(self.cluster.gpu).bandwidth_bytes_per_s * fitted.UPDATE_SHARE
        if self.layout.offload:  # gradients to the host, which updates, and weights back
            bandwidth = fitted.OFFLOAD_BYTES_S
        self._add(parts.UPDATE, fitted.UPDATE_BYTES * mine / bandwidth)
