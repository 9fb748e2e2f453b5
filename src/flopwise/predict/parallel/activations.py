"""What a layer keeps of a micro-batch for its backward pass, in closed formulas: bytes for each token on one tensor rank.

The formulas count the tensors that autograd saves. With written scores, dropout and no recomputation they are those of
arXiv 2205.05198 (Korthikanti et al. 2022): 34 bytes of each token and channel, and 5 of each score. Three ways of running what
lies between the matmuls keep different tensors:

    fused     a norm's input and output, q k v and attention's output, the activation's input and output
    compiled  the same without outputs of norms and activations: Inductor computes them again from their inputs
    eager     the activation's parts, too; under autocast a copy of its input for each matmul, and the stream in fp32

Selective recomputation leaves out the scores where they are written; else the outputs of norms and activations; and of compiled
layers every second matmul's output (torchtitan's 'selective op').
"""

from functools import cache
from typing import NamedTuple

from flopwise.spec.planned_model import PlannedModel
from flopwise.spec.software import Software

# Bytes of a number that a low-precision matmul keeps of its input, block scales included (one for 32 numbers; for 16).
INPUT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}


class Ranks(NamedTuple):
    """Who shares a layer's activations."""

    tensor: int
    sequence: bool
    context: int
    way: str  # of the context ranks
    expert_tensor: int

    @property
    def between(self) -> int:
        """That share what lies between the matmuls."""
        return self.tensor if self.sequence else 1


class LayerBytes(NamedTuple):
    """Of one token in one layer; scores of one token and one key."""

    stream: float  # the layer's input
    kept: float  # the input included, without scores
    selective: float  # kept where parts are recomputed
    full: float  # kept where all is
    scores: float  # written for each key, where no kernel holds them
    working: float  # of gradients and gathered tensors, while the layer runs backward
    score_gradients: float  # for each key

    def saved(self, recompute: str, keys: int) -> tuple[float, float]:
        """Bytes of activations and of scores from forward to backward."""
        if recompute == "none":
            return self.kept, self.scores * keys
        return (self.selective if recompute == "selective" else self.full), 0.0


class _Part(NamedTuple):
    """Attention or an MLP: what it keeps, what of that a selective recomputation leaves out, and its working memory."""

    kept: float
    spared: float
    working: float


@cache
def layer_bytes(
    model: PlannedModel, experts: bool, ranks: Ranks, software: Software, precision: str, autocast: bool
) -> LayerBytes:
    """`experts`: of a layer that has them. `autocast`: weights and the stream are in fp32, each matmul casts its input."""
    width, item = model.spec.d_model / ranks.between, INPUT_BYTES[precision]
    stream = (4 if autocast else 2) * width
    normed = 0.0 if software.passes == "compiled" else item * width
    masks = 2 * width if software.dropout else 0.0  # of a byte each, after attention and after the MLP
    attention = _attention(model, ranks, software, item, autocast)
    mlp = (
        _experts(model, ranks, software, item)
        if experts
        else _activation(model, model.spec.d_ff / ranks.tensor, software, item)
    )
    copies = _copies(model, experts) * item * width if autocast else 2 * normed
    kept = 2 * stream + copies + masks + attention.kept + mlp.kept
    gathered = 4 * model.spec.d_model if ranks.between > 1 else 0.0  # a matmul's whole input, and its gradient
    working = max(attention.working, mlp.working) + gathered + 2 * stream
    heads = model.spec.n_heads / ranks.tensor
    scores = 0.0 if software.flash else heads * (5 if software.dropout else 2)
    selective = kept - (attention.spared + mlp.spared + copies if software.flash else 0.0)
    return LayerBytes(stream, kept, selective, stream, scores, working, 0.0 if software.flash else 2 * 2 * heads)


def _copies(model: PlannedModel, experts: bool) -> int:
    """Matmuls of a layer that read a norm's output, each of which casts it."""
    return 3 + (1 if model.spec.mlp == "gelu" or experts else 2)


def _attention(model: PlannedModel, ranks: Ranks, software: Software, item: float, autocast: bool) -> _Part:
    spec, t = model.spec, ranks.tensor
    if (a := model.latent) is not None:
        heads = spec.n_heads / t
        q = k = heads * (a.plain_dim + a.rope_dim)
        v = out = heads * a.value_dim
        latent = 2.0 * (2 * (a.q_rank + a.kv_rank) + a.rope_dim)  # before and after their norms
    else:
        q = out = spec.n_heads * spec.head_dim / t
        k = v = max(1.0, spec.n_kv_heads / t) * spec.head_dim
        latent = 0.0
    sums = 4 * spec.n_heads / t if software.flash else 0.0
    again = item * out if item < 2 or (autocast and spec.positions == "rope") else 0.0  # the next matmul's own copy
    kept = 2 * (q + k + v + out) + latent + sums + again
    spared = 2 * k if software.passes == "compiled" else latent / 2
    working = 2 * (q + k + v + out) + _context_working(ranks, q, k + v)
    return _Part(kept, spared, working)


def _context_working(ranks: Ranks, q: float, kv: float) -> float:
    """A ring has the next keys and values on their way, their gradients and its sum in fp32; Ulysses exchanges copies."""
    if ranks.context == 1:
        return 0.0
    return 2 * (2 * q + kv) if ranks.way == "ulysses" else 2 * 2 * kv + 2 * 4 * kv + 4 * q


def _activation(model: PlannedModel, width: float, software: Software, item: float) -> _Part:
    """Of an MLP's inner numbers: the activation's inputs, and its output that the second matmul reads."""
    gated = model.spec.mlp == "swiglu"
    inputs, result = 2 * width * (2 if gated else 1), item * width
    if software.passes == "eager" and gated:
        result += 2 * width  # silu's own
    kept = inputs if software.passes == "compiled" else inputs + result
    spared = 2 * width * gated if software.passes == "compiled" else result
    return _Part(kept, spared, inputs + 2 * width)


def _experts(model: PlannedModel, ranks: Ranks, software: Software, item: float) -> _Part:
    """Each token as many times as it has experts: what arrives, and the activation; the router's numbers in fp32.

    Tokens are taken to be spread evenly. A token's tensor ranks send their parts of the sequence.
    """
    found, spec = model.experts, model.spec
    assert found is not None
    arrived = found.chosen / ranks.tensor * ranks.expert_tensor
    one = _activation(model, found.d_ff / ranks.expert_tensor, software, item)
    shared = _activation(model, found.shared_d_ff / ranks.tensor, software, item)
    tokens = item * spec.d_model * arrived
    router = 2 * 4 * found.count / ranks.between
    moved = 2 * 2 * spec.d_model * arrived  # sent and received, or their gradients
    return _Part(
        arrived * one.kept + shared.kept + tokens + router,
        arrived * one.spared + shared.spared,
        arrived * one.working + shared.working + moved,
    )
