"""Runs of one length as the rows of one array: their medians, the medians' bootstrap intervals, and how far their levels moved.

Thousands of runs take little longer than one. Why these statistics: docs/decisions/0003-median-and-bootstrap.md.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Series: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = npt.NDArray[np.float64]  # a series in each row, all of one length
Counts: TypeAlias = npt.NDArray[np.int64]

QUARTERS = 4  # a run is cut into so many consecutive parts to see whether its level moved
FEWEST = 6  # min..max of six holds the median with 1 - 2 * 0.5**6 = 97 %; of five with less than 95 %
_RESAMPLES = 1000
_FEWEST_RESAMPLES = 100
_GATHERED = 20_000_000  # numbers drawn per bootstrap; caps the cost of long runs (100k samples: 200 resamples, < 1 s)
_CHUNK = 2_000_000  # numbers held at a time
_TOGETHER = _CHUNK // _RESAMPLES  # runs whose resampled medians are held at a time
_CHI2_99 = 11.345  # the 99 % quantile for QUARTERS - 1 degrees of freedom


def middles(x: Rows) -> Series:
    """The median of each row."""
    ordered, half = np.sort(x, axis=1), x.shape[1] // 2
    found: Series = ordered[:, half] if x.shape[1] % 2 else (ordered[:, half - 1] + ordered[:, half]) / 2
    return found


def intervals(
    x: Rows, centers: Series, blocks: npt.NDArray[np.int64], confidence: float, seed: int = 0
) -> tuple[Series, Series]:
    """Of each row the interval of its resampled medians, drawn in blocks of its own length; it always holds the center."""
    low, high = np.empty(len(x)), np.empty(len(x))
    for block in np.unique(blocks).tolist():
        rows, tail = np.flatnonzero(blocks == block), _tail(confidence, x.shape[1] / block)
        for some in np.split(rows, range(_TOGETHER, len(rows), _TOGETHER)):
            medians, often = resampled_medians(x[some], block, seed)
            low[some], high[some] = _percentiles(medians, often, (tail, 100 - tail))
    return np.minimum(low, centers), np.maximum(high, centers)


def _percentiles(x: Rows, often: Counts, shares: Sequence[float]) -> list[Series]:
    """Those of each row whose values are there so often, as `np.percentile` of all of them."""
    order = np.argsort(x, axis=1)
    ordered, until = np.take_along_axis(x, order, axis=1), np.cumsum(often[order], axis=1)
    found = []
    for share in shares:
        below, between = divmod(share / 100 * (often.sum() - 1), 1)
        places = [np.minimum((until <= below + step).sum(axis=1), x.shape[1] - 1) for step in (0, 1)]
        at, then = (np.take_along_axis(ordered, place[:, None], axis=1)[:, 0] for place in places)
        found.append(at + (then - at) * between)
    return found


def _tail(confidence: float, blocks: float) -> float:
    """How many per cent of resampled medians lie beyond each end of an interval, fewer for few independent `blocks`.

    A resample of few blocks varies too little and its spread is itself uncertain: the expanded percentile of
    Hesterberg (2015, section 4.4) takes sqrt(m / (m - 1)) times Student's t with m - 1 degrees of freedom for the normal z.
    """
    normal = NormalDist()
    z, freedom = normal.inv_cdf(0.5 + confidence / 2), max(1.0, blocks - 1)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # Cornish and Fisher
    return 100 * normal.cdf(-t * math.sqrt((freedom + 1) / freedom))


def block_lengths(x: Rows) -> npt.NDArray[np.int64]:
    """How many neighbours to draw together, from the autocorrelation of a row's ranks (an outlier is just a high rank).

    The longer of two rules. For short runs, where only the first lag can be told from noise: the best length for an
    AR(1) process of that correlation (Andrews 1991). For long ones: Politis and White (2004), corrected by Patton et
    al. (2009), who look at every lag. 1, hence single samples, where neither sees any correlation.
    """
    n, lengths = x.shape[1], np.ones(len(x), dtype=np.int64)
    varied = np.flatnonzero(np.ptp(x, axis=1) > 0)
    if n < FEWEST or not varied.size:
        return lengths
    longest = math.ceil(min(3 * math.sqrt(n), n / 3))
    correlations = _autocorrelation(_ranks(x[varied]), longest)
    seen = (correlations[:, 1] >= _first_seen(n)) | (np.abs(correlations[:, 1:]) >= _any_seen(n)).any(axis=1)
    for row in np.flatnonzero(seen):
        correlation = correlations[row]
        best = max(_ar1_length(float(correlation[1]), n), _politis_white_length(correlation, n))
        lengths[varied[row]] = max(1, min(longest, round(best)))
    return lengths


def _ranks(x: Rows) -> Rows:
    """Each sample's place among its row, from the row's middle; equal samples share theirs."""
    n, order = x.shape[1], np.argsort(x, axis=1)
    ordered, place = np.take_along_axis(x, order, axis=1), np.arange(n)
    new = np.diff(ordered, axis=1) > 0
    ends = np.ones((len(x), 1), dtype=bool)
    first = np.maximum.accumulate(np.where(np.hstack([ends, new]), place, 0), axis=1)
    last = np.minimum.accumulate(np.where(np.hstack([new, ends]), place, n)[:, ::-1], axis=1)[:, ::-1]
    ranks = np.empty_like(x)
    np.put_along_axis(ranks, order, (first + last + 1 - n) / 2, axis=1)
    return ranks


def _first_seen(n: int) -> float:
    """A correlation of neighbours from which on it is more than noise."""
    return 1.96 / math.sqrt(n)


def _any_seen(n: int) -> float:
    """A correlation at any lag from which on it is more than noise."""
    return 2 * math.sqrt(math.log10(n) / n)


def _autocorrelation(x: Rows, lags: int) -> Rows:
    size = 1 << (x.shape[1] + lags).bit_length()  # padded, so that the ends do not meet
    covariance = np.fft.irfft(np.abs(np.fft.rfft(x, size)) ** 2, size)[:, : lags + 1]
    correlation: Rows = covariance / covariance[:, :1]
    return correlation


def _ar1_length(rho: float, n: int) -> float:
    if rho < _first_seen(n):
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
    quiet = np.abs(correlation[1:]) < _any_seen(n)
    run = 0
    for lag, is_quiet in enumerate(quiet, start=1):
        run = run + 1 if is_quiet else 0
        if run == 5:
            return lag - 5
    return int(quiet.size - run)


def resampled_medians(x: Rows, block: int, seed: int = 0) -> tuple[Rows, Counts]:
    """Medians of each row's bootstrap resamples, the same draws for every row, and how often each was drawn."""
    if block == 1:
        return _iid_medians(x, seed)
    n = x.shape[1]
    rings = np.hstack([x, x[:, : block - 1]])  # closed to a ring, every sample is as likely
    parts = [[np.median(ring[drawn], axis=1) for ring in rings] for drawn in _drawn(n, block, seed)]
    medians = np.concatenate(parts, axis=1)
    return medians, np.ones(medians.shape[1], dtype=np.int64)


def _drawn(n: int, block: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """The places in the ring of some resamples' samples, drawn in blocks; together all resamples."""
    resamples, rng = max(_FEWEST_RESAMPLES, min(_RESAMPLES, _GATHERED // n)), np.random.default_rng(seed)
    blocks, rows = -(-n // block), max(1, _CHUNK // n)
    for done in range(0, resamples, rows):
        starts = rng.integers(n, size=(min(rows, resamples - done), blocks, 1))
        yield (starts + np.arange(block)).reshape(len(starts), -1)[:, :n]


def _iid_medians(x: Rows, seed: int) -> tuple[Rows, Counts]:
    """Exact draws of a resample's median without drawing the resample.

    A resample of n is x_sorted[floor(n U)] for n uniform U; its middle is that of the middle order statistic of U,
    which is Beta distributed. For an even n the next one is the least of the n - k left, uniform above it.
    """
    ordered, ((lower, upper), often) = np.sort(x, axis=1), _iid_ranks(x.shape[1], seed)
    return (ordered[:, lower] + ordered[:, upper]) / 2, often


@lru_cache(maxsize=256)
def _iid_ranks(n: int, seed: int) -> tuple[npt.NDArray[np.int64], Counts]:
    """Which two order statistics are the middle of a resample, and of how many: the same for every run of n samples."""
    rng, k = np.random.default_rng(seed), (n + 1) // 2
    lower = rng.beta(k, n - k + 1, _RESAMPLES)
    upper = lower
    if n % 2 == 0:
        upper = lower + (1 - lower) * rng.beta(1, n - k, _RESAMPLES)
    drawn = np.minimum((n * np.stack([lower, upper])).astype(np.int64), n - 1)
    pairs, often = np.unique(drawn, axis=1, return_counts=True)
    return pairs, often


def level_ranges(x: Rows) -> Series:
    """How far each row's level moved, at most: from the lowest to the highest median of its four quarters.

    Noise moves them too, and is counted: what cannot be told from drift must be allowed for as drift.
    """
    if x.shape[1] < FEWEST:
        return np.zeros(len(x))
    found: Series = np.ptp([middles(part) for part in np.array_split(x, QUARTERS, axis=1)], axis=0)
    return found


def shown_drifts(x: Rows) -> Series:
    """`level_ranges` where the quarters differ by more than noise explains; else 0.

    Mood's median test at 1 %: at one level, half of each quarter lies above the run's median.
    """
    above = np.sign(x - middles(x)[:, None])
    parts = np.array_split(above, min(QUARTERS, x.shape[1]), axis=1)
    statistic = sum(part.sum(axis=1) ** 2 / part.shape[1] for part in parts)
    return np.where(statistic > _CHI2_99, level_ranges(x), 0.0)
