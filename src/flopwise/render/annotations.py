"""A comparison as GitHub's annotations: lines that a workflow's log turns into marks on a pull request."""

from collections.abc import Sequence

from flopwise import units
from flopwise.records.comparison import INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.records.run import Point
from flopwise.render.visible import LONGEST_LINE, visible

_TITLE = "flopwise compare"


def annotations(
    pairs: Sequence[tuple[Point, Point, Comparison]],
    only_a: Sequence[Point],
    only_b: Sequence[Point],
    fail_above: float | None,
) -> str:
    """`::error` where the gate fails, `::warning` where nothing can be said or B is slower, `::notice` for the rest."""
    lines = [_annotation(_level(c, fail_above), _said(b, c, fail_above)) for _, b, c in pairs]
    lines += [_annotation("warning", f"{p.trial.workload.label()}: only in A, not compared") for p in only_a]
    lines += [_annotation("notice", f"{p.trial.workload.label()}: only in B, not compared") for p in only_b]
    return "\n".join(lines) + "\n" if lines else ""


def _level(c: Comparison, fail_above: float | None) -> str:
    if c.verdict == SLOWER:
        return "error" if fail_above is not None and (c.ratio or 0.0) > 1 + fail_above else "warning"
    return "warning" if c.verdict == INCONCLUSIVE else "notice"


def _said(b: Point, c: Comparison, fail_above: float | None) -> str:
    label = b.trial.workload.label()
    if c.ratio is None:
        return f"{label}: {c.verdict}: {c.reason}"
    interval = f", 95 % interval {c.low:.3f} to {c.high:.3f}" if c.low is not None and c.high is not None else ""
    gate = f"; the gate is {units.percent(fail_above)}" if fail_above is not None else ""
    why = f": {c.reason}" if c.reason else ""
    verdict = {NO_DIFFERENCE: "no difference is shown", INCONCLUSIVE: "the comparison is inconclusive"}
    return f"{label}: {verdict.get(c.verdict, f'B is {c.verdict}')}, B takes {c.ratio:.3f} times A's time{interval}{gate}{why}"


def _annotation(level: str, message: str) -> str:
    """One line; what would end it, or begin another command, is written as GitHub wants it.

    >>> _annotation("error", "10 % slower\\n::warning::no")
    '::error title=flopwise compare::10 %25 slower␊::warning::no'
    """
    return f"::{level} title={_TITLE}::{visible(message, LONGEST_LINE).replace('%', '%25')}"
