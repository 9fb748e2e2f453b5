"""The median of a run's samples with its interval, and the difference of two steps with the process as the unit.

The statistics, why they are these, and how often they err: docs/decisions/0003-median-and-bootstrap.md.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import NormalDist
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from flopwise.errors import FlopwiseError

Samples: TypeAlias = Sequence[int] | Sequence[float] | npt.NDArray[np.float64] | npt.NDArray[np.int64]
Series: TypeAlias = npt.NDArray[np.float64]

FEWEST = 6  # min..max of six holds the median with 1 - 2 * 0.5**6 = 97 %; of five with less than 95 %
QUARTERS = 4  # a run is cut into so many consecutive parts to see whether its level moved
_RESAMPLES = 1000
_FEWEST_RESAMPLES = 100
_GATHERED = 20_000_000  # numbers drawn per bootstrap; caps the cost of long runs (100k samples: 200 resamples, < 1 s)
_CHUNK = 2_000_000  # numbers held at a time
_CHI2_99 = 11.345  # the 99 % quantile for QUARTERS - 1 degrees of freedom

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

    Blocks of neighbouring samples are drawn, as long as the samples' autocorrelation asks for (`block_length`);
    without autocorrelation, single samples.

    >>> e = estimate([100, 101, 99, 100, 102, 98, 100, 101])
    >>> e.median, e.low <= 100 <= e.high, e.method
    (100.0, True, 'bootstrap')
    """
    x = checked(samples_ns, confidence)
    median, drift = float(np.median(x)), shown_drift(x)
    low: float | None = None
    high: float | None = None
    if x.size == 1:
        method = SINGLE
    elif x.size < FEWEST:
        low, high, method = float(x.min()), float(x.max()), RANGE
    else:
        block = block_length(x)
        low, high = interval(
            resampled_medians(x, block, np.random.default_rng(seed)), median, confidence, x.size / block
        )
        method = IID if block == 1 else BLOCKS
    return Estimate(
        median=median,
        low=low,
        high=high,
        n=x.size,
        mean=float(np.mean(x)),
        std=float(np.std(x, ddof=1)) if x.size > 1 else 0.0,
        drift=drift / median if median > 0 else 0.0,
        method=method,
    )


def checked(samples: Samples, confidence: float) -> Series:
    """The samples as floats, if they are durations: at least one, finite, none below zero."""
    if not 0.5 <= confidence < 1:
        raise FlopwiseError(
            f"confidence = {confidence:g} is not allowed", "use a share from 0.5 to below 1, such as 0.95"
        )
    try:
        x = np.asarray(samples, dtype=np.float64).ravel()
    except OverflowError:
        raise FlopwiseError("a sample is larger than any duration", "samples are durations in nanoseconds") from None
    if x.size == 0:
        raise FlopwiseError("there are no samples to summarise", "measure at least one: a point that failed has none")
    if not np.isfinite(x).all() or (x < 0).any():
        raise FlopwiseError("a sample is negative or not a number", "samples are durations in nanoseconds")
    return x


def interval(medians: Series, center: float, confidence: float, blocks: float) -> tuple[float, float]:
    """The percentile interval of resampled medians, widened for few independent `blocks`; it always holds the median.

    A resample of few blocks varies too little and its spread is itself uncertain: the expanded percentile of
    Hesterberg (2015, section 4.4) takes sqrt(m / (m - 1)) times Student's t with m - 1 degrees of freedom for the normal z.
    """
    normal = NormalDist()
    z, freedom = normal.inv_cdf(0.5 + confidence / 2), max(1.0, blocks - 1)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # Cornish and Fisher
    tail = 100 * normal.cdf(-t * math.sqrt((freedom + 1) / freedom))
    low, high = np.percentile(medians, [tail, 100 - tail])
    return min(float(low), center), max(float(high), center)


def block_length(x: Series) -> int:
    """How many neighbours to draw together, from the autocorrelation of the samples' ranks (an outlier is just a high rank).

    The longer of two rules. For short runs, where only the first lag can be told from noise: the best length for an
    AR(1) process of that correlation (Andrews 1991). For long ones: Politis and White (2004), corrected by Patton et
    al. (2009), who look at every lag. 1, hence single samples, where neither sees any correlation.
    """
    n = x.size
    if n < FEWEST or np.ptp(x) == 0:
        return 1
    _, tied, counts = np.unique(x, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - counts / 2)[tied]  # equal samples share their rank
    longest = math.ceil(min(3 * math.sqrt(n), n / 3))
    correlation = _autocorrelation(rank - rank.mean(), longest)
    best = max(_ar1_length(float(correlation[1]), n), _politis_white_length(correlation, n))
    return max(1, min(longest, round(best)))


def _autocorrelation(x: Series, lags: int) -> Series:
    size = 1 << (x.size + lags).bit_length()  # padded, so that the ends do not meet
    covariance = np.fft.irfft(np.abs(np.fft.rfft(x, size)) ** 2, size)[: lags + 1]
    correlation: Series = covariance / covariance[0]
    return correlation


def _ar1_length(rho: float, n: int) -> float:
    if rho < 1.96 / math.sqrt(n):
        return 1.0
    rho = min(0.99, rho + (1 + 3 * rho) / n)  # its estimate is low by that much (Kendall 1954)
    return float((math.sqrt(6) * rho / (1 - rho**2)) ** (2 / 3) * n ** (1 / 3))


def _politis_white_length(correlation: Series, n: int) -> float:
    seen = _last_seen_lag(correlation, n)
    if seen == 0:
        return 1.0
    lags = np.arange(1, min(2 * seen, correlation.size - 1) + 1)
    weighted = np.clip(2 * (1 - lags / (2 * seen)), 0, 1) * correlation[lags]  # the flat-top window
    spectrum = 1 + 2 * float(weighted.sum())
    slope = 2 * float((weighted * lags).sum())
    if spectrum <= 0:  # neighbours alternate: drawing singly is on the safe side
        return 1.0
    return float((1.5 * (slope / spectrum) ** 2 * n) ** (1 / 3))


def _last_seen_lag(correlation: Series, n: int) -> int:
    """The last lag before five in a row that look like noise."""
    quiet = np.abs(correlation[1:]) < 2 * math.sqrt(math.log10(n) / n)
    run = 0
    for lag, is_quiet in enumerate(quiet, start=1):
        run = run + 1 if is_quiet else 0
        if run == 5:
            return lag - 5
    return int(quiet.size - run)


def resampled_medians(x: Series, block: int, rng: np.random.Generator) -> Series:
    """Medians of bootstrap resamples drawn in blocks; the run is closed to a ring, so every sample is as likely."""
    if block == 1:
        return _iid_medians(x, rng)
    resamples = max(_FEWEST_RESAMPLES, min(_RESAMPLES, _GATHERED // x.size))
    return np.concatenate([np.median(drawn, axis=1) for drawn in _drawn(x, block, resamples, rng)])


def _drawn(x: Series, block: int, resamples: int, rng: np.random.Generator) -> Iterator[Series]:
    ring = np.concatenate([x, x[: block - 1]])
    blocks = -(-x.size // block)
    rows = max(1, _CHUNK // x.size)
    for done in range(0, resamples, rows):
        starts = rng.integers(x.size, size=(min(rows, resamples - done), blocks, 1))
        yield ring[starts + np.arange(block)].reshape(len(starts), -1)[:, : x.size]


def _iid_medians(x: Series, rng: np.random.Generator) -> Series:
    """Exact draws of a resample's median without drawing the resample.

    A resample of n is x_sorted[floor(n U)] for n uniform U; its middle is that of the middle order statistic of U,
    which is Beta distributed. For an even n the next one is the least of the n - k left, uniform above it.
    """
    n, ordered = x.size, np.sort(x)
    k = (n + 1) // 2
    lower = rng.beta(k, n - k + 1, _RESAMPLES)
    upper = lower
    if n % 2 == 0:
        upper = lower + (1 - lower) * rng.beta(1, n - k, _RESAMPLES)
    ranks = np.minimum((n * np.stack([lower, upper])).astype(np.int64), n - 1)
    result: Series = ordered[ranks].mean(axis=0)
    return result


def level_range(x: Series) -> float:
    """How far the level moved during the run, at most: from the lowest to the highest median of its four quarters.

    Noise moves them too, and is counted: what cannot be told from drift must be allowed for as drift.
    """
    return float(np.ptp([np.median(part) for part in np.array_split(x, QUARTERS)])) if x.size >= FEWEST else 0.0


def shown_drift(x: Series) -> float:
    """`level_range` where the quarters differ by more than noise explains; else 0.

    Mood's median test at 1 %: at one level, half of each quarter lies above the run's median.
    """
    parts = np.array_split(np.sign(x - np.median(x)), QUARTERS)
    statistic = sum(float(part.sum()) ** 2 / part.size for part in parts if part.size)
    return level_range(x) if statistic > _CHI2_99 else 0.0


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


def level(processes: Sequence[Samples]) -> float:
    """Of several processes: the geometric mean of their medians, each counting as much, however many samples it took.

    >>> round(level([[100, 100, 100], [121]]), 6), level([[1, 2, 9]])
    (110.0, 2.0)
    """
    medians = [float(np.median(np.asarray(one, dtype=np.float64))) for one in processes]
    if len(medians) == 1 or min(medians) <= 0:
        return float(np.median(medians))
    return math.exp(sum(map(math.log, medians)) / len(medians))


def estimate_of(processes: Sequence[Samples]) -> Estimate:
    """The level with an interval that knows how far the processes lie apart; of one process, as `estimate`."""
    known = estimate(np.concatenate([np.asarray(one, dtype=np.float64) for one in processes]))
    if len(processes) == 1 or known.median <= 0:
        return known
    center = level(processes)
    logs = [math.log(max(float(np.median(np.asarray(one, dtype=np.float64))), 1e-9)) for one in processes]
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
        return math.log(float(np.median(xb))) - math.log(float(np.median(xa)))
    return float(np.median(np.log(xb) - np.log(xa)))


def spread_of_one(x: Series) -> float:
    """How far apart two processes may lie of which one was seen: as far as its samples do (the study says: less), robustly."""
    return max(1.4826 * float(np.median(np.abs(x - np.median(x)))), LEAST_SPREAD_OF_ONE)
