"""Microseconds with decimals, as Kineto writes them, into whole nanoseconds."""

from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise.trace.kineto_stream import Event

LARGEST_START_NS = 1 << 61  # the year 2043 of the Unix epoch; starts and durations below these sum within 64 bits
LARGEST_DURATION_NS = 1 << 60
NO_TIME = np.iinfo(np.int64).min
_EXACT_BELOW_US = 2.0**43  # a float of microseconds holds three decimals below 101 days, and not beyond

Integers = NDArray[np.int64]


class NeedsExactTimes(Exception):
    """A time is too large for a float of microseconds to hold its nanoseconds: absolute epochs of older writers."""


def start_times(events: list[Event[Any]], exact: bool) -> Integers:
    """When events begin; NO_TIME where they do not say. `exact`: from the numbers' own text."""
    if exact:
        return _exact_nanoseconds([_text(event.ts) for event in events])
    return checked_nanoseconds(np.fromiter([event.ts for event in events], np.float64, len(events)))


def checked_nanoseconds(us: NDArray[np.float64]) -> Integers:
    """Nanoseconds, unless a float is too coarse for them."""
    if (np.abs(us) >= _EXACT_BELOW_US).any():
        raise NeedsExactTimes
    return nanoseconds(us)


def nanoseconds(us: NDArray[np.float64]) -> Integers:
    """Exact below 2**43 µs: the whole part and the rounded fraction apart, as their product would not fit a float.

    >>> nanoseconds(np.array([3845976557080.535]))
    array([3845976557080535])
    """
    usable = np.abs(us) < LARGEST_START_NS / 1000
    us = np.where(usable, us, 0.0)
    whole = np.floor(us)
    exact = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    return np.where(usable, exact, NO_TIME)


def _exact_nanoseconds(texts: list[str]) -> Integers:
    """From the decimal text of microseconds; further decimals than three are cut."""
    text = pl.Series(texts, dtype=pl.String)
    whole = text.str.extract(r"^(-?\d{1,16})(?:\.\d+)?$", 1).cast(pl.Int64, strict=False)
    fraction = text.str.extract(r"\.(\d+)$", 1).fill_null("0").str.head(3).str.pad_end(3, "0").cast(pl.Int64)
    sign = pl.select(pl.when(text.str.starts_with("-")).then(-1).otherwise(1)).to_series()
    fits = (whole.abs() < LARGEST_START_NS // 1000).fill_null(False)
    exact = (whole * 1000 + sign * fraction).fill_null(NO_TIME).to_numpy()
    rounded = nanoseconds(text.cast(pl.Float64, strict=False).fill_null(float("nan")).to_numpy())
    return np.where(fits.to_numpy(), exact, rounded)


def _text(number: object) -> str:
    return bytes(number).decode("ascii", "replace") if isinstance(number, msgspec.Raw) else ""
