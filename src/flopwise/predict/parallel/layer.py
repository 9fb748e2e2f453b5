"""One layer of a model on one rank: its kernels' times, forward and backward, for one micro-batch."""

import math
from functools import lru_cache
from typing import NamedTuple

import msgspec

from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.op_time import matmul_ns
from flopwise.predict.parallel import constants as fitted
from flopwise.records.ceilings import Ceilings
from flopwise.spec.cluster import Cluster
from flopwise.spec.gpu import Gpu, gpu
from flopwise.spec.layout import Layout
from flopwise.spec.planned_model import PlannedModel
from flopwise.spec.software import software
from flopwise.store.ceilings import load_ceilings

_HALF, _SINGLE = 2, 4  # bytes


class Times(NamedTuple):
    """Seconds by what takes them; kernels are what the host launches."""

    matmuls: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    kernels: float = 0.0

    def plus(self, other: "Times", times: float = 1.0) -> "Times":
        return Times(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def seconds(self) -> float:
        return self.matmuls + self.attention + self.passes


class Both(NamedTuple):
    forward: Times
    backward: Times


@lru_cache(maxsize=64)
def limits(name: str) -> Ceilings:
    """By the datasheet; products as they were measured here, where this kind of GPU was calibrated."""
    stated, measured = from_datasheet(gpu(name)), load_ceilings(name)
    if measured is None:
        return stated
    return msgspec.structs.replace(stated, how=measured.how, matmul=stated.matmul | measured.matmul)


@lru_cache(maxsize=100_000)
def _product_s(name: str, dtype: str, batch: int, m: int, n: int, k: int, power: float = 1.0) -> float:
    """One product, within training: the chip is hot, and its clock lower than at its best."""
    known, chip = limits(name), gpu(name)
    rate, share = _rate(chip, dtype), fitted.SUSTAINED.get(chip.capability, fitted.SUSTAINED_ELSE)
    share *= fitted.LOW_SUSTAINED.get(dtype, 1.0) * math.pow(power, fitted.POWER)
    found = known.matmul.get("fp8" if dtype in fitted.LOW_SUSTAINED else dtype) or known.matmul["fp32"]
    item = {"nvfp4": 0.5, "fp8": 1.0, "mxfp8": 1.0}.get(dtype, 2.0)
    moved = batch * (item * (m * k + k * n) + _HALF * m * n) / known.bandwidth_bytes_per_s
    computing = matmul_ns(batch, m, n, k, found, known.processors) * (1 + fitted.TILE_DEPTH / k)
    return max(1e-9 * computing / rate / share, moved)


def _rate(chip: Gpu, dtype: str) -> float:
    """How many times as fast as in fp8."""
    return fitted.FP4_RATE.get(chip.capability, 1.0) if dtype == "nvfp4" else 1.0


def _linear(
    name: str, power: float, dtype: str, tokens: int, wide: int, out: int, batch: int = 1
) -> tuple[float, float]:
    """Forward; and backward, of its input and of its weights."""
    tokens, wide, out = max(1, tokens), max(1, wide), max(1, out)
    forward = _product_s(name, dtype, batch, tokens, out, wide, power)
    back = _product_s(name, dtype, batch, tokens, wide, out, power)
    back += _product_s(name, dtype, batch, wide, out, tokens, power)
    return forward, back


def _passes_s(name: str, n_bytes: float, passes: str) -> float:
    return n_bytes / (limits(name).bandwidth_bytes_per_s * fitted.PASS_SHARES[passes])


class Share(NamedTuple):
    """What one rank has of a layer and a micro-batch."""

    model: PlannedModel
    gpu: str
    tokens: int  # of a micro-batch, on one context rank
    context: int  # of a whole sequence
    tensor: int
    context_ranks: int
    sequence: bool
    expert: int
    expert_tensor: int
    precision: str
    software: str
    power: float = 1.0


def share_of(model: PlannedModel, layout: Layout, cluster: Cluster, context: int) -> Share:
    return Share(
        model,
        cluster.gpu,
        layout.micro_batch * context // layout.context,
        context,
        layout.tensor,
        layout.context,
        layout.sequence,
        layout.expert,
        layout.expert_tensor,
        layout.precision,
        layout.software,
        cluster.power,
    )


@lru_cache(maxsize=20_000)
def attention_block(one: Share) -> Both:
    """A layer's attention: projections, scores, and what lies around them."""
    spec, program, name = one.model.spec, software(one.software), one.gpu
    dtype = one.precision
    queries, keys = spec.n_heads * spec.head_dim // one.tensor, -(-spec.n_kv_heads // one.tensor) * spec.head_dim
    kernels = [count / 2 for count in fitted.KERNELS[program.passes]]
    if not program.flash and _loose(one):
        kernels = [count + more for count, more in zip(kernels, fitted.LOOSE_KERNELS, strict=True)]
    if (latent := one.model.latent) is not None:
        heads = spec.n_heads // one.tensor
        head = latent.plain_dim + latent.rope_dim
        pairs = [
            (spec.d_model, latent.q_rank + latent.kv_rank + latent.rope_dim),
            (latent.q_rank or spec.d_model, heads * head),
            (latent.kv_rank, heads * (latent.plain_dim + latent.value_dim)),
            (heads * latent.value_dim, spec.d_model),
        ]
        score, value, wide = head, latent.value_dim, 4 * heads * head
    else:
        heads = spec.n_heads // one.tensor
        pairs = [(spec.d_model, queries + 2 * keys), (queries, spec.d_model)]
        score = value = spec.head_dim
        wide = queries + keys
    products = [_linear(name, one.power, dtype, one.tokens, a, b) for a, b in pairs]
    squares = _scores(one, heads, score, value)
    narrow = spec.d_model // (one.tensor if one.sequence else 1)
    rope = 2 * wide if spec.positions == "rope" else 0
    forward, back = _around(one, narrow)
    cast = _casts(one, sum(a for a, _ in pairs), sum(b for _, b in pairs), spec.d_model)
    return Both(
        Times(
            sum(f for f, _ in products),
            squares[0],
            _passes_s(name, one.tokens * (_HALF * (forward + rope) + cast[0]), program.passes),
            kernels[0],
        ),
        Times(
            sum(b for _, b in products),
            squares[1],
            _passes_s(name, one.tokens * (_HALF * (back + rope) + cast[1]), program.passes),
            kernels[1],
        ),
    )


def _around(one: Share, wide: int) -> tuple[float, float]:
    """Numbers for each token that a norm and a sum with the residual read and write, forward and backward."""
    program = software(one.software)
    norm, add = (2, 3) if program.passes != "compiled" else (2, 2)
    drop = 1.5 if program.dropout else 0
    return (norm + add + drop) * wide, (3 + 3 + (2.5 if program.dropout else 0)) * wide


def _casts(one: Share, inputs: int, outputs: int, fused: int = 0) -> tuple[float, float]:
    """Bytes for each token that turning matmuls' inputs and their outputs' gradients into few bits takes: read, and written in
    both orders. `fused`: how many of the numbers a kernel writes so that makes them anyway, where people have fused that.
    """
    if one.precision in ("bf16", "fp16"):
        return 0.0, 0.0
    each = _HALF + 2
    if software(one.software).passes != "fused":
        fused = 0
    return each * (inputs - fused), each * (outputs - fused)


def _loose(one: Share) -> bool:
    """Megatron's fused softmax takes four rows of heads at a time; else it is scaling, masking and softmax one by one."""
    sequences = one.tokens * one.context_ranks // one.context
    return bool(sequences * one.model.spec.n_heads // one.tensor % 4)


def _scores(one: Share, heads: int, score: int, value: int) -> tuple[float, float]:
    name, program = one.gpu, software(one.software)
    chip, sequences = gpu(name), one.tokens * one.context_ranks / one.context
    rows, columns = one.context / one.context_ranks, one.context
    whole = 2.0 * sequences * heads * rows * columns * (score + value)
    if program.flash:
        shares = fitted.OLD_FLASH_SHARES if program.old_flash else fitted.FLASH_SHARES
        forward, back = shares.get(chip.capability) or fitted.FLASH_SHARES.get(chip.capability, fitted.FLASH_ELSE)
        peak = chip.peaks.get("bf16") or chip.peaks["fp16"]
        return whole / 2 / (peak * forward * math.pow(one.power, fitted.POWER)), 2.5 * whole / 2 / (
            peak * back * math.pow(one.power, fitted.POWER)
        )
    batch = round(sequences * heads)
    product = [
        _product_s(name, "fp16", batch, round(rows), columns, score),
        _product_s(name, "fp16", batch, round(rows), value, columns),
    ]
    square = sequences * heads * rows * columns * _HALF
    drop = fitted.DROPOUT_PASSES if program.dropout else 0.0
    passes = fitted.LOOSE_SOFTMAX_PASSES if _loose(one) else fitted.SOFTMAX_PASSES
    forward = sum(product) + _passes_s(name, square * (passes[0] + drop), program.passes)
    return forward, 2 * sum(product) + _passes_s(name, square * (passes[1] + drop), program.passes)


@lru_cache(maxsize=20_000)
def mlp_block(one: Share) -> Both:
    """A layer's plain MLP."""
    spec, program = one.model.spec, software(one.software)
    return _mlp(one, spec.d_ff // one.tensor, one.tokens, program.passes, _HALF)


def _mlp(one: Share, d_ff: int, tokens: int, passes: str, item: int, batch: int = 1) -> Both:
    spec, name, kernels = one.model.spec, one.gpu, fitted.KERNELS[passes]
    gates = 2 if spec.mlp == "swiglu" else 1
    each = tokens // batch
    up = _linear(name, one.power, one.precision, each, spec.d_model, gates * d_ff, batch)
    down = _linear(name, one.power, one.precision, each, d_ff, spec.d_model, batch)
    narrow = spec.d_model // (one.tensor if one.sequence else 1) if batch == 1 else 0
    forward, back = _around(one, narrow)
    forward += (gates + 1) * d_ff
    back += (2 * gates + 1) * d_ff
    cast = _casts(one, spec.d_model + d_ff, gates * d_ff + spec.d_model, d_ff + (spec.d_model if batch == 1 else 0))
    return Both(
        Times(up[0] + down[0], 0.0, _passes_s(name, tokens * (item * forward + cast[0]), passes), kernels[0] / 2),
        Times(up[1] + down[1], 0.0, _passes_s(name, tokens * (item * back + cast[1]), passes), kernels[1] / 2),
    )


@lru_cache(maxsize=20_000)
def expert_block(one: Share) -> Both:
    """A layer's experts on one rank: the tokens that come to it, the shared expert, the router, and the sorting of tokens."""
    spec, experts = one.model.spec, one.model.experts
    assert experts is not None
    name, narrow = one.gpu, spec.d_model // (one.tensor if one.sequence else 1)
    mine = one.tokens // (one.tensor if one.sequence else 1)  # tokens that this rank sends
    here = max(1, experts.count // one.expert)
    copies = mine * experts.chosen * (one.expert_tensor if one.expert_tensor > 1 else 1)
    found = _mlp(one, experts.d_ff // one.expert_tensor, max(here, copies), "fused", _HALF, batch=here)
    forward, back = _around(one, narrow)
    sort = 4 * spec.d_model * copies * _HALF  # into the experts' order and back
    extra = Times(
        passes=_passes_s(name, sort + one.tokens * _HALF * forward, "fused"), kernels=fitted.EXPERT_KERNELS[0]
    )
    extra_back = Times(
        passes=_passes_s(name, 1.5 * sort + one.tokens * _HALF * back, "fused"), kernels=fitted.EXPERT_KERNELS[1]
    )
    both = Both(found.forward.plus(extra), found.backward.plus(extra_back))
    if experts.shared_d_ff:
        shared = _mlp(one, experts.shared_d_ff // one.tensor, one.tokens, "fused", _HALF)
        both = Both(both.forward.plus(shared.forward), both.backward.plus(shared.backward))
    return both


@lru_cache(maxsize=20_000)
def head_block(one: Share) -> Both:
    """The last matmul and the loss."""
    spec, program = one.model.spec, software(one.software)
    half = one.precision if one.precision in ("bf16", "fp16") else "bf16"
    vocab = -(-spec.vocab // one.tensor // 64) * 64
    forward, back = _linear(one.gpu, one.power, half, one.tokens, spec.d_model, vocab)
    passes = fitted.LOSS_BYTES[program.passes]
    moved = [_passes_s(one.gpu, one.tokens * vocab * n, program.passes) for n in passes]
    return Both(Times(forward, 0.0, moved[0], 12), Times(back, 0.0, moved[1], 16))
