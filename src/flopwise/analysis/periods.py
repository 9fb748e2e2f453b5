"""Steps that nothing marks: the period of the kernels."""

import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times
from flopwise.work.operation import LOSS, OPTIMIZER

FEWEST_PERIODS = 2
MATCHING = 0.97  # of the kernels must recur one period later
REPEATING = 0.9  # of the GPU time, whatever occurs rarely included
MOST_CANDIDATES = 200
_LAYERS = 0.5  # of a step's kernels: repeated within it at least so many are its layers
_MOST_IN_LAYER = 400  # kernels
_OF_A_STEP = (LOSS, OPTIMIZER)  # classes of kernels that no layer has
_TRANSFERS = ("Memcpy HtoD", "Memcpy DtoH")


def periodic_starts(work: pl.DataFrame, launched: Times, waits: Times) -> tuple[int, ...]:
    """When each period began on the host; empty if there is none. `work` is sorted by start, `launched` are its launches.

    A model's layers repeat within a step, so a period must explain everything: the rarest kernel bounds the number of steps,
    and one that occurs once (an embedding, a head, an optimizer) means one step. Of the periods that pass, the smallest:
    twice a period is one, too. Copies do not count: a log that is read now and then is not periodic.

    A trace of nothing but layers has a period as well, which is no step: see `_is_a_step`. `waits`: when the host had waited.

    >>> def starts(names):
    ...     times = np.arange(len(names))
    ...     kernels = {"source": "kernel", "name": pl.Series(list(names), dtype=pl.Categorical), "duration_ns": times}
    ...     return periodic_starts(pl.DataFrame(kernels | {"class": "other"}), times, np.array([]))
    >>> starts("embbbhembbbh"), starts("embmbmbmbh"), starts("abcabcabc")
    ((0, 6), (), ())
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
            begins = np.maximum.accumulate(launched[kernels])[n % period :: period]
            if not _is_a_step(work, names[n % period :], period, begins, waits):
                return ()
            starts = begins.tolist()
            if n % period == 0:  # all of it is steps, the copy ahead of the first kernel included
                starts[0] = int(launched[launched >= 0].min(initial=starts[0]))
            return tuple(starts)
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


def _is_a_step(work: pl.DataFrame, names: Times, period: int, begins: Times, waits: Times) -> bool:
    """Whether a period is more than a layer: a transfer, a wait, or work that no layer has is in each; or it has layers."""
    n = len(begins)
    copies = work.filter(pl.col("source") == "copy")["name"].cast(pl.String)
    transfers = int(copies.is_in(_TRANSFERS).sum())
    of_a_step = sum(int((work["class"] == kind).sum()) for kind in _OF_A_STEP)
    waited = np.unique(np.searchsorted(begins, waits))
    return transfers >= n or of_a_step >= n or len(waited) >= n - 1 > 0 or _has_layers(names[:period])


def _has_layers(names: Times) -> bool:
    """Whether a stretch of kernels is repeated right after itself, over half of them."""
    n = len(names)
    for length in range(1, min(n // 2, _MOST_IN_LAYER) + 1):
        same = names[length:] == names[:-length]
        if 2 * int(same.sum()) < _LAYERS * n:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
        runs = edges[1::2] - edges[::2]
        if len(runs) and int(runs.max()) >= length and int(runs.max()) + length >= _LAYERS * n:
            return True
    return False
