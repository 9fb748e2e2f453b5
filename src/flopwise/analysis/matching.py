"""Which points of two runs belong together, and how one compares with the other."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from flopwise.analysis.clocks import LAUNCH, phase_bound
from flopwise.analysis.comparison import Sides, compare_each
from flopwise.analysis.hosts import different_environments
from flopwise.capture.stopping import DECIDED, PROCESSES
from flopwise.records.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.records.printed import Printed
from flopwise.records.run import INTERRUPTED, OK, STEP, Point
from flopwise.spec import fields
from flopwise.spec.recipe import Recipe
from flopwise.statistics import ERROR_RATE, LOOKS, error_rate_at

CLOCKS = ("wall", "gpu", "launch")
Points = dict[int, Point]  # by their place in the run
Matched = tuple[list[tuple[Point, Point]], list[Point], list[Point]]


@dataclass(frozen=True, repr=False)
class Compared(Printed):
    """Two runs: the pairs that were found, and what had no partner."""

    pairs: tuple[tuple[Point, Point, Comparison], ...]
    only_a: tuple[Point, ...] = ()
    only_b: tuple[Point, ...] = ()
    phase: str = STEP
    clock: str = "wall"
    clocks: Mapping[str, Comparison] = field(default_factory=dict)  # of a single pair, by every clock that both have
    damage: tuple[str, ...] = ()  # rows of A or B that are lost: "B: …"
    mixed: bool = False  # a gate judges A and B of different environments, too

    @property
    def across(self) -> str:
        """How the environments of A and B differ; '' where they do not."""
        return different_environments([(a, b) for a, b, _ in self.pairs])

    def refused(self, fail_above: float | None) -> str:
        """Why a gate does not judge: a time of another machine is no baseline. '' where it does."""
        gated = fail_above is not None and not self.mixed and self.across
        return f"the gate does not judge: {self.across}" if gated else ""

    def exit_code(self, fail_above: float | None = None) -> int:
        """1: B is slower by more than `fail_above`; 3: a verdict is inconclusive, or a gate cannot judge; else 0."""
        if self.refused(fail_above):
            return 3
        ratios = [(c.ratio or 0.0, c.verdict) for _, _, c in self.pairs]
        if fail_above is not None and any(verdict == SLOWER and ratio > 1 + fail_above for ratio, verdict in ratios):
            return 1
        lacking = fail_above is not None and (self.only_a or self.damage)
        return 3 if lacking or any(verdict == INCONCLUSIVE for _, verdict in ratios) else 0

    def headline(self) -> str:
        verdicts = Counter(found.verdict for _, _, found in self.pairs)
        return "B compared with A: " + ", ".join(f"{n} {word}" if n > 1 else word for word, n in verdicts.items())


def match(points_a: Sequence[Point], points_b: Sequence[Point]) -> Matched:
    """Pairs, what only A has, what only B has; a point that failed is matched too, so that 'oom -> ok' can be shown.

    Rules, each for what the earlier ones left: the same trial; the only point of each run; the same workload but for
    its recipe; the same label (on the same device, then on any), whatever the sampling; and if nothing matched so far,
    the only usable point of each run. A rule pairs only what is unique in its run: a guess between two would compare what
    nobody asked for. (A trial measured twice is paired in the order measured.) Pairs follow A's order.
    """
    runs = dict(enumerate(points_a)), dict(enumerate(points_b))
    left_a, left_b = runs[0].copy(), runs[1].copy()
    pairs: dict[int, tuple[Point, Point]] = {}

    def pair(among: tuple[Points, Points], identity: Callable[[Point], Hashable]) -> None:
        if not left_a or not left_b:
            return
        unique_a, unique_b = (_unique(points, identity) for points in among)
        for key in unique_a.keys() & unique_b.keys():
            i, j = unique_a[key], unique_b[key]
            if i in left_a and j in left_b:
                pairs[i] = left_a.pop(i), left_b.pop(j)

    sizes: dict[Hashable, list[int]] = {}
    for j, point in runs[1].items():
        sizes.setdefault(_size(point), []).append(j)
    for i, point in runs[0].items():
        alike = sizes.get(_size(point), [])
        same = next((j for j in alike if runs[1][j].trial == point.trial), None)
        if same is not None:
            alike.remove(same)
            pairs[i] = left_a.pop(i), left_b.pop(same)
    if len(points_a) == len(points_b) == 1:
        pair((left_a, left_b), lambda point: "the only one")
    pair(runs, _workload_but_recipe)
    pair((left_a, left_b), lambda point: (point.trial.workload.label(), point.trial.device))
    pair((left_a, left_b), lambda point: point.trial.workload.label())
    if not pairs:
        pair((_usable(left_a), _usable(left_b)), lambda point: "the only one")
    return [pairs[i] for i in sorted(pairs)], list(left_a.values()), list(left_b.values())


def _size(point: Point) -> Hashable:
    """What equal trials have in common, and few others."""
    work = point.trial.workload
    return work.target, work.batch, work.context, work.recipe


def _unique(points: Points, identity: Callable[[Point], Hashable]) -> dict[Hashable, int]:
    """The places of those whose identity no other has."""
    keys = {i: identity(point) for i, point in points.items()}
    times = Counter(keys.values())
    return {key: i for i, key in keys.items() if times[key] == 1}


def _usable(points: Points) -> Points:
    return {i: p for i, p in points.items() if p.status == OK and (times := p.times()) and times.wall_ns}


def _workload_but_recipe(point: Point) -> bytes:
    plain = msgspec.structs.replace(point.trial.workload, recipe=Recipe())
    return msgspec.json.encode(plain, order="deterministic")


def compare_points(
    a: Point,
    b: Point,
    phase: str = STEP,
    clock: str = "wall",
    *,
    threshold: float = 0.03,
    error_rate: float = ERROR_RATE,
) -> Comparison:
    """One phase of two points by one clock; paired where they were measured against each other.

    A point is no different from itself; one that has no samples leaves it inconclusive, and says why.
    """
    return compare_all([(a, b)], phase, clock, threshold=threshold, error_rate=error_rate)[0]


def compare_all(
    pairs: Sequence[tuple[Point, Point]],
    phase: str = STEP,
    clock: str = "wall",
    *,
    threshold: float = 0.03,
    error_rate: float = ERROR_RATE,
) -> list[Comparison]:
    """`compare_points` of each pair, all at once."""
    fields.one_of("clock", clock, CLOCKS)
    asked = [_asked(a, b, phase, clock, error_rate) for a, b in pairs]
    found = iter(compare_each([one for one in asked if isinstance(one, Sides)], threshold))
    return [
        one if isinstance(one, Comparison) else _with_load(_with_bound(next(found), a, b, phase, clock), a, b)
        for one, (a, b) in zip(asked, pairs, strict=True)
    ]


def _asked(a: Point, b: Point, phase: str, clock: str, error_rate: float) -> Sides | Comparison:
    """The samples to compare; or the answer, where there is none to ask of them."""
    samples_a, samples_b = _samples(a, phase, clock), _samples(b, phase, clock)
    paired = a == b or bool(a.key and b.paired_with == a.key) or bool(b.key and a.paired_with == b.key)
    if problem := _problem({"A": (a, samples_a), "B": (b, samples_b)}, phase, clock, paired):
        return _without_ratio(INCONCLUSIVE, problem, len(samples_a), len(samples_b), paired)
    if a == b:
        same = _without_ratio(NO_DIFFERENCE, "the same point", len(samples_a), len(samples_b), paired)
        return msgspec.structs.replace(same, ratio=1.0, low=1.0, high=1.0)
    of_a, of_b = (_by_process(point, phase, clock) for point in (a, b))
    if paired:
        error_rate = _spent(b, min(len(of_a), len(of_b)), error_rate)
    return Sides(of_a, of_b, paired, a.together and b.together, error_rate)


def _with_load(found: Comparison, a: Point, b: Point) -> Comparison:
    """One that is slower and alone had to share its machine may be slower by that: nothing is shown then."""
    slower = {FASTER: (a, b), SLOWER: (b, a)}.get(found.verdict)
    if found.paired or slower is None or not slower[0].busy_cores or slower[1].busy_cores:
        return found
    name = "A" if slower[0] is a else "B"
    reason = f"{name} was measured on a busy machine, which alone can make it slower"
    return msgspec.structs.replace(
        found, verdict=INCONCLUSIVE, reason=reason, settle=f"measure {name} again on an idle machine"
    )


def _problem(sides: Mapping[str, tuple[Point, tuple[int, ...]]], phase: str, clock: str, paired: bool) -> str:
    """Why the two cannot be compared; '' if they can."""
    missing = [
        f"{name} has no samples: {_why(point, phase, clock)}" for name, (point, samples) in sides.items() if not samples
    ]
    if missing:
        return "; ".join(missing)
    if min(min(samples) for _, samples in sides.values()) <= 0:
        return f"a sample of the {clock} clock is zero or below: too short for it"
    if not paired and len({bool(point.paired_with) for point, _ in sides.values()}) == 2:
        return "one was measured beside another step, the other alone: measure both alike"
    return ""


def compare_clocks(a: Point, b: Point, phase: str = STEP, *, threshold: float = 0.03) -> dict[str, Comparison]:
    """By every clock that both have: each with a verdict of its own, as one may be certain where another is not."""
    read = [clock for clock in CLOCKS if all(_samples(point, phase, clock) for point in (a, b))]
    return {clock: compare_points(a, b, phase, clock, threshold=threshold) for clock in read}


def compare_within(points: Sequence[Point]) -> Compared | None:
    """Two workloads that were measured against each other; None where they were not, or one of them has no samples."""
    if len(points) != 2 or points[1].paired_with != points[0].key or not all(point.phases for point in points):
        return None
    a, b = points
    return Compared(((a, b, compare_points(a, b)),), clocks=compare_clocks(a, b))


def what_changed(clocks: Mapping[str, Comparison]) -> str:
    """Which of the GPU's work and the host's launching B changes, where the wall clock alone would mislead; else ''.

    >>> faster = Comparison(ratio=0.8, low=0.7, high=0.9, verdict=FASTER, reason="", n_a=9, n_b=9, paired=True)
    >>> same = Comparison(ratio=1.0, low=0.9, high=1.1, verdict=INCONCLUSIVE, reason="", n_a=9, n_b=9, paired=True)
    >>> what_changed({"wall": same, "gpu": faster, "launch": same})
    "B changes the GPU's work, to 0.800 of A's time; the wall time does not show it"
    """
    changed = {clock: found for clock, found in clocks.items() if found.verdict in (FASTER, SLOWER)}
    gpu, launch = changed.get("gpu"), changed.get("launch")
    if gpu is not None and "wall" not in changed:
        return f"B changes the GPU's work, to {gpu.ratio:.3f} of A's time; the wall time does not show it"
    if "wall" in changed and gpu is None and launch is not None and "gpu" in clocks:
        return "B changes what the host does; no change of the GPU's own work is shown"
    return ""


def _by_process(point: Point, phase: str, clock: str) -> list[tuple[int, ...]]:
    times = point.times(phase)
    assert times is not None
    return times.by_process(clock)


def _spent(point: Point, pairs: int, error_rate: float) -> float:
    """What of the error rate a verdict may spend where sampling stopped: all of it where the number was given before.

    Whoever stopped it may have seen how it stood: that spends the least share.
    """
    if point.stopped == INTERRUPTED:
        return error_rate_at(min(LOOKS), True, error_rate)
    return error_rate if point.stopped == PROCESSES else error_rate_at(pairs, point.stopped == DECIDED, error_rate)


def _with_bound(found: Comparison, a: Point, b: Point, phase: str, clock: str) -> Comparison:
    """Of an inconclusive wall time that launching dictates: what else would settle it."""
    if found.verdict != INCONCLUSIVE or clock != "wall" or not found.settle:
        return found
    if not any(phase_bound(point, phase) == LAUNCH for point in (a, b)):
        return found
    settle = f"{found.settle}; or graph = on for both: the time to launch kernels dictates this step"
    return msgspec.structs.replace(found, settle=settle)


def _samples(point: Point, phase: str, clock: str) -> tuple[int, ...]:
    times = point.times(phase)
    return () if times is None else {"wall": times.wall_ns, "launch": times.launch_ns, "gpu": times.gpu_ns}[clock]


def _why(point: Point, phase: str, clock: str) -> str:
    if point.status != OK:
        return f"{point.status}, {point.reason}" if point.reason else point.status
    if point.times(phase) is None:
        return f"the phase '{phase}' was not measured"
    return f"the {clock} clock was not read"


def _without_ratio(verdict: str, reason: str, n_a: int, n_b: int, paired: bool) -> Comparison:
    return Comparison(
        ratio=None, low=None, high=None, verdict=verdict, reason=reason, n_a=n_a, n_b=n_b, paired=paired, drift=0.0
    )
