"""Is B faster than A?"""

from pathlib import Path

from flopwise.analysis.matching import CLOCKS, Compared, compare_all, compare_clocks, match
from flopwise.errors import Damaged, FlopwiseError
from flopwise.records.run import STEP, PhaseTimes
from flopwise.spec import fields
from flopwise.store import StoredRun, find, runs_root


def compare(
    a: str | Path | StoredRun,
    b: str | Path | StoredRun,
    *,
    phase: str = STEP,
    clock: str | None = None,
    threshold: float = 0.03,
    mixed: bool = False,
    runs: str | Path | None = None,
) -> Compared:
    """Compare two runs, point by point; `clock` is wall, gpu or launch. Without one it is wall, and a single pair is also
    compared by every clock that both have. A gate (`exit_code`) judges runs of different GPUs, drivers or versions of torch only
    if `mixed`.

    >>> flopwise.compare("last~1", "last").pairs[0][2].verdict       # doctest: +SKIP
    'faster'
    """
    asked = "wall" if clock is None else clock
    fields.one_of("clock", asked, CLOCKS)
    root = runs_root(runs)
    first, second = (x if isinstance(x, StoredRun) else StoredRun.load(find(x, root)) for x in (a, b))
    pairs, only_a, only_b = match(first.points, second.points)
    damage = tuple(f"{side}: {lost}" for side, run in (("A", first), ("B", second)) for lost in run.damage())
    if not pairs and damage:
        raise Damaged(f"nothing is left to compare: {'; '.join(damage)}", "measure the damaged run again")
    if not pairs:
        raise FlopwiseError(
            f"{first.header.id} and {second.header.id} have no workload in common", "compare runs of the same workloads"
        )
    _check_measured([times for pair in pairs for point in pair for times in point.phases], phase, asked)
    found = compare_all(pairs, phase, asked, threshold=threshold)
    compared = tuple((x, y, one) for (x, y), one in zip(pairs, found, strict=True))
    clocks = compare_clocks(*pairs[0], phase, threshold=threshold) if len(pairs) == 1 and clock is None else {}
    return Compared(compared, tuple(only_a), tuple(only_b), phase, asked, clocks, damage, mixed)


def _check_measured(times: list[PhaseTimes], phase: str, clock: str) -> None:
    """Refuse a phase or a clock that no point has, where there are any samples."""
    phases = dict.fromkeys(one.phase for one in times)
    if times and phase not in phases:
        raise FlopwiseError(
            f"phase = {fields.show(phase)} was not measured in these runs", f"allowed: {', '.join(phases)}"
        )
    if times and not any(getattr(one, f"{clock}_ns") for one in times):
        raise FlopwiseError(f"clock = '{clock}' was not read in these runs", "on the CPU there is the wall clock alone")
