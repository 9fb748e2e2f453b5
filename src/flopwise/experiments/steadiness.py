"""Whether a time is known well enough for what a verdict makes of it. No torch here.

A row holds the median of its samples, and the interval of the wall clock's (`wall_low_ns`, `wall_high_ns`). The GPU's own clock
has no interval in a row: it stands as it is, unless the GPU waited for the host (`gpu_exact` is False). A field that is not
there says nothing.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flopwise import units
from flopwise.experiments.experiment import CONFIRMED, INCONCLUSIVE, REFUTED

FEWEST_SAMPLES = 3  # of fewer the spread is not known
WALL, GPU, DEVICE = "wall_ns", "gpu_ns", "device_ns"
# Of the memory's specified bandwidth: what is slower has another limit; what is faster was not moved by the memory alone.
LEAST_OF_MEMORY, MOST_OF_MEMORY = 0.5, 1.1
WORK = {"rate_flops_per_s": "work_flops", "rate_bytes_per_s": "moved_bytes", "used_bytes_per_s": "used_bytes"}
SAME = 0.01  # of a number: one that was computed from others of its row is off by less


def no_evidence(rows: Iterable[Mapping[str, Any]]) -> str:
    """Why these rows cannot have been measured: a time or a rate that is not above zero, or one that denies another; '' if none.

    >>> no_evidence([{"wall_ns": 5.0, "gpu_ns": None}, {"wall_ns": 5.0, "latency_ns": -2.0}])
    'latency_ns is -2 in a row: no time or rate is.'
    >>> no_evidence([{"used_bytes": 8, "used_bytes_per_s": 2e9, "gpu_ns": 8.0}])
    'used_bytes_per_s is not what gpu_ns makes it.'
    """
    for row in rows:
        for key, value in row.items():
            # What is left after others (`rest_ns`) may be nothing.
            if (
                key.endswith(("_ns", "_per_s"))
                and key != "rest_ns"
                and isinstance(value, int | float)
                and not value > 0
            ):
                return f"{key} is {value:.3g} in a row: no time or rate is."
        clock = device_clock(row)
        took = row.get(clock)
        if not took:
            continue
        if DEVICE in row and not _alike(row[DEVICE], took):
            return f"{DEVICE} is not what {clock} says."
        for rate, work in WORK.items():
            if work in row and row.get(rate) and not _alike(row[rate], 1e9 * row[work] / took):
                return f"{rate} is not what {clock} makes it."
    return ""


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * abs(other)


def device_clock(row: Mapping[str, Any]) -> str:
    """The clock of the device's own work: the GPU's, or on the CPU the wall's.

    >>> device_clock({"wall_ns": 5.0, "gpu_ns": None})
    'wall_ns'
    """
    return GPU if row.get(GPU) is not None else WALL if WALL in row else DEVICE


def span(row: Mapping[str, Any], key: str = WALL) -> tuple[float, float]:
    """Between what the time lies, as far as the row knows; anything, where there are too few samples of the wall clock.

    >>> span({"wall_ns": 5.0, "wall_low_ns": 4.0, "wall_high_ns": 7.0, "samples": 9})
    (4.0, 7.0)
    >>> span({"wall_ns": 5.0, "wall_low_ns": 4.0, "wall_high_ns": 7.0, "samples": 2})
    (0.0, inf)
    """
    if key == WALL and row.get("samples", FEWEST_SAMPLES) < FEWEST_SAMPLES:
        return 0.0, math.inf
    if key == GPU and row.get("gpu_exact") is False:
        return 0.0, float(row[key])  # it holds waits for the host, too
    stem = key.removesuffix("_ns")
    return float(row.get(f"{stem}_low_ns", row[key])), float(row.get(f"{stem}_high_ns", row[key]))


def unsteady(row: Mapping[str, Any], key: str, allowed_ratio: float) -> str:
    """Why a time cannot carry a verdict that needs its interval's ends to be within this ratio; '' if it can.

    >>> unsteady({"wall_ns": 3e8, "wall_low_ns": 2.2e8, "wall_high_ns": 5e8, "samples": 6}, "wall_ns", 1.5)
    '300 ms, between 220 ms and 500 ms in 6 samples'
    >>> unsteady({"wall_ns": 3e8}, "wall_ns", 1.5)
    ''
    """
    low, high = span(row, key)
    if low > 0 and high <= allowed_ratio * low:
        return ""
    took = units.duration(row[key])
    if key == GPU:
        return f"{took} at most: the GPU waited for the host"
    ends = units.duration(row.get("wall_low_ns", row[key])), units.duration(row.get("wall_high_ns", row[key]))
    n = row.get("samples")
    return f"{took}, between {ends[0]} and {ends[1]}" + (f" in {n} samples" if n else "")


@dataclass(frozen=True)
class Ratio:
    """How many times one time is another, and between what that lies."""

    middle: float
    low: float
    high: float

    def around(self, middle: float) -> "Ratio":
        """As uncertain as this, around another value: of a rate that was computed from these times."""
        by = middle / self.middle
        return Ratio(middle, by * self.low, by * self.high)

    def within(self, least: float = 0.0, most: float = math.inf) -> bool | None:
        """Whether it lies there; None where the interval does not tell.

        >>> Ratio(3.0, 2.5, 3.5).within(least=2), Ratio(3.0, 2.5, 3.5).within(most=2), Ratio(3.0, 2.5, 3.5).within(least=3)
        (True, False, None)
        """
        if least <= self.low and self.high <= most:
            return True
        return False if self.high < least or self.low > most else None


def times(row: Mapping[str, Any], base: Mapping[str, Any], key: str = "") -> Ratio:
    """How many times as long as the base a row takes, by this clock; without one, by the device's.

    The errors are independent: their logarithms add up by squares.

    >>> times({"wall_ns": 6.0}, {"wall_ns": 2.0})
    Ratio(middle=3.0, low=3.0, high=3.0)
    """
    key = key or device_clock(base)
    middle = row[key] / base[key]
    (low, high), (base_low, base_high) = span(row, key), span(base, key)
    return Ratio(
        middle=middle,
        low=middle / _factor(row[key], low, base_high, base[key]),
        high=middle * _factor(high, row[key], base[key], base_low),
    )


def _factor(one: float, by: float, other: float, other_by: float) -> float:
    """The factor of two independent errors, one / by and other / other_by."""
    if 0.0 in (by, other_by) or math.inf in (one, other):
        return math.inf
    return math.exp(math.hypot(math.log(one / by), math.log(other / other_by)))


def of_memory(row: Mapping[str, Any], peak_bytes_per_s: float | None) -> bool | None:
    """Whether the moved bytes take about the time that the memory needs for them; None where they come faster than it can give.

    Without a known bandwidth there is nothing to ask.

    >>> [of_memory({"moved_bytes": 8, "gpu_ns": ns}, 1e9) for ns in (10.0, 100.0, 1.0)], of_memory({}, None)
    ([True, False, None], True)
    """
    if peak_bytes_per_s is None:
        return True
    low, high = (
        row["moved_bytes"] / peak_bytes_per_s * 1e9 / ns if ns else math.inf
        for ns in span(row, device_clock(row))[::-1]
    )
    if high > MOST_OF_MEMORY:
        return None
    return Ratio(low, low, high).within(least=LEAST_OF_MEMORY)


def together(*answers: bool | None) -> bool | None:
    """Whether all hold: one that does not is enough for no; one that is open leaves open the rest.

    >>> together(True, None), together(None, False), together(True, True)
    (None, False, True)
    """
    if False in answers:
        return False
    return None if None in answers else True


def word(answer: bool | None) -> str:
    """The verdict's word.

    >>> word(True), word(False), word(None)
    ('confirmed', 'refuted here', 'inconclusive')
    """
    return INCONCLUSIVE if answer is None else CONFIRMED if answer else REFUTED


def left_open(named: Iterable[tuple[str, Mapping[str, Any]]], key: str = "") -> str:
    """A sentence on the least steady of these times, for a verdict that they leave open.

    >>> left_open([("one", {"wall_ns": 5e6}), ("two", {"wall_ns": 3e6, "wall_low_ns": 2e6, "wall_high_ns": 4e6, "samples": 6})])
    'Too unsteady to tell: two takes 3.00 ms, between 2.00 ms and 4.00 ms in 6 samples.'
    """
    name, row = max(named, key=lambda one: _width(one[1], key or device_clock(one[1])))
    clock = key or device_clock(row)
    open_by = "Not exact enough" if clock == GPU else "Too unsteady"
    return f"{open_by} to tell: {name} takes {unsteady(row, clock, 1.0) or units.duration(row[clock])}."


def _width(row: Mapping[str, Any], key: str) -> float:
    low, high = span(row, key)
    return high / low if low > 0 else math.inf
