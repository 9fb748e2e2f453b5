"""A step's matrix products: how many of each size and precision, what they took, and why that is more than their FLOPs ask."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import polars as pl

from flopwise import units
from flopwise.predict.op_time import matmul_limits, matmul_ns, matmul_shape
from flopwise.records.ceilings import Ceilings
from flopwise.spec.dtypes import item_bytes
from flopwise.spec.gpu import PEAK_DTYPES
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import MATMUL, OpWork
from flopwise.work.recorded import input_sizes
from flopwise.work.sized import MATMULS, factors

ALIGNED_BYTES = (
    16  # tensor cores load rows in pieces of so many; a row that is no multiple of them is loaded number by number
)
Shape = tuple[int, int, int, int]  # batch, M, N, K


@dataclass(frozen=True)
class Product:
    """Products of one size and precision, of one step."""

    shape: Shape
    precision: str
    count: float
    ns: float | None  # that all of them took; None where only the whole is known

    @property
    def flops(self) -> float:
        """Of all of them."""
        return 2.0 * prod(self.shape) * self.count

    @property
    def n_bytes(self) -> float:
        """Both factors read and the product written once, of all of them."""
        batch, m, n, k = self.shape
        return batch * (m * k + k * n + m * n) * item_bytes(self.precision, 4) * self.count


@dataclass(frozen=True)
class Gap:
    """What products took, in nanoseconds: at the peak of the precision used, and why it is more. The parts are the whole."""

    ideal: float = 0.0
    precision: float = 0.0
    shape: float = 0.0
    unaligned: float = 0.0
    other: float = 0.0

    worst: Mapping[str, str] = field(
        default_factory=dict
    )  # for 'precision', 'shape', 'unaligned': which product most of all

    def __add__(self, more: "Gap") -> "Gap":
        return Gap(
            ideal=self.ideal + more.ideal,
            precision=self.precision + more.precision,
            shape=self.shape + more.shape,
            unaligned=self.unaligned + more.unaligned,
            other=self.other + more.other,
            worst={**more.worst, **self.worst},
        )


def products_of_trace(rows: pl.DataFrame, shapes: tuple[str, ...], n: int, scale: float = 1.0) -> list[Product]:
    """The products whose sizes the trace holds. `rows`: work added up, of the ops of products.

    All kernels of an op are one product: a part that was split off, and the sum or the memset that goes with it, say nothing
    of its precision, and have that of most of the time of their op and size.
    """
    found: dict[tuple[Shape, str], list[float]] = {}
    known = rows.filter(pl.col("op").is_in(MATMULS), pl.col("shape") > 0)
    for (op, number), some in known.group_by("op", "shape", maintain_order=True):
        size = _size(str(op), shapes[int(number)])
        if size is None:
            continue
        told = [(matmul_precision(name), ns, ops) for name, ns, ops in some.select("name", "own_ns", "ops").iter_rows()]
        usual = _usual((one.precision if one else "", ns) for one, ns, _ in told)
        for one, ns, ops in told:
            precision = one.precision if one is not None and one.precision in PEAK_DTYPES else usual
            spent = found.setdefault((size, precision), [0.0, 0.0])
            spent[0], spent[1] = spent[0] + ops / n, spent[1] + ns * scale / n
    return [
        Product(shape=size, precision=precision, count=count, ns=ns) for (size, precision), (count, ns) in found.items()
    ]


def _usual(told: Iterable[tuple[str, float]]) -> str:
    spent: dict[str, float] = {}
    for precision, ns in told:
        if precision in PEAK_DTYPES:
            spent[precision] = spent.get(precision, 0.0) + ns
    return max(spent, key=spent.__getitem__, default="")


def _size(op: str, sizes: str) -> Shape | None:
    pair = factors(op, input_sizes(sizes) or [])
    if pair is None:
        return None
    left, right = pair
    return prod(left[:-2]), left[-2], right[-1], left[-1]


def products_of_ops(ops: Sequence[OpWork]) -> list[Product]:
    """The products that a step is known to have; what each took is not known."""
    counts: dict[tuple[Shape, str], int] = {}
    for op in ops:
        if op.kind == MATMUL and op.flops:
            key = matmul_shape(op), op.dtype
            counts[key] = counts.get(key, 0) + 1
    return [Product(shape=size, precision=dtype, count=count, ns=None) for (size, dtype), count in counts.items()]


def precision_used(products: Sequence[Product], rows: pl.DataFrame) -> str:
    """The one with most of the products' FLOPs; where these are not known, with most of the kernels' time; or ''."""
    flops: dict[str, float] = {}
    for one in products:
        if one.precision in PEAK_DTYPES:
            flops[one.precision] = flops.get(one.precision, 0.0) + one.flops
    if flops:
        return max(flops, key=flops.__getitem__)
    names = rows.group_by("name", maintain_order=True).agg(pl.col("own_ns").sum())
    told = ((matmul_precision(name), ns) for name, ns in names.iter_rows())
    return _usual((one.precision if one else "", ns) for one, ns in told)


def split(products: Sequence[Product], used: str, ceilings: Ceilings, total_ns: float | None = None) -> Gap:
    """Why products take longer than their FLOPs at the peak of the precision `used`.

    Each by itself where its time is known; else all of them together, of the `total_ns` that they took, and what neither
    precision nor shape explains is 'other'.
    """
    products = [one if one.precision in PEAK_DTYPES else replace(one, precision=used) for one in products]
    if total_ns is not None:
        limits = [_limits(one, used, ceilings) for one in products]
        ideal, floor, least = (math.fsum(one[i] for one in limits) for i in range(3))
        return _gap(total_ns, ideal, floor, least, unaligned=False)
    sides = _unaligned_sides(products)
    each = [_one(one, used, ceilings, sides) for one in products]
    whole = sum(each, Gap())
    names = [name for name in ("precision", "shape", "unaligned") if getattr(whole, name) > 0]
    most = {name: max(range(len(each)), key=lambda i: getattr(each[i], name)) for name in names}
    return replace(whole, worst={name: _told(products[i], getattr(each[i], name)) for name, i in most.items()})


def _told(product: Product, ns: float) -> str:
    """A product and what of a part is its own, for one line.

    >>> _told(Product(shape=(1, 2048, 768, 3072), precision="bf16", count=24, ns=None), 0.5e6)
    'most of all 24 × bf16 [2048, 3072] · [3072, 768], 500 µs'
    """
    batch, m, n, k = product.shape
    left, right = ([batch, *pair] if batch > 1 else list(pair) for pair in ((m, k), (k, n)))
    return f"most of all {product.count:.0f} × {product.precision} {left} · {right}, {units.duration(ns)}"


def _one(product: Product, used: str, ceilings: Ceilings, sides: frozenset[int]) -> Gap:
    assert product.ns is not None
    _, m, n, k = product.shape
    unaligned = bool(sides & {m, n, k})
    return _gap(product.ns, *_limits(product, used, ceilings), unaligned=unaligned)


def _limits(product: Product, used: str, ceilings: Ceilings) -> tuple[float, float, float]:
    """The time at the peak of the precision used, at that of its own, and of its shape: in tiles and waves, or by its bytes."""
    own = matmul_limits(product.precision, ceilings)
    best = max(own.peak_flops, matmul_limits(used, ceilings).peak_flops)
    tiled = matmul_ns(*product.shape, own, ceilings.processors) * product.count
    moving = 1e9 * product.n_bytes / ceilings.bandwidth_bytes_per_s
    floor = 1e9 * product.flops / own.peak_flops
    return 1e9 * product.flops / best, floor, max(floor, tiled, moving)


def _gap(ns: float, ideal: float, floor: float, least: float, *, unaligned: bool) -> Gap:
    shape = max(0.0, min(least, ns) - floor)
    rest = ns - floor - shape
    other = (0.0, rest) if unaligned and rest > 0 else (rest, 0.0)
    return Gap(ideal=ideal, precision=floor - ideal, shape=shape, unaligned=other[1], other=other[0])


def _unaligned_sides(products: Sequence[Product]) -> frozenset[int]:
    """Sizes of K or N that are no whole number of loads; such a size is unaligned as M, too: there its rows lie across."""
    return frozenset(
        side
        for one in products
        for side in one.shape[2:]
        if side % max(1, ALIGNED_BYTES // item_bytes(one.precision, 4))
    )
