"""The median of a run's samples with its interval, and the difference of two steps with the process as the unit.

The statistics, why they are these, and how often they err: docs/decisions/0003-median-and-bootstrap.md.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from flopwise.errors import FlopwiseError
from flopwise.resampling import FEWEST as FEWEST
from flopwise.resampling import Rows, Series, block_lengths, intervals, middles, shown_drifts

Samples: TypeAlias = Sequence[int] | Sequence[float] | npt.NDArray[np.float64] | npt.NDArray[np.int64]
_Found = TypeVar("_Found")

_FEW = 200  # samples

# Of a comparison: after so many pairs of processes a verdict may fall, and the share of the error rate that is spent there.
LOOKS = {2: 0.04, 3: 0.10, 5: 0.20, 8: 0.28, 12: 0.38}
MOST_PAIRS = max(LOOKS)
ERROR_RATE = 0.05
# As logarithms of ratios. Few processes may agree by chance, where they fall into groups: a GPU's memory makes two, 1.6 %
# apart. And one process of each shows nothing of that (benchmarks/results/verdicts-2026-11.md).
LEAST_SPREAD = 0.005
LEAST_SPREAD_OF_ONE = 0.012

RANGE, SINGLE, IID, BLOCKS, PROCESSES = "range", "single", "bootstrap", "block bootstrap", "processes"


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of samples says about its level; in the samples' unit, except `drift`.

    `low` and `high` are None for a single sample, which says nothing about its spread.
    """

    median: float
    low: float | None
    high: float | None
    n: int
    mean: float
    std: float  # with n - 1; 0 for a single sample
    drift: float  # how far the level moved during the run, as a share of the median; 0 where noise alone explains it
    # 'bootstrap', 'block bootstrap'; 'range': fewer than 6 samples, min..max; 'single': no interval; 'processes': Student's t
    method: str


def estimate(samples_ns: Samples, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """The median with a bootstrap interval; the same samples and seed give the same answer.

    Blocks of neighbouring samples are drawn, as long as the samples' autocorrelation asks for (`block_lengths`);
    without autocorrelation, single samples.

    >>> e = estimate([100, 101, 99, 100, 102, 98, 100, 101])
    >>> e.median, e.low <= 100 <= e.high, e.method
    (100.0, True, 'bootstrap')
    """
    return estimates([samples_ns], confidence, seed)[0]


def estimates(runs: Sequence[Samples], confidence: float = 0.95, seed: int = 0) -> list[Estimate]:
    """`estimate` of each of many runs, those of one length together."""
    return each(runs, lambda rows: _estimates(checked(rows, confidence), confidence, seed))


def each(series: Sequence[Samples | float], of_rows: Callable[[Rows], Iterable[_Found]]) -> list[_Found]:
    """What `of_rows` finds of each series, in their order; it is given those of one length as the rows of one array."""
    alike: dict[int, list[int]] = {}
    for place, x in enumerate(series):
        alike.setdefault(1 if isinstance(x, float) else len(x), []).append(place)
    found: dict[int, _Found] = {}
    for places in alike.values():
        found.update(zip(places, of_rows(_rows([series[i] for i in places])), strict=True))
    return [found[i] for i in range(len(series))]


def _rows(series: Sequence[Samples | float]) -> Rows:
    try:
        return np.array(series, dtype=np.float64).reshape(len(series), -1)
    except OverflowError:
        raise FlopwiseError("a sample is larger than any duration", "samples are durations in nanoseconds") from None


def _estimates(x: Rows, confidence: float, seed: int) -> Iterator[Estimate]:
    n = x.shape[1]
    medians, drifts, methods = middles(x), shown_drifts(x), [SINGLE if n == 1 else RANGE] * len(x)
    low, high = x.min(axis=1), x.max(axis=1)
    if n >= FEWEST:
        blocks = block_lengths(x)
        low, high = intervals(x, medians, blocks, confidence, seed)
        methods = [IID if block == 1 else BLOCKS for block in blocks]
    spreads = np.std(x, axis=1, ddof=1) if n > 1 else np.zeros(len(x))
    columns = (medians, low, high, np.mean(x, axis=1), spreads, drifts)
    for median, from_, to, mean, std, drift, method in zip(*(one.tolist() for one in columns), methods, strict=True):
        yield Estimate(
            median=median,
            low=from_ if n > 1 else None,
            high=to if n > 1 else None,
            n=n,
            mean=mean,
            std=std,
            drift=drift / median if median > 0 else 0.0,
            method=method,
        )


def checked(x: npt.NDArray[np.float64], confidence: float) -> npt.NDArray[np.float64]:
    """The samples, if they are durations: at least one, finite, none below zero."""
    if not 0.5 <= confidence < 1:
        raise FlopwiseError(
            f"confidence = {confidence:g} is not allowed", "use a share from 0.5 to below 1, such as 0.95"
        )
    if x.size == 0:
        raise FlopwiseError("there are no samples to summarise", "measure at least one: a point that failed has none")
    if not np.isfinite(x).all() or (x < 0).any():
        raise FlopwiseError("a sample is negative or not a number", "samples are durations in nanoseconds")
    return x


# --- two steps, with the process as the unit


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The logarithm of a ratio of times, `center` ± `half`: swapping the two only turns its sign."""

    center: float
    half: float
    spread: float  # the standard deviation of what the interval is made of: a pair of processes, or a process

    def differs(self) -> bool:
        return abs(self.center) > self.half

    def decided(self, threshold: float) -> bool:
        """Whether nothing is left to ask: the two differ, or by less than `threshold`."""
        return self.differs() or abs(self.center) + self.half <= math.log1p(threshold)


@cache
def student(error_rate: float, freedom: int) -> float:
    """How many standard errors hold all but `error_rate`, both sides together: Student's t for whole degrees of freedom.

    >>> round(student(0.05, 1), 2), round(student(0.05, 4), 3), round(student(0.001, 60), 3)
    (12.71, 2.776, 3.46)
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < 1 - error_rate:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 1 - error_rate else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The probability that |T| < t; the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def error_rate_at(pairs: int, decided: bool, error_rate: float = ERROR_RATE) -> float:
    """What a verdict after so many pairs of processes may spend of the error rate.

    `decided`: sampling stopped there because of what was seen. Otherwise the time was up, which does not depend on it: all
    that earlier looks have left. Summed over all looks it is `error_rate` at the most, whatever the looks have in common.

    >>> error_rate_at(3, True), error_rate_at(4, False)
    (0.005, 0.043)
    """
    earlier = sum(share for at, share in LOOKS.items() if at < min(pairs, MOST_PAIRS))
    share = LOOKS[pairs] if decided and pairs in LOOKS else 1 - earlier
    return round(error_rate * share, 12)


def difference_of_pairs(differences: Sequence[float], error_rate: float) -> Difference:
    """From the log ratios of pairs of processes: their mean, and Student's t with a least spread.

    >>> difference_of_pairs([-0.2, -0.21, -0.19], 0.005).differs()
    True
    """
    x = np.asarray(differences, dtype=np.float64)
    spread = max(float(np.std(x, ddof=1)), LEAST_SPREAD)
    half = student(error_rate, x.size - 1) * spread / math.sqrt(x.size)
    return Difference(center=float(x.mean()), half=half, spread=spread)


def difference_of_groups(a: Sequence[float], b: Sequence[float], error_rate: float) -> Difference:
    """From the log levels of processes of A, and of others of B: Welch's t with a least spread; at least two of each."""
    xa, xb = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    parts = [max(float(np.var(x, ddof=1)), LEAST_SPREAD**2 / 2) / x.size for x in (xa, xb)]
    freedom = sum(parts) ** 2 / sum(part**2 / (x.size - 1) for part, x in zip(parts, (xa, xb), strict=True))
    spread = math.sqrt(sum(parts) * 2 / (1 / xa.size + 1 / xb.size))
    half = student(error_rate, max(1, int(freedom))) * math.sqrt(sum(parts))
    return Difference(center=float(xb.mean() - xa.mean()), half=half, spread=spread)


def middle(samples: Samples) -> float:
    """The median: of few samples by sorting them, which takes a tenth of numpy's time.

    >>> middle([3, 1, 2]), middle([4, 1, 2, 3])
    (2.0, 2.5)
    """
    if len(samples) > _FEW or not len(samples):
        return float(np.median(np.asarray(samples, dtype=np.float64)))
    ordered = sorted(samples.tolist() if isinstance(samples, np.ndarray) else samples)
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def level(processes: Sequence[Samples]) -> float:
    """Of several processes: the geometric mean of their medians, each counting as much, however many samples it took.

    >>> round(level([[100, 100, 100], [121]]), 6), level([[1, 2, 9]])
    (110.0, 2.0)
    """
    medians = [middle(one) for one in processes]
    if len(medians) == 1 or min(medians) <= 0:
        return middle(medians)
    return math.exp(sum(map(math.log, medians)) / len(medians))


def estimates_of(steps: Sequence[Sequence[Samples]]) -> list[Estimate]:
    """Each level with an interval that knows how far its processes lie apart; of one process, as `estimate`."""
    whole = [one[0] if len(one) == 1 else np.concatenate(one) for one in steps]
    return [_of_processes(known, one) for known, one in zip(estimates(whole), steps, strict=True)]


def _of_processes(known: Estimate, processes: Sequence[Samples]) -> Estimate:
    if len(processes) == 1 or known.median <= 0:
        return known
    center = level(processes)
    logs = [math.log(max(middle(one), 1e-9)) for one in processes]
    half = student(ERROR_RATE, len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    low, high = (center * math.exp(min(side, 50.0)) for side in (-half, half))
    return msgspec.structs.replace(known, median=center, low=low, high=high, method=PROCESSES)


def log_ratio(a: Samples, b: Samples, together: bool) -> float:
    """What one pair of processes says: the middle of the ratios of samples next to each other, or the ratio of the middles.

    >>> round(log_ratio([10, 20, 10], [11, 22, 11], True), 4) == round(math.log(1.1), 4)
    True
    """
    xa, xb = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if not together or xa.size != xb.size:
        return math.log(middle(xb)) - math.log(middle(xa))
    return middle(np.log(xb) - np.log(xa))


def spreads_of_one(x: Rows) -> Series:
    """How far apart two processes may lie of which one was seen: as far as its samples do (the study says: less), robustly."""
    return np.maximum(1.4826 * middles(np.abs(x - middles(x)[:, None])), LEAST_SPREAD_OF_ONE)
