"""A comparison of two runs: a table, or annotations for a pull request on GitHub."""

from collections.abc import Mapping, Sequence

from flopwise import units
from flopwise.analysis.hosts import different_hosts, several_environments, several_hosts
from flopwise.analysis.loop_notes import while_busy
from flopwise.analysis.matching import Compared, what_changed
from flopwise.records.comparison import INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.records.run import Point
from flopwise.records.table import Column, Table
from flopwise.render.json import document, picked
from flopwise.render.table import View, columns, saying
from flopwise.render.visible import LONGEST_LINE, visible
from flopwise.statistics import level

Pairs = Sequence[tuple[Point, Point, Comparison]]

_VERDICTS = {NO_DIFFERENCE: "no difference is shown", INCONCLUSIVE: "the comparison is inconclusive"}


def comparison_view(compared: Compared) -> View:
    """One row per pair: both times, the ratio with its interval, and the verdict; of a single pair, one for every clock."""
    pairs, phase, clock, clocks = compared.pairs, compared.phase, compared.clock, compared.clocks
    asked = [(clock, pair) for pair in pairs]
    every = [(name, (a, b, found)) for a, b, _ in pairs[:1] for name, found in clocks.items()]
    by_clock = len(pairs) == 1 and len(clocks) > 1
    told = {key: [_row(pair, phase, of) for of, pair in some] for key, some in (("pairs", asked), ("clocks", every))}
    rows = tuple(told["clocks" if by_clock else "pairs"])
    paired = _paired(pairs)
    alone = {"only_a": list(map(_label, compared.only_a)), "only_b": list(map(_label, compared.only_b))}
    what = phase if by_clock else f"{phase}, {clock} clock"
    across = compared.across
    title = f"B compared with A{' across environments' if across else ''}: {what}, with 95 % intervals, {_how(pairs, paired)}"
    missing = [f"only in {key[-1].upper()}: {label}" for key in alone for label in alone[key]]
    where = (*([across] if across else []), *_hosts(pairs), *_busy(pairs))
    notes = (*compared.damage, *where, *missing, *_notes(pairs, clocks, paired))
    table = Table("comparison", title, _columns(rows, by_clock, paired), rows, notes)
    content = document("compare", what=what, **told, **alone, damage=compared.damage, across=across, notes=notes)
    return saying(View([table], content), compared.damage)


def _hosts(pairs: Pairs) -> list[str]:
    """Whether A and B, or the points of one of them, were measured on different machines of a cluster."""
    sides = {"A": [a for a, _, _ in pairs], "B": [b for _, b, _ in pairs]}
    both = [(a, b) for a, b, _ in pairs]
    kinds = (several_hosts, several_environments)
    within = [f"{side}: {said}" for side, points in sides.items() for kind in kinds if (said := kind(points))]
    return [said for said in (different_hosts(both), *within) if said]


def _busy(pairs: Pairs) -> list[str]:
    """Which side was measured on a busy machine."""
    sides = {"A": [a for a, _, _ in pairs], "B": [b for _, b, _ in pairs]}
    busiest = {side: max(points, key=lambda one: one.busy_cores, default=None) for side, points in sides.items()}
    return [f"{side}: {while_busy(one)}" for side, one in busiest.items() if one is not None and one.busy_cores]


def _paired(pairs: Pairs) -> bool:
    return bool(pairs) and all(c.paired and a != b for a, b, c in pairs)


def _columns(rows: Sequence[Mapping[str, object]], by_clock: bool, paired: bool) -> tuple[Column, ...]:
    same = all(row["a"] == row["b"] for row in rows)
    names = ("clock | " if by_clock else "") + ("a: workload" if same else "a: A | b: B")
    ratios = (
        f"ratio: {'paired ratio' if paired else 'B / A'} [ratio] | ratio_low: low [ratio] | ratio_high: high [ratio]"
    )
    heading = f"{names} | a_ns: A [ms] | b_ns: B [ms] | {ratios} | verdict: B is | reason"
    return columns(heading, keep="a_ns b_ns ratio verdict")


def _how(pairs: Pairs, paired: bool) -> str:
    """Where the numbers are from."""
    n = [len(times.by_process("wall")) for pair in pairs for one in pair[:2] if (times := one.times()) is not None] or [
        0
    ]
    counted = f"{min(n)}" if n and min(n) == max(n) else f"{min(n, default=0)} to {max(n, default=0)}"
    if not paired:
        return f"one run after the other, {counted} {'process' if counted == '1' else 'processes'} each"
    where = "beside each other" if all(a.together for a, _, _ in pairs) else "one after the other"
    return f"{counted} {'pair' if counted == '1' else 'pairs'} of processes {where}"


def _notes(pairs: Pairs, clocks: Mapping[str, Comparison], paired: bool) -> list[str]:
    """What the lever changes, what would settle an open verdict, and what the ratio is a ratio of."""
    settle = dict.fromkeys(c.settle for _, _, c in pairs if c.settle)
    notes = [what_changed(clocks), *(f"what would settle it: {text}" for text in settle)]
    if paired:
        notes.append(
            "paired ratio: of steps run next to each other, its mean over the pairs of processes; "
            "A and B: means of the processes' medians"
        )
    return [note for note in notes if note]


def _row(pair: tuple[Point, Point, Comparison], phase: str, clock: str) -> dict[str, object]:
    a, b, c = pair
    times = {"clock": clock, "a_ns": _median_ns(a, phase, clock), "b_ns": _median_ns(b, phase, clock)}
    ratios = {"ratio": c.ratio, "ratio_low": c.low, "ratio_high": c.high}
    more = picked(c, "verdict reason settle paired n_processes n_a n_b")
    return {"a": _label(a), "b": _label(b)} | times | ratios | more


def _label(point: Point) -> str:
    return point.trial.workload.label()


def _median_ns(point: Point, phase: str, clock: str) -> float | None:
    times = point.times(phase)
    processes = times.by_process(clock) if times else [()]
    return level(processes) if all(processes) else None


def annotations(compared: Compared, fail_above: float | None) -> str:
    """`::error` where the gate fails, `::warning` where nothing can be said or B is slower, `::notice` for the rest."""
    lost, refused = "warning" if fail_above is None else "error", compared.refused(fail_above)
    gate = None if refused else fail_above
    lines = [_annotation("error" if refused else "warning", line) for line in (refused or compared.across,) if line]
    lines += [_annotation(_level(c, gate), _message(b, c, gate)) for _, b, c in compared.pairs]
    lines += [_annotation(lost, f"{_label(p)}: only in A, not compared") for p in compared.only_a]
    lines += [_annotation("notice", f"{_label(p)}: only in B, not compared") for p in compared.only_b]
    lines += [_annotation(lost, line) for line in compared.damage]
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
