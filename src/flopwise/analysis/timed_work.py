"""A step's GPU work by its part in a waterfall, with every instant counted once, of one step."""

import math
from dataclasses import dataclass

import polars as pl

from flopwise.analysis.attention import in_core
from flopwise.analysis.idle import Idle
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.analysis.transfers import NAMES
from flopwise.trace.phases import OPTIMIZER, OTHER, RECOMPUTE
from flopwise.work.operation import ATTENTION, COMMUNICATION, COPY, MATMUL, MEMORY, REDUCTION
from flopwise.work.operation import OPTIMIZER as OPTIMIZER_KERNEL
from flopwise.work.sized import ATTENTIONS, MATMULS

PRODUCTS, FUSED, CORE, MOVING = "products", "fused attention", "attention written out", "memory-bound"
AGAIN, UPDATE, COMMUNICATES, GRAPH = "recomputation", "optimizer", "communication", "whole graphs"
MOVES_TO_HOST, CASTS = "transfers", "fp8 casts"
_TO_FP8 = r"fp8|float8|e4m3|e5m2"  # in names of kernels


@dataclass(frozen=True)
class TimedWork:
    """`rows` are totals by phase, class, kernel, op, size and module; `what` is one of the above, `ns` of one step.

    `hidden_ns`: what they took beyond it, while other work ran for which those instants count.
    """

    rows: pl.DataFrame
    shapes: tuple[str, ...]
    n: int
    step_ns: float
    scale: float  # of `ns` times `n` over the traced time: below 1 where the untraced GPU was faster
    elsewhere_ns: float  # in which the GPU did other work than these steps'

    def of(self, *what: str) -> pl.DataFrame:
        """The rows of some kinds."""
        return self.rows.filter(pl.col("what").is_in(what))

    def ns(self, *what: str) -> float:
        """Their time."""
        return math.fsum(self.of(*what)["ns"])

    @property
    def phases_known(self) -> bool:
        """Whether most of the work has a phase: that of a replayed CUDA graph has none."""
        unknown = math.fsum(self.rows.filter(pl.col("phase") == OTHER)["ns"])
        return unknown <= 0.5 * math.fsum(self.rows["ns"])


def timed_work(part: TracedSteps, step_ns: float, idle: Idle) -> TimedWork:
    """Sort the work of the steps; together with the idle time it fills steps of `step_ns`."""
    n = len(part.steps)
    own_ns = int(part.totals["own_ns"].sum())
    busy_ns = part.high_ns - part.low_ns - part.idle.total_ns
    scale = (step_ns * n - idle.total_ns) / busy_ns if busy_ns else 1.0
    hidden = pl.col("duration_ns") - pl.col("own_ns")
    rows = part.totals.with_columns(
        _what().alias("what"), ns=pl.col("own_ns") * (scale / n), hidden_ns=hidden * (scale / n)
    )
    elsewhere_ns = (busy_ns - own_ns) * scale / n
    return TimedWork(rows=rows, shapes=part.whole.shapes, n=n, step_ns=step_ns, scale=scale, elsewhere_ns=elsewhere_ns)


def _what() -> pl.Expr:
    """The first that holds. A memset inside a product or inside attention is the library's, and goes with it."""
    kind, phase, helps = pl.col("class"), pl.col("phase"), pl.col("class") == MEMORY
    cases = (
        (kind == COMMUNICATION, COMMUNICATES),
        (pl.col("name").is_in(list(NAMES)), MOVES_TO_HOST),
        (phase == RECOMPUTE, AGAIN),
        ((phase == OPTIMIZER) | (kind == OPTIMIZER_KERNEL), UPDATE),
        (pl.col("source") == "graph run", GRAPH),
        ((kind == MATMUL) | (helps & pl.col("op").is_in(MATMULS)), PRODUCTS),
        ((kind == ATTENTION) | (helps & pl.col("op").is_in(ATTENTIONS)), FUSED),
        (in_core(), CORE),
        (kind.is_in([COPY, REDUCTION]) & pl.col("name").str.contains(_TO_FP8), CASTS),
    )
    expression = pl.lit(MOVING)
    for holds, what in reversed(cases):
        expression = pl.when(holds.fill_null(False)).then(pl.lit(what)).otherwise(expression)
    return expression
