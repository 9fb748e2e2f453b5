"""`data-types`: what a number format can hold, determined by computing in it.

From 1, by halving and doubling: the resolution is the smallest power of two that still changes 1 when it is added; the largest
number is what grows no more; the smallest normal one is the last that keeps its last bit; the smallest subnormal one is the last
that is not zero. Nothing is looked up. Formats without arithmetic of their own (fp8) compute in fp32 and are rounded after every
step; TF32 is what a matrix product does to its inputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flopwise import units
from flopwise.errors import Unsupported
from flopwise.experiments.experiment import Axis, Experiment, Picture, Rule, columns, scatter, span, table_of
from flopwise.experiments.rows import Row, fields, select
from flopwise.experiments.verdict import Check, holds, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

LINE = "Range and resolution of fp32, TF32, bf16, fp16 and fp8, computed by arithmetic; the bytes of a linear layer."
CLAIM = "fp16 turns 1e-8 into zero; bf16 keeps it, because it has fp32's range, at a lower resolution."
TINY = 1e-8
D_MODEL = 12 * 1024  # the lecture's 12k
TF32_SIDE = 64  # of the matrices whose product shows TF32
MOST_STEPS = 2000  # of halving or doubling: more than any format here has exponents
COMPARED = ("fp32", "fp16", "bf16")


class Range(Row, frozen=True):
    """What numbers a format can hold."""

    resolution: float
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    tiny_held: float  # what 1e-8 becomes


class Format(Range, frozen=True, kw_only=True):
    format: str
    how: str
    each_bytes: int
    layer_bytes: int


class NotMeasured(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    how: str  # why it could not be measured
    layer_bytes: int


Rows = Sequence[Format | NotMeasured]


@dataclass(frozen=True)
class Arithmetic:
    """Sums and products of numbers that the format holds, rounded to the format."""

    add: Callable[[float, float], float]
    multiply: Callable[[float, float], float]


def measure(bench: "Bench") -> Iterator[Format | NotMeasured]:
    import torch

    formats = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    formats |= {"fp8 e4m3": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}
    for name, dtype in formats.items():
        bench.doing(name)
        layer = _layer_bytes(bench, dtype)
        try:
            how, arithmetic = _arithmetic(bench, name, dtype)
        except Unsupported as error:
            yield NotMeasured(format=name, how=error.message, layer_bytes=layer)
            continue
        yield Format(format=name, how=how, each_bytes=dtype.itemsize, layer_bytes=layer, **fields(probe(arithmetic)))


def probe(arithmetic: Arithmetic) -> Range:
    """Range and resolution of a format from nothing but its sums and products.

    >>> python = probe(Arithmetic(lambda a, b: a + b, lambda a, b: a * b))   # Python's own numbers: 52 bits after the point
    >>> python.resolution == 2.0**-52, python.smallest_normal == 2.0**-1022, python.smallest_subnormal == 2.0**-1074
    (True, True, True)
    """
    add, multiply = arithmetic.add, arithmetic.multiply
    resolution = 1.0
    while add(1.0, resolution / 2) > 1.0:
        resolution /= 2
    largest = _last(1.0, lambda x: multiply(x, 2.0), lambda x, y: math.isfinite(y) and y > x)
    step = largest / 2
    while step >= largest * resolution / 4:  # fill in the bits below the first
        more = add(largest, step)
        largest = more if math.isfinite(more) and more > largest else largest
        step /= 2
    # normal as long as its last bit stays
    fine = _last(1.0 + resolution, lambda x: multiply(x, 0.5), lambda x, y: y * 2 == x)
    smallest = _last(1.0, lambda x: multiply(x, 0.5), lambda _, y: y > 0)
    return Range(resolution, largest, fine / (1.0 + resolution), smallest, tiny_held=multiply(TINY, 1.0))


def _last(x: float, following: Callable[[float], float], good: Callable[[float, float], bool]) -> float:
    """The last of a series of numbers that is good compared with the one before it."""
    for _ in range(MOST_STEPS):
        y = following(x)
        if not good(x, y):
            break
        x = y
    return x


def _arithmetic(bench: "Bench", name: str, dtype: "torch.dtype") -> tuple[str, Arithmetic]:
    """How a format computes, and its arithmetic; raises where it has none here."""
    import torch

    def held(x: float) -> "torch.Tensor":
        return torch.tensor(x, dtype=torch.float64).to(dtype).to(bench.device)

    def rounded(x: float) -> float:
        return torch.tensor(x, dtype=torch.float32, device=bench.device).to(dtype).float().item()

    if name == "tf32":
        through = _through_product(bench)
        return "by a matrix product", Arithmetic(lambda a, b: through(a + b), lambda a, b: through(a * b))
    if name.startswith("fp8"):
        return "rounded after fp32 arithmetic", Arithmetic(lambda a, b: rounded(a + b), lambda a, b: rounded(a * b))
    return "by its own arithmetic", Arithmetic(
        lambda a, b: (held(a) + held(b)).double().item(), lambda a, b: (held(a) * held(b)).double().item()
    )


def _through_product(bench: "Bench") -> Callable[[float], float]:
    """TF32: a number among zeros, times the identity, comes back as the tensor cores read it."""
    import torch

    bench.needs_gpu("TF32")
    bench.fp32_matmul("tf32")
    identity = torch.eye(TF32_SIDE, device=bench.device)
    row = torch.zeros(TF32_SIDE, TF32_SIDE, device=bench.device)

    def through(x: float) -> float:
        row[0, 0] = torch.tensor(x, dtype=torch.float64).float()  # beyond fp32 it becomes infinite, and no error
        return (row @ identity)[0, 0].double().item()

    if through(1.0 + 2.0**-20) != 1.0:
        raise Unsupported("this GPU's matrix products do not use TF32")
    return through


def _layer_bytes(bench: "Bench", dtype: "torch.dtype") -> int:
    """The weight of a linear layer of 12k → 48k, as allocated on a GPU; on the CPU its size without its storage."""
    import torch

    if not bench.on_gpu:
        return torch.empty(4 * D_MODEL, D_MODEL, dtype=dtype, device="meta").nbytes
    before = torch.cuda.memory_allocated(bench.device)
    weight = torch.empty(4 * D_MODEL, D_MODEL, dtype=dtype, device=bench.device)
    taken = torch.cuda.memory_allocated(bench.device) - before
    del weight
    return taken


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    by_name = {row.format: row for row in select(rows, Format)}
    there = ", ".join(by_name) or "nothing"
    yield require("formats", set(COMPARED) <= set(by_name), f"only {there} could be measured.")
    fp32, fp16, bf16 = (by_name[name] for name in COMPARED)
    yield said(
        f"1e-8 is held as {fp16.tiny_held:.3g} in fp16 (its smallest number is {fp16.smallest_subnormal:.3g}) and as "
        f"{bf16.tiny_held:.3g} in bf16, which reaches from {bf16.smallest_normal:.3g} to {bf16.largest:.3g} (fp32: "
        f"{fp32.smallest_normal:.3g} to {fp32.largest:.3g}) with steps of {bf16.resolution:.2g} at 1 (fp16 "
        f"{fp16.resolution:.2g}, fp32 {fp32.resolution:.2g}). A layer of 12k → 48k takes {units.size(fp32.layer_bytes)} "
        f"in fp32, {units.size(bf16.layer_bytes)} in bf16."
    )
    same_largest = 0.9 < bf16.largest / fp32.largest < 1.1
    yield holds("fp16 turns 1e-8 into zero", fp16.tiny_held == 0)
    yield holds("bf16 keeps 1e-8", abs(bf16.tiny_held / TINY - 1) < bf16.resolution)
    yield holds("bf16 has fp32's range", same_largest and bf16.smallest_normal == fp32.smallest_normal)
    yield holds("bf16 is the coarsest", bf16.resolution > fp16.resolution > fp32.resolution)


def draw(rows: Rows, place: Place) -> list[Picture]:
    measured = select(rows, Format)
    spans = [
        {"format": row.format, "numbers": kind, "from": low, "to": high}
        for row in measured
        for kind, low, high in (
            ("normal", row.smallest_normal, row.largest),
            ("subnormal: fewer bits", row.smallest_subnormal, row.smallest_normal),
        )
        if low < high
    ]
    tiny, steps = (Rule("x", TINY, "1e-8"),), [fields(row) for row in measured]
    return [
        span(spans, Axis("from", "number", log=True, to="to"), Axis("format"), colour="numbers", rules=tiny).titled(
            "Range of each format", "From the smallest to the largest number; 1e-8 lies outside of some."
        ),
        scatter(steps, Axis("resolution", "step at 1", log=True), Axis("format")).titled(
            "Resolution of each format", "The smallest power of two that changes 1 when it is added to it."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns("format", each_bytes="size", largest="largest", smallest_normal="smallest normal")
    headings |= columns(smallest_subnormal="smallest subnormal", resolution="step at 1", tiny_held="1e-8 is held as")
    headings |= columns(layer_bytes="weight of a layer 12k → 48k", how="how it was measured")
    return [table_of("what each format can hold", headings, [fields(row) for row in rows])]


EXPERIMENT = Experiment(4, "data-types", LINE, CLAIM, (Format, NotMeasured), measure, judge, draw, tabulate)
