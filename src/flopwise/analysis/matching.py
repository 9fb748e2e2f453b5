"""Which points of two runs belong together, and how one compares with the other."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import msgspec

from flopwise.analysis.comparison import compare_samples
from flopwise.records.comparison import INCONCLUSIVE, NO_DIFFERENCE, Comparison
from flopwise.records.run import OK, STEP, Point
from flopwise.spec import fields
from flopwise.spec.recipe import Recipe

CLOCKS = ("wall", "gpu", "launch")

Matched = tuple[list[tuple[Point, Point]], list[Point], list[Point]]


def match(points_a: Sequence[Point], points_b: Sequence[Point]) -> Matched:
    """Pairs, what only A has, what only B has; a point that failed is matched too, so that 'oom -> ok' can be shown.

    Rules, each for what the earlier ones left: the same trial; the only point of each run; the same workload but for
    its recipe; the same label (on the same device, then on any), whatever the sampling; and if nothing matched so far,
    the only usable point of each run. But for the first, a rule pairs only what is unique in its run: a guess between
    two would compare what nobody asked for. Pairs follow A's order.
    """
    rest_a, rest_b = list(points_a), list(points_b)
    pairs = _pair_same_trial(rest_a, rest_b)
    if len(points_a) == len(points_b) == 1:
        pairs += _pair_unique(rest_a, rest_b, rest_a, rest_b, lambda point: "the only one")
    pairs += _pair_unique(rest_a, rest_b, points_a, points_b, _workload_but_recipe)
    pairs += _pair_unique(rest_a, rest_b, rest_a, rest_b, lambda p: (p.trial.workload.label(), p.trial.device))
    pairs += _pair_unique(rest_a, rest_b, rest_a, rest_b, lambda p: p.trial.workload.label())
    if not pairs:
        usable_a, usable_b = [p for p in rest_a if _usable(p)], [p for p in rest_b if _usable(p)]
        pairs += _pair_unique(rest_a, rest_b, usable_a, usable_b, lambda point: "the only one")
    order = {id(point): i for i, point in enumerate(points_a)}
    return sorted(pairs, key=lambda pair: order[id(pair[0])]), rest_a, rest_b


def _usable(point: Point) -> bool:
    times = point.times()
    return point.status == OK and times is not None and bool(times.wall_ns)


def _workload_but_recipe(point: Point) -> bytes:
    plain = msgspec.structs.replace(point.trial.workload, recipe=Recipe())
    return msgspec.json.encode(plain, order="deterministic")


def _pair_same_trial(rest_a: list[Point], rest_b: list[Point]) -> list[tuple[Point, Point]]:
    """A trial measured twice in each run is paired in the order measured."""
    waiting: dict[str, list[Point]] = defaultdict(list)
    for point in rest_b:
        waiting[point.trial.key()].append(point)
    same = [(point, queue.pop(0)) for point in rest_a if (queue := waiting[point.trial.key()])]
    _take(rest_a, rest_b, same)
    return same


def _pair_unique(
    rest_a: list[Point],
    rest_b: list[Point],
    among_a: Sequence[Point],
    among_b: Sequence[Point],
    identity: Callable[[Point], Hashable],
) -> list[tuple[Point, Point]]:
    """Pair points left in both that share an identity which no other among theirs has."""
    unique_a, unique_b = _unique(among_a, identity), _unique(among_b, identity)
    left = {id(point) for point in (*rest_a, *rest_b)}
    same = [
        (a, b)
        for key, a in unique_a.items()
        if (b := unique_b.get(key)) is not None and id(a) in left and id(b) in left
    ]
    _take(rest_a, rest_b, same)
    return same


def _unique(points: Sequence[Point], identity: Callable[[Point], Hashable]) -> dict[Hashable, Point]:
    groups: dict[Hashable, list[Point]] = defaultdict(list)
    for point in points:
        groups[identity(point)].append(point)
    return {key: group[0] for key, group in groups.items() if len(group) == 1}


def _take(rest_a: list[Point], rest_b: list[Point], pairs: list[tuple[Point, Point]]) -> None:
    taken_a, taken_b = {id(a) for a, _ in pairs}, {id(b) for _, b in pairs}
    rest_a[:] = [p for p in rest_a if id(p) not in taken_a]
    rest_b[:] = [p for p in rest_b if id(p) not in taken_b]


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
