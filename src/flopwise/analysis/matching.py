"""Which points of two runs belong together, and how one compares with the other."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import msgspec

from flopwise.analysis.comparison import compare_samples
from flopwise.records.comparison import INCONCLUSIVE, NO_DIFFERENCE, Comparison
from flopwise.records.run import OK, STEP, Point
from flopwise.spec import fields
from flopwise.spec.recipe import Recipe

CLOCKS = ("wall", "gpu", "launch")
Points = dict[int, Point]  # by their place in the run
Matched = tuple[list[tuple[Point, Point]], list[Point], list[Point]]


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
        unique_a, unique_b = (_unique(points, identity) for points in among)
        for key in unique_a.keys() & unique_b.keys():
            i, j = unique_a[key], unique_b[key]
            if i in left_a and j in left_b:
                pairs[i] = left_a.pop(i), left_b.pop(j)

    for i, point in runs[0].items():
        same = next((j for j, other in left_b.items() if other.trial == point.trial), None)
        if same is not None:
            pairs[i] = left_a.pop(i), left_b.pop(same)
    if len(points_a) == len(points_b) == 1:
        pair((left_a, left_b), lambda point: "the only one")
    pair(runs, _workload_but_recipe)
    pair((left_a, left_b), lambda point: (point.trial.workload.label(), point.trial.device))
    pair((left_a, left_b), lambda point: point.trial.workload.label())
    if not pairs:
        pair((_usable(left_a), _usable(left_b)), lambda point: "the only one")
    return [pairs[i] for i in sorted(pairs)], list(left_a.values()), list(left_b.values())


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
    a: Point, b: Point, phase: str = STEP, clock: str = "wall", *, threshold: float = 0.03
) -> Comparison:
    """One phase of two points by one clock; paired where the two were interleaved.

    A point is no different from itself; one that has no samples leaves it inconclusive, and says why.
    """
    fields.one_of("clock", clock, CLOCKS)
    samples_a, samples_b = _samples(a, phase, clock), _samples(b, phase, clock)
    paired = a == b or bool(a.key and b.paired_with == a.key) or bool(b.key and a.paired_with == b.key)
    missing = [
        f"{name} has no samples: {_why(point, phase, clock)}"
        for name, point, samples in (("A", a, samples_a), ("B", b, samples_b))
        if not samples
    ]
    if not missing and min(*samples_a, *samples_b) <= 0:
        missing = [f"a sample of the {clock} clock is zero: too short for it"]
    if missing:
        return _without_ratio(INCONCLUSIVE, "; ".join(missing), len(samples_a), len(samples_b), paired)
    if a == b:
        same = _without_ratio(NO_DIFFERENCE, "the same point", len(samples_a), len(samples_b), paired)
        return msgspec.structs.replace(same, ratio=1.0, low=1.0, high=1.0)
    return compare_samples(samples_a, samples_b, paired=paired, threshold=threshold)


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
