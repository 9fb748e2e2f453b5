"""AdamW four ways, on shapes: the loop's, foreach's, fused's and our own kernels and what they need beside the state."""

from collections.abc import Sequence

from flopwise.predict.shapes.ops import pointwise
from flopwise.predict.shapes.tape import Parameter, Tape, Tensor
from flopwise.spec.recipe import SCALES_ON_DEVICE, Recipe
from flopwise.work.operation import ELEMENTWISE, OPTIMIZER, OPTIMIZER_STATE

# torch's multi_tensor_apply: a launch takes so many tensors (by how many lists it walks), and so many chunks of 64 Ki.
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}
_MOST_CHUNKS, _CHUNK = 320, 65_536

# 8-bit states as bitsandbytes keeps them: a byte each and an fp32 scale per block of 256; small weights stay in 32 bits.
EIGHT_BIT_BLOCK, EIGHT_BIT_LEAST = 256, 4096


_MOMENTS = {"flopwise": "fp32", "flopwise-bf16": "bf16"}  # our own kernel's, whatever the weights are
_ITEM = {"fp32": 4, "bf16": 2}


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
            if eight_bits and p.weight.numel >= EIGHT_BIT_LEAST:
                state.append(t.tensor((eight_bit_bytes(p.weight.numel),), "bool", OPTIMIZER_STATE, p.name))
            else:
                dtype = _MOMENTS.get(kind, p.weight.dtype)
                state.append(t.tensor(p.weight.shape, dtype, OPTIMIZER_STATE, p.name))
        if recipe.graph == "on" or kind in SCALES_ON_DEVICE:
            state.append(t.tensor((), "fp32", OPTIMIZER_STATE, p.name))
        if recipe.precision == "bf16-master":
            state.append(t.tensor(p.weight.shape, "bf16", OPTIMIZER_STATE, p.name))
    return state


def step(t: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
    """One update of every weight. fp16 gradients carry a loss scale, which fused kernels take out and write back."""
    kind = recipe.optimizer
    if kind == "fused":
        return _fused(t, parameters, writes=3 + (recipe.precision == "fp16"))
    if kind in _MOMENTS:
        return _own(t, parameters, 2 * _ITEM[_MOMENTS[kind]] + 2 * (recipe.precision == "bf16-master"))
    if kind == "foreach":
        return _foreach(t, parameters, capturable=recipe.graph == "on")
    return _loop(t, parameters)


def _loop(t: Tape, parameters: Sequence[Parameter]) -> None:
    """Eleven kernels a weight; three temporaries as large as it."""
    for p in parameters:
        t.module, w = p.name, p.weight
        for op, reads in (("mul_", 1), ("mul_", 1), ("add_", 2), ("mul_", 1), ("addcmul_", 3)):
            t.work(op, ELEMENTWISE, (w,) * reads, w.n_bytes, w.dtype)
        root = pointwise(t, "sqrt", w)
        corrected = pointwise(t, "div", root)
        del root
        denominator = pointwise(t, "add", corrected)
        del corrected
        change = pointwise(t, "mul", pointwise(t, "div", w, denominator))
        t.work("sub_", ELEMENTWISE, (w, change), w.n_bytes, w.dtype)
        del denominator, change
    t.module = ""


def _foreach(t: Tape, parameters: Sequence[Parameter], *, capturable: bool) -> None:
    """A few kernels over all weights at once; √v of the whole model is in memory for a moment.

    `capturable`, as a graph wants it: the factors are tensors of one number on the device. They take ten small operations,
    and the two divisions by them go tensor by tensor, since a list of unlike shapes is not walked in one kernel.
    """
    sizes = [p.weight.numel for p in parameters]
    weights = [p.weight for p in parameters]
    n_bytes = sum(w.n_bytes for w in weights)

    def over_all(op: str, lists: int, reads: int, writes: int = 1) -> None:
        kernels, shapes = launches(sizes, lists), ((sum(sizes),),)
        t.work(op, OPTIMIZER, weights * reads, n_bytes * writes, weights[0].dtype, kernels=kernels, shapes=shapes)

    def divided() -> None:
        for weight in weights:
            t.work("div_", ELEMENTWISE, (weight,), weight.n_bytes, weight.dtype, strided=True)

    over_all("foreach_mul_", 1, 1)  # weight decay
    over_all("foreach_lerp_", 2, 2)
    over_all("foreach_mul_", 1, 1)
    over_all("foreach_addcmul_", 3, 2)  # the gradient is in the list twice and loaded once
    roots = [t.tensor(w.shape, w.dtype, op="foreach_sqrt") for w in weights]
    over_all("foreach_sqrt", 2, 1)
    if capturable:
        small = 10 * launches([1] * len(sizes), 1)
        t.work("foreach_pow", OPTIMIZER, (), 40 * len(sizes), "fp32", kernels=small)
        divided()
        over_all("foreach_add_", 1, 1)
        divided()
    else:
        over_all("foreach_div_", 1, 1)
        over_all("foreach_add_", 1, 1)
    over_all("foreach_addcdiv_", 3, 3)
    del roots


def _fused(t: Tape, parameters: Sequence[Parameter], writes: int) -> None:
    """One kernel reads weight, gradient and both moments and writes all but the gradient."""
    sizes = [p.weight.numel for p in parameters]
    weights = [p.weight for p in parameters]
    n_bytes, n = sum(w.n_bytes for w in weights), len(sizes)
    t.work("foreach_add_", OPTIMIZER, (), 4 * n, "fp32", kernels=launches([1] * n, 1))  # the step counts
    kernels, shapes = launches(sizes, 4), ((sum(sizes),),)
    t.work("fused_adamw_", OPTIMIZER, weights * 4, writes * n_bytes, weights[0].dtype, kernels=kernels, shapes=shapes)


def _own(t: Tape, parameters: Sequence[Parameter], state_bytes: int) -> None:
    """Two kernels whatever the number of weights: their coefficients, and the update. `state_bytes`: of one weight."""
    weights = [p.weight for p in parameters]
    read = sum(2 * w.n_bytes + state_bytes * w.numel + 4 for w in weights)
    written = sum(w.n_bytes + state_bytes * w.numel + 4 for w in weights)
    t.work_of(
        "flopwise::adamw_",
        OPTIMIZER,
        read,
        written,
        weights[0].dtype,
        kernels=2,
        shapes=((sum(w.numel for w in weights),),),
    )


def unscale(t: Tape, parameters: Sequence[Parameter]) -> None:
    """What loss scaling does before a step: every gradient is divided in place and looked at."""
    weights = [p.weight for p in parameters]
    n_bytes = sum(w.n_bytes for w in weights)
    sizes = [w.numel for w in weights]
    t.work("unscale_", OPTIMIZER, weights, n_bytes, "fp32", kernels=launches(sizes, 1), shapes=((sum(sizes),),))


def launches(sizes: Sequence[int], lists: int) -> int:
    """How many kernels a foreach op over tensors of these sizes takes: torch's own packing into launches.

    >>> launches([65_536] * 110, lists=1), launches([65_536 * 400], lists=1)
    (1, 2)
    """
    count = tensors = chunks = 0
    for size in sizes:
        tensors += 1
        chunks += -(-size // _CHUNK)
        full, chunks = divmod(chunks, _MOST_CHUNKS)
        count += full
        if full:
            tensors = 1 if chunks else 0  # the tensor that filled a launch goes on in the next
        if tensors == _MOST_TENSORS[lists]:
            count, tensors, chunks = count + 1, 0, 0
    return count + (tensors > 0)
