"""Is B faster than A? A ratio, its interval, and a verdict that is allowed to be 'inconclusive'.

A process is one observation, however many samples it took: two processes of the same code differ. The rule, why it is this
one, and how often it errs: docs/decisions/0003-median-and-bootstrap.md.
"""

import math
from collections.abc import Sequence

import numpy as np

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.statistics import (
    ERROR_RATE,
    FEWEST,
    Difference,
    Samples,
    Series,
    block_length,
    checked,
    difference_of_groups,
    difference_of_pairs,
    interval,
    level_range,
    log_ratio,
    resampled_medians,
    spread_of_one,
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
    xa, xb = _positive(a), _positive(b)
    n_a, n_b = (sum(x.size for x in one) for one in (xa, xb))
    pairs, drift = min(len(xa), len(xb)), 0.0
    if paired and pairs > 1:
        ratios = [log_ratio(one, other, together) for one, other in zip(xa, xb, strict=False)]
        found = difference_of_pairs(ratios, error_rate)
    elif paired:
        found = _one_pair(xa[0], xb[0], together, error_rate)
    else:
        found = _groups(xa, xb, error_rate)
        drift = math.hypot(*(level_range(np.log(np.concatenate(x))) for x in (xa, xb)))
        found = Difference(center=found.center, half=found.half + drift, spread=found.spread)
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
        paired=paired,
        drift=math.expm1(drift),
        n_processes=pairs,
        spread=min(found.spread, 1e3),
        settle="" if verdict != INCONCLUSIVE else _more(found, pairs, paired, threshold),
    )


def _positive(processes: Sequence[Samples]) -> list[Series]:
    """Every process's samples, all of them above zero."""
    series = [checked(samples, 0.95) for samples in processes]
    if not series:
        raise FlopwiseError("there are no samples to compare", "measure at least one: a point that failed has none")
    if min(x.min() for x in series) <= 0:
        raise FlopwiseError(
            "a sample is zero, so there is no ratio to give", "compare a clock that ran, such as 'wall'"
        )
    return series


def _one_pair(a: Series, b: Series, together: bool, error_rate: float) -> Difference:
    """Of single processes: the interval of their samples, and beside it what processes may differ by."""
    center, logs = log_ratio(a, b, together), [np.log(a), np.log(b)]
    return _of_one(center, [logs[1] - logs[0]] if together and a.size == b.size else logs, error_rate)


def _groups(a: list[Series], b: list[Series], error_rate: float) -> Difference:
    levels_a, levels_b = ([math.log(float(np.median(x))) for x in one] for one in (a, b))
    if min(len(a), len(b)) > 1:
        return difference_of_groups(levels_a, levels_b, error_rate)
    center = float(np.mean(levels_b) - np.mean(levels_a))
    return _of_one(center, [np.log(np.concatenate(one)) for one in (a, b)], error_rate)


def _of_one(center: float, series: list[Series], error_rate: float) -> Difference:
    if min(x.size for x in series) == 1:
        return Difference(center=center, half=math.inf, spread=math.inf)
    spread = math.hypot(*map(spread_of_one, series))
    noise = math.hypot(*(_half(x, 1 - error_rate) for x in series))
    return Difference(center=center, half=math.hypot(noise, student(error_rate, _MANY) * spread), spread=spread)


def _half(x: Series, confidence: float) -> float:
    """Half the interval of a median of few or correlated samples: the wider side, as few have lopsided ones by chance."""
    x = x - float(np.median(x))
    if x.size < FEWEST:
        return float(np.abs(x).max())
    x = x if x[np.argmax(np.abs(x))] > 0 else -x  # the same draws whichever of the two is called A
    block = block_length(x)
    medians = resampled_medians(x, block, np.random.default_rng(0))
    low, high = interval(medians, 0.0, confidence, x.size / block)
    return max(-low, high)


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
