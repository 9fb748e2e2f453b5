"""Operations under a machine's roofs: how much each does per byte, how fast it goes, and how far that is from the limit."""

from collections.abc import Sequence

import msgspec

from flopwise.predict.op_time import OpTime, cut, matmul_limits, matmul_shape
from flopwise.records.ceilings import Ceilings
from flopwise.records.printed import Printed
from flopwise.work.operation import OpWork

PREDICTED, MEASURED = "predicted", "measured"


class RooflinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of one kind and size, together."""

    op: str
    kind: str
    phase: str
    dtype: str
    shapes: str
    count: int
    ns: float  # of all of them
    flops: float  # of one; one for every element where no matmul is in it
    n_bytes: float  # of one, each tensor read or written once
    roof_flops: float  # FLOP/s that its intensity and precision allow
    how: str
    kernel: str = ""  # of a trace: the one that took longest of those the op launched
    kernels: int = 1  # launched by one of them; their time is together
    bytes_are: str = (
        ""  # 'at most': two inputs may be one tensor; 'about': of a compiled kernel, or without types; or exact
    )

    @property
    def bytes_per_s(self) -> float:
        """How fast its bytes move, if each moves once."""
        return 1e9 * self.n_bytes * self.count / self.ns if self.ns else 0.0

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.n_bytes if self.n_bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        """What it reaches."""
        return 1e9 * self.flops * self.count / self.ns if self.ns else 0.0

    @property
    def share(self) -> float:
        """Of its roof."""
        return self.flops_per_s / self.roof_flops if self.roof_flops else 0.0


class Unplaced(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a trace that has no point, since its bytes cannot be told."""

    op: str  # '' where no op is known
    kernel: str
    kind: str
    why: str
    count: int
    ns: float  # of all of them


class MatmulTiles(msgspec.Struct, frozen=True, kw_only=True):
    """A product in tiles of one size: how many there are, and in how many waves the multiprocessors do them."""

    tile: str
    grid: str
    tiles: int
    waves: int
    last_share: float  # how full the last wave is
    ns: float  # by the tile model, were all rows aligned


def matmul_tiles(op: OpWork, ceilings: Ceilings) -> tuple[MatmulTiles, ...]:
    """Every tile that libraries have, the one that takes least first."""
    limits, shape = matmul_limits(op.dtype, ceilings), matmul_shape(op)
    cuts = sorted((cut(shape, tile, limits, ceilings.processors) for tile in limits.tiles), key=lambda one: one.ns)
    return tuple(
        MatmulTiles(
            tile=f"{one.m} × {one.n}",
            grid=f"{one.rows} × {one.columns}",
            tiles=shape[0] * one.rows * one.columns,
            waves=one.waves,
            last_share=one.last,
            ns=one.ns,
        )
        for one in cuts
    )


class Roofline(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """Points and the roofs over them."""

    title: str
    how: str  # 'measured' or 'predicted': the points
    ceilings: Ceilings
    points: tuple[RooflinePoint, ...]
    notes: tuple[str, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    cache_bytes: int = 0  # the GPU's last cache; 0: not known
    tiles: tuple[MatmulTiles, ...] = ()  # of op:matmul

    def headline(self) -> str:
        return self.title

    @property
    def gpu_ns(self) -> float:
        """All that ran on the GPU, placed or not, durations added up."""
        return sum(point.ns for point in self.points) + sum(rest.ns for rest in self.unplaced)

    @property
    def covered(self) -> float:
        """The points' share of it."""
        return sum(point.ns for point in self.points) / self.gpu_ns if self.gpu_ns else 1.0


def roof(intensity: float, dtype: str, ceilings: Ceilings) -> float:
    """FLOP/s at most: by the bandwidth, or by the precision's rate."""
    return min(matmul_limits(dtype, ceilings).peak_flops, intensity * ceilings.bandwidth_bytes_per_s)


def predicted_points(ops: Sequence[OpWork], times: Sequence[OpTime], ceilings: Ceilings) -> list[RooflinePoint]:
    """The operations of a step that was not run, those alike together, the longest first."""
    alike: dict[tuple[object, ...], list[tuple[OpWork, OpTime]]] = {}
    for op, time in zip(ops, times, strict=True):
        if op.kernels:
            key = (op.op, op.kind, op.phase, op.dtype, op.shapes, op.read_bytes, op.write_bytes)
            alike.setdefault(key, []).append((op, time))
    points = [_point(some[0][0], sum(time.ns for _, time in some), len(some), ceilings) for some in alike.values()]
    return sorted(points, key=lambda point: -point.ns)


def _point(op: OpWork, ns: float, count: int, ceilings: Ceilings) -> RooflinePoint:
    n_bytes = op.read_bytes + op.write_bytes
    flops = op.flops or max(1, op.elements)
    return RooflinePoint(
        op=op.op,
        kind=op.kind,
        phase=op.phase,
        dtype=op.dtype,
        shapes=" ".join(str(list(shape)) for shape in op.shapes),
        count=count,
        ns=ns,
        flops=flops,
        n_bytes=n_bytes,
        roof_flops=roof(flops / max(1, n_bytes), op.dtype, ceilings),
        how=PREDICTED,
    )
