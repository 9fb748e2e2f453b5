"""What flopwise's own ops (kernels/) do on a GPU behind the one call that is seen here: their parts and what they hold."""

from collections.abc import Iterator
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from flopwise.spec.dtypes import dtype_name
from flopwise.work.catalogue import TRANSPOSED
from flopwise.work.op_rules import one_pass_scratch
from flopwise.work.operation import COPY, LOSS, MATMUL, OpWork

LOSS_OP = "linear_cross_entropy"
_ALIGNED = 16  # a row of its logits is padded to a multiple of this


def loss_parts(whole: OpWork, args: tuple[Any, ...]) -> Iterator[OpWork]:
    """The kernels of the loss that is fused with the head's matmul: for each chunk of tokens three matmuls, and between
    them one kernel that turns logits into losses and gradients.
    """
    rows, weight, targets, chunk, dtype, row_gradient, weight_gradient = args
    (tokens, width), vocab, item = rows.shape, len(weight), dtype.itemsize

    def part(op: str, kind: str, read: int, written: int, *shapes: tuple[int, ...], kernels: int = 1) -> OpWork:
        (m, k), n = (shapes[0], shapes[1][1]) if kind == MATMUL else ((0, 0), 0)
        name = whole.dtype if dtype == torch.float32 else dtype_name(dtype)
        if kind == MATMUL and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        work = {"flops": 2 * m * k * n, "read_bytes": read, "write_bytes": written, "kernels": kernels}
        return msgspec.structs.replace(whole, op=op, kind=kind, dtype=name, shapes=shapes, **work)

    yield part("share", LOSS, targets.nbytes, 4, kernels=5)  # of each token that counts, in five small kernels
    if weight.dtype != dtype:
        yield part("_to_copy", COPY, weight.nbytes, vocab * width * item, (vocab, width))
    for start in range(0, tokens, chunk):
        n = min(chunk, tokens - start)
        h, logits, w = n * width * item, n * vocab * item, vocab * width * item
        if rows.dtype != dtype:
            yield part("_to_copy", COPY, n * width * rows.element_size(), h, (n, width))
        yield part("mm", MATMUL, h + w, logits, (n, width), (width, vocab))
        yield part("flopwise::cross_entropy_rows", LOSS, logits + 8 * n, logits + 4 * n, (n, vocab))
        if row_gradient:
            yield part("mm", MATMUL, logits + w, h, (n, vocab), (vocab, width))
            if rows.dtype != dtype:
                yield part("copy_", COPY, h, n * width * rows.element_size(), (n, width))
        if weight_gradient:
            total = vocab * width * _sum_itemsize(weight)
            yield part("addmm", MATMUL, logits + h + total * bool(start), total, (vocab, n), (n, width))
    yield part("mean", LOSS, 4 * tokens, 4, (tokens,), kernels=2)


def factor_shapes(name: str, args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Of our own products, what is multiplied, as [m, k] and [k, n]; None of other ops."""
    if name not in TRANSPOSED:
        return None
    left, right = (args[place].shape for place in TRANSPOSED[name])
    return tuple(left), tuple(right)[::-1]


def _sum_itemsize(weight: Tensor) -> int:
    return 4 if weight.dtype == torch.float16 else weight.element_size()


def loss_holds(args: tuple[Any, ...]) -> int:
    """One chunk of logits; the weight, a chunk's rows and their gradient in the matmuls' dtype, where that is another."""
    rows, weight, _, chunk, dtype, *_ = args
    n, vocab = min(chunk, len(rows)), -(-len(weight) // _ALIGNED) * _ALIGNED
    cast = weight.numel() if weight.dtype != dtype else 0
    moved = 2 * n * rows.shape[1] if rows.dtype != dtype else 0
    return int((n * vocab + cast + moved) * dtype.itemsize)


def _flash_backward_holds(args: tuple[Any, ...], hopper: bool) -> int:
    q, k, window = args[1], args[2], args[7]
    once = one_pass_scratch(tuple(q.shape), tuple(k.shape), dtype_name(q.dtype)) if hopper and window is None else None
    return 4 * sum(prod(shape) for shape in once or [q.shape[:3]])  # else a number for each row


def passing_bytes(name: str, args: tuple[Any, ...], inputs: list[Tensor], hopper: bool) -> int:
    """What a kernel allocates for itself and gives back before it ends; the partial sums of a norm's weight are left out.

    The attention backwards sum dq over blocks of keys in fp32 and keep one number per query row (flash-attention 2's
    `dq_accum` and `dsoftmax_sum`; cuDNN and the efficient kernel hold the like).
    """
    if name == "flash_backward":
        return _flash_backward_holds(args, hopper)
    if not name.startswith("_scaled_dot_product") or not name.endswith("_backward"):
        return 0
    q = inputs[1]  # after the gradient of the output
    batch, heads, length, head_dim = q.shape
    row_sums = batch * heads * length * 4
    if "efficient" in name and q.dtype == torch.float32:
        return row_sums  # dq is fp32 and summed in place
    if "flash" in name:
        length, head_dim = -(-length // 128) * 128, -(-head_dim // 32) * 32
    grouped = 2 * 2 * batch * heads * inputs[2].shape[2] * head_dim if inputs[2].shape[1] != heads else 0
    return batch * heads * length * (head_dim + 1) * 4 + grouped
