"""Matrices in fp8 with scales: by rows, by columns (written transposed), or both in one pass over the matrix.

Hopper's fp8 tensor cores multiply A [m, k] by B [n, k], both with k side by side. A training step needs three such products
of a linear layer, y = x Wᵀ, dx = dy W and dW = dyᵀ x: of x, W and dy each, one order for one product and the transposed order
for another. `cast` therefore writes both. A scale holds for a whole product sum: one for the tensor, or one for every row of
what is multiplied, which of the transposed order is one for every column.

q = x · (F / amax), x ≈ q · (amax / F), with F the format's largest number: 448 of e4m3, 57344 of e5m2.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise import torch_private
from flopwise.kernels.case import Case
from flopwise.kernels.direct_op import direct_op
from flopwise.kernels.dispatch import multiprocessors, runs_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
LEAST = 1e-30  # an amax below it counts as this: zeros have a scale as well
ROWS, COLUMNS, WARPS = 128, 128, 8  # of a tile: 128 bytes of fp8 side by side in both orders
HELD = 16384  # the longest rows that a program holds
ROW_TILE, ROW_WARP = 4096, 512  # elements of a program that takes several short rows; of a warp
PER_SM = 4  # programs that look for a tensor's amax, each at many tiles

Parts = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # by rows and its scale, by columns and its scale; empty what was not asked


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """What a quantised number is multiplied with to have the original's size.

    >>> scale_of(torch.tensor([448.0, 896.0]), E4M3)
    tensor([1., 2.])
    """
    return amax.float().clamp_min(LEAST) / LARGEST[dtype]


def quantised_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, rounded to the format."""
    return (x.float() * (1.0 / scale)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


@triton.jit
def _fp8_tensor_amax_kernel(x_ptr, amax_ptr, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest |x| of a program's tiles, as the bits of an fp32 number: those of positive numbers are in the same order."""
    across = tl.cdiv(columns, COLUMNS)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
        row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < columns)
        largest = tl.maximum(
            largest, tl.abs(tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32))
        )
    tl.store(amax_ptr + tl.program_id(0), tl.max(largest).to(tl.int32, bitcast=True))


@triton.jit
def _fp8_axis_amax_kernel(
    x_ptr, row_amax_ptr, column_amax_ptr, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The largest |x| of every row and of every column."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.abs(tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32))
    tl.atomic_max(row_amax_ptr + row, tl.max(x, 1).to(tl.int32, bitcast=True), mask=row < rows, sem="relaxed")
    tl.atomic_max(
        column_amax_ptr + column, tl.max(x, 0).to(tl.int32, bitcast=True), mask=column < columns, sem="relaxed"
    )


@triton.jit
def _fp8_cast_kernel(
    x_ptr,
    row_amax_ptr,
    column_amax_ptr,
    by_rows_ptr,
    by_columns_ptr,
    row_scale_ptr,
    column_scale_ptr,
    stride,
    rows,
    columns,
    largest,
    least,
    parts,
    AXIS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile in fp8, as it lies and transposed. AXIS: amaxes of every row and column; else `parts` of the tensor's."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if AXIS:
        row_amax = tl.load(row_amax_ptr + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
        column_amax = tl.load(column_amax_ptr + column, mask=column < columns, other=0).to(tl.float32, bitcast=True)
    else:
        part = tl.arange(0, PARTS)
        row_amax = tl.max(tl.load(row_amax_ptr + part, mask=part < parts, other=0), 0).to(tl.float32, bitcast=True)
        column_amax = row_amax
    row_amax = tl.maximum(row_amax, least)
    column_amax = tl.maximum(column_amax, least)
    if BY_ROWS:
        inverse = largest / row_amax
        q = (x * (inverse[:, None] if AXIS else inverse)).to(by_rows_ptr.dtype.element_ty)
        tl.store(by_rows_ptr + row[:, None] * columns + column[None, :], q, mask=inside)
    if BY_COLUMNS:
        inverse = largest / column_amax
        q = (x * (inverse[None, :] if AXIS else inverse)).to(by_columns_ptr.dtype.element_ty)
        at = column.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(by_columns_ptr + at, tl.trans(q), mask=tl.trans(inside))
    if AXIS:
        tl.store(row_scale_ptr + row, row_amax / largest, mask=(row < rows) & (tl.program_id(1) == 0))
        tl.store(column_scale_ptr + column, column_amax / largest, mask=(column < columns) & (tl.program_id(0) == 0))
    elif (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(row_scale_ptr, row_amax / largest)


@triton.jit
def _fp8_row_cast_kernel(
    x_ptr, by_rows_ptr, scale_ptr, stride, rows, columns, largest, least, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Whole rows: their amaxes, scales and fp8 numbers in one pass."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    x = tl.load(x_ptr + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), 1), least)
    tl.store(scale_ptr + row, amax / largest, mask=row < rows)
    q = (x * (largest / amax)[:, None]).to(by_rows_ptr.dtype.element_ty)
    tl.store(by_rows_ptr + row[:, None] * columns + column, q, mask=inside)


def row_shape(columns: int) -> tuple[int, int, int]:
    """Rows of a program that holds them whole, columns of its tile, warps.

    >>> row_shape(2560), row_shape(10240)
    ((1, 4096, 8), (1, 16384, 32))
    """
    block = max(16, triton.next_power_of_2(columns))
    rows = max(1, ROW_TILE // block)
    return rows, block, min(32, max(4, rows * block // ROW_WARP))


def _amax(x: Tensor, axis: bool) -> tuple[Tensor, Tensor]:
    """Of all rows and all columns, or twice those of the tensor's parts: as the bits of fp32 numbers."""
    rows, columns = x.shape
    tiles = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    if axis:
        found = torch.zeros(rows + columns, dtype=torch.int32, device=x.device)
        by_row, by_column = found.split((rows, columns))
        _fp8_axis_amax_kernel[tiles](x, by_row, by_column, x.stride(0), rows, columns, **tile)
        return by_row, by_column
    programs = min(tiles[0] * tiles[1], PER_SM * multiprocessors(x.device))
    found = torch.empty(programs, dtype=torch.int32, device=x.device)  # a part of each: nothing is cleared or locked
    _fp8_tensor_amax_kernel[(programs,)](x, found, x.stride(0), rows, columns, **tile)
    return found, found


def _cast(x: Tensor, dtype: torch.dtype, axis: bool, by_rows: bool, by_columns: bool, amax: Tensor | None) -> Parts:
    rows, columns = x.shape
    parts = _empty(x, dtype, axis, by_rows, by_columns)
    (by_row, row_scale, by_column, column_scale), largest = parts, LARGEST[dtype]
    if axis and not by_columns and columns <= HELD:
        per, block, warps = row_shape(columns)
        _fp8_row_cast_kernel[(triton.cdiv(rows, per),)](
            x, by_row, row_scale, x.stride(0), rows, columns, largest, LEAST, ROWS=per, BLOCK=block, num_warps=warps
        )
        return parts
    found = (amax, amax) if amax is not None else _amax(x, axis)
    _fp8_cast_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
        x,
        *found,
        by_row,
        by_column,
        row_scale,
        column_scale,
        x.stride(0),
        rows,
        columns,
        largest,
        LEAST,
        found[0].numel(),
        AXIS=axis,
        BY_ROWS=by_rows,
        BY_COLUMNS=by_columns,
        PARTS=1 if axis else triton.next_power_of_2(found[0].numel()),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return parts


def _empty(x: Tensor, dtype: torch.dtype, axis: bool, by_rows: bool, by_columns: bool) -> Parts:
    """A tensor's one scale is the first; with scales by axis each order has its own."""
    rows, columns = x.shape
    return (
        x.new_empty((rows, columns) if by_rows else (0,), dtype=dtype),
        x.new_empty(rows if axis else 1, dtype=torch.float32),
        x.new_empty((columns, rows) if by_columns else (0,), dtype=dtype),
        x.new_empty(columns if axis else 0, dtype=torch.float32),
    )


def cast_reference(
    x: Tensor, dtype: torch.dtype, axis: bool, by_rows: bool, by_columns: bool, amax: Tensor | None
) -> Parts:
    """The same, one operation after the other."""
    size = x.float().abs()
    if not axis:
        found = size.amax().view(1) if amax is None else amax.view(torch.float32).amax().view(1)
        row_scale = scale_of(found, dtype)
        column_scale = row_scale.new_empty(0)
        rows = columns = quantised_reference(x, row_scale, dtype)
    else:
        row_scale, column_scale = scale_of(size.amax(1), dtype), scale_of(size.amax(0), dtype)
        rows = quantised_reference(x, row_scale[:, None], dtype)
        columns = quantised_reference(x, column_scale, dtype)
    none = x.new_empty(0, dtype=dtype)
    return rows if by_rows else none, row_scale, columns.t().contiguous() if by_columns else none, column_scale


@direct_op("flopwise::fp8_cast")
def _cast_op(x: Tensor, dtype: torch.dtype, axis: bool, by_rows: bool, by_columns: bool, amax: Tensor | None) -> Parts:
    work = _cast if runs_triton(x) else cast_reference
    return work(x, dtype, axis, by_rows, by_columns, amax)


@_cast_op.register_fake
def _(x: Tensor, dtype: torch.dtype, axis: bool, by_rows: bool, by_columns: bool, amax: Tensor | None) -> Parts:
    return _empty(x, dtype, axis, by_rows, by_columns)


class Cast(NamedTuple):
    """A matrix [rows, columns] in fp8: by rows, and by columns as [columns, rows]; None where it was not asked for."""

    by_rows: Tensor | None
    row_scale: Tensor
    by_columns: Tensor | None
    column_scale: Tensor


def cast(
    x: Tensor,
    dtype: torch.dtype,
    *,
    axis: bool,
    by_rows: bool = True,
    by_columns: bool = True,
    amax: Tensor | None = None,
) -> Cast:
    """A matrix in fp8. `axis`: a scale for every row (and column), else one. `amax`: the tensor's, where it is known, as the
    bits of an fp32 number.

    >>> found = cast(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), E4M3, axis=True)
    >>> found.row_scale * 448, found.by_columns.shape
    (tensor([2., 4.]), torch.Size([2, 2]))
    """
    rows = x if x.stride(-1) == 1 else x.contiguous()
    first, row_scale, second, column_scale = _cast_op(rows, dtype, axis, by_rows, by_columns, amax)
    return Cast(
        first if by_rows else None, row_scale, second if by_columns else None, column_scale if axis else row_scale
    )


@direct_op("flopwise::fp8_matmul")
def matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    """a bᵀ (+ bias) in bf16, of a [m, k] and b [n, k] in fp8. `fast`: sums stay in the tensor cores, with fewer bits.

    Without a GPU, and for what its tensor cores do not take, in fp32.
    """
    rows, columns = a_scale.view(-1, 1), b_scale.view(1, -1)
    if a.is_cuda:
        axis = {"scale_a": rows, "scale_b": columns} if a_scale.numel() > 1 or b_scale.numel() > 1 else None
        scales = axis or {"scale_a": a_scale.view(()), "scale_b": b_scale.view(())}
        return torch_private.scaled_mm(a, b.t(), **scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)
    product = (a.float() @ b.float().t()) * rows * columns
    return (product if bias is None else product + bias.float()).to(torch.bfloat16)


@matmul.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


def cases() -> Iterator[Case]:
    numbers = dict.fromkeys(("stride", "rows", "columns", "parts"), "i32") | dict.fromkeys(("largest", "least"), "fp32")
    amaxes = dict.fromkeys(("amax_ptr", "row_amax_ptr", "column_amax_ptr"), "*i32")
    scales = dict.fromkeys(("row_scale_ptr", "column_scale_ptr", "scale_ptr"), "*fp32")
    whole, tile = ("stride", "rows", "columns"), {"ROWS": ROWS, "COLUMNS": COLUMNS}
    for name, dtype in (("e4m3", "*fp8e4nv"), ("e5m2", "*fp8e5")):
        signature = (
            {"x_ptr": "*bf16"} | amaxes | scales | numbers | dict.fromkeys(("by_rows_ptr", "by_columns_ptr"), dtype)
        )
        options: dict[str, Any] = {"divisible": whole, "archs": (90, 100)}
        for axis in (False, True):
            both = tile | {"AXIS": axis, "BY_ROWS": True, "BY_COLUMNS": True, "PARTS": 1 if axis else 1024}
            of = f"{name} by {'axis' if axis else 'tensor'}"
            yield Case(f"fp8 cast {of}", _fp8_cast_kernel, signature, both, WARPS, **options)
        for columns in (2560, 10240):
            rows, block, warps = row_shape(columns)
            held = {"ROWS": rows, "BLOCK": block}
            yield Case(f"fp8 cast {name} rows of {columns}", _fp8_row_cast_kernel, signature, held, warps, **options)
    yield Case("fp8 amax", _fp8_tensor_amax_kernel, signature, tile, WARPS, **options)
    yield Case("fp8 amax by axis", _fp8_axis_amax_kernel, signature, tile, WARPS, **options)
