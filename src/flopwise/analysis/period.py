"""Steps of a trace without any marks: the period after which all of its kernels come again."""

import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times

FEWEST_PERIODS = 2
MATCHING = 0.97  # of the kernels must come again one period later
REPEATING = 0.9  # of the GPU time, whatever occurs rarely included
MOST_CANDIDATES = 200


def periodic_starts(work: pl.DataFrame, launched: Times) -> tuple[int, ...]:
    """When each period began on the host; empty if there is none. `work` is sorted by start, `launched` says when each was.

    A model's layers repeat within a step, so a period must explain all there is: the rarest kernel bounds the number of steps,
    and one that occurs once (an embedding, a head, an optimizer) means one step. Of the periods that pass, the smallest:
    twice a period is one, too. Copies do not count: a log that is read now and then is no part of the rhythm.

    >>> def starts(names):
    ...     times = np.arange(len(names))
    ...     kernels = {"source": "kernel", "name": pl.Series(list(names), dtype=pl.Categorical), "duration_ns": times}
    ...     return periodic_starts(pl.DataFrame(kernels), times)
    >>> starts("embbbhembbbh"), starts("embmbmbmbh")
    ((0, 6), ())
    """
    kernels = np.flatnonzero((work["source"] != "copy").to_numpy())
    names = work["name"].to_physical().to_numpy()[kernels].astype(np.int64)
    duration = work["duration_ns"].to_numpy()[kernels]
    n = len(names)
    if n < 2 * FEWEST_PERIODS:
        return ()
    distinct, counts = np.unique(names, return_counts=True)
    fewest = int(counts.min())
    positions = np.flatnonzero(names == distinct[counts.argmin()])
    near = sorted({int(d) for d in positions[1:] - positions[0] if d <= n // FEWEST_PERIODS})
    for period in near[:MOST_CANDIDATES]:
        if n // period <= fewest and _repeats(names, duration, period):
            begins = np.maximum.accumulate(launched[kernels])[n % period :: period].tolist()
            if n % period == 0:  # all of it is steps, the copy ahead of the first kernel included
                begins[0] = int(launched.min())
            return tuple(begins)
    return ()


def _repeats(names: Times, duration: Times, period: int) -> bool:
    """Whether nearly all kernels, by number and by time, have one of their name a period before or after."""
    same = names[period:] == names[:-period]
    if float(np.mean(same)) < MATCHING:
        return False
    again = np.zeros(len(names), dtype=bool)
    again[period:] |= same
    again[:-period] |= same
    return int(duration[again].sum()) >= REPEATING * int(duration.sum())
