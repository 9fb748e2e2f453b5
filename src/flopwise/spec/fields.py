"""Checks on fields: every message names the field, the value and what is allowed."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from flopwise.errors import FlopwiseError


def one_of(field: str, value: object, allowed: Iterable[str]) -> None:
    """Raise unless `value` is one of the `allowed` words."""
    words = tuple(allowed)
    if value not in words:
        several = isinstance(value, str) and "," in value and all(one.strip() in words for one in value.split(","))
        first = "one of them at a time (several: flopwise sweep, or bench --versus); " if several else ""
        hint = f"{first or did_you_mean(value, words)}allowed: {', '.join(words)}"
        raise FlopwiseError(f"{field} = {show(value)} is not allowed", hint)


def whole(field: str, value: object, low: int = 1, high: int = 2**31) -> None:
    """Raise unless `value` is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FlopwiseError(f"{field} = {show(value)} is not allowed", f"allowed: a whole number from {low} to {high}")


def number(field: str, value: object, low: float, high: float) -> None:
    """Raise unless `value` is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise FlopwiseError(f"{field} = {show(value)} is not allowed", f"allowed: a number from {low:g} to {high:g}")


def flag(field: str, value: object) -> None:
    """Raise unless `value` is true or false."""
    if not isinstance(value, bool):
        raise FlopwiseError(f"{field} = {show(value)} is not allowed", "allowed: true, false")


def switch(field: str, value: object) -> bool:
    """A flag as people write it; raises on anything else.

    >>> switch("causal", "off"), switch("causal", True)
    (False, True)
    """
    if isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise FlopwiseError(f"{field} = {show(value)} is not allowed", "allowed: on, off")
    return value == "on"


def text(field: str, value: object) -> None:
    """Raise unless `value` is text that a file can hold (not a path's undecodable bytes)."""
    if not isinstance(value, str) or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
        raise FlopwiseError(f"{field} = {show(value)} is not allowed", "allowed: text")


def known(kind: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raise if `given` has a key that is not `allowed`."""
    words = tuple(allowed)
    for key in given:
        if key not in words:
            raise FlopwiseError(
                f"{kind} has no field {show(key)} (value {show(given[key])})",
                f"{did_you_mean(key, words)}allowed: {', '.join(words)}",
            )


def did_you_mean(value: object, words: Iterable[str]) -> str:
    """The start of a hint: the closest word, if one is close.

    >>> did_you_mean("smal", ["small", "large"])
    "did you mean 'small'? "
    """
    close = difflib.get_close_matches(value, list(words), n=1) if isinstance(value, str) else []
    return f"did you mean '{close[0]}'? " if close else ""


def show(value: object) -> str:
    """A value as the user would write it, cut short.

    >>> show("x" * 100)[:12], show(0)
    ("'xxxxxxxxxxx", '0')
    """
    try:
        shown = f"'{value}'" if isinstance(value, str) else str(value)
    except (RecursionError, ValueError):  # nested too deep; an integer of more than 4300 digits
        return f"a very large {type(value).__name__}"
    return shown if len(shown) <= 80 else shown[:76] + "…'"
