"""What a user is shown of a comparison."""

from collections.abc import Sequence
from statistics import median

from flopwise import units
from flopwise.records.comparison import Comparison
from flopwise.records.run import STEP, Point
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.render.visible import LONGEST_LINE


def comparison_view(
    pairs: Sequence[tuple[Point, Point, Comparison]],
    only_a: Sequence[Point],
    only_b: Sequence[Point],
    phase: str = STEP,
    clock: str = "wall",
) -> View:
    """One row per pair: the ratio B / A with its interval, and the verdict."""
    rows = [
        {
            "a": a.trial.workload.label(),
            "b": b.trial.workload.label(),
            "a_ns": _median_ns(a, phase, clock),
            "b_ns": _median_ns(b, phase, clock),
            "ratio": c.ratio,
            "ratio_low": c.low,
            "ratio_high": c.high,
            "verdict": c.verdict,
            "reason": c.reason,
            "paired": c.paired,
            "n_a": c.n_a,
            "n_b": c.n_b,
        }
        for a, b, c in pairs
    ]
    same = all(row["a"] == row["b"] for row in rows)
    columns = [Column("a", "workload" if same else "A", right=False)] + (
        [] if same else [Column("b", "B", right=False)]
    )
    columns += [Column("a_ns", "A ms", units.milliseconds), Column("b_ns", "B ms", units.milliseconds)]
    columns += [
        Column("ratio", "B / A", _ratio),
        Column("ratio_low", "low", _ratio),
        Column("ratio_high", "high", _ratio),
    ]
    columns += [Column("verdict", "B is", right=False), Column("reason", "why", right=False, longest=LONGEST_LINE)]
    notes = [
        f"only in {name}: {p.trial.workload.label()}" for name, points in (("A", only_a), ("B", only_b)) for p in points
    ]
    what = f"{phase}, {clock} clock"
    taken = "in turns" if pairs and all(c.paired and a != b for a, b, c in pairs) else "one after the other"
    table = Table(
        title=f"B against A: {what}, ratio of medians with its 95 % interval, measured {taken}",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(notes),
    )
    content = document(
        "compare",
        what=what,
        pairs=rows,
        only_a=[p.trial.workload.label() for p in only_a],
        only_b=[p.trial.workload.label() for p in only_b],
    )
    return [table], content


def _median_ns(point: Point, phase: str, clock: str) -> float | None:
    times = point.times(phase)
    samples = getattr(times, f"{clock}_ns") if times else ()
    return median(samples) if samples else None


def _ratio(value: float) -> str:
    return f"{value:.3f}"
