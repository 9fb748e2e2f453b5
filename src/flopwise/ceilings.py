"""What a machine can do at most: the numbers a roofline needs, measured on it or taken from its datasheet."""

import math
from bisect import bisect_right

import msgspec

SPECIFIED, MEASURED = "specified", "measured"


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds a kernel takes by the bytes it moves; between the points a power law, beyond the ends proportional.

    >>> Curve(moved_bytes=(1e6, 1e9), ns=(2e3, 250e3)).at(2e9)
    500000.0
    """

    moved_bytes: tuple[float, ...]
    ns: tuple[float, ...]

    def at(self, n_bytes: float) -> float:
        """The time for so many bytes; never less than the shortest kernel's."""
        if n_bytes <= self.moved_bytes[0]:
            return self.ns[0]
        if n_bytes >= self.moved_bytes[-1]:
            return self.ns[-1] * n_bytes / self.moved_bytes[-1]
        right = bisect_right(self.moved_bytes, n_bytes)
        x0, x1, y0, y1 = *self.moved_bytes[right - 1 : right + 1], *self.ns[right - 1 : right + 1]
        along = math.log(n_bytes / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + along * math.log(y1 / y0))


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One size of output tile that a matmul library may choose, and what a multiprocessor takes for it."""

    m: int
    n: int
    start_ns: float  # before the first and after the last multiply: loading, storing
    flops_per_s: float  # of one multiprocessor that works on it


class Matmul(msgspec.Struct, frozen=True, kw_only=True):
    """How fast products of one precision go: tiles over multiprocessors, in waves; the library picks the best tile."""

    peak_flops: float  # per second, of the whole chip
    tiles: tuple[Tile, ...]


class HostCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the CPU spends before the GPU has its work: nanoseconds per operation of a phase, and per further kernel."""

    op_ns: float
    view_ns: float  # an operation that launches nothing
    kernel_ns: float  # each kernel of an operation beyond its first


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's limits. `how` says where they are from; a number predicted with them carries it on."""

    gpu: str
    how: str
    processors: int  # multiprocessors
    bandwidth_bytes_per_s: float
    matmul: dict[str, Matmul]  # by precision
    memory: dict[str, Curve]  # by class of kernel; 'elementwise' is there always
    attention_share: dict[str, float]  # of the precision's peak, forward; by precision
    attention_backward_share: dict[str, float]
    host: dict[str, HostCost]  # by phase; 'forward' is there always
    latency_ns: float  # from the launch call's return to the kernel's start
    graph_gap_ns: float  # between two kernels of a CUDA graph
    versions: dict[str, str] = {}  # of driver, torch, … where measured

    def curve(self, kind: str) -> Curve:
        """The curve of a class of kernels."""
        return self.memory.get(kind) or self.memory["elementwise"]

    def host_cost(self, phase: str) -> HostCost:
        """What launching an operation of a phase costs."""
        return self.host.get(phase) or self.host["forward"]
