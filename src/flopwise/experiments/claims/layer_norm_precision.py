"""`layer-norm-precision`: a layer norm computed in 16 bits, step by step, against one with fp32 inside.

Three ways for each format. `one by one`: the sums of the mean and of the variance are kept in the format. `rounded between`: each
operation computes in fp32 and rounds its result, as PyTorch's own operations do. `fp32 inside`: PyTorch's layer norm, which
rounds only what it returns. The error is relative to fp64 on the same numbers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, line, table_of
from flopwise.experiments.rows import Row, fields
from flopwise.experiments.verdict import Check, each, holds, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

LINE = "Layer norm in fp32, bf16 and fp16 by the size of its numbers and the width of its rows: where each goes wrong."
CLAIM = (
    "In fp16 a layer norm's squares overflow from 256 on; in bf16 they do not, but sums kept in bf16 are wrong for wide rows; "
    "with fp32 inside, both are as exact as the format of the result."
)
SEQUENTIAL, BETWEEN, INSIDE = WAYS = ("one by one", "rounded between", "fp32 inside")
FORMATS = ("fp32", "bf16", "fp16")
RESOLUTION = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
SCALES = tuple(2.0**power for power in range(0, 14, 1))
WIDTHS, QUICK_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192), (64, 512, 4096)
WIDTH, SCALE, BATCH = 1024, 1.0, 64  # of the sweep over the other; rows
EPS = 1e-5
OVERFLOW = 256.0  # its square is 2¹⁶, and fp16's largest number is 65504
WORSE = 4.0  # times the error of the narrowest row
LOST = 0.5  # relative: what is off by more is lost
WIDE = 2048


class Norm(Row, frozen=True, kw_only=True):
    sweep: str  # 'scale' or 'width'
    way: str
    format: str
    width: int
    scale: float  # the standard deviation of the numbers
    error: float  # relative, in root mean square; 1 where a result is not finite

    @property
    def name(self) -> str:
        return f"{self.format}, {self.way}"


Rows = Sequence[Norm]


def measure(bench: "Bench") -> Iterator[Norm]:
    widths = QUICK_WIDTHS if bench.quick else WIDTHS
    scales = SCALES[::3] if bench.quick else SCALES
    settings = [("scale", WIDTH, scale) for scale in scales] + [("width", width, SCALE) for width in widths]
    for sweep, width, scale in settings:
        bench.doing(f"{width} numbers of about {scale:g}")
        original = bench.randn(BATCH, width) * scale
        for name in FORMATS:
            for way in WAYS:
                if sweep == "scale" and way == SEQUENTIAL:  # a matter of the width
                    continue
                error = _error(original, name, way)
                yield Norm(sweep=sweep, way=way, format=name, width=width, scale=scale, error=error)


def _error(original: "torch.Tensor", number_format: str, way: str) -> float:
    from flopwise.lm.precision import torch_dtype

    x = original.to(torch_dtype(number_format))
    right = written_out(x.double(), _mean)
    found = _layer_norm(x) if way == INSIDE else written_out(x, _mean if way == BETWEEN else _mean_one_by_one)
    error = float((found.double() - right).norm() / right.norm())
    return min(error, 1.0) if math.isfinite(error) else 1.0


def written_out(x: "torch.Tensor", mean: "Callable[[torch.Tensor], torch.Tensor]") -> "torch.Tensor":
    """(x − μ) / √(σ² + ε), each operation in the format of x."""
    centred = x - mean(x)
    return centred * (mean(centred * centred) + EPS).rsqrt()


def _mean(x: "torch.Tensor") -> "torch.Tensor":
    return x.mean(-1, keepdim=True)


def _mean_one_by_one(x: "torch.Tensor") -> "torch.Tensor":
    """The sum of each row, number by number, in the format of x."""
    total = x.new_zeros(len(x))
    for column in x.T.contiguous():
        total = total + column
    return (total / x.shape[-1]).unsqueeze(-1)


def _layer_norm(x: "torch.Tensor") -> "torch.Tensor":
    from torch.nn.functional import layer_norm

    return layer_norm(x, x.shape[-1:], eps=EPS)


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    between = [row for row in rows if row.sweep == "scale" and row.way == BETWEEN and row.scale >= 2 * OVERFLOW]
    wide = [row for row in rows if row.way == SEQUENTIAL and row.width >= WIDE]
    complete = all({row.format for row in measured} == set(FORMATS) for measured in (between, wide))
    yield require("both sweeps", complete, "not all sizes were measured in all formats.")
    yield from _sizes(rows)
    yield from _widths(rows)
    yield from _inside(rows)


def _inside(rows: Rows) -> Iterator[Check]:
    inside = {name: max(row.error for row in rows if row.format == name and row.way == INSIDE) for name in FORMATS}
    yield said(
        f"With fp32 inside the error is at most {', '.join(f'{off:.2g} in {name}' for name, off in inside.items())}."
    )
    exact = {name: error <= RESOLUTION[name] for name, error in inside.items()}
    yield each("fp32 inside is exact", exact, refuted="With fp32 inside, less exact than the format: {}.")


def _sizes(rows: Rows) -> Iterator[Check]:
    """From which numbers on the result is lost, each operation rounded."""
    sizes = [row for row in rows if row.sweep == "scale" and row.way == BETWEEN and row.error > LOST]
    first = {name: min((row.scale for row in sizes if row.format == name), default=math.inf) for name in FORMATS}
    words = {name: "holds at all sizes" if math.isinf(at) else f"is lost from {at:g} on" for name, at in first.items()}
    yield said(
        f"by the standard deviation of its numbers, {', '.join(f'{name} {word}' for name, word in words.items())}."
    )
    # A row of 1024 has numbers of three to four times its standard deviation: their squares overflow first.
    yield holds("fp16 overflows", OVERFLOW / 8 <= first["fp16"] <= 2 * OVERFLOW)
    yield holds("bf16 does not", math.isinf(first["bf16"]) and math.isinf(first["fp32"]))


def _widths(rows: Rows) -> Iterator[Check]:
    """How far sums in the format are off, from the narrowest to the widest row."""
    sums = sorted((row for row in rows if row.way == SEQUENTIAL), key=lambda row: row.width)
    widest = {name: [row for row in sums if row.format == name][-1] for name in FORMATS}
    off = ", ".join(f"{row.error:.2g} in {name}" for name, row in widest.items())
    yield said(f"With sums kept in the format, rows of {widest['bf16'].width} are off by {off}.")
    narrow, wide = next(row.error for row in sums if row.format == "bf16"), widest["bf16"].error
    yield holds("bf16 sums are wrong for wide rows", wide > LOST / 2 and wide > WORSE * narrow)


def draw(rows: Rows, place: Place) -> list[Picture]:
    words = tuple(f"{name}, {way}" for way in WAYS for name in FORMATS)
    shown = [fields(row) | {"name": row.name} for row in rows]
    by_scale, by_width = ([row for row in shown if row["sweep"] == sweep] for sweep in ("scale", "width"))
    error = Axis("error", "relative error", log=True)
    scale, width = (
        Axis("scale", "standard deviation of the numbers", log=True),
        Axis("width", "numbers in a row", log=True),
    )
    return [
        line(by_scale, scale, error, colour="name", words=words).titled(
            "Error of a layer norm by the size of its numbers",
            "The square of 256 is infinite in fp16, and a row has numbers of three times its standard deviation.",
        ),
        line(by_width, width, error, colour="name", words=words).titled(
            "Error of a layer norm by the width of its rows",
            "A 16-bit sum stops growing when its next term is less than half of its last digit.",
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    found: dict[tuple[str, int, float], dict[str, Any]] = {}
    for row in rows:
        line_of = found.setdefault((row.sweep, row.width, row.scale), {"width": row.width, "scale": row.scale})
        line_of[row.name] = row.error
    names = dict.fromkeys(row.name for row in rows)
    headings = columns(width="numbers in a row", scale="of about") | {name: name for name in names}
    return [table_of("relative error of a layer norm", headings, list(found.values()))]


EXPERIMENT = Experiment(20, "layer-norm-precision", LINE, CLAIM, (Norm,), measure, judge, draw, tabulate)
