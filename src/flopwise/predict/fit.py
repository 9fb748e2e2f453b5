"""What fits a memory: the largest batch, context and model; whether a workload will; and what each lever would change."""

import math
from collections.abc import Callable, Iterator

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.predict.machine import Machine, gpu_of
from flopwise.predict.prediction import peak_bytes, predict_quickly
from flopwise.predict.shapes.overlap import updates_in_backward
from flopwise.records.events import DeviceInfo
from flopwise.records.prediction import SHAPES, PredictedStep
from flopwise.spec.gpu import Gpu
from flopwise.spec.recipe import WITH_MASTERS, Recipe
from flopwise.spec.workload import Workload, check
from flopwise.work.operation import GRADIENTS

MOST_BATCH, MOST_TOKENS = 2**20, 2**24
CONTEXT_STEP = 64  # contexts are looked for in steps of so many tokens


class LeverEffect(msgspec.Struct, frozen=True, kw_only=True):
    """A lever and the peak it would lead to."""

    lever: str  # '--checkpoint 4'
    peak_bytes: int
    saved_bytes: int  # negative: it costs
    how: str
    note: str = ""
    levers: dict[str, str] = {}  # the recipe's, where it has one for it: {'checkpoint': '4'}


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
    low = 2.0 if recipe.precision in WITH_MASTERS else 0.0
    gradient = 0.0 if updates_in_backward(recipe) else item  # 0: only those of a block or two are there
    return {"forward": item, "backward": 2 * item, "train": item + gradient + moments + low}[phase]


def largest_model(memory_bytes: float, per_parameter: float = 16.0) -> int:
    """The most parameters: their weights, gradients and optimizer state alone fill the memory.

    >>> largest_model(8 * 80e9)          # the lecture's: eight H100s, AdamW naively
    40000000000
    """
    return int(memory_bytes / per_parameter)


def largest_batch(
    workload: Workload, memory_bytes: int, gpu: Gpu | None = None, optimizer_bits: int = 32, cached_bytes: int = 0
) -> int:
    """The most sequences that fit, with `cached_bytes` for every token besides; 0 if one does not.

    >>> from flopwise.spec.workload import workload
    >>> largest_batch(workload("tiny"), 10**9) > largest_batch(workload("tiny"), 10**8) > 0
    True
    """
    most = min(MOST_BATCH, max(1, MOST_TOKENS // workload.context))
    even = workload.recipe.data_ranks  # of all ranks together
    return _largest(workload, "batch", most * even, memory_bytes, gpu, optimizer_bits, cached_bytes, even)


def largest_context(
    workload: Workload, memory_bytes: int, gpu: Gpu | None = None, optimizer_bits: int = 32, cached_bytes: int = 0
) -> int:
    """The longest context, in steps of 64 tokens and as far as the model goes, that fits; 0 if none does."""
    spec = workload.own_model
    limits = [limit for limit in (spec.max_context, spec.window) if limit] if spec is not None else []
    most = max(CONTEXT_STEP, min([MOST_TOKENS // workload.batch, *limits]))
    return _largest(workload, "context", most, memory_bytes, gpu, optimizer_bits, cached_bytes, CONTEXT_STEP)


def _largest(
    workload: Workload, size: str, most: int, memory: int, gpu: Gpu | None, bits: int, cached: int, step: int = 1
) -> int:
    """The largest multiple of `step` that fits. Memory grows with it, nearly along a line: that leads close to it at once."""

    def needed(steps: int) -> float:
        larger = msgspec.structs.replace(workload, **{size: steps * step})
        peak = peak_bytes(larger, gpu, bits)
        return math.inf if peak is None else peak + larger.batch * larger.context * cached

    return _last_below(needed, memory, most // step) * step


def _last_below(needed: Callable[[int], float], limit: float, most: int) -> int:
    """The largest n up to `most` with needed(n) <= limit, of a function that grows; 0 if 1 is too much.

    >>> _last_below(lambda n: 3 * n + n * n, 1000, 50), _last_below(float, 1000, 50), _last_below(float, 0, 50)
    (30, 50, 0)
    """
    low, high, n = 0, most + 1, 1
    left, over = 0.0, math.inf  # of the limit at `low`, and beyond it at `high`
    fitted = None
    while high - low > 1:
        beyond = needed(n) - limit
        stays = 0.5 if (beyond <= 0) == fitted else 1.0  # an end that stays twice loses weight: the Illinois method
        if fitted := beyond <= 0:
            low, left, over = n, -beyond, over * stays
        else:
            high, left, over = n, left * stays, beyond
        if math.isinf(over):
            n = (low + high) // 2 if high <= most else 8 * low
        else:
            n = low + int((high - low) * left / (left + over))
        n = min(max(n, low + 1), high - 1)
    return low


def too_large(workload: Workload, there: DeviceInfo) -> str:
    """The line that warns of a workload that will not fit; '' if it will, or if that cannot be known in a moment.

    The predicted peak errs by a few per cent and is of eager steps only: a note, not a refusal.

    >>> from flopwise.records.run import Environment
    >>> from flopwise.spec.workload import workload
    >>> there = DeviceInfo(environment=Environment(flopwise="", python="", torch=""), device="cpu", free_bytes=2**33)
    >>> too_large(workload("tiny"), there), too_large(workload("xl"), there).partition(": ")[2]
    ('', 'predicted peak 37.2 GiB of 8.00 GiB free: it will probably run out of memory')
    """
    if there.free_bytes is None or workload.recipe.compile != "off":
        return ""
    needed = peak_bytes(workload, gpu_of(there.environment))
    if needed is None or needed <= there.free_bytes:
        return ""
    sizes = f"predicted peak {units.size(needed)} of {units.size(there.free_bytes)} free"
    return f"{workload.label()}: {sizes}: it will probably run out of memory"


def memory_levers(workload: Workload, gpu: Gpu | None = None, *, quick: bool = False) -> tuple[LeverEffect, ...]:
    """Every lever that is not set and the peak it would lead to, the largest saving first; none where that is not known.

    `quick`: of checkpointing the smallest segments only, as larger ones take most of the time to predict.

    >>> from flopwise.spec.workload import workload
    >>> found = {effect.lever: effect for effect in memory_levers(workload("small", attention="naive", context=1024))}
    >>> found["--attention sdpa"].saved_bytes > 0
    True
    """
    now = predict_quickly(workload, Machine(gpu=gpu))
    if now is None:
        return ()
    found = []
    for lever, value in _unset_levers(workload, quick):
        try:
            recipe = msgspec.structs.replace(workload.recipe, **{lever: value})
            changed = msgspec.structs.replace(workload, recipe=recipe)
            check(changed)
        except FlopwiseError:  # it does not go with another of them
            continue
        then = peak_bytes(changed, gpu)
        if then is None:
            continue
        saved = now.step.peak_bytes - then
        option, levers = f"--{lever} {value}", {lever: str(value)}
        found.append(LeverEffect(lever=option, peak_bytes=then, saved_bytes=saved, how=SHAPES, levers=levers))
    if workload.phase == "train" and workload.recipe.overlap == "off":
        found.append(_zeroed_gradients(now.step))
    return tuple(sorted(found, key=lambda effect: -effect.saved_bytes))


def checkpoint_sizes(n_layers: int) -> tuple[int, ...]:
    """Segments worth trying: powers of two up to half the layers, and √layers, the rule of thumb.

    With c bytes for a segment's input and a for what a block keeps, c · layers / N + a · N is least at N = √(layers · c / a):
    √layers only where a block keeps no more than its input, and less where it keeps more, as attention and MLP do.

    >>> checkpoint_sizes(32)
    (1, 2, 4, 6, 8, 16)
    """
    powers = [2**n for n in range(n_layers.bit_length()) if 2**n <= max(1, n_layers // 2)]
    return tuple(sorted({*powers, max(1, round(math.sqrt(n_layers)))}))


def _unset_levers(workload: Workload, quick: bool) -> Iterator[tuple[str, str | int]]:
    recipe, n_layers = workload.recipe, workload.own_model.n_layers if workload.own_model else 0
    sizes = (1,) if quick else checkpoint_sizes(n_layers)
    levers: list[tuple[str, str | int]] = [("precision", "bf16"), ("precision", "bf16-pure")]
    if recipe.attention == "naive":
        levers.append(("attention", "sdpa"))
    if workload.trains:
        levers += [("loss", "chunked"), ("loss", "fused"), *(("checkpoint", n) for n in sizes)]
    if workload.phase == "train":
        levers += [("optimizer", "fused"), *([("overlap", "on")] if recipe.precision != "fp16" else [])]
    yield from ((lever, value) for lever, value in levers if getattr(recipe, lever) != value)


def _zeroed_gradients(step: PredictedStep) -> LeverEffect:
    """Gradients that are set to zero, not to none, would be there in forward and loss, too: each phase's peak with them."""
    gradients = step.after_backward.owners.get(GRADIENTS, 0) if step.after_backward else 0
    kept = max(phase.peak_bytes + gradients - phase.owners.get(GRADIENTS, 0) for phase in step.phases)
    return LeverEffect(
        lever="gradients kept as zeros, not set to none",
        peak_bytes=kept,
        saved_bytes=step.peak_bytes - kept,
        how="from the owners: this step cannot do it",
        note="this step sets them to none",
    )
