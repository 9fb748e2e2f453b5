"""GPU time shared out: by phase, class and module, and by kernel. Parts add up to the whole."""

import msgspec
import polars as pl

from flopwise.analysis.modules import with_folded_modules

MOST_PARTS = 300  # of phase × class × module; a model has fewer, a trace with a name for each layer more
REST = "(the rest)"


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


def added_up(work: pl.DataFrame) -> pl.DataFrame:
    """The work by all that is asked of it: what follows is sums over thousands of rows and not over millions.

    `kernels` counts kernels (and graphs traced as one row), `copies` what moves or sets memory.
    """
    telling = ["source", "phase", "class", "name", "op", "module", "path"]
    copies = (pl.col("source") == "copy").sum()
    sums = [
        pl.col("duration_ns", "own_ns").sum(),
        (pl.len() - copies).alias("kernels"),
        copies.alias("copies"),
        pl.col("ops").sum(),
    ]
    added = work.select(*telling, "shape", "ops", "duration_ns", "own_ns").group_by(*telling, "shape").agg(sums)
    return with_folded_modules(added.with_columns(pl.col(telling).cast(pl.String)))


def gpu_time(work: pl.DataFrame) -> int:
    """Durations added up, in nanoseconds.

    >>> gpu_time(pl.DataFrame({"duration_ns": [3, 4]}))
    7
    """
    return int(work["duration_ns"].sum())


def shares(work: pl.DataFrame, column: str, n: int) -> tuple[Share, ...]:
    """Per step, the largest first.

    >>> work = pl.DataFrame({"phase": ["loss", "forward"], "duration_ns": [10, 30], "kernels": [1, 4], "copies": [0, 2]})
    >>> shares(work, "phase", 2)[0]
    Share(name='forward', gpu_ns=15.0, share=0.75, count=2.0, copies=1.0)
    """
    total = max(gpu_time(work), 1)
    rows = (
        work.group_by(column)
        .agg(pl.col("duration_ns", "kernels", "copies").sum())
        .sort("duration_ns", column, descending=[True, False])
    )
    return tuple(
        Share(name=str(name or ""), gpu_ns=ns / n, share=ns / total, count=kernels / n, copies=copies / n)
        for name, ns, kernels, copies in rows.iter_rows()
    )


def matrix(work: pl.DataFrame, n: int) -> dict[str, dict[str, float]]:
    """Phase by class."""
    found: dict[str, dict[str, float]] = {}
    for phase, kind, ns in (
        work.group_by("phase", "class").agg(pl.col("duration_ns").sum()).sort("phase", "class").iter_rows()
    ):
        found.setdefault(phase, {})[kind] = ns / n
    return found


def parts(work: pl.DataFrame, n: int, most: int = MOST_PARTS) -> tuple[Part, ...]:
    """Phase by class by module, the largest first; what comes after the first `most` is one row, so that they add up."""
    total = max(gpu_time(work), 1)
    by = ["phase", "class", "folded"]
    rows = (
        work.group_by(by)
        .agg(pl.col("duration_ns", "kernels", "copies").sum())
        .sort("duration_ns", *by, descending=[True, False, False, False])
    )
    first, rest = rows[:most], rows[most:]
    if rest.height:
        names = (pl.lit(REST).alias(name) for name in by)
        first = first.vstack(rest.select(*names, pl.col("duration_ns", "kernels", "copies").sum()))
    return tuple(
        Part(phase=p, kind=kind, module=module, gpu_ns=ns / n, share=ns / total, count=kernels / n, copies=copies / n)
        for p, kind, module, ns, kernels, copies in first.iter_rows()
    )


def kernels(work: pl.DataFrame, n: int) -> tuple[Kernel, ...]:
    """By name; of a name in several classes, the class it is in most often."""
    total = max(gpu_time(work), 1)
    by_class = (
        work.filter(pl.col("source") == "kernel")
        .group_by("name", "class")
        .agg(pl.col("duration_ns", "kernels").sum())
        .sort("kernels", "class", descending=[True, False])
    )
    rows = (
        by_class.group_by("name", maintain_order=True)
        .agg(pl.col("class").first(), pl.col("duration_ns", "kernels").sum())
        .sort("duration_ns", "name", descending=[True, False])
    )
    return tuple(
        Kernel(name=name, kind=kind, gpu_ns=ns / n, share=ns / total, count=count / n, mean_ns=ns / count)
        for name, kind, ns, count in rows.iter_rows()
    )
