"""How text is cut into words before byte-pair encoding: no merge spans two of them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from flopwise.errors import FlopwiseError

HINT = "pip install 'flopwise[train]'"
_SPACE = (
    r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space; Python's \s has more
)
_NOT_LINE = r"\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # the same without \r and \n


class Pattern(NamedTuple):
    """`words` is the definition. `runs`, if any, cuts at some of the same places with Python's own, faster `re`.

    Text repeats itself: the definition then needs to look at each distinct run only once.
    """

    words: str
    runs: str = ""


PATTERNS = {
    # https://github.com/openai/gpt-2/blob/master/src/encoder.py
    "gpt2": Pattern(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        rf" ?[^{_SPACE}]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+",
    ),
    # https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
    "llama3": Pattern(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        rf"[{_NOT_LINE}]?[^{_SPACE}]+(?:[{_SPACE}]*[\r\n])?|[{_SPACE}]*[\r\n]|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+",
    ),
}


def pattern_of(name: str) -> Pattern:
    """A pattern by its name, or a regular expression as it is."""
    if name not in PATTERNS and name.isidentifier():
        raise FlopwiseError(f"pattern '{name}' is unknown", f"use {' or '.join(PATTERNS)}, or a regular expression")
    return PATTERNS.get(name, Pattern(name))


def name_of(words: str) -> str:
    """The name of a regular expression, if it has one."""
    return next((name for name, pattern in PATTERNS.items() if pattern.words == words), words)


def words_of(pattern: Pattern) -> Callable[[str], list[str]]:
    """The function that cuts a text into words."""
    try:
        import regex
    except ImportError:
        raise FlopwiseError("training a tokenizer needs the package regex", HINT) from None
    try:
        compiled: Any = regex.compile(pattern.words)
    except regex.error as error:
        raise FlopwiseError(
            f"the pattern is no regular expression: {error}", f"or use {' or '.join(PATTERNS)}"
        ) from None
    if compiled.groups:
        raise FlopwiseError("the pattern has a group that captures", "write (?:…) instead of (…)")
    find: Callable[[str], list[str]] = compiled.findall
    return find


def runs_of(pattern: Pattern) -> Callable[[str], list[str]] | None:
    return re.compile(pattern.runs).findall if pattern.runs else None
