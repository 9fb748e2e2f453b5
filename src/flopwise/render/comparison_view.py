"""A comparison of two runs: a table, or annotations for a pull request on GitHub."""

from collections.abc import Sequence
from statistics import median

from flopwise import units
from flopwise.records.comparison import INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.records.run import STEP, Point
from flopwise.records.table import Table
from flopwise.render.json import document, picked
from flopwise.render.table import View, columns
from flopwise.render.visible import LONGEST_LINE, visible

Pairs = Sequence[tuple[Point, Point, Comparison]]

_VERDICTS = {NO_DIFFERENCE: "no difference is shown", INCONCLUSIVE: "the comparison is inconclusive"}


def comparison_view(
    pairs: Pairs, only_a: Sequence[Point], only_b: Sequence[Point], phase: str = STEP, clock: str = "wall"
) -> View:
    """One row per pair: the ratio B / A with its interval, and the verdict."""
    rows = tuple(_row(a, b, c, phase, clock) for a, b, c in pairs)
    same = all(row["a"] == row["b"] for row in rows)
    names = "a: workload" if same else "a: A | b: B"
    ratios = "ratio: B / A [ratio] | ratio_low: low [ratio] | ratio_high: high [ratio]"
    heading = f"{names} | {ratios} | verdict: B is | a_ns: A [ms] | b_ns: B [ms] | reason"
    alone = {"only_a": [_label(p) for p in only_a], "only_b": [_label(p) for p in only_b]}
    what = f"{phase}, {clock} clock"
    interleaved = bool(pairs) and all(c.paired and a != b for a, b, c in pairs)
    how = "interleaved runs" if interleaved else "one run after the other"
    title = f"B compared with A: {what}, ratio of medians with its 95 % interval, {how}"
    notes = tuple(f"only in {key[-1].upper()}: {label}" for key, labels in alone.items() for label in labels)
    table = Table("comparison", title, columns(heading), rows, notes)
    return View([table], document("compare", what=what, pairs=rows, **alone))


def _row(a: Point, b: Point, c: Comparison, phase: str, clock: str) -> dict[str, object]:
    times = {"a_ns": _median_ns(a, phase, clock), "b_ns": _median_ns(b, phase, clock)}
    ratios = {"ratio": c.ratio, "ratio_low": c.low, "ratio_high": c.high}
    return {"a": _label(a), "b": _label(b)} | times | ratios | picked(c, "verdict reason paired n_a n_b")


def _label(point: Point) -> str:
    return point.trial.workload.label()


def _median_ns(point: Point, phase: str, clock: str) -> float | None:
    times = point.times(phase)
    samples = getattr(times, f"{clock}_ns") if times else ()
    return median(samples) if samples else None


def annotations(pairs: Pairs, only_a: Sequence[Point], only_b: Sequence[Point], fail_above: float | None) -> str:
    """`::error` where the gate fails, `::warning` where nothing can be said or B is slower, `::notice` for the rest."""
    lines = [_annotation(_level(c, fail_above), _message(b, c, fail_above)) for _, b, c in pairs]
    lines += [_annotation("warning", f"{_label(p)}: only in A, not compared") for p in only_a]
    lines += [_annotation("notice", f"{_label(p)}: only in B, not compared") for p in only_b]
    return "\n".join(lines) + "\n" if lines else ""


def _level(c: Comparison, fail_above: float | None) -> str:
    if c.verdict == SLOWER:
        return "error" if fail_above is not None and (c.ratio or 0.0) > 1 + fail_above else "warning"
    return "warning" if c.verdict == INCONCLUSIVE else "notice"


def _message(b: Point, c: Comparison, fail_above: float | None) -> str:
    if c.ratio is None:
        return f"{_label(b)}: {c.verdict}: {c.reason}"
    interval = f", 95 % interval {c.low:.3f} to {c.high:.3f}" if c.low is not None and c.high is not None else ""
    gate = f"; the gate is {units.percent(fail_above)}" if fail_above is not None else ""
    verdict = _VERDICTS.get(c.verdict, f"B is {c.verdict}")
    why = f": {c.reason}" if c.reason else ""
    return f"{_label(b)}: {verdict}, B takes {c.ratio:.3f} times A's time{interval}{gate}{why}"


def _annotation(level: str, message: str) -> str:
    """One line; what would end it, or begin another command, is written as GitHub wants it.

    >>> _annotation("error", "10 % slower\\n::warning::no")
    '::error title=flopwise compare::10 %25 slower␊::warning::no'
    """
    return f"::{level} title=flopwise compare::{visible(message, LONGEST_LINE).replace('%', '%25')}"
