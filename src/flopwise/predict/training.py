"""How long a training run takes: FLOPs over what the GPUs do in a day."""

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.predict.flops import model_flops
from flopwise.spec import fields
from flopwise.spec.model import ModelSpec

DAY_S = 86_400


class TrainingTime(msgspec.Struct, frozen=True, kw_only=True):
    """A training run, predicted from its FLOPs."""

    tokens: int
    gpus: int
    mfu: float
    flops: float
    seconds: float
    rule: str  # how the FLOPs were counted
    dtype: str = ""  # whose peak rate

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
