"""Is B faster than A? A ratio, its interval, and a verdict that is allowed to be 'inconclusive'.

A process is one observation, however many samples it took: two processes of the same code differ. The rule, why it is this
one, and how often it errs: docs/decisions/0003-median-and-bootstrap.md.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.resampling import FEWEST, Rows, Series, block_lengths, intervals, level_ranges, middles
from flopwise.statistics import (
    ERROR_RATE,
    Difference,
    Samples,
    checked,
    difference_of_groups,
    difference_of_pairs,
    each,
    log_ratio,
    middle,
    spreads_of_one,
    student,
)

NEGLIGIBLE = 0.005  # a smaller difference is none, however certain
MOST_ADVISED = 100  # processes: more would not be waited for
_MANY = 10_000  # degrees of freedom of what is not estimated


def compare_samples(
    a: Sequence[Samples],
    b: Sequence[Samples],
    *,
    paired: bool,
    together: bool = True,
    error_rate: float = ERROR_RATE,
    threshold: float = 0.03,
) -> Comparison:
    """Compare the samples of processes of A with those of processes of B.

    Paired: process i of A ran beside process i of B (`together`), or just before or after it; the ratio is the mean over the
    pairs. Otherwise it is that of the mean levels, and the interval is widened by how far the level moved within each run,
    since it may have moved as far between them. One process of each says nothing of how far processes differ: as far is
    assumed as its samples lie apart.

    >>> a = [[100, 101, 99, 100, 102, 98]] * 3
    >>> compare_samples(a, [[80, 81, 79, 80, 82, 78]] * 3, paired=True).verdict
    'faster'
    """
    return compare_each([Sides(a, b, paired, together, error_rate)], threshold)[0]


class Sides(NamedTuple):
    """What `compare_samples` is asked."""

    a: Sequence[Samples]
    b: Sequence[Samples]
    paired: bool
    together: bool = True
    error_rate: float = ERROR_RATE


def compare_each(asked: Sequence[Sides], threshold: float = 0.03) -> list[Comparison]:
    """`compare_samples` of each of many; what is resampled is resampled together."""
    read = [(_positive(one.a), _positive(one.b)) for one in asked]
    found: dict[int, Difference] = {}
    for rate in {one.error_rate for one in asked}:
        found |= _differences({i: (one, *read[i]) for i, one in enumerate(asked) if one.error_rate == rate}, rate)
    unpaired = [i for i, one in enumerate(asked) if not one.paired]
    moved = iter(each([np.log(np.concatenate(x)) for i in unpaired for x in read[i]], _moved))
    drifts = {i: math.hypot(next(moved), next(moved)) for i in unpaired}
    return [_compared(one, *read[i], found[i], drifts.get(i, 0.0), threshold) for i, one in enumerate(asked)]


def _differences(some: dict[int, tuple[Sides, list[Series], list[Series]]], rate: float) -> dict[int, Difference]:
    """Of all that share an error rate."""
    alone = {i: _alone(*one) for i, one in some.items()}
    noise = iter(each([x for series in alone.values() for x in series], partial(_noise, confidence=1 - rate)))
    return {i: _difference(*one, [next(noise) for _ in alone[i]]) for i, one in some.items()}


def _compared(
    asked: Sides, a: list[Series], b: list[Series], found: Difference, drift: float, threshold: float
) -> Comparison:
    found = Difference(center=found.center, half=found.half + drift, spread=found.spread)
    n_a, n_b = (sum(x.size for x in one) for one in (a, b))
    pairs = min(len(a), len(b))
    few = min(n_a, n_b) < FEWEST and pairs == 1
    verdict, reason = (
        (INCONCLUSIVE, f"too few samples: {n_a} and {n_b}, where each needs {FEWEST}")
        if few
        else _verdict(found, drift, threshold)
    )
    return Comparison(
        ratio=math.exp(found.center),
        low=_ratio_or_none(found.center - found.half),
        high=_ratio_or_none(found.center + found.half),
        verdict=verdict,
        reason=reason,
        n_a=n_a,
        n_b=n_b,
        paired=asked.paired,
        drift=math.expm1(drift),
        n_processes=pairs,
        spread=min(found.spread, 1e3),
        settle="" if verdict != INCONCLUSIVE else _more(found, pairs, asked.paired, threshold),
    )


def _positive(processes: Sequence[Samples]) -> list[Series]:
    """Every process's samples, all of them above zero."""
    series = each(processes, lambda rows: checked(rows, 0.95))
    if not series:
        raise FlopwiseError("there are no samples to compare", "measure at least one: a point that failed has none")
    if min(x.min() for x in series) <= 0:
        raise FlopwiseError(
            "a sample is zero, so there is no ratio to give", "compare a clock that ran, such as 'wall'"
        )
    return series


def _alone(asked: Sides, a: list[Series], b: list[Series]) -> list[Series]:
    """Of single processes, the logarithms whose noise is also that of the processes; none where there are several."""
    if min(len(a), len(b)) > 1:
        return []
    if not asked.paired:
        return [np.log(np.concatenate(one)) for one in (a, b)]
    logs = [np.log(a[0]), np.log(b[0])]
    return [logs[1] - logs[0]] if asked.together and logs[0].size == logs[1].size else logs


class _Noise(NamedTuple):
    """How far one process may lie from another, and its median from where it would be without noise."""

    n: int
    spread: float
    half: float


def _noise(x: Rows, confidence: float) -> list[_Noise]:
    columns = (spreads_of_one(x).tolist(), _halves(x, confidence).tolist())
    return [_Noise(x.shape[1], spread, half) for spread, half in zip(*columns, strict=True)]


def _halves(x: Rows, confidence: float) -> Series:
    """Half the interval of a median of few or correlated samples: the wider side, as few have lopsided ones by chance."""
    x = x - middles(x)[:, None]
    farthest = np.take_along_axis(x, np.argmax(np.abs(x), axis=1)[:, None], axis=1)
    if x.shape[1] < FEWEST:
        return np.abs(farthest[:, 0])
    x = np.where(farthest > 0, x, -x)  # the same draws whichever of the two is called A
    low, high = intervals(x, np.zeros(len(x)), block_lengths(x), confidence)
    return np.maximum(-low, high)


def _moved(x: Rows) -> list[float]:
    found: list[float] = level_ranges(x).tolist()
    return found


def _difference(asked: Sides, a: list[Series], b: list[Series], noise: list[_Noise]) -> Difference:
    """The ratio and its interval; of single processes by their samples' `noise`, and what processes may differ by."""
    if asked.paired:
        ratios = [log_ratio(one, other, asked.together) for one, other in zip(a, b, strict=False)]
        if not noise:
            return difference_of_pairs(ratios, asked.error_rate)
        center = ratios[0]
    else:
        levels_a, levels_b = ([math.log(middle(x)) for x in one] for one in (a, b))
        if not noise:
            return difference_of_groups(levels_a, levels_b, asked.error_rate)
        center = float(np.mean(levels_b) - np.mean(levels_a))
    if min(one.n for one in noise) == 1:
        return Difference(center=center, half=math.inf, spread=math.inf)
    spread = math.hypot(*(one.spread for one in noise))
    half = math.hypot(*(one.half for one in noise))
    return Difference(center=center, half=math.hypot(half, student(asked.error_rate, _MANY) * spread), spread=spread)


def _ratio_or_none(log: float) -> float | None:
    return math.exp(log) if abs(log) < math.log(1e6) else None


def _verdict(found: Difference, drift: float, threshold: float) -> tuple[str, str]:
    difference = abs(found.center)
    shown = units.percent(abs(math.expm1(found.center)))
    if found.differs() and difference < math.log1p(NEGLIGIBLE):
        return NO_DIFFERENCE, f"differs by {shown}, less than the {units.percent(NEGLIGIBLE)} that matter"
    if found.differs():
        return (SLOWER, f"takes {shown} more time") if found.center > 0 else (FASTER, f"takes {shown} less time")
    if difference + found.half <= math.log1p(threshold):
        return NO_DIFFERENCE, f"the interval holds 1 and lies within {units.percent(threshold)} of it"
    if drift >= difference:
        moved = units.percent(math.expm1(drift))
        return INCONCLUSIVE, f"the level moved by {moved} within the runs, the difference is {shown}"
    return (
        INCONCLUSIVE,
        f"same against same would differ as much; {shown} {'more' if found.center > 0 else 'less'} was seen",
    )


def _more(found: Difference, pairs: int, paired: bool, threshold: float) -> str:
    """What would settle it: the number of pairs that makes the interval short enough, if that can be waited for."""
    if not paired:
        return "more processes of each (--processes 8), or both beside each other: flopwise bench … --versus …"
    room = max(abs(found.center), math.log1p(threshold) - abs(found.center))
    needed = 2 + math.ceil((2.2 * found.spread / room) ** 2) if math.isfinite(found.spread) else 2
    if needed > MOST_ADVISED:
        return "a quieter machine"
    return f"about {max(needed, pairs + 1, 4)} pairs of processes: --processes {max(needed, pairs + 1, 4)}"
