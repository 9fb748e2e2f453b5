"""Is B faster than A? A ratio of medians, its interval, and a verdict that is allowed to be 'inconclusive'.

The rule and its operating characteristics: docs/decisions/0003-median-and-bootstrap.md.
"""

import math

import msgspec
import numpy as np

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.statistics import (
    FEWEST,
    Samples,
    Series,
    block_length,
    checked,
    interval,
    level_range,
    resampled_medians,
    shown_drift,
)


class _Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """The logarithm of the ratio, `center` ± `half` from the bootstrap ± `drift`: swapping A and B only turns its sign."""

    center: float
    half: float | None  # None: a single sample says nothing about its spread
    drift: float

    def reach(self) -> float:
        return (self.half or 0.0) + self.drift


def compare_samples(
    a: Samples,
    b: Samples,
    *,
    paired: bool,
    threshold: float = 0.03,
    negligible: float = 0.005,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare two runs of samples.

    Paired, where sample i of A was taken next to sample i of B: the ratio is the median of the pairs' ratios, so that
    whatever slowed both cancels. Otherwise it is the ratio of the medians, and the interval is widened by how far the
    level moved within each run, since it may have moved as far between them.

    >>> a = [100, 101, 99, 100, 102, 98] * 5
    >>> compare_samples(a, [0.8 * x for x in a], paired=False).verdict
    'faster'
    """
    xa, xb = _positive(checked(a, confidence)), _positive(checked(b, confidence))
    n_a, n_b = xa.size, xb.size
    pairs = min(n_a, n_b)
    if pairs < FEWEST:
        log = _few_pairs(xa[:pairs], xb[:pairs]) if paired else _few_unpaired(xa, xb)
        verdict, reason = INCONCLUSIVE, f"too few samples: {n_a} and {n_b}, where each needs {FEWEST}"
    else:
        log = (
            _paired(np.log(xb[:pairs]) - np.log(xa[:pairs]), confidence, seed)
            if paired
            else _unpaired(xa, xb, confidence, seed)
        )
        verdict, reason = _verdict(log, threshold, negligible)
    return Comparison(
        ratio=math.exp(log.center),
        low=None if log.half is None else math.exp(log.center - log.reach()),
        high=None if log.half is None else math.exp(log.center + log.reach()),
        verdict=verdict,
        reason=reason,
        n_a=n_a,
        n_b=n_b,
        paired=paired,
        drift=math.expm1(log.drift),
    )


def _positive(x: Series) -> Series:
    if x.min() <= 0:
        raise FlopwiseError(
            "a sample is zero, so there is no ratio to give", "compare a clock that ran, such as 'wall'"
        )
    return x


def _paired(difference: Series, confidence: float, seed: int) -> _Ratio:
    """The drift here is that of the ratio itself: what the two had in common is gone."""
    center = float(np.median(difference))
    x = _ordered(difference, -difference)[1]
    block = block_length(x)
    medians = resampled_medians(x, block, np.random.default_rng(seed))
    return _Ratio(center=center, half=_half(medians, abs(center), confidence, x.size / block), drift=shown_drift(x))


def _unpaired(a: Series, b: Series, confidence: float, seed: int) -> _Ratio:
    fast, slow = _ordered(a, b)
    rng, block_fast, block_slow = np.random.default_rng(seed), block_length(fast), block_length(slow)
    from_fast, from_slow = resampled_medians(fast, block_fast, rng), resampled_medians(slow, block_slow, rng)
    resamples = min(from_fast.size, from_slow.size)
    ratios = np.log(from_slow[:resamples]) - np.log(from_fast[:resamples])
    center = _log_median(b) - _log_median(a)
    half = _half(ratios, abs(center), confidence, min(fast.size / block_fast, slow.size / block_slow))
    drift = math.hypot(level_range(np.log(fast)), level_range(np.log(slow)))
    return _Ratio(center=center, half=half, drift=drift)


def _log_median(x: Series) -> float:
    return math.log(float(np.median(x)))


def _ordered(one: Series, other: Series) -> tuple[Series, Series]:
    """The lower median first: the same order whichever is called A, so that both ways draw the same resamples."""
    first, second = sorted((one, other), key=lambda x: (float(np.median(x)), x.tolist()))
    return first, second


def _half(medians: Series, center: float, confidence: float, blocks: float) -> float:
    """The wider side of the interval, for both: few samples have lopsided intervals by chance, and verdicts with them."""
    low, high = interval(medians, center, confidence, blocks)
    return max(center - low, high - center)


def _few_pairs(a: Series, b: Series) -> _Ratio:
    """As far as any pair lies from the middle one; nothing for a single pair."""
    apart = np.log(b) - np.log(a)
    center = float(np.median(apart))
    return _Ratio(center=center, half=float(np.abs(apart - center).max()) if a.size > 1 else None, drift=0.0)


def _few_unpaired(a: Series, b: Series) -> _Ratio:
    """As far as any sample of B lies from any of A; nothing where one of them is single."""
    center = _log_median(b) - _log_median(a)
    least, most = math.log(b.min() / a.max()), math.log(b.max() / a.min())
    half = max(center - least, most - center) if min(a.size, b.size) > 1 else None
    return _Ratio(center=center, half=half, drift=0.0)


def _verdict(log: _Ratio, threshold: float, negligible: float) -> tuple[str, str]:
    difference, reach = abs(log.center), log.reach()
    shown = units.percent(abs(math.expm1(log.center)))
    if difference > reach and difference < math.log1p(negligible):
        return NO_DIFFERENCE, f"differs by {shown}, less than the {units.percent(negligible)} that matter"
    if difference > reach:
        return (SLOWER, f"takes {shown} more time") if log.center > 0 else (FASTER, f"takes {shown} less time")
    if difference + reach <= math.log1p(threshold):
        return NO_DIFFERENCE, f"the interval holds 1 and lies within {units.percent(threshold)} of it"
    if log.drift >= difference > (log.half or 0.0):
        moved = units.percent(math.expm1(log.drift))
        return (
            INCONCLUSIVE,
            f"the level moved by {moved} within the runs, the difference is {shown}: run them interleaved",
        )
    return INCONCLUSIVE, f"the spread allows for more than {units.percent(threshold)} either way: take more samples"
