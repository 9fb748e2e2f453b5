"""AdamW four ways, on shapes: the loop's, foreach's, fused's and our own kernels and what they need beside the state."""

from collections.abc import Sequence

from flopwise.predict.shapes.ops import pointwise
from flopwise.predict.shapes.tape import Parameter, Tape, Tensor
from flopwise.spec.dtypes import item_bytes
from flopwise.spec.recipe import SCALES_ON_DEVICE, WITH_MASTERS, Recipe
from flopwise.work.catalogue import launches_over
from flopwise.work.operation import OPTIMIZER, OPTIMIZER_STATE

# 8-bit states as bitsandbytes keeps them: a byte each and an fp32 scale per block of 256; small weights stay in 32 bits.
EIGHT_BIT_BLOCK, EIGHT_BIT_LEAST = 256, 4096

_MOMENTS = {"flopwise": "fp32", "flopwise-bf16": "bf16"}  # our own kernel's, whatever the weights are


def eight_bit_bytes(numel: int) -> int:
    """One moment of `numel` numbers in 8 bits.

    >>> eight_bit_bytes(4096)
    4160
    """
    return numel + 4 * -(-numel // EIGHT_BIT_BLOCK)


def make_state(t: Tape, parameters: Sequence[Parameter], recipe: Recipe, eight_bits: bool = False) -> list[Tensor]:
    """Two moments for every weight; its step count, where that lives on the device (fused, or in a CUDA graph); and what a
    bf16 weight lacks of fp32.
    """
    state, kind = [], recipe.optimizer
    for p in parameters:
        for _ in range(2):
            if eight_bits and p.weight.elements >= EIGHT_BIT_LEAST:
                state.append(t.tensor((eight_bit_bytes(p.weight.elements),), "bool", OPTIMIZER_STATE, p.name))
            else:
                dtype = _MOMENTS.get(kind, p.weight.dtype)
                state.append(t.tensor(p.weight.shape, dtype, OPTIMIZER_STATE, p.name))
        if recipe.graph == "on" or kind in SCALES_ON_DEVICE:
            state.append(t.tensor((), "fp32", OPTIMIZER_STATE, p.name))
        if recipe.precision in WITH_MASTERS:
            state.append(t.tensor(p.weight.shape, "bf16", OPTIMIZER_STATE, p.name))
    return state


def step(t: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
    """One update of every weight. fp16 gradients carry a loss scale, which fused kernels take out and write back."""
    kind, weights = recipe.optimizer, [p.weight for p in parameters]
    if kind == "fused":
        _over_numbers(t, "foreach_add_", len(weights))  # the step counts
        _over_lists(t, "fused_adamw_", weights, 4, 4, 3 + (recipe.precision == "fp16"))
    elif kind in _MOMENTS:
        _own(t, weights, 2 * item_bytes(_MOMENTS[kind]) + 2 * (recipe.precision in WITH_MASTERS))
    elif kind == "foreach":
        _foreach(t, weights, capturable=recipe.graph == "on")
    else:
        _loop(t, parameters)


def _loop(t: Tape, parameters: Sequence[Parameter]) -> None:
    """Eleven kernels a weight; three temporaries as large as it."""
    for p in parameters:
        t.module, w = p.name, p.weight
        for op, reads in (("mul_", 1), ("mul_", 1), ("add_", 2), ("mul_", 1), ("addcmul_", 3)):
            t.work(op, (w,) * reads, (w,), w.dtype)
        root = pointwise(t, "sqrt", w)
        corrected = pointwise(t, "div", root)
        del root
        denominator = pointwise(t, "add", corrected)
        del corrected
        change = pointwise(t, "mul", pointwise(t, "div", w, denominator))
        t.work("sub_", (w, change), (w,), w.dtype)
        del denominator, change
    t.module = ""


def _over_lists(t: Tape, op: str, weights: list[Tensor], lists: int, reads: int, writes: int = 1) -> None:
    """A kernel over `lists` lists of weights and what is as large; so many are read, so many written."""
    sizes, n_bytes = [weight.elements for weight in weights], sum([weight.n_bytes for weight in weights])
    reading = [(weight.storage.number, weight.n_bytes) for weight in weights] * reads
    written, kernels = n_bytes * writes, launches_over(op, sizes, lists)
    moved = {"reads": tuple(reading), "writes": ((weights[0].storage.number, written),)}
    t.work_of(op, OPTIMIZER, n_bytes * reads, written, weights[0].dtype, kernels, (sum(sizes),), **moved)


def _over_numbers(t: Tape, op: str, n: int, times: int = 1) -> None:
    """A kernel over a list of single numbers, so many times."""
    t.work_of(op, OPTIMIZER, 0, times * 4 * n, "fp32", times * launches_over(op, [1] * n, 1))


def _foreach(t: Tape, weights: list[Tensor], *, capturable: bool) -> None:
    """A few kernels over all weights at once; √v of the whole model is in memory for a moment.

    `capturable`, as a graph wants it: the factors are tensors of one number on the device. They take ten small operations,
    and the two divisions by them go tensor by tensor, since a list of unlike shapes is not walked in one kernel.
    """

    def divided() -> None:
        for weight in weights:
            t.work("div_", (weight,), (weight,), weight.dtype, strided=True)

    _over_lists(t, "foreach_mul_", weights, 1, 1)  # weight decay
    _over_lists(t, "foreach_lerp_", weights, 2, 2)
    _over_lists(t, "foreach_mul_", weights, 1, 1)
    _over_lists(t, "foreach_addcmul_", weights, 3, 2)  # the gradient is in the list twice and loaded once
    roots = [t.tensor(w.shape, w.dtype, op="foreach_sqrt") for w in weights]
    _over_lists(t, "foreach_sqrt", weights, 2, 1)
    if capturable:
        _over_numbers(t, "foreach_pow", len(weights), times=10)
        divided()
        _over_lists(t, "foreach_add_", weights, 1, 1)
        divided()
    else:
        _over_lists(t, "foreach_div_", weights, 1, 1)
        _over_lists(t, "foreach_add_", weights, 1, 1)
    _over_lists(t, "foreach_addcdiv_", weights, 3, 3)
    del roots


def _own(t: Tape, weights: list[Tensor], state_bytes: int) -> None:
    """Two kernels whatever the number of weights: their coefficients, and the update. `state_bytes`: of one weight."""
    read = sum(2 * w.n_bytes + state_bytes * w.elements + 4 for w in weights)
    written = sum(w.n_bytes + state_bytes * w.elements + 4 for w in weights)
    elements = [w.elements for w in weights]
    op = "flopwise::adamw_"
    t.work_of(op, OPTIMIZER, read, written, weights[0].dtype, launches_over(op, elements, 1), (sum(elements),))


def unscale(t: Tape, parameters: Sequence[Parameter]) -> None:
    """What loss scaling does before a step: every gradient is divided in place and looked at."""
    _over_lists(t, "unscale_", [p.weight for p in parameters], 1, 1)
