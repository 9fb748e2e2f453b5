"""What cross entropy does to a row of logits, in Triton: its loss, and its gradient in its place.

The formulas are those of `cross_entropy.py`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case
from flopwise.kernels.dispatch import runs_triton, wide

IGNORED = -100  # F.cross_entropy's ignore_index
ROW_WARPS, ROW_LANES = 8, 1024  # of a row's program: each thread has four loads of 16 bytes under way
SCALE_BLOCK, SCALE_PROGRAMS = 4096, 1056  # 8 programs on each of an H200's SMs


def row_reference(logits: Tensor, targets: Tensor, factor: Tensor | float) -> tuple[Tensor, Tensor]:
    """What the row kernel computes: each row's loss, and e · factor in the logits' dtype."""
    kept = targets != IGNORED
    unknown = targets[kept & ((targets < 0) | (targets >= logits.shape[1]))]
    if len(unknown):
        raise ValueError(f"target {int(unknown[0])} is none of {logits.shape[1]} classes; what is ignored is {IGNORED}")
    log_probabilities = F.log_softmax(logits.to(wide(logits.dtype)), -1)
    index = torch.where(kept, targets, 0).long()[:, None]
    losses = torch.where(kept, -log_probabilities.gather(1, index)[:, 0], 0.0)
    errors = log_probabilities.exp_().scatter_add_(1, index, torch.full_like(index, -1, dtype=log_probabilities.dtype))
    return losses, torch.where(kept[:, None], errors * factor, 0.0).to(logits.dtype)


@triton.jit
def _finite(largest):
    """What to subtract where nothing but −∞ was seen: the difference of two infinities is no number."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _add_to_sum(m, s, x):
    """Σ exp(x − m), one running maximum for each lane of [LANES], x [LANES, VECTOR].

    The maximum is taken away before the scaling by log₂ e, which would carry a large number beyond fp32.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    larger = tl.maximum(m, tl.max(x, axis=1))
    base = _finite(larger)
    s = s * tl.exp2((m - base) * LOG2E) + tl.sum(tl.exp2((x - base[:, None]) * LOG2E), axis=1)
    return larger, s


@triton.jit
def _cross_entropy_row_kernel(
    logits,
    targets,
    losses,
    normalizers,
    factor,
    row_stride,
    vocabulary,
    ERRORS: tl.constexpr,
    NORMALIZERS: tl.constexpr,
    IGNORED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One program for a row: its loss, and with ERRORS the row overwritten by (p − onehot) · factor.

    A thread's 16 bytes share a maximum, so that each element costs one exponential and no two threads meet before the
    row's end. Full blocks run without a mask: one that may end anywhere would cut every load into single elements.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits = logits + row * row_stride
    target = tl.load(targets + row)
    kept = target != IGNORED
    # Read before it is overwritten. A target that is no word makes the loss NaN rather than read beyond the row.
    known = (target >= 0) & (target < vocabulary)
    chosen = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
    places = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = vocabulary // (LANES * VECTOR) * (LANES * VECTOR)

    m = tl.full([LANES], float("-inf"), dtype=tl.float32)
    s = tl.zeros([LANES], dtype=tl.float32)
    for start in range(0, whole, LANES * VECTOR):
        x = tl.load(logits + start + places).to(tl.float32)
        m, s = _add_to_sum(m, s, x)
    if whole < vocabulary:
        inside = places < vocabulary - whole
        x = tl.load(logits + whole + places, mask=inside, other=float("-inf")).to(tl.float32)
        m, s = _add_to_sum(m, s, x)
    largest = _finite(tl.max(m))
    logarithm = tl.log2(tl.sum(s * tl.exp2((m - largest) * LOG2E)))  # log₂ Σ exp(z − largest)
    logarithm = tl.where(kept & (known == 0), float("nan"), logarithm)  # and the gradient NaN as well

    tl.store(losses + row, tl.where(kept, (largest - chosen) + logarithm / LOG2E, 0.0))
    if NORMALIZERS:
        tl.store(normalizers + 2 * row, largest)
        tl.store(normalizers + 2 * row + 1, logarithm)
    if ERRORS:
        scale = tl.where(kept, tl.load(factor), 0.0)
        for start in range(0, whole, LANES * VECTOR):
            x = tl.load(logits + start + places).to(tl.float32)
            e = tl.exp2((x - largest) * LOG2E - logarithm) - tl.where(start + places == target, 1.0, 0.0)
            e = tl.where(kept, e * scale, 0.0)
            tl.store(logits + start + places, e.to(logits.dtype.element_ty))
        if whole < vocabulary:
            inside = places < vocabulary - whole
            x = tl.load(logits + whole + places, mask=inside, other=float("-inf")).to(tl.float32)
            e = tl.exp2((x - largest) * LOG2E - logarithm) - tl.where(whole + places == target, 1.0, 0.0)
            e = tl.where(kept, e * scale, 0.0)
            tl.store(logits + whole + places, e.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _cross_entropy_error_kernel(
    logits, targets, normalizers, factor, errors, row_stride, vocabulary, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    """(p − onehot) · factor of one block of one row, from the row's two normalizers."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    target = tl.load(targets + row)
    x = tl.load(logits + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    largest, logarithm = tl.load(normalizers + 2 * row), tl.load(normalizers + 2 * row + 1)
    e = tl.exp2((x - largest) * LOG2E - logarithm) - tl.where(columns == target, 1.0, 0.0)
    e = tl.where(target != IGNORED, e * tl.load(factor), 0.0)
    tl.store(errors + row * vocabulary + columns, e.to(errors.dtype.element_ty), mask=inside)


@triton.jit
def _loss_scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    """x ← x · factor. A factor of 1, which `loss.backward()` has, moves no byte."""
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            places = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            wide = tl.load(x + places, mask=places < n).to(tl.float32)
            tl.store(x + places, (wide * scale).to(x.dtype.element_ty), mask=places < n)


def losses_and_errors(
    logits: Tensor, targets: Tensor, losses: Tensor, factor: Tensor | None, normalizers: Tensor | None = None
) -> None:
    """Each row's loss, and its normalizers: the largest logit and log₂ Σ exp(z − largest); with a factor, the logits
    overwritten by their gradients."""
    if not runs_triton(logits):
        found, errors = row_reference(logits, targets, 1.0 if factor is None else factor)
        losses.copy_(found)
        if factor is not None:
            logits.copy_(errors)
        if normalizers is not None:
            exact = logits.to(wide(logits.dtype))
            largest = exact.amax(-1, keepdim=True)
            normalizers[:, :1] = largest
            normalizers[:, 1] = torch.exp(exact - largest).sum(-1).log2()
        return
    lanes, vector, warps = _row_config(logits.shape[1], logits.element_size())
    wanted = {"ERRORS": factor is not None, "NORMALIZERS": normalizers is not None, "IGNORED": IGNORED}
    tensors, tile = (logits, targets, losses, normalizers, factor), {"LANES": lanes, "VECTOR": vector}
    _cross_entropy_row_kernel[(len(logits),)](
        *tensors, logits.stride(0), logits.shape[1], **wanted, **tile, num_warps=warps
    )


def _row_config(vocabulary: int, element_bytes: int) -> tuple[int, int, int]:
    """LANES, VECTOR and warps: a long row is many threads' work, a short row that of few."""
    vector = 16 // element_bytes
    lanes = min(ROW_LANES, triton.next_power_of_2(triton.cdiv(vocabulary, vector)))
    return lanes, vector, max(1, min(ROW_WARPS, lanes // 128))


def cases() -> Iterator[Case]:
    """The kernels for a vocabulary of 128,256: bf16 and fp32 logits."""
    for name, kind, size in (("bf16", "*bf16", 2), ("fp32", "*fp32", 4)):
        lanes, vector, warps = _row_config(128_256, size)
        pointers = {"logits": kind, "targets": "*i64", "losses": "*fp32", "factor": "*fp32"}
        numbers = {"row_stride": "i32", "vocabulary": "i32"}
        fixed = {"IGNORED": IGNORED, "LANES": lanes, "VECTOR": vector, "NORMALIZERS": False, "normalizers": None}
        divisible = ("row_stride", "vocabulary")
        rows, whole = _cross_entropy_row_kernel, {**pointers, **numbers}
        yield Case(f"cross_entropy rows {name}", rows, whole, fixed | {"ERRORS": True}, warps, 3, divisible)
        backward = {"logits": kind, "targets": "*i64", "normalizers": "*fp32", "factor": "*fp32", "errors": kind}
        errors, constants = _cross_entropy_error_kernel, {"IGNORED": IGNORED, "BLOCK": SCALE_BLOCK}
        yield Case(f"cross_entropy backward {name}", errors, {**backward, **numbers}, constants, 8, 3, divisible)
        scale = {"x": kind, "factor": "*fp32", "n": "i64"}
        yield Case(f"scale {name}", _loss_scale_kernel, scale, {"BLOCK": SCALE_BLOCK}, 8, divisible=("n",))
