"""What a machine can do at most: the numbers a roofline needs, measured on it or taken from its datasheet."""

import math
from bisect import bisect_right
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from flopwise.records.printed import Printed

SPECIFIED, MEASURED = "specified", "measured"
STRIDED = "elementwise, strided"  # broadcast or transposed inputs

# A class of kernels has a curve of its own where it is known to run otherwise; a name without one is cut from the right.
STRIDES, INDICES, FUSED, HALF = ", strided", ", with indices", ", fused", ", half"
MIXED, EXPONENTIAL, RMS, JOINED, BACKWARD = ", mixed", ", exponential", ", rms", ", joined", ", backward"
WIDE = ", wide heads"  # of attention
COMPILED = "host:compiled"  # the probe of a trivial compiled graph; with a phase after it, of larger ones
VECTOR = "vector"  # multiply-adds that are no matmul
COLD = "cold"  # elementwise work on input that was not touched lately, and so comes from memory whatever its size
# Who is nearer than the name cut from the right: inputs of several dtypes are loaded one number at a time, each through
# a cast, as PyTorch's copy from half to single precision loads them.
STAND_INS = {
    "elementwise, mixed": "copy/cast, half",
    "elementwise, strided, mixed": "elementwise, strided, half",
    "copy/cast, joined": "copy/cast, strided",
    "copy/cast, joined, half": "copy/cast, strided, half",
}
_LARGEST, _SMALLEST = 1e19, 1e-12  # FLOP/s, bytes and nanoseconds
_WIDEST_MISS = 20.0  # of a logarithm
_NEEDED = {
    "matmul": "fp32",
    "memory": "elementwise",
    "attention": "fp32",
    "attention_backward": "fp32",
    "host": "forward",
}
_CACHE_SHOWS = 1.1  # what goes faster than memory by more than this lies in the cache


def _check_range(found: Any) -> None:
    """Every number is one that a machine can have: a file from outside may hold anything."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            _check_range(one)
    elif isinstance(found, int | float) and not (abs(found) <= _LARGEST and (found == 0 or abs(found) >= _SMALLEST)):
        raise ValueError("a number that no machine has")


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds a kernel takes by its amount of work (bytes or FLOPs): between the points a power law.

    >>> Curve(amount=(1e6, 1e9), ns=(2e3, 250e3)).at(2e9)      # beyond the last point: in proportion
    500000.0
    """

    amount: tuple[float, ...]  # ascending
    ns: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.amount))
        if not self.amount or len(self.amount) != len(self.ns) or not rising or min(*self.amount, *self.ns) <= 0:
            raise ValueError("a curve needs rising amounts and a time above zero for each")

    def at(self, amount: float) -> float:
        """The time for so much work; never less than the shortest kernel's."""
        if amount <= self.amount[0]:
            return self.ns[0]
        if amount >= self.amount[-1]:
            return self.ns[-1] * amount / self.amount[-1]
        right = bisect_right(self.amount, amount)
        x0, x1, y0, y1 = *self.amount[right - 1 : right + 1], *self.ns[right - 1 : right + 1]
        along = math.log(amount / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + along * math.log(y1 / y0))


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One size of output tile that a matmul library may choose, and what a multiprocessor takes for it."""

    m: int
    n: int
    start_ns: float  # once a product: before the first and after the last multiply
    flops_per_s: float  # of one multiprocessor that works on it


class Near(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A product that was measured, and the logarithm of its time over the tile model's."""

    shape: tuple[int, int, int, int]  # batch, M, N, K
    miss: float


class Matmul(msgspec.Struct, frozen=True, kw_only=True):
    """How fast products of one precision go: tiles over multiprocessors, in waves; the library picks the best tile."""

    peak_flops: float  # per second, of the whole chip
    tiles: tuple[Tile, ...]
    join_ns: float  # adding up the parts of a product that was split along its inner dimension
    near: tuple[Near, ...] = ()  # what the tiles do not explain: a library has kernels that are better, and worse

    def __post_init__(self) -> None:
        if any(min(one.shape) < 1 or abs(one.miss) > _WIDEST_MISS for one in self.near):
            raise ValueError("a product that was measured has sides, and a time that can be")
        if self.peak_flops <= 0 or not self.tiles or any(t.flops_per_s <= 0 or min(t.m, t.n) < 1 for t in self.tiles):
            raise ValueError("matmuls need a rate, and tiles with a size and a rate")


class HostCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the CPU spends before the GPU has its work: nanoseconds per operation of a phase, and per further kernel."""

    op_ns: float
    view_ns: float  # an operation that launches nothing
    kernel_ns: float  # each kernel of an operation beyond its first
    listed_ns: float = 0.0  # each tensor that an operation over lists of them reads (foreach, fused optimizers)
    cast_ns: float | None = None  # a cast, which autocast makes on its own, without Python; None: as any operation
    start_ns: float = 0.0  # once a phase, whatever is in it


class Ceilings(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """A machine's limits. `how` says where they are from; a number predicted with them carries it on."""

    gpu: str
    how: str
    processors: int  # multiprocessors
    bandwidth_bytes_per_s: float
    matmul: dict[str, Matmul]  # by precision
    memory: dict[str, Curve]  # bytes -> ns by class of kernel; 'elementwise' and STRIDED are there always
    attention: dict[str, Curve]  # FLOPs -> ns of fused attention, by precision and ", backend"
    attention_backward: dict[str, Curve]
    host: dict[str, HostCost]  # by phase; 'inference': a forward pass without autograd; 'forward' is there always
    latency_ns: float  # from the launch call's return to the kernel's start
    graph_gap_ns: float  # what a kernel takes more in a CUDA graph than in a stream; below zero: less
    vector_flops_per_s: float = 0.0  # fp32 multiply-adds that are no matmul; 0: not known
    switch_ns: float = 0.0  # what a kernel among unlike ones takes more than one among its like
    pause_ns: float = 0.0  # of the GPU, before a kernel that waits in the stream's queue; curves hold some of it, too
    backward_start_ns: float = 0.0  # the host's, from the call of backward to its first operation
    compiled_call_ns: float = 0.0  # the host's, before a compiled graph launches its first kernel
    compiled: dict[str, HostCost] = {}  # by phase: kernels of a compiled graph; 'listed' are the tensors handed to it
    versions: dict[str, str] = {}  # of driver, torch, … where measured
    file: str = ""  # that they were read from

    def headline(self) -> str:
        return f"{self.gpu}, {self.how}"

    def __post_init__(self) -> None:
        _check_range(msgspec.to_builtins(self))
        costs = [ns for cost in self.host.values() for ns in msgspec.structs.astuple(cost) if ns is not None]
        if min([self.pause_ns, *costs]) < 0:
            raise ValueError("a launch takes time, and so does a pause")
        if self.processors < 1 or self.bandwidth_bytes_per_s <= 0:
            raise ValueError("a machine has a processor and a bandwidth")
        for table, needed in _NEEDED.items():
            if needed not in getattr(self, table):
                raise ValueError(f"{table} needs '{needed}'")

    def describe(self) -> str:
        """Where the ceilings come from, in words; empty where it is the datasheet."""
        if self.how != MEASURED:
            return ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        return f"measured on {self.gpu}{f' ({versions})' if versions else ''}{f', {self.file}' if self.file else ''}"

    def curve(self, name: str) -> Curve:
        """The curve of a class of kernels: 'elementwise, strided, half', or what is nearest to it."""
        while name not in self.memory:
            name = STAND_INS.get(name) or name.rpartition(", ")[0] or "elementwise"
        return self.memory[name]

    @property
    def cached_bytes(self) -> float:
        """How much the cache keeps: the most that goes clearly faster than what cannot lie in it."""
        curve = self.memory["elementwise"]
        slowest = curve.ns[-1] / curve.amount[-1]
        kept = [a for a, ns in zip(curve.amount, curve.ns, strict=True) if ns / a * _CACHE_SHOWS < slowest]
        return max(kept, default=0.0)

    @property
    def cache_bytes_per_s(self) -> float | None:
        """The best rate of what lies in the cache, the kernel's start included; None where no cache shows."""
        curve, most = self.memory["elementwise"], self.cached_bytes
        return max((1e9 * a / ns for a, ns in zip(curve.amount, curve.ns, strict=True) if a <= most), default=None)

    def cold_ns(self, n_bytes: float) -> float:
        """What so many bytes read from memory take longer than if they lay in the cache."""
        warm = self.memory["elementwise"]
        if cold := self.memory.get(COLD):
            probed = max(2 * n_bytes, cold.amount[0])  # what is less than that hides in the kernel's start
            return max(0.0, cold.at(probed) - warm.at(probed)) * min(1.0, 2 * n_bytes / probed)
        cached_ns = (warm.at(2 * n_bytes) - warm.ns[0]) / 2  # half of it for reading
        return max(0.0, n_bytes * warm.ns[-1] / warm.amount[-1] - cached_ns)

    def host_cost(self, phase: str) -> HostCost:
        """What launching an operation of a phase costs."""
        return self.host.get(phase) or self.host["forward"]


class HostCounts(NamedTuple):
    """What the host launched during a probe."""

    ops: int  # that launch a kernel, casts among them
    views: int
    kernels: int  # of an operation beyond its first
    listed: int  # tensors that operations over lists read
    casts: int = 0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One measured limit: an operation at one size, run many times in a row."""

    what: str  # 'matmul', 'attention', 'attention backward', a class of kernels, STRIDED; 'host:PHASE'
    dtype: str = ""
    amount: float = 0.0  # bytes moved; FLOPs of attention and matmul
    shape: tuple[int, ...] = ()  # (batch, M, N, K) of a matmul; of a 'host' probe what `HostCounts` names
    ns: float  # the median over repetitions, of one run of it
