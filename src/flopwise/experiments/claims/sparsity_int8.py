"""`sparsity-int8`: what narrower and sparser numbers give a large matmul, and what they take from its result.

int8 and fp8 have half the bits of bf16. 2:4 sparsity keeps the two largest of each four weights, and the tensor cores skip the
others. The error is that of the product, compared with the product of the numbers before they were rounded or pruned, in fp64.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta

from flopwise import units
from flopwise.errors import Unsupported, one_line
from flopwise.experiments.experiment import Axis, Experiment, Picture, bar, columns, scatter, table_of
from flopwise.experiments.rows import Row, Timed, by, fields, select
from flopwise.experiments.verdict import Check, each, least_certain, require, said, within
from flopwise.predict.flops import matmul_flops
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

LINE = "2:4 sparsity, int8 and fp8 against bf16 and fp32: the rate of a large matmul, and the error of its result."
CLAIM = (
    "Half the bits double a matmul's rate and 2:4 sparsity doubles it again; int8 and fp8 cost a few percent of the result, and "
    "pruning random weights costs a third."
)
FORMATS = ("fp32", "bf16", "int8", "fp8")
PRUNED = ("bf16", "int8", "fp8")
GPU_SIDE, GPU_QUICK_SIDE = 8192, 4096
CHECKED = 256  # rows of the product that are compared
DOUBLE = (1.6, 2.4)
FEW_PERCENT, THIRD = 0.05, (0.2, 0.45)  # relative errors
KEPT_WRONG = (
    0.02  # relative: the product of the very numbers that a format holds is off by less, or it is another product
)


class Product(Timed, frozen=True, kw_only=True, tag_field="part", tag="product"):
    format: str
    sparse: bool
    side: int
    work_flops: int  # of the dense product
    rate_flops_per_s: float
    error: float  # relative, in root mean square, of the product of the original numbers
    own_error: float  # of the product of the numbers that the format holds

    @property
    def name(self) -> str:
        return named(self.format, self.sparse)


class Skipped(Row, frozen=True, kw_only=True, tag_field="part", tag="skipped", forbid_unknown_fields=True):
    format: str
    sparse: bool
    note: Annotated[str, Meta(min_length=1)]


Rows = Sequence[Product | Skipped]
Products = Mapping[str, Product]


class Held(NamedTuple):
    """Weights and inputs as a format holds them: each times its scale is about the number that it stands for."""

    weights: "torch.Tensor"  # [m, k]
    inputs: "torch.Tensor"  # [n, k]
    scale: "torch.Tensor | float"  # of the product


def named(number_format: str, sparse: bool) -> str:
    return f"{number_format}, 2:4" if sparse else number_format


def measure(bench: "Bench") -> Iterator[Product | Skipped]:
    bench.needs_gpu("a tensor core")
    side = GPU_QUICK_SIDE if bench.quick else GPU_SIDE
    weights, inputs = (bench.randn(side, side) for _ in range(2))
    right = weights[:CHECKED].double() @ inputs.double().T
    for number_format, sparse in [(name, False) for name in FORMATS] + [(name, True) for name in PRUNED]:
        bench.doing(named(number_format, sparse))
        about: dict[str, Any] = {"format": number_format, "sparse": sparse}
        try:
            held = hold(number_format, prune(weights) if sparse else weights, inputs)
            run = _product(bench, number_format, sparse, held)
            result, kept = run()[:CHECKED].double() * held.scale, _exact(held)
            timing = bench.time(run, seconds=0.1 if bench.quick else 0.4)
        except (RuntimeError, NotImplementedError, ValueError, Unsupported) as error:
            yield Skipped(**about, note=one_line(str(error))[:200] or type(error).__name__)
            continue
        work = matmul_flops(side, side, side)
        rate: dict[str, Any] = {"work_flops": work, "rate_flops_per_s": 1e9 * work / timing.took_ns}
        errors: dict[str, Any] = {"error": relative_error(result, right), "own_error": relative_error(result, kept)}
        yield Product(**about, side=side, **rate, **errors, **fields(timing))


def prune(weights: "torch.Tensor") -> "torch.Tensor":
    """Of each four numbers in a row the two largest; the others are zero."""
    fours = weights.view(-1, 4)
    kept = fours.abs().topk(2, dim=1).indices
    return fours.new_zeros(fours.shape).scatter(1, kept, fours.gather(1, kept)).view_as(weights)


def hold(number_format: str, weights: "torch.Tensor", inputs: "torch.Tensor") -> Held:
    """Both matrices in a format. int8 and fp8 have one scale for each matrix: its largest number is the format's largest."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    dtype = dtypes[number_format]
    if number_format in ("fp32", "bf16"):
        return Held(weights.to(dtype), inputs.to(dtype), 1.0)
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = [matrix.abs().max() / most for matrix in (weights, inputs)]
    scaled = [matrix / scale for matrix, scale in zip((weights, inputs), scales, strict=True)]
    whole = [matrix.round() if dtype == torch.int8 else matrix for matrix in scaled]
    return Held(whole[0].to(dtype), whole[1].to(dtype), scales[0].double() * scales[1].double())


def relative_error(found: "torch.Tensor", right: "torch.Tensor") -> float:
    return float((found - right).norm() / right.norm())


def _exact(held: Held) -> "torch.Tensor":
    """The first rows of the product of the numbers that are held, in fp64."""
    return held.weights[:CHECKED].double() @ held.inputs.double().T * held.scale


def _product(bench: "Bench", number_format: str, sparse: bool, held: Held) -> "Callable[[], torch.Tensor]":
    """The product of weights and inputs, without the scale; the inputs lie column by column."""
    import torch

    from flopwise import torch_private

    weights, inputs = held.weights, held.inputs.t()
    bench.fp32_matmul("fp32")
    if sparse:
        if not torch.backends.cusparselt.is_available():
            raise Unsupported("this torch has no cuSPARSELt")
        packed, out_dtype = torch_private.sparse_compress(weights), None if number_format == "bf16" else torch.bfloat16
        try:
            best = torch_private.sparse_mm_search(packed, inputs, out_dtype=out_dtype)
        except RuntimeError:  # the library's default
            best = 0
        return lambda: torch_private.sparse_mm(packed, inputs, out_dtype=out_dtype, alg_id=best)
    if number_format == "int8":
        return lambda: torch_private.int_mm(weights, inputs)
    if number_format == "fp8":
        one = torch.ones((), device=bench.device)
        more = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch_private.scaled_mm(weights, inputs, **more)
    return lambda: torch.mm(weights, inputs)


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    found = by(select(rows, Product), "name")
    yield require("bf16", "bf16" in found, "bf16, which all others are compared with, was not measured.")
    wrong = ", ".join(name for name, row in found.items() if not row.own_error <= KEPT_WRONG)
    yield require("right products", not wrong, f"not the product of the numbers held: {wrong}.")
    yield said(" ".join(_described(row, found["bf16"]) for row in found.values()))
    pruned = {name: row for name, row in found.items() if row.sparse and row.format in found}
    narrow = {name: found[name] for name in ("int8", "fp8") if name in found}
    yield from _faster(found, narrow, pruned)
    costs = {name: row.error <= FEW_PERCENT for name, row in narrow.items()}
    costs |= {name: THIRD[0] <= row.error <= THIRD[1] for name, row in pruned.items()}
    yield each("errors", costs, refuted="Another error than claimed: {}.")
    missing = [named(name, sparse) for sparse in (False, True) for name in PRUNED if named(name, sparse) not in found]
    yield each("all formats", dict.fromkeys(missing), unknown="Not measured: {}.")
    yield least_certain({name: row.device for name, row in found.items()})


def _faster(found: Products, narrow: Products, pruned: Products) -> Iterator[Check]:
    half = {name: found["bf16"].device / row.device for name, row in narrow.items()}
    yield within("half the bits", half, *DOUBLE, refuted="Not about twice bf16's rate: {}.")
    sparse = {name: found[row.format].device / row.device for name, row in pruned.items()}
    yield within("sparsity", sparse, *DOUBLE, refuted="Not about twice the dense rate: {}.")


def _described(row: Product, base: Product) -> str:
    return (
        f"{row.name}: {units.rate(row.rate_flops_per_s, 'FLOP/s')}, {base.took_ns / row.took_ns:.2f} times bf16, "
        f"error {units.percent(row.error, 2)}."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    products = [
        fields(row) | {"name": row.name, "weights": "2:4" if row.sparse else "dense"} for row in select(rows, Product)
    ]
    return [
        bar(products, Axis("format"), Axis("rate_flops_per_s", "rate"), colour="weights").titled(
            "Rate of a large matmul", "FLOPs are those of the dense product: what is skipped counts as done."
        ),
        scatter(
            products,
            Axis("error", "relative error of the product", log=True),
            Axis("rate_flops_per_s", "rate"),
            colour="name",
        ).titled("Rate against error", "Up is faster, left is closer to the product of the original numbers."),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    base = next((row.took_ns for row in select(rows, Product) if row.name == "bf16"), None)
    shown = []
    for row in rows:
        times = base / row.took_ns if base and isinstance(row, Product) else None
        shown.append(fields(row) | {"weights": "2:4" if row.sparse else "dense", "times": times})
    headings = columns("format", "weights", gpu_ns="GPU", rate_flops_per_s="rate", times="times bf16", error="error")
    headings |= columns(own_error="of the numbers held") | (columns(note="why not") if select(rows, Skipped) else {})
    notes = (
        "rate: the FLOPs of the dense product over the time",
        "error: of the product of the original numbers; of the numbers held: of what rounding and pruning left",
    )
    return [table_of("a square matmul by number format", headings, shown, notes)]


EXPERIMENT = Experiment(19, "sparsity-int8", LINE, CLAIM, (Product, Skipped), measure, judge, draw, tabulate)
