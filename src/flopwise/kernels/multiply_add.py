"""Multiply-adds without end on a few numbers: how fast a chip computes in fp32 where no matmul is. It computes nothing of use.

Each number is taken through a chain of x ← a x + b. A thread has eight of them, so that one chain's wait for its last
result is filled with the others'; memory is touched once at the start and once at the end.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case
from flopwise.kernels.dispatch import require, runs_triton

BLOCK, WARPS, UNROLLED = 1024, 4, 16
SCALE, SHIFT = 0.5, 0.25  # x goes to 0.5 and stays there: neither large nor denormal


def multiply_adds_reference(x: Tensor, rounds: int) -> Tensor:
    """x after 16 · `rounds` steps of x ← x / 2 + 1/4.

    >>> multiply_adds_reference(torch.tensor([0.5, 1e6]), rounds=4)
    tensor([0.5000, 0.5000])
    """
    for _ in range(UNROLLED * rounds):
        x = x * SCALE + SHIFT
    return x


@triton.jit
def _pointwise_multiply_adds_kernel(
    x_ptr, rounds, BLOCK: tl.constexpr, UNROLLED: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in range(rounds):
        for _ in tl.static_range(UNROLLED):
            x = x * SCALE + SHIFT  # one instruction: contracted into a multiply-add
    tl.store(x_ptr + at, x)


def multiply_adds(x: Tensor, rounds: int) -> int:
    """Take every number of x (fp32, a multiple of 1024 of them) through 16 · `rounds` multiply-adds, in place; the FLOPs.

    >>> multiply_adds(torch.ones(1024), rounds=2)
    65536
    """
    require(x.dtype == torch.float32 and x.is_contiguous(), "multiply_adds takes fp32 numbers that lie side by side")
    require(x.numel() % BLOCK == 0, f"multiply_adds takes a multiple of {BLOCK} numbers: there are {x.numel()}")
    if runs_triton(x) and x.numel():
        _pointwise_multiply_adds_kernel[(x.numel() // BLOCK,)](
            x, rounds, BLOCK=BLOCK, UNROLLED=UNROLLED, SCALE=SCALE, SHIFT=SHIFT, num_warps=WARPS
        )
    else:
        x.copy_(multiply_adds_reference(x, rounds))
    return 2 * UNROLLED * rounds * x.numel()


def cases() -> Iterator[Case]:
    """The one configuration."""
    constants = {"BLOCK": BLOCK, "UNROLLED": UNROLLED, "SCALE": SCALE, "SHIFT": SHIFT}
    yield Case(
        "multiply-adds",
        _pointwise_multiply_adds_kernel,
        {"x_ptr": "*fp32", "rounds": "i32"},
        constants,
        num_warps=WARPS,
    )
