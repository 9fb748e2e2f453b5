"""What fits: the largest batch, context and model for a memory, by asking the closed form."""

from collections.abc import Callable

import msgspec

from flopwise.predict.shapes.overlap import updates_in_backward
from flopwise.predict.shapes.step import account_step
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Workload

MOST_BATCH, MOST_TOKENS = 2**20, 2**24
CONTEXT_STEP = 64  # contexts are looked for in steps of so many tokens
_SHALLOW = (4, 6)  # depths from which deeper models are extrapolated


def bytes_per_parameter(recipe: Recipe, phase: str = "train", optimizer_bits: int = 32) -> float:
    """Weights, gradients and AdamW's two moments, for each parameter.

    >>> bytes_per_parameter(Recipe()), bytes_per_parameter(Recipe(precision="bf16-pure"))
    (16.0, 8.0)
    >>> bytes_per_parameter(Recipe(overlap="on"))  # gradients are never there together
    12.0
    """
    item = 2.0 if recipe.weights == "bf16" else 4.0
    moment = {"flopwise": 4.0, "flopwise-bf16": 2.0}.get(recipe.optimizer, item)
    moments = 2 * (1 + 4 / 256 if optimizer_bits == 8 else moment)
    low = 2.0 if recipe.precision == "bf16-master" else 0.0
    gradient = 0.0 if updates_in_backward(recipe) else item  # those of a block or two are nothing beside the rest
    return {"forward": item, "backward": 2 * item, "train": item + gradient + moments + low}[phase]


def largest_model(memory_bytes: float, per_parameter: float = 16.0) -> int:
    """The most parameters whose weights, gradients and state alone fill a memory.

    >>> largest_model(8 * 80e9)          # the lecture's: eight H100s, AdamW naively
    40000000000
    """
    return int(memory_bytes / per_parameter)


def largest_batch(
    workload: Workload, memory_bytes: int, gpu: Gpu | None = None, optimizer_bits: int = 32, cached_bytes: int = 0
) -> int:
    """The most sequences whose step fits, with `cached_bytes` for every token beside it; 0 if one does not.

    >>> from flopwise.spec.workload import workload
    >>> largest_batch(workload("tiny"), 10**9) > largest_batch(workload("tiny"), 10**8) > 0
    True
    """

    def peak_bytes(batch: int) -> int:
        step = peak_of(msgspec.structs.replace(workload, batch=batch), gpu, optimizer_bits)
        return step + batch * workload.context * cached_bytes

    most = min(MOST_BATCH, max(1, MOST_TOKENS // workload.context))
    return _largest(peak_bytes, memory_bytes, most)


def largest_context(
    workload: Workload, memory_bytes: int, gpu: Gpu | None = None, optimizer_bits: int = 32, cached_bytes: int = 0
) -> int:
    """The longest context, in steps of 64 tokens and as far as the model goes, whose step fits; 0 if none does."""
    spec = workload.subject
    assert isinstance(spec, ModelSpec)

    def peak_bytes(steps: int) -> int:
        changed = msgspec.structs.replace(workload, context=steps * CONTEXT_STEP)
        return peak_of(changed, gpu, optimizer_bits) + changed.batch * changed.context * cached_bytes

    limits = [x for x in (spec.max_context, spec.window) if x]
    most = min([MOST_TOKENS // workload.batch, *limits]) // CONTEXT_STEP
    return _largest(peak_bytes, memory_bytes, max(1, most)) * CONTEXT_STEP


def _largest(peak_bytes: Callable[[int], int], memory_bytes: int, most: int) -> int:
    """The largest whole number whose peak fits: memory grows with it, so doubling and halving find it."""
    if peak_bytes(1) > memory_bytes:
        return 0
    low, high = 1, 2
    while high <= most and peak_bytes(high) <= memory_bytes:
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak_bytes(middle) <= memory_bytes else (low, middle)
    return low


def peak_of(workload: Workload, gpu: Gpu | None = None, optimizer_bits: int = 32) -> int:
    """A step's peak; of a deep model from two shallow ones, since every layer adds the same bytes to each phase's peak.

    >>> from flopwise.spec.workload import workload
    >>> peak_of(workload("tiny", precision="bf16-pure")) < peak_of(workload("tiny"))
    True
    """
    spec = workload.subject
    assert isinstance(spec, ModelSpec)
    every = max(1, workload.recipe.checkpoint)
    depths = [n * every + spec.n_layers % every for n in _SHALLOW]  # with the same rest in a checkpoint's last segment
    if spec.n_layers <= depths[1] + every:
        return account_step(workload, gpu, optimizer_bits).peak_bytes
    shallow = [
        account_step(
            msgspec.structs.replace(workload, subject=msgspec.structs.replace(spec, n_layers=n)), gpu, optimizer_bits
        )
        for n in depths
    ]
    steps = (spec.n_layers - depths[1]) / (depths[1] - depths[0])
    return max(
        round(b.peak_bytes + steps * (b.peak_bytes - a.peak_bytes))
        for a, b in zip(shallow[0].phases, shallow[1].phases, strict=True)
    )
