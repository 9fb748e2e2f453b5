"""A model's FLOPs by formula, and what follows from them: MFU, the days of a training run.

For every weight and token 2 forward, 4 backward, 6 in all; and attention's squares. Matmuls alone are counted, as PyTorch's
FlopCounterMode and every published MFU count them: everything else is less than a hundredth of them and is limited by
bytes, not by FLOPs.
"""

from functools import lru_cache

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.model import ModelSpec
from flopwise.work.op_rules import causal_share

DAY_S = 86_400


def matmul_flops(m: int, k: int, n: int) -> int:
    """[m, k] times [k, n]: a multiplication and an addition for each of m·k·n pairs.

    >>> matmul_flops(1024, 256, 64)                    # the lecture's linear layer: batch 1024, 256 -> 64
    33554432
    """
    return 2 * m * k * n


def matmul_parameters(spec: ModelSpec) -> int:
    """The weights that take part in a matmul with every token: all but the embeddings' tables, norms and biases.

    The head counts, shared with the embedding or not.

    >>> from flopwise.spec.model import preset
    >>> matmul_parameters(preset("small"))
    120926208
    """
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    attention = spec.d_model * (2 * q + 2 * kv)
    mlp = (3 if spec.mlp == "swiglu" else 2) * spec.d_model * spec.d_ff
    return spec.n_layers * (attention + mlp) + spec.vocab * spec.d_model


class ModelFlops(msgspec.Struct, frozen=True, kw_only=True):
    """The FLOPs of one step that the model itself asks for: nothing that is computed twice."""

    forward: int
    backward: int  # 0: inference
    attention_forward: int  # of `forward`, the scores and their product with the values, counted as whole squares
    causal_saved: int  # of forward and backward, what a causal kernel need not do
    rule: int  # 2 or 6 times parameters times tokens: the rule of thumb, for comparison

    @property
    def total(self) -> int:
        """Every score counted, as PaLM's MFU does it (Chowdhery et al. 2022, appendix B)."""
        return self.forward + self.backward

    @property
    def causal(self) -> int:
        """Only the scores that the causal mask leaves."""
        return self.total - self.causal_saved


@lru_cache(maxsize=1 << 14)  # views of a sweep ask again and again
def model_flops(spec: ModelSpec, batch: int, context: int, phase: str = "train") -> ModelFlops:
    """One step's FLOPs.

    >>> from flopwise.spec.model import preset
    >>> f = model_flops(preset("small"), batch=4, context=512)
    >>> f.backward == 2 * f.forward, round(f.total / f.rule, 3)
    (True, 1.014)
    """
    decode, passes = phase == "decode", 3 if phase in ("backward", "train") else 1
    tokens, seen = (batch, context + 1) if decode else (batch * context, context)
    square = 4 * tokens * spec.n_heads * spec.head_dim * seen * spec.n_layers
    forward = 2 * matmul_parameters(spec) * tokens + square
    if phase == "prefill":  # the head sees each prompt's last token alone
        forward -= 2 * spec.vocab * spec.d_model * (tokens - batch)
    return ModelFlops(
        forward=forward,
        backward=forward * (passes - 1),
        attention_forward=square,
        causal_saved=0 if decode else round(square * passes * (1 - causal_share(context))),
        rule=2 * passes * spec.parameters() * tokens,
    )


def mfu(flops: float, seconds: float, peak_flops_s: float, gpus: int = 1) -> float:
    """Model FLOPs utilisation: the model's FLOPs over what the GPUs could have done in that time.

    >>> round(mfu(989.4e12, 2.0, 989.4e12), 2)
    0.5
    """
    if seconds <= 0 or peak_flops_s <= 0 or gpus <= 0:
        raise FlopwiseError(f"a time of {seconds:g} s on {gpus} GPUs says nothing about MFU", "give a time above zero")
    return flops / (seconds * peak_flops_s * gpus)


class TrainingTime(msgspec.Struct, frozen=True, kw_only=True):
    """A training run, predicted from its FLOPs."""

    tokens: int
    gpus: int
    mfu: float
    flops: float
    seconds: float
    rule: str  # how the FLOPs were counted
    dtype: str = ""  # of the peak rate

    @property
    def days(self) -> float:
        return self.seconds / DAY_S

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.gpus / 3600


def training_time(
    parameters: float,
    tokens: float,
    gpus: int,
    peak_flops_s: float,
    mfu: float,
    flops_per_token: float | None = None,
    dtype: str = "",
) -> TrainingTime:
    """Time for `tokens` at a given MFU; by the rule 6 · parameters · tokens unless the FLOPs of a token are given.

    >>> from flopwise.spec.gpu import gpu
    >>> int(training_time(70e9, 15e12, 1024, gpu("h100").peak("bf16"), mfu=0.5).days)       # the lecture's question
    143
    """
    fields.number("tokens", tokens, 1, 1e18)
    fields.whole("gpus", gpus, 1, 100_000_000)
    if not 0 < mfu <= 1:
        raise FlopwiseError(f"mfu = {mfu:g} is not allowed", units.SHARE_HINT)
    flops = (6 * parameters if flops_per_token is None else flops_per_token) * tokens
    rule = "6 · parameters · tokens" if flops_per_token is None else "counted, attention included"
    seconds = flops / (peak_flops_s * mfu * gpus)
    return TrainingTime(tokens=int(tokens), gpus=gpus, mfu=mfu, flops=flops, seconds=seconds, rule=rule, dtype=dtype)


def flops_per_token(spec: ModelSpec, context: int) -> float:
    """A training step's FLOPs for one token of a sequence of `context`: 6 a weight, and attention's share.

    >>> from flopwise.spec.model import preset
    >>> round(flops_per_token(preset("llama3-8b"), 8192) / (6 * preset("llama3-8b").parameters()), 2)
    1.2
    """
    return model_flops(spec, 1, context).total / context
