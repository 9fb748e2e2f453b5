"""Whether the numbers of a record from outside are some that a program can have."""

from functools import cache
from typing import Any, get_args

import msgspec

from flopwise.units import shown, unit_of

MOST_NS, MOST_BYTES, MOST = 2**53, 2**60, 1e30  # 104 days, an exbibyte; FLOPs, rates and counts
_MOMENTS, _LAST_NS = ("created_ns", "at_ns", "begin_ns"), 2**62  # since 1970: until 2116
_MOST = {"ns": MOST_NS, "s": MOST_NS / 1e9, "bytes": MOST_BYTES}
_PLAIN = {bool, int, float, str, type(None), ...}
_NESTED = (msgspec.Struct, tuple, list)
_UNITS = {"owners": "bytes"} | dict.fromkeys(  # of names that do not end in one
    ("batch", "context", "parameters", "tokens", "vocabulary", "n_weights", "world", "gpus", "price"), "count"
)


def impossible(record: Any) -> str:
    """The first quantity that is less than nothing, or more than any machine has; '': none is.

    >>> from flopwise.records.run import PhaseTimes
    >>> impossible(PhaseTimes(phase="step", wall_ns=(5, -1))), impossible(PhaseTimes(phase="step", wall_ns=(5,)))
    ('wall_ns = -1', '')
    """
    if isinstance(record, msgspec.Struct):
        for field, most in _quantities(type(record)):
            value = getattr(record, field)
            if not most:
                odd = impossible(value) if isinstance(value, _NESTED) else ""
            elif isinstance(value, int | float) and 0 <= value <= most:
                continue
            else:
                odd = _beyond(field, value, most)
            if odd:
                return odd
        return ""
    if isinstance(record, tuple | list) and record and isinstance(record[0], msgspec.Struct):
        return next(filter(None, map(impossible, record)), "")
    return ""


def too_large(document: Any) -> bool:
    """Whether a number anywhere in a document is more than anything is counted in."""
    if isinstance(document, dict | list):
        return any(map(too_large, document.values() if isinstance(document, dict) else document))
    return isinstance(document, int | float) and not abs(document) <= MOST


@cache
def _quantities(kind: type[msgspec.Struct]) -> tuple[tuple[str, float], ...]:
    """The fields of a record that have a unit, with the most that each may be; 0: of other records, which have their own."""
    found = []
    for field, declared in zip(kind.__struct_fields__, msgspec.structs.fields(kind), strict=True):
        rate = field.endswith(("flops_s", "bytes_s", "tokens_s"))  # a second, not seconds
        unit = "rate" if rate else _UNITS.get(field) or unit_of(field)
        if unit not in ("share", ""):
            found.append((field, _LAST_NS if field in _MOMENTS else _MOST.get(unit, MOST)))
        elif not _plain(declared.type):
            found.append((field, 0))
    return tuple(found)


def _plain(declared: Any) -> bool:
    """Whether no record can be in a field of this type."""
    inner = get_args(declared)
    return all(map(_plain, inner)) if inner else declared in _PLAIN


def _beyond(field: str, value: Any, most: float) -> str:
    odd = next((one for one in _extremes(value) if not 0 <= one <= most), None)
    return "" if odd is None else f"{field} = {shown(odd)}"


def _extremes(value: Any) -> tuple[float, ...]:
    """The least and the largest of the numbers in a value."""
    if isinstance(value, dict):
        return tuple(one for each in value.values() for one in _extremes(each))
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], tuple | list | dict):
            return tuple(one for each in value for one in _extremes(each))
        numbers = [one for one in value if isinstance(one, int | float)] if None in value else value
        return (min(numbers), max(numbers)) if numbers and isinstance(numbers[0], int | float) else ()
    return (value,) if isinstance(value, int | float) else ()
