"""The only place where seconds, bytes and FLOPs become text, and text becomes them."""

import math
import re
from collections.abc import Callable

from flopwise.errors import FlopwiseError

_DURATIONS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_RATES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))


def significant(value: float, digits: int = 3) -> str:
    """A plain decimal with `digits` significant digits and never more than four, never in exponent form.

    >>> [significant(v) for v in (0.01234, 1.005, 38.749, 123.4, 1234.0, 12345.6, 0.0)]
    ['0.0123', '1.00', '38.7', '123', '1234', '12350', '0']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    rounded = round(value, 3 - magnitude) if magnitude > 3 else value
    return f"{rounded:.{max(0, digits - 1 - magnitude)}f}"


def duration(ns: float) -> str:
    """Nanoseconds as text with three significant digits.

    >>> duration(6_400_000), duration(950), duration(1.5e9)
    ('6.40 ms', '950 ns', '1.50 s')
    """
    name, size = next(((n, s) for n, s in _DURATIONS if abs(ns) >= s), _DURATIONS[-1])
    return f"{significant(ns / size)} {name}"


def milliseconds(ns: float) -> str:
    """Nanoseconds as a number of milliseconds, for table columns that say `ms`; less than a microsecond is no number.

    >>> milliseconds(6_432_100), milliseconds(63_534), milliseconds(86)
    ('6.432', '0.06353', '<0.001')
    """
    if 0 < ns < 1e3:
        return "<0.001"
    text = significant(ns / 1e6, 4)
    return text if len(text.partition(".")[2]) <= 5 else f"{ns / 1e6:.5f}"


def size(n_bytes: float) -> str:
    """Bytes as text, in binary units.

    >>> size(64 * 2**30), size(512)
    ('64.0 GiB', '512 B')
    """
    name, unit = next(((n, s) for n, s in _BYTES if abs(n_bytes) >= s), _BYTES[-1])
    return f"{n_bytes:.0f} B" if unit == 1 else f"{significant(n_bytes / unit)} {name}"


def count(n: float) -> str:
    """A large count as text.

    >>> count(3_406_809_600), count(912)
    ('3.41B', '912')
    """
    name, unit = next(((k, s) for k, s in _COUNTS if abs(n) >= s), ("", 1.0))
    return f"{n:.0f}" if unit == 1.0 else f"{significant(n / unit)}{name}"


def several(n: float, what: str) -> str:
    """A number of things.

    >>> several(1, "wait"), several(2.6, "call"), several(1200, "launch")
    ('1 wait', '3 calls', '1,200 launches')
    """
    number = f"{n:,.0f}"
    plural = f"{what}{'es' if what.endswith(('ch', 's')) else 's'}"
    return f"{number} {what if number == '1' else plural}"


def rate(per_second: float, unit: str) -> str:
    """A rate with a decimal prefix, as datasheets print it.

    >>> rate(9.894e14, "FLOP/s"), rate(24.2e9, "B/s")
    ('989 TFLOP/s', '24.2 GB/s')
    """
    name, scale = next(((n, s) for n, s in _RATES if abs(per_second) >= s), ("", 1.0))
    return f"{significant(per_second / scale)} {name}{unit}"


def flops(n: float) -> str:
    """FLOPs with their prefix; beyond the usual prefixes, as papers write them.

    >>> flops(1.5e12), flops(912), flops(8.1e24)
    ('1.50 T', '912', '8.1e+24')
    """
    return f"{n:.3g}" if abs(n) >= 1e18 else rate(n, "").strip()


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage.

    >>> percent(0.0312), percent(-0.5, 0)
    ('3.1 %', '-50 %')
    """
    return f"{100 * share:.{digits}f} %"


def saving(ns: float) -> str:
    """A saved time, with a minus where time is lost.

    >>> saving(6_400_000), saving(-950)
    ('6.40 ms', '−950 ns')
    """
    return f"−{duration(-ns)}" if ns < 0 else duration(ns)


def days(value: float) -> str:
    """Days, or hours and less where it is less than one.

    >>> days(143.92), days(0.5), days(0.000179), days(12345.6)
    ('143.9 days', '12.0 h', '15.5 s', '12350 days')
    """
    if value >= 1:
        return f"{value:.1f} days" if value < 1000 else f"{significant(value)} days"
    return f"{significant(24 * value)} h" if 24 * value >= 1 else duration(value * 86400e9)


# How a table shows a value of each unit. The first ones are also the endings of names: `peak_bytes`, `wall_ns`.
_ENDINGS: dict[str, Callable[[float], str]] = {
    "bytes_per_s": lambda value: rate(value, "B/s"),
    "flops_per_s": lambda value: rate(value, "FLOP/s"),
    "per_s": count,
    "bytes": size,
    "ns": duration,
    "s": lambda value: duration(1e9 * value),
    "share": percent,
    "flops": flops,
}
_SHOWN: dict[str, Callable[[float], str]] = _ENDINGS | {
    "ms": milliseconds,  # of a value in nanoseconds
    "percent": lambda value: percent(value, 0),
    "signed_share": lambda value: f"{100 * value:+.1f} %",
    "error_share": lambda value: "<0.001 %" if 0 < value < 1e-5 else f"{100 * value:.2g} %",
    "signed_bytes": lambda value: f"{'+' if value > 0 else ''}{size(value)}" if value else "0",
    "saving": saving,
    "GB": lambda value: rate(value, "B"),  # as datasheets count
    "count": count,
    "number": significant,
    "ratio": lambda value: f"{value:.3f}",
    "times": lambda value: f"{value:.2f}x",
    "days": days,
    "hours": lambda value: count(value) if value >= 1000 else significant(value),
}
_LARGEST, _WHOLE = 1e300, 1e6  # a stored file may hold any number; a whole number below is shown with all its digits


def unit_of(name: str) -> str:
    """The unit at the end of a name; '' where there is none.

    >>> unit_of("wall_ns"), unit_of("m_flops_per_s"), unit_of("share"), unit_of("phase")
    ('ns', 'flops_per_s', 'share', '')
    """
    return next((unit for unit in _ENDINGS if name == unit or name.endswith(f"_{unit}")), "")


def shown(value: object, unit: str = "") -> str:
    """A raw value as a person reads it.

    >>> shown(1500.0, "ns"), shown(1.5e6, "ms"), shown(True), shown("relu"), shown(7), shown(10**400)
    ('1.50 µs', '1.500', 'yes', 'relu', '7', 'a number too large to show')
    >>> shown(1.19e-7), shown(65504.0), shown(3.4e38)
    ('1.19e-07', '65504', '3.4e+38')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if abs(value) > _LARGEST:
        return "a number too large to show"
    if unit in _SHOWN:
        return _SHOWN[unit](value)
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < _WHOLE)
    return f"{value:.0f}" if whole else f"{value:.4g}"


def parse_percent(text: str) -> float:
    """`3%`, `3 %`, `3` or `0.03` as a share: a bare number below 1 is a share, one from 1 on a percentage.

    >>> parse_percent("3%"), parse_percent("3"), parse_percent("0.03")
    (0.03, 0.03, 0.03)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    if match is None or float(match[1]) > 1000:
        raise FlopwiseError(f"'{text}' is not a percentage", "write it as 3% or 0.03")
    number = float(match[1])
    return number / 100 if match[2] or number >= 1 else number


def parse_share(text: str) -> float:
    """`50%` or `0.5`: a bare number is a share, so that 1 is all of it, and no share is above that.

    >>> parse_share("50%"), parse_share("0.5"), parse_share("1")
    (0.5, 0.5, 1.0)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    share = 0.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 < share <= 1:
        raise FlopwiseError(f"'{text}' is not a share", SHARE_HINT)
    return share


SHARE_HINT = "write it as 0.5 or 50%: above 0, and 1 or 100% at most"


def parse_count(text: str) -> int:
    """`15T`, `300B`, `1.5M`, `512` as a whole number.

    >>> parse_count("15T"), parse_count("1.5M"), parse_count("512")
    (15000000000000, 1500000, 512)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([kKmMbBgGtT]?)\s*", text)
    if match is None or not 1 <= (number := float(match[1]) * _SUFFIXES[match[2].upper()]) <= 1e18:
        raise FlopwiseError(f"'{text}' is not a count", "write it as 15T, 300B, 1.5M or 512")
    return round(number)


_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_duration(text: str) -> int:
    """`24ms`, `1.5 s`, `300us`, `10m` as nanoseconds.

    >>> parse_duration("24ms"), parse_duration("1.5 s"), parse_duration("300us"), parse_duration("10m")
    (24000000, 1500000000, 300000, 600000000000)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(h|m|s|ms|us|µs|ns)\s*", text)
    known = dict(_DURATIONS) | {"m": 60e9, "h": 3600e9}
    if match is None or not 1 <= (ns := float(match[1]) * known[match[2].replace("us", "µs")]) <= 1e18:
        raise FlopwiseError(f"'{text}' is not a time", "a number above zero and its unit: 24ms, 1.5s, 10m")
    return round(ns)


def parse_size(text: str) -> int:
    """`40GiB`, `40 GB`, `512MiB` as bytes.

    >>> parse_size("40GiB"), parse_size("1.5 GB")
    (42949672960, 1500000000)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT])(i?)B\s*", text, re.IGNORECASE)
    if match is None or len(match[1]) > 15:
        raise FlopwiseError(f"'{text}' is not a size", "a number above zero and its unit: 40GiB, 512MiB")
    unit: int = (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2].upper()))
    return round(float(match[1]) * unit)
