"""Where a kernel can run: on a GPU, or anywhere when Triton interprets. And how it sees its tensors: as rows."""

from functools import cache

import torch
from torch import Tensor

from flopwise.errors import FlopwiseError, Unsupported
from flopwise.kernels.triton_private import triton_interprets

GRID = 65535  # programs that a launch takes along its second and third axis
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def runs_triton(x: Tensor) -> bool:
    """A kernel runs on CUDA tensors; on the CPU only in Triton's interpreter (TRITON_INTERPRET=1), for tests.

    None computes in float64: that is the references' alone.
    """
    if x.dtype == torch.float64:
        return False
    if x.is_cuda:
        return True
    return triton_interprets()


def wide(dtype: torch.dtype) -> torch.dtype:
    """What the references compute in: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would make of x for a matmul; None where it is off. float64 it leaves alone, meta it does not know."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def require_float(operation: str, *tensors: Tensor, beside: tuple[Tensor, ...] = ()) -> None:
    """Numbers that the kernels compute with, on one device, as is what comes `beside` them.

    The kernels compute in fp32 and store fp32, bf16 or fp16; the eager reference on the CPU takes float64 as well.
    """
    for x in tensors:
        if x.dtype not in FLOATS and (x.is_cuda or x.dtype != torch.float64):
            raise Unsupported(
                f"{operation} of {x.dtype} has no kernel: use {', '.join(map(str, FLOATS))}, on the CPU torch.float64"
            )
    devices = list(dict.fromkeys(str(x.device) for x in (*tensors, *beside)))
    require(len(devices) == 1, f"{operation} of tensors on {' and '.join(devices)}: put them on one device")


def require(truth: bool, message: str) -> None:
    """What a caller must hand over."""
    if not truth:
        raise FlopwiseError(message)


def row_order(x: Tensor) -> tuple[int, ...]:
    """The dimensions in the order they lie in memory, the last one kept last: a transposed view is not copied.

    >>> row_order(torch.empty(2, 5, 3, 4).transpose(1, 2))
    (0, 2, 1, 3)
    """
    last = x.dim() - 1
    if x.is_contiguous():
        return tuple(range(last + 1))
    strides = x.stride()
    return (*sorted(range(last), key=lambda n: -strides[n]), last)


def to_rows(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """x as [rows, columns], columns side by side: a view where the strides allow one, else a copy."""
    if x.is_contiguous() and order == tuple(range(x.dim())):
        return x.view(-1, x.shape[-1])
    rows = x.permute(order).reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def from_rows(rows: Tensor, x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Dense [rows, columns] in x's shape, in x's order in memory: the way back from `to_rows`.

    >>> x = torch.randn(2, 5, 3, 4).transpose(1, 2)
    >>> back = from_rows(to_rows(x, row_order(x)), x, row_order(x))
    >>> torch.equal(back, x), back.stride() == x.stride()
    (True, True)
    """
    if order == tuple(range(x.dim())):
        return rows.view(x.shape)
    lying = rows.view([x.shape[n] for n in order])
    inverse = [0] * len(order)
    for place, dim in enumerate(order):
        inverse[dim] = place
    return lying.permute(inverse)


def empty_in_order(x: Tensor, order: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Unwritten memory of x's shape, dense, with the dimensions in this order (`row_order`)."""
    return from_rows(x.new_empty([x.shape[n] for n in order], dtype=dtype), x, order)


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 2 in the interpreter, so that work is split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
