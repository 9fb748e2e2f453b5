"""Rows: what an experiment measures, as frozen records, and how well their times are known. No torch here.

A field has its unit at the end of its name: `_ns`, `_bytes`, `_bytes_per_s`, `_flops`, `_flops_per_s`, `_share` (of 1). Tables
and charts show a value by that ending. What could not be measured is None, never a guess. Where an experiment has several
kinds of row, the JSON field `part` is the tag that separates them.
"""

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from flopwise import units
from flopwise.statistics import LEAST_SPREAD_OF_ONE

FEWEST_SAMPLES = 3  # with fewer, the spread is not known
MAY_BE_ZERO = {"rest_ns"}  # what is left after the other parts
# Rates that a row holds next to the work they were computed from.
WORK = {"rate_flops_per_s": "work_flops", "rate_bytes_per_s": "moved_bytes", "used_bytes_per_s": "used_bytes"}
TOLERANCE = 0.01  # relative: a number computed from other fields of its row is off by less

_Kind = TypeVar("_Kind")


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of any experiment."""


def fields(row: Row) -> dict[str, Any]:
    """The row as a dictionary, without its tag."""
    return msgspec.structs.asdict(row)


def values(rows: Iterable[Row], *properties: str) -> list[dict[str, Any]]:
    """The rows as dictionaries, for a table or a picture; with these properties next to their fields."""
    return [fields(row) | {name: getattr(row, name) for name in properties} for row in rows]


def select(rows: Iterable[object], kind: type[_Kind]) -> list[_Kind]:
    """The rows of one kind."""
    return [row for row in rows if isinstance(row, kind)]


def by(rows: Iterable[_Kind], *names: str) -> dict[Any, _Kind]:
    """The rows by the values of these fields; of several with the same, the last."""
    key = attrgetter(*names)
    return {key(row): row for row in rows}


NORMAL_95 = 1.96  # standard deviations that hold 95 %


class Interval(msgspec.Struct, frozen=True):
    """A value and the interval that it lies in. Of a time, `text` describes both."""

    middle: float
    low: float
    high: float
    text: str = ""

    def __truediv__(self, other: "Interval") -> "Interval":
        """The ratio. The errors are independent: their logarithms add up by squares.

        >>> exact(6.0) / exact(2.0)
        Interval(middle=3.0, low=3.0, high=3.0, text='')
        """
        middle = self.middle / other.middle
        down = _error(self.middle, self.low, other.high, other.middle)
        up = _error(self.high, self.middle, other.middle, other.low)
        return Interval(middle, middle / down, middle * up)

    def around(self, middle: float) -> "Interval":
        """An interval as wide as this one around another value: around a ratio of rates computed from these times."""
        factor = middle / self.middle
        return Interval(middle, factor * self.low, factor * self.high)

    def within(self, least: float = 0.0, most: float = math.inf) -> bool | None:
        """Whether the value lies between these limits; None if the interval leaves it open.

        >>> ratio = Interval(3.0, 2.5, 3.5)
        >>> ratio.within(least=2), ratio.within(most=2), ratio.within(least=3)
        (True, False, None)
        """
        if least <= self.low and self.high <= most:
            return True
        return False if self.high < least or self.low > most else None

    @property
    def width(self) -> float:
        return self.high / self.low if self.low > 0 else math.inf


def exact(value: float) -> Interval:
    return Interval(value, value, value)


def _error(one: float, by: float, other: float, other_by: float) -> float:
    """The factor of two independent errors, one / by and other / other_by."""
    if 0.0 in (by, other_by) or math.inf in (one, other):
        return math.inf
    return math.exp(math.hypot(math.log(one / by), math.log(other / other_by)))


class Timed(Row, frozen=True, kw_only=True):
    """Nanoseconds per run: medians of the samples, and the 95 % interval of the wall clock's median.

    A row of timed work inherits these fields: `Product(n=n, **fields(bench.time(run)))`. The GPU's clock has no interval. It is
    exact, unless the GPU waited for the host.
    """

    wall_ns: float
    wall_low_ns: float
    wall_high_ns: float
    launch_ns: float | None  # until the host was free again; None on the CPU
    gpu_ns: float | None  # the GPU's own time; None on the CPU
    gpu_exact: bool  # all work was queued before it began; otherwise gpu_ns includes waits for the host
    samples: int
    repeats: int  # runs in a sample

    @property
    def wall(self) -> Interval:
        """The wall clock; without limits where there are too few samples."""
        return wall_interval(self.wall_ns, self.wall_low_ns, self.wall_high_ns, self.samples)

    @property
    def device(self) -> Interval:
        """The device's own work without launches: the GPU's clock, or on the CPU the wall clock."""
        if self.gpu_ns is None:
            return self.wall
        took = units.duration(self.gpu_ns)
        if self.gpu_exact:
            return _of_one_process(Interval(self.gpu_ns, self.gpu_ns, self.gpu_ns, took))
        return Interval(self.gpu_ns, 0.0, self.gpu_ns, f"{took} at most: the GPU waited for the host")

    @property
    def took_ns(self) -> float:
        return self.wall_ns if self.gpu_ns is None else self.gpu_ns


class Moved(Timed, frozen=True, kw_only=True):
    """Timed work that reads and writes so many bytes."""

    moved_bytes: int


def wall_interval(wall_ns: float, low_ns: float, high_ns: float, samples: int) -> Interval:
    """A time on the wall clock.

    >>> wall_interval(3e8, 2.2e8, 5e8, samples=6).text
    '300 ms, between 220 ms and 500 ms in 6 samples'
    >>> wall_interval(5.0, 4.0, 7.0, samples=2).high
    inf
    """
    text = units.duration(wall_ns)
    if samples < FEWEST_SAMPLES or high_ns > low_ns:
        text += f", between {units.duration(low_ns)} and {units.duration(high_ns)} in {samples} samples"
    if samples < FEWEST_SAMPLES:
        return Interval(wall_ns, 0.0, math.inf, text)
    return _of_one_process(Interval(wall_ns, low_ns, high_ns, text))


def _of_one_process(seen: Interval) -> Interval:
    """Wider by what another process of the same code may take more or less, of which the samples of one show nothing."""
    apart = NORMAL_95 * LEAST_SPREAD_OF_ONE / math.sqrt(2)  # that spread is of the ratio of two processes
    down, up = (
        math.hypot(math.log(seen.middle / seen.low), apart),
        math.hypot(math.log(seen.high / seen.middle), apart),
    )
    return Interval(seen.middle, seen.middle * math.exp(-down), seen.middle * math.exp(up), seen.text)


def contradiction(rows: Iterable[Row]) -> str:
    """Why these rows cannot have been measured: a time or rate that is not positive or contradicts another; '' if none does."""
    for row in rows:
        values = fields(row)
        for key, value in values.items():
            if key.endswith(("_ns", "_per_s")) and key not in MAY_BE_ZERO and value is not None and not value > 0:
                return f"{key} is {value:.3g} in a row, but every time and rate is positive."
        if isinstance(row, Timed) and (text := _disagreement(values, row.took_ns)):
            return text
    return ""


def _disagreement(values: Mapping[str, Any], took_ns: float) -> str:
    """The field that does not agree with the row's clock."""
    if (device_ns := values.get("device_ns")) is not None and not _alike(device_ns, took_ns):
        return "device_ns does not agree with the clock that it was read from."
    for rate, work in WORK.items():
        if work in values and values.get(rate) and not _alike(values[rate], 1e9 * values[work] / took_ns):
            return f"{rate} does not agree with {work} and the time."
    return ""


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * abs(other)
