"""Rules of the catalogue: bytes, FLOPs and launches of one call from the shapes and dtypes of its tensors.

Bytes are a roofline's: every input read once, every result written once; what a cache saves and what a kernel reads twice
is not in them. FLOPs are those of matmuls alone, a multiply-add counted as two, and of attention the whole square of
scores, as PyTorch's own counter has it. Arguments come by position, as the op's schema has them: a tensor, a list of
tensors, or anything else.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from flopwise.spec.dtypes import HALVES, item_bytes
from flopwise.work.tensor import Shape, TensorLike, broadcast

Args = Sequence[Any]
Tensors = Sequence[TensorLike]
Moved = tuple[int, int]  # bytes read, bytes written
MovedRule = Callable[[Args, Tensors, Tensors], Moved]  # of arguments, the tensors among them, and results
FlopsRule = Callable[[Args], int | None]  # None: these are no arguments of such an op
LaunchRule = Callable[[Args], int]


def total(tensors: Tensors) -> int:
    """Bytes of all of them."""
    return sum(tensor.n_bytes for tensor in tensors)


def is_tensor(value: Any) -> bool:
    """Whether an argument is one tensor."""
    return hasattr(value, "n_bytes")


# Bytes.


def nothing(args: Args, inputs: Tensors, outputs: Tensors) -> Moved:
    """A view, an allocation, a flag that says 'by one'."""
    return 0, 0


def gathers(args: Args, inputs: Tensors, outputs: Tensors) -> Moved:
    """Of the table, the first argument, as much as is written; no more than it holds."""
    table, written = args[0], total(outputs)
    return total([tensor for tensor in inputs if tensor is not table]) + min(written, table.n_bytes), written


def picks(args: Args, inputs: Tensors, outputs: Tensors) -> Moved:
    """nll_loss_forward: one number of each row, by the targets."""
    table, targets = args[0], args[1]
    rest = [tensor for tensor in inputs if tensor is not table]
    return total(rest) + targets.elements * item_bytes(table.dtype, 1), total(outputs)


def scatters(count: Callable[[Args], int | None], adds: Callable[[Args], bool]) -> MovedRule:
    """Only the elements that are written move, and those of the source that they come from; `adds`: they are read first."""

    def rule(args: Args, inputs: Tensors, outputs: Tensors) -> Moved:
        target, touched = args[0], count(args)
        if touched is None:  # the numbers decide
            return total(inputs), total(outputs)
        touched = min(touched, target.elements)
        moved = touched * item_bytes(target.dtype, 1)
        given = [min(one.n_bytes, touched * item_bytes(one.dtype, 1)) for one in inputs if one is not target]
        return sum(given) + (moved if adds(args) else 0), moved

    return rule


def _of_index(args: Args) -> int:
    return int(args[2].elements)


def _of_source(args: Args) -> int:
    return int(args[3].elements)


def _of_rows(args: Args) -> int:
    target, dim, index = args[:3]
    return int(index.elements * target.elements // max(1, target.shape[dim] if target.shape else 1))


def _of_indices(args: Args) -> int | None:
    target, indices = args[:2]
    given = [index for index in indices if index is not None]
    shape = broadcast([index.shape for index in given])
    if shape is None or any(index.dtype in ("bool", "uint8") for index in given):
        return None
    sliced = [size for i, size in enumerate(target.shape) if i >= len(indices) or indices[i] is None]
    return int(prod(shape) * prod(sliced))


def _yes(args: Args) -> bool:
    return True


def _no(args: Args) -> bool:
    return False


scatter, scatter_add = scatters(_of_index, _no), scatters(_of_index, _yes)
index_copy, index_add, index_fill = scatters(_of_source, _no), scatters(_of_source, _yes), scatters(_of_rows, _no)
index_put = scatters(_of_indices, lambda args: len(args) > 3 and bool(args[3]))


# FLOPs.


def matmul(first: int) -> FlopsRule:
    """Of two matrices, or two stacks of them, from argument `first` on; a single one beside a stack is shared among it."""

    def rule(args: Args) -> int | None:
        pair = factors(args, first)
        if pair is None:
            return None
        a, b = pair
        stacked = prod(a[:-2]) if 2 < len(a) == len(b) else 1
        return 2 * stacked * a[-2] * a[-1] * b[-1]

    return rule


def transposed(left: int, right: int) -> FlopsRule:
    """Of [m, k] at one place and [n, k] at another."""
    return lambda args: 2 * int(args[left].elements) * int(args[right].shape[0])


def factors(args: Args, first: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """The shapes of a product's two factors; None where they do not fit each other."""
    try:
        a, b = args[first].shape, args[first + 1].shape
    except (IndexError, AttributeError):
        return None
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2] or (len(a) == len(b) and a[:-2] != b[:-2]):
        return None
    return a, b


def vector(place: int) -> FlopsRule:
    """A matrix or a vector, at `place`, times a vector."""
    return lambda args: 2 * int(args[place].elements)


class AttentionFlops(NamedTuple):
    """Of one op of fused attention, the whole square of scores counted: whether it skips a part, the sizes do not tell."""

    useful: int  # two products forward, four backward
    done: int  # and the scores once more in the backward pass, which did not keep them


def attention(args: Args, backward: bool, by_head: bool) -> AttentionFlops | None:
    """FLOPs from the sizes of q, k and v, [batch, heads, tokens, width] or with heads and tokens the other way round."""
    first = 1 if backward else 0  # after the gradient
    shapes = [one.shape for one in args[first : first + 3] if hasattr(one, "shape")]
    if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes):
        return None
    q, k, v = shapes if by_head else [(b, h, t, d) for b, t, h, d in shapes]
    square = q[0] * q[1] * q[2] * k[2]
    scores, values = 2 * square * q[3], 2 * square * v[3]
    if not backward:
        return AttentionFlops(scores + values, scores + values)
    return AttentionFlops(2 * (scores + values), 3 * scores + 2 * values)


def attention_rule(backward: bool, by_head: bool) -> FlopsRule:
    """All that is done, recomputed scores included."""

    def rule(args: Args) -> int | None:
        found = attention(args, backward, by_head)
        return found.done if found else None

    return rule


def causal_share(context: int) -> float:
    """The part of the square of scores that a causal mask leaves: the triangle with its diagonal.

    >>> causal_share(1), causal_share(1024)
    (1.0, 0.50048828125)
    """
    return (context + 1) / (2 * context)


def one_pass_scratch(q: Shape, k: Shape, dtype: str) -> tuple[Shape, Shape] | None:
    """What our attention's backward pass holds in fp32 on sm_90, where it goes over the scores once: L and Δ in whole tiles
    of 64 queries, and the sums of dQ. None of what it goes over twice (kernels/attention_hopper_backward.py, `takes`).

    >>> one_pass_scratch((1, 8, 4097, 128), (1, 8, 4097, 128), "bf16")
    ((2, 8, 4160), (1, 8, 4097, 128))
    """
    batch, heads, length, head_dim = q
    if head_dim != 128 or dtype not in ("bf16", "fp16") or heads != k[1] or max(length, k[2]) < 4096:
        return None
    return (2, batch * heads, -(-length // 64) * 64), q


# Launches. Read from aten/src/ATen/native/cuda of torch 2.11, and counted with its profiler on an H200.

_UNSORTED_INDICES = 3072  # of embedding_dense_backward: with more indices than this, they are sorted first
_SORTED_LAUNCHES = 21  # ten of the sort (its memsets left out), zeros, and ten that sum the segments
_CAT_INPUTS, _CAT_DIMS = 128, 4  # of one launch


def embedding_backward(args: Args) -> int:
    """Zeros and a kernel, or a sort by index."""
    return 2 if args[1].elements <= _UNSORTED_INDICES else _SORTED_LAUNCHES


def cat(args: Args) -> int:
    """The kernel for many inputs knows four dimensions: with more, each is a copy."""
    listed = args[0] if args and isinstance(args[0], list | tuple) else args
    given = [one for one in listed if is_tensor(one)]
    return len(given) if given and len(given[0].shape) > _CAT_DIMS else -(-len(given) // _CAT_INPUTS)


def efficient_backward(args: Args) -> int:
    """Zeros and the kernel; in fp32 the row sums of gradient · output come first, in three more."""
    return 2 if args[0].dtype in HALVES else 5


# multi_tensor_apply (aten/src/ATen/native/cuda/MultiTensorApply.cuh): a launch takes so many tensors of each list, by the
# number of lists, and so many chunks of 65,536 elements in all.
_CHUNK_ELEMENTS = 65_536
_LAUNCH_TENSORS = (110, 64, 48, 36, 30)
_LAUNCH_CHUNKS = 320


def list_launches(elements: Sequence[int], lists: int) -> int:
    """Launches of one op over `lists` lists of tensors, each list with tensors of these sizes.

    >>> list_launches([10] * 111, lists=1), list_launches([65_536 * 320 + 1], lists=4)
    (2, 2)
    """
    most = _LAUNCH_TENSORS[min(max(lists, 1), len(_LAUNCH_TENSORS)) - 1]
    count = tensors = chunks = 0
    for size in elements:
        tensors += size > 0
        full, chunks = divmod(chunks + -(-size // _CHUNK_ELEMENTS), _LAUNCH_CHUNKS)
        if full:
            count, tensors = count + full, int(chunks > 0)  # the tensor that is cut goes on in the next launch
        if tensors == most:
            count, tensors, chunks = count + 1, 0, 0
    return count + (tensors > 0)
