"""What the attention kernels share: how a tile is loaded, which scores are seen, and how large the tiles are."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flopwise.kernels.case import Case

LOG2E = math.log2(math.e)  # the kernels take powers of two: exp(x) is 2^(x · log2 e), and the GPU has only 2^x


@dataclass(frozen=True)
class Fixed:
    """What an attention kernel is compiled for: the constants `C` of all of them."""

    head_dim: int
    block_d: int  # the head dimension, padded
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    causal: bool
    windowed: bool
    tail: bool  # the last tiles are not whole, or masked
    tma: bool  # tiles come by the copy engine
    precision: str  # of fp32 products: "ieee" or "tf32"
    interpret: bool
    late: bool = False  # see Config
    grouped: bool = False  # several query heads share a key head


@triton.jit
def load_tile(source, batch, head, start, length, ROWS: tl.constexpr, CHECKED: tl.constexpr, C: tl.constexpr):
    """Rows `start`… of one head, [ROWS, block_d]; past the last row or column there are zeros.

    `source`: the tensor (or its descriptor) and its strides of batch, head and row. Not CHECKED: all rows are known to be
    inside. The copy engine (TMA) checks by itself, at no cost.
    """
    if C.tma:
        tile = source[0].load([batch, head, start, 0]).reshape(ROWS, C.block_d)
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, C.block_d)
        # 64 bits to the tile's corner, 32 within it
        corner = source[0] + tl.cast(batch, tl.int64) * source[1] + tl.cast(head, tl.int64) * source[2]
        corner += tl.cast(start, tl.int64) * source[3]
        pointers = corner + (rows[:, None] * source[3] + columns[None, :])
        if CHECKED and C.head_dim < C.block_d:
            tile = tl.load(pointers, (start + rows < length)[:, None] & (columns < C.head_dim)[None, :], other=0.0)
        elif CHECKED:
            tile = tl.load(pointers, (start + rows < length)[:, None], other=0.0)
        elif C.head_dim < C.block_d:
            tile = tl.load(pointers, (columns < C.head_dim)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(target, tile, batch, head, start, length, ROWS: tl.constexpr, C: tl.constexpr):
    """Write a tile in the target's dtype, without what lies outside. `target`: a tensor and its strides."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, C.block_d)
    corner = target[0] + tl.cast(batch, tl.int64) * target[1] + tl.cast(head, tl.int64) * target[2]
    corner += tl.cast(start, tl.int64) * target[3]
    pointers = corner + (rows[:, None] * target[3] + columns[None, :])
    inside = (start + rows < length)[:, None] & (columns < C.head_dim)[None, :]
    tl.store(pointers, tile.to(target[0].dtype.element_ty), inside)


@triton.jit
def dot(a, b, C: tl.constexpr):
    """a b with sums in fp32. The interpreter takes bf16 for integers, so there the operands are widened first."""
    if C.interpret:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=C.precision)


@triton.jit
def dot_add(a, b, total, C: tl.constexpr):
    """total + a b, accumulated in the matrix unit."""
    if C.interpret:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, total, input_precision=C.precision)


@triton.jit
def visible(queries, keys, window, C: tl.constexpr):
    """Which scores the causal mask leaves; queries and keys are broadcast against each other."""
    counts = keys <= queries
    if C.windowed:
        counts &= keys > queries - window
    return counts


@triton.jit
def key_ranges(start, key_length, window, C: tl.constexpr):
    """Where a tile of queries looks: tiles of keys from `low`, all seen in [full_low, full_high), to `high`."""
    high = key_length
    full_high = key_length // C.block_n * C.block_n
    if C.causal:
        high = tl.minimum(high, start + C.block_m)
        full_high = tl.minimum(full_high, (start + 1) // C.block_n * C.block_n)
    low = 0
    full_low = 0
    if C.windowed:
        low = tl.minimum(tl.maximum(start - window + 1, 0) // C.block_n * C.block_n, full_high)
        full_low = tl.maximum(start + C.block_m - window, 0)
        full_low = tl.minimum(tl.maximum(low, (full_low + C.block_n - 1) // C.block_n * C.block_n), full_high)
    return low, full_low, full_high, high


class Config(NamedTuple):
    """How a kernel is cut: the tile is block_m queries by block_n keys."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False  # Q, K, V and dO come by the copy engine (sm_90 on), where their layout allows
    late: bool = False  # dK/dV: a tile's last product is begun after the next tile's first, beside its exponentials

    def fixed(self, q: Tensor, problem: "Problem", tma: bool, tail: bool, grouped: bool = False) -> Fixed:
        """The kernel's constants for these tensors."""
        tiles = (q.shape[-1], padded(q.shape[-1]), self.block_m, self.block_n)
        masks = (problem.causal, problem.window is not None, tail)
        return Fixed(*tiles, *masks, tma, precision(q), not q.is_cuda, self.late and not grouped, grouped)

    def call(self, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], fixed: Fixed) -> "Call":
        return Call(kernel, grid, arguments, {"C": fixed, "num_warps": self.warps, "num_stages": self.stages})


class Call(NamedTuple):
    """A launch that is not made yet: to launch, or only to compile (`kernel.warmup`)."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def launch(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)


Table = dict[tuple[int, int], Config]  # by architecture (80, 90: it and later ones) and padded head dimension


def choose(table: Table, q: Tensor, key_length: int) -> Config:
    """The tiles for these tensors: short sequences take small ones, fp32 those whose products fit the registers."""
    block_d = padded(q.shape[-1])
    if q.dtype == torch.float32:
        return exact(block_d, architecture(q))
    longest = max(q.shape[2], key_length)
    if longest <= 64 and block_d <= 128:
        return SHORTEST if longest <= 16 else SHORT
    chip = max(80, architecture(q))
    return next(
        table[arch, max(64, block_d)] for arch in (100, 90, 80) if arch <= chip and (arch, max(64, block_d)) in table
    )


SHORTEST, SHORT = Config(16, 16, 4, 2), Config(32, 32, 4, 2)  # sequences of up to 16, up to 64
# fp32 products without TF32 run on the ordinary cores, from registers: all three kernels take the same small tiles.
EXACT = {16: Config(32, 32, 8, 2), 32: Config(32, 32, 8, 2), 64: Config(32, 32, 8, 2), 128: Config(16, 16, 8, 2)}


def exact(block_d: int, arch: int) -> Config:
    """The tiles of fp32; on sm_100 those of narrow heads would spill."""
    return Config(16, 32, 8, 2) if arch >= 100 and block_d <= 32 else EXACT[block_d]


class Problem(NamedTuple):
    """What the kernels are told besides tensors."""

    causal: bool
    window: int | None
    scale: float


def padded(head_dim: int) -> int:
    """Matrix units take powers of two from 16.

    >>> padded(80), padded(8)
    (128, 16)
    """
    return max(16, 1 << (head_dim - 1).bit_length())


def precision(x: Tensor) -> str:
    """fp32 inputs are multiplied in fp32, unless the user allows TF32 for matmuls."""
    return "tf32" if x.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def architecture(x: Tensor) -> int:
    """80, 90, 100…; the interpreter runs as 80."""
    return _capability(x.device) if x.is_cuda else 80


def tma_ready(*tensors: Tensor) -> bool:
    """The copy engine wants every address a multiple of 16 bytes."""
    for x in tensors:
        strides = x.stride()
        width = x.element_size()
        if x.data_ptr() % 16 or any(s <= 0 or s * width % 16 for s in strides[:-1]):
            return False
    return True


def tile_of(x: Tensor, rows: int, block_d: int, tma: bool) -> Any:
    """What the kernel's `load_tile` takes: the tensor, or its descriptor for the copy engine."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block_d]) if tma else x


def lined_up(x: Tensor, config: Config) -> Tensor:
    """x, whose last stride is 1, or a copy of it whose rows all start on multiples of 16 elements.

    Else every element would be loaded by itself, from an address of its own: slower by far than a copy, and more
    registers than the tiles leave.
    """
    whole = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1])
    if tma_ready(x) if config.tma else whole:
        return x
    head_dim = x.shape[-1]
    rows = x.new_empty(*x.shape[:-1], -(-head_dim // 16) * 16)
    return rows[..., :head_dim].copy_(x)


def unit_stride(x: Tensor) -> Tensor:
    """The kernels read the head dimension in one piece; the other strides may be any."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Bytes a thread that are spilled and stay: two to four registers; and 58 where the rows of dK and dV start off multiples of
# 16 elements, which takes an address for every element that is stored. More than these is a fault.
SPILLS = {
    ("flash dK/dV bf16 d64 128x64 grouped window", 90): 8,
    ("flash dK/dV bf16 d256 16x64 grouped window", 90): 8,
    ("flash dK/dV bf16 d256 16x64 grouped window", 100): 16,
    ("flash dK/dV bf16 d248 16x64 grouped window odd", 90): 232,
}


def case(
    name: str,
    kernel: Any,
    config: Config,
    dtype: str,
    head_dim: int,
    archs: tuple[int, ...],
    grouped: bool = False,
    odd: bool = False,
    **other: Any,
) -> Case:
    """A kernel as it is shipped, causal unless `other` constants say else: what `resources` compiles.

    One query head to a key head is a number that is compiled in, as Triton does with every 1; `grouped` is any other.
    `odd`: lengths and the strides of what is written are no multiples of 16; what is read is lined up.
    """
    tiles = (head_dim, padded(head_dim), config.block_m, config.block_n)
    late = config.late and not grouped
    fixed = Fixed(*tiles, True, False, True, config.tma, "tf32", interpret=False, late=late, grouped=grouped)
    fixed = replace(fixed, **other)
    mask = " window" if fixed.windowed else "" if fixed.causal else " full"
    words = " grouped" * grouped + mask + " odd" * odd
    title = f"{name} {dtype} d{head_dim} {config.block_m}x{config.block_n}{words}"
    constants: dict[str, Any] = {"C": fixed} if grouped else {"C": fixed, "group": 1}
    signature = {argument: _kind(argument, dtype, fixed) for argument in kernel.arg_names}
    read = ("q_", "k_", "v_", "g_")
    strides = tuple(a for a in signature if a.endswith(("_b", "_h", "_t", "_length")) and (not odd or a[:2] in read))
    known = {arch: SPILLS.get((title, arch), 0) for arch in archs}
    return Case(title, kernel, signature, constants, config.warps, config.stages, strides, archs, known)


def _kind(argument: str, dtype: str, fixed: Fixed) -> str:
    """The type of a kernel's argument, as Triton writes it."""
    rows = {"q_in": fixed.block_m, "g_in": fixed.block_m, "k_in": fixed.block_n, "v_in": fixed.block_n}
    if argument in rows and fixed.tma:
        return f"tensordesc<{dtype}[1, 1, {rows[argument]}, {fixed.block_d}]>"
    if argument.endswith(("_in", "_out")):
        return "*fp32" if argument[:2] in ("l_", "d_") else f"*{dtype}"
    return "fp32" if argument == "scale" else "i32"


def shipped(name: str, kernel: Any, table: Table) -> Iterator[Case]:
    """Every tile in bf16 where it is chosen: with what takes the most registers, a window over grouped heads of odd lengths
    and a head dimension that is padded; and causal, on sm_80 for one head dimension alone, since each takes seconds.

    Of the rest not every pair, but each at least once: fp16, no mask, a narrow head dimension, the tiles of short sequences
    and of fp32. dK and dV of grouped heads have a loop of their own: from sm_90 on each tile is compiled with and without a
    window.
    """
    by_group = "dk_out" in kernel.arg_names
    for (arch, head_dim), config in table.items():
        archs = (90, 100) if arch == 90 and (100, head_dim) not in table else (arch,)
        yield case(name, kernel, config, "bf16", head_dim - 8, archs, grouped=True, odd=True, windowed=True)
        if arch > 80 or head_dim == 128:
            yield case(name, kernel, config, "bf16", head_dim, archs)
        if by_group and arch > 80:
            yield case(name, kernel, config, "fp16", 80 if head_dim == 128 else head_dim, (arch,), grouped=True)
        if head_dim != 128 and by_group and arch > 80:
            yield case(name, kernel, config, "bf16", head_dim, archs, grouped=True, windowed=True)
    yield case(name, kernel, table[90, 64], "fp16", 32, (90,))
    yield case(name, kernel, table[90, 128], "bf16", 128, (90,), causal=False)
    yield case(name, kernel, SHORTEST, "bf16", 80, (90,))
    yield case(name, kernel, SHORT, "bf16", 100, (90, 100), grouped=True, odd=True, windowed=True)
    for arch, head_dim in ((80, 128), (100, 32)):
        config = exact(head_dim, arch)
        yield case(name, kernel, config, "fp32", head_dim - 8, (arch,), True, True, windowed=True, precision="ieee")
