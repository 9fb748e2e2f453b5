"""Is B faster than A?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flopwise.analysis.matching import CLOCKS, compare_clocks, compare_points, match
from flopwise.errors import FlopwiseError
from flopwise.records.comparison import INCONCLUSIVE, SLOWER, Comparison
from flopwise.records.run import STEP, PhaseTimes, Point
from flopwise.spec import fields
from flopwise.store import StoredRun, find, runs_root


@dataclass(frozen=True)
class Compared:
    """The pairs that were found, and what had no partner."""

    pairs: tuple[tuple[Point, Point, Comparison], ...]
    only_a: tuple[Point, ...] = ()
    only_b: tuple[Point, ...] = ()
    clocks: Mapping[str, Comparison] = field(default_factory=dict)  # of a single pair, by every clock that both have

    def exit_code(self, fail_above: float | None = None) -> int:
        """1: B is slower by more than `fail_above`; 3: some verdict is inconclusive; else 0."""
        ratios = [(c.ratio or 0.0, c.verdict) for _, _, c in self.pairs]
        if fail_above is not None and any(verdict == SLOWER and ratio > 1 + fail_above for ratio, verdict in ratios):
            return 1
        return 3 if any(verdict == INCONCLUSIVE for _, verdict in ratios) else 0


def compare(
    a: str | Path | StoredRun,
    b: str | Path | StoredRun,
    *,
    phase: str = STEP,
    clock: str = "wall",
    threshold: float = 0.03,
    runs: str | Path | None = None,
) -> Compared:
    """Compare two runs, point by point.

    >>> flopwise.compare("last~1", "last").pairs[0][2].verdict       # doctest: +SKIP
    'faster'
    """
    fields.one_of("clock", clock, CLOCKS)
    root = runs_root(runs)
    first, second = (x if isinstance(x, StoredRun) else StoredRun.load(find(x, root)) for x in (a, b))
    pairs, only_a, only_b = match(first.points, second.points)
    if not pairs:
        raise FlopwiseError(
            f"{first.header.id} and {second.header.id} have no workload in common", "compare runs of the same workloads"
        )
    _check_measured([times for pair in pairs for point in pair for times in point.phases], phase, clock)
    compared = tuple((x, y, compare_points(x, y, phase=phase, clock=clock, threshold=threshold)) for x, y in pairs)
    clocks = compare_clocks(*pairs[0], phase, threshold=threshold) if len(pairs) == 1 else {}
    return Compared(compared, tuple(only_a), tuple(only_b), clocks)


def _check_measured(times: list[PhaseTimes], phase: str, clock: str) -> None:
    """Refuse a phase or a clock that no point has, where there are any samples."""
    phases = dict.fromkeys(one.phase for one in times)
    if times and phase not in phases:
        raise FlopwiseError(
            f"phase = {fields.show(phase)} was not measured in these runs", f"allowed: {', '.join(phases)}"
        )
    if times and not any(getattr(one, f"{clock}_ns") for one in times):
        raise FlopwiseError(f"clock = '{clock}' was not read in these runs", "on the CPU there is the wall clock alone")


def compare_within(run: StoredRun) -> Compared | None:
    """Compare the two workloads of a run that were measured against each other; None if one of them has no samples."""
    if len(run.points) != 2 or not all(point.phases for point in run.points):
        return None
    a, b = run.points
    return Compared(((a, b, compare_points(a, b)),), clocks=compare_clocks(a, b))
