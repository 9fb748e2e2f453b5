"""GPU time shared out: by phase, class and module, and by kernel. Parts add up to the whole."""

import re

import msgspec
import polars as pl

from flopwise.trace.host import SEPARATOR

MOST_PARTS = 300  # of phase × class × module; a model has fewer, a trace with a name for each layer more
REST = "(the rest)"
_SUMS = pl.col("duration_ns", "kernels", "copies").sum()
_LAYER = re.compile(r"(?<=[._/])\d+(?=[._/]|$)|(?<=_)\d+$")
_INSTANCE = re.compile(r"^([A-Z]\w*)_\d+$")  # how PyTorch's profiler names modules: Linear_3, the fourth Linear it met


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time of one kind of work, per step."""

    name: str
    gpu_ns: float
    share: float
    count: float  # kernels, per step
    copies: float = 0.0  # copies and memsets, per step


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time of one class of work of one module in one phase, per step."""

    phase: str
    kind: str  # the class
    module: str  # layers together; empty where none is known
    gpu_ns: float
    share: float
    count: float  # kernels, per step
    copies: float = 0.0


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel, by its full name, per step."""

    name: str
    kind: str
    gpu_ns: float
    share: float
    count: float
    mean_ns: float


def totals(work: pl.DataFrame) -> pl.DataFrame:
    """The work summed by everything that analyses group by: thousands of rows instead of millions.

    `kernels` counts kernels (and graphs traced as one row), `copies` what moves or sets memory.
    """
    texts = ["source", "phase", "class", "name", "op", "module", "path"]
    copies = (pl.col("source") == "copy").sum()
    sums = [pl.col("duration_ns", "own_ns", "ops").sum(), (pl.len() - copies).alias("kernels"), copies.alias("copies")]
    rows = work.select(*texts, "shape", "ops", "duration_ns", "own_ns").group_by(*texts, "shape").agg(sums)
    rows = rows.with_columns(pl.col(texts).cast(pl.String)).sort(*texts, "shape", nulls_last=True)
    modules = rows.select("module", "path").unique(maintain_order=True)  # hundreds: each is folded once
    folded = [folded_module(module or "", path or "") for module, path in modules.iter_rows()]
    named = modules.with_columns(pl.Series("folded", folded, dtype=pl.String))
    return rows.join(named, on=["module", "path"], how="left", nulls_equal=True, maintain_order="left")


def folded_module(module: str, path: str = "") -> str:
    """A module's name without the number of its layer; of one that is named by its class, the classes it lies in.

    >>> folded_module("blocks.11.attention.q")
    'blocks.*.attention.q'
    >>> folded_module("Linear_12", "forward pass/Block_3/Attention_3/Linear_12/scores")
    'Block.Attention.Linear'
    """
    if _INSTANCE.match(module) is None:
        return _LAYER.sub("*", module)
    names = path.split(SEPARATOR)
    if module in names:  # ranges further in are not modules
        names = names[: len(names) - names[::-1].index(module)]
    classes = [match[1] for name in names if (match := _INSTANCE.match(name))]
    return ".".join(classes) or _LAYER.sub("*", module)


def gpu_time(work: pl.DataFrame) -> int:
    """The sum of the durations, in nanoseconds."""
    return int(work["duration_ns"].sum())


def shares(work: pl.DataFrame, column: str, n: int) -> tuple[Share, ...]:
    """Per step, the largest first.

    >>> work = pl.DataFrame({"phase": ["loss", "forward"], "duration_ns": [10, 30], "kernels": [1, 4], "copies": [0, 2]})
    >>> shares(work, "phase", 2)[0]
    Share(name='forward', gpu_ns=15.0, share=0.75, count=2.0, copies=1.0)
    """
    total = max(gpu_time(work), 1)
    rows = work.group_by(column).agg(_SUMS).sort("duration_ns", column, descending=[True, False])
    return tuple(
        Share(name=str(name or ""), gpu_ns=ns / n, share=ns / total, count=kernels / n, copies=copies / n)
        for name, ns, kernels, copies in rows.iter_rows()
    )


def matrix(work: pl.DataFrame, n: int) -> dict[str, dict[str, float]]:
    """Phase by class."""
    cells: dict[str, dict[str, float]] = {}
    rows = work.group_by("phase", "class").agg(pl.col("duration_ns").sum()).sort("phase", "class")
    for phase, kind, ns in rows.iter_rows():
        cells.setdefault(phase, {})[kind] = ns / n
    return cells


def parts(work: pl.DataFrame, n: int, most: int = MOST_PARTS) -> tuple[Part, ...]:
    """Phase by class by module, the largest first; what comes after the first `most` is one row, so that they add up."""
    total = max(gpu_time(work), 1)
    by = ["phase", "class", "folded"]
    rows = work.group_by(by).agg(_SUMS).sort("duration_ns", *by, descending=[True, False, False, False])
    first, rest = rows[:most], rows[most:]
    if rest.height:
        first = first.vstack(rest.select(*(pl.lit(REST).alias(name) for name in by), _SUMS))
    return tuple(
        Part(phase=p, kind=kind, module=module, gpu_ns=ns / n, share=ns / total, count=kernels / n, copies=copies / n)
        for p, kind, module, ns, kernels, copies in first.iter_rows()
    )


def kernels(work: pl.DataFrame, n: int) -> tuple[Kernel, ...]:
    """By name; of a name in several classes, the class it is in most often."""
    total = max(gpu_time(work), 1)
    sums = pl.col("duration_ns", "kernels").sum()
    by_class = work.filter(pl.col("source") == "kernel").group_by("name", "class").agg(sums)
    by_name = by_class.sort("kernels", "class", descending=[True, False]).group_by("name", maintain_order=True)
    rows = by_name.agg(pl.col("class").first(), sums).sort("duration_ns", "name", descending=[True, False])
    return tuple(
        Kernel(name=name, kind=kind, gpu_ns=ns / n, share=ns / total, count=count / n, mean_ns=ns / count)
        for name, kind, ns, count in rows.iter_rows()
    )
