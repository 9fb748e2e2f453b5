"""Rotary positions in one kernel: both halves of a head are read once, turned in fp32, and written once.

A program turns one head at a few positions; the heads read the same table of angles, which stays in the
caches. The backward pass is the rotation by the opposite angle.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case
from flopwise.kernels.dispatch import GRID, empty_in_order, require, require_float, row_order, runs_triton

TILE, WARPS = 512, 4  # pairs that a program turns, 4 a thread


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i+D/2}) of x [B, H, T, D] by their position's angle, in fp32, cast back.

    >>> quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])  # 90 degrees
    >>> rope_reference(torch.tensor([[[[1.0, 2.0]]]]), *quarter)
    tensor([[[[-2.,  1.]]]])
    """
    first, second = x.chunk(2, -1)  # [B, H, T, D/2]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


@triton.jit
def _turn(x, y, angle, sequence, head, position, pair, inside, HALF: tl.constexpr):
    """Turn one head of one sequence. `x`, `y`: a pointer and its strides of batch, head and position; `angle`: cos, sin."""
    cos, sin = angle
    head = head.to(tl.int64)
    source = x[0] + sequence * x[1] + head * x[2] + position * x[3] + pair
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)  # [POSITIONS, BLOCK]
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = y[0] + sequence * y[1] + head * y[2] + position * y[3] + pair
    tl.store(target, (first * cos - second * sin).to(y[0].dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(y[0].dtype.element_ty), mask=inside)


@triton.jit
def _rope_kernel(
    q_ptr,
    yq_ptr,
    q_batch,
    q_head,
    q_position,
    yq_batch,
    yq_head,
    yq_position,
    k_ptr,
    yk_ptr,
    k_batch,
    k_head,
    k_position,
    yk_batch,
    yk_head,
    yk_position,
    cos_ptr,
    sin_ptr,
    q_heads,
    context,
    HALF: tl.constexpr,
    PAIR: tl.constexpr,
    INVERSE: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: blocks of positions; heads, the queries' before the keys' where there is a PAIR; sequences.

    HALF is known when it is compiled: of an argument Triton learns whether it is a multiple of 16, and with 40 pairs a head,
    which are not, it would load number by number.
    """
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)[:, None].to(tl.int64)
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (position < context) & (pair < HALF)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + pair, mask=inside, other=0.0)
    if INVERSE:
        sin = -sin
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    if head < q_heads:
        _turn(
            (q_ptr, q_batch, q_head, q_position),
            (yq_ptr, yq_batch, yq_head, yq_position),
            (cos, sin),
            sequence,
            head,
            position,
            pair,
            inside,
            HALF,
        )
    elif PAIR:
        _turn(
            (k_ptr, k_batch, k_head, k_position),
            (yk_ptr, yk_batch, yk_head, yk_position),
            (cos, sin),
            sequence,
            head - q_heads,
            position,
            pair,
            inside,
            HALF,
        )


def _like(x: Tensor) -> Tensor:
    return empty_in_order(x, row_order(x))


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(pair: tuple[Tensor, ...], turned: tuple[Tensor, ...], cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """One launch for one tensor or two."""
    batch, _, context, dim = pair[0].shape
    half = dim // 2
    block = triton.next_power_of_2(half)
    positions = max(1, TILE // block)
    heads = sum(x.shape[1] for x in pair)
    sides: list[Any] = []
    for x, y in ((pair[0], turned[0]), (pair[-1], turned[-1])):
        sides += [x, y, *x.stride()[:3], *y.stride()[:3]]
    options = {"HALF": half, "PAIR": len(pair) == 2, "INVERSE": inverse, "POSITIONS": positions, "BLOCK": block}
    grid = (triton.cdiv(context, positions), heads, batch)
    _rope_kernel[grid](*sides, cos, sin, pair[0].shape[1], context, **options, num_warps=WARPS)


@torch.library.custom_op("flopwise::rope", mutates_args=())
def _rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    y = _like(x)
    if not runs_triton(x):
        return y.copy_(rope_reference(x, cos, -sin if inverse else sin))
    if x.numel():
        _launch((_side_by_side(x),), (y,), cos.contiguous(), sin.contiguous(), inverse)
    return y


@torch.library.custom_op("flopwise::rope_pair", mutates_args=())
def _rope_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    yq, yk = _like(q), _like(k)
    if not runs_triton(q):
        sin = -sin if inverse else sin
        return yq.copy_(rope_reference(q, cos, sin)), yk.copy_(rope_reference(k, cos, sin))
    if q.numel() + k.numel():
        _launch((_side_by_side(q), _side_by_side(k)), (yq, yk), cos.contiguous(), sin.contiguous(), inverse)
    return yq, yk


@_rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return _like(x)


@_rope_pair.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return _like(q), _like(k)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *_, cos, sin, inverse = inputs
    ctx.save_for_backward(cos, sin)
    ctx.inverse = inverse


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    return _rope(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None


def _pair_gradient(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    return *_rope_pair(dq, dk, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rope.register_autograd(_gradient, setup_context=_keep)
_rope_pair.register_autograd(_pair_gradient, setup_context=_keep)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    require_float("rope", x, beside=(cos, sin))
    shaped = x.dim() == 4 and x.shape[3] % 2 == 0
    require(shaped, f"rope turns [B, H, T, D] with an even D, pairs (i, i + D/2), not {list(x.shape)}")
    fits = cos.shape == sin.shape == (x.shape[2], x.shape[3] // 2) and cos.dtype == sin.dtype == torch.float32
    given = f"cos {list(cos.shape)} {cos.dtype} and sin {list(sin.shape)} {sin.dtype}"
    require(fits, f"the angles do not fit x {list(x.shape)}: they are [T, D/2] each in fp32, not {given}")
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    fits = max(x.shape[:2]) <= GRID or not runs_triton(x)
    require(fits, f"rope of {list(x.shape)}: the kernel takes at most {GRID} sequences and heads at a time")
    require(not learned, "rope has no gradient for its angles: detach cos and sin, or use rope_reference")


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, H, T, D], any strides, by its positions' angles; the result lies in memory as x does.

    >>> quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    >>> rope(torch.tensor([[[[1.0, 2.0]]]]), *quarter)
    tensor([[[[-2.,  1.]]]])
    """
    _check(x, cos, sin)
    return _rope(x, cos, sin, False)  # type: ignore[no-any-return]


def rope_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of queries and keys in one launch; their numbers of heads may differ."""
    _check(q, cos, sin)
    _check(k, cos, sin)
    same = q.shape[0] == k.shape[0] and q.dtype == k.dtype and q.device == k.device
    given = f"{list(q.shape)} {q.dtype} and {list(k.shape)} {k.dtype}"
    require(same, f"q and k differ, {given}: one batch, one dtype and one device are needed")
    return _rope_pair(q, k, cos, sin, False)  # type: ignore[no-any-return]


def cases() -> Iterator[Case]:
    strides = [f"{side}_{of}" for side in ("q", "yq", "k", "yk") for of in ("batch", "head", "position")]
    numbers = dict.fromkeys((*strides, "q_heads", "context"), "i32")
    for dtype, dim in (("bf16", 128), ("bf16", 80), ("fp32", 64), ("fp32", 256)):
        pointers = dict.fromkeys(("q_ptr", "yq_ptr", "k_ptr", "yk_ptr"), f"*{dtype}")
        block = triton.next_power_of_2(dim // 2)
        tile = {"HALF": dim // 2, "PAIR": True, "INVERSE": False, "POSITIONS": TILE // block, "BLOCK": block}
        signature = {**pointers, "cos_ptr": "*fp32", "sin_ptr": "*fp32", **numbers}
        yield Case(f"rope pair {dtype} {dim}", _rope_kernel, signature, tile, WARPS, 3, tuple(strides))
