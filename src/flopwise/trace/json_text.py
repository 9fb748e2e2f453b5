"""JSON as bytes: where its brackets are without decoding it, and how to repair what careless writers emit."""

import re

import numpy as np
from numpy.typing import NDArray


class Structure:
    """Where brackets open and close outside strings, without decoding; `depth` counts from the start of the text."""

    def __init__(self, text: bytes) -> None:
        # An escaped quote ends no string, unless the backslash before it is escaped itself; the length stays.
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._text = np.frombuffer(text, dtype=np.uint8)
        # A quote opens where an odd number of quotes has been seen, itself included.
        self.in_string: NDArray[np.bool_] = (
            np.bitwise_xor.accumulate(self._text == ord('"')) if text else np.zeros(0, np.bool_)
        )
        lowered = self._text | 0x20  # [ and { differ by this bit only, and so do ] and }
        brackets = ((lowered == ord("{")) | (lowered == ord("}"))) & ~self.in_string
        self.at = np.flatnonzero(brackets)
        self.opens = lowered[self.at] == ord("{")
        self.depth = np.cumsum(np.where(self.opens, np.int8(1), np.int8(-1)), dtype=np.int32)

    def last_event_end(self) -> int:
        """Just past the last bracket that closes at depth 0; 0 if none does."""
        ends = self.at[(self.depth == 0) & ~self.opens]
        return int(ends[-1]) + 1 if len(ends) else 0

    def list_end(self) -> int | None:
        """The bracket that closes the list the text began in."""
        ends = self.at[self.depth < 0]
        return int(ends[0]) if len(ends) else None

    def depth_at(self, position: int) -> int:
        before = int(np.searchsorted(self.at, position))
        return int(self.depth[before - 1]) if before else 0


_CONTROL_TO_SPACE = bytes(32 if byte < 32 else byte for byte in range(256))
_BAD_ESCAPE = re.compile(rb'\\(?:[^"\\/bfnrtu]|u(?![0-9a-fA-F]{4})|u[dD][89a-fA-F])')
_ESCAPE = re.compile(
    rb"""\\(?:
    (?P<pair> u[dD][89abAB][0-9a-fA-F]{2} \\u[dD][c-fC-F][0-9a-fA-F]{2} ) |
    (?P<lone> u[dD][89a-fA-F][0-9a-fA-F]{2} ) |
    (?P<plain> u[0-9a-fA-F]{4} | ["\\/bfnrt] )
    )?""",
    re.VERBOSE,
)
_BARE_WORD = re.compile(rb"(?:inf(?:inity)?|Inf(?:inity)?|INF|nan(?:\(\w*\))?|NaN|NAN)(?=[,\]}\s])")


def repaired(text: bytes) -> bytes:
    r"""Make JSON of what careless writers emit: bare inf and NaN, control characters, bad escapes, bytes that are not UTF-8.

    >>> repaired(b'[inf, "inf", -NaN, "a\x01 \\q \xff"]').decode()
    '[null, "inf", null, "a  \\\\q �"]'
    """
    text = text.decode("utf-8", "replace").encode().translate(_CONTROL_TO_SPACE)
    if _BAD_ESCAPE.search(text.replace(b"\\\\", b"__")):
        text = _ESCAPE.sub(_valid_escape, text)
    words = [match.span() for match in _BARE_WORD.finditer(text)]
    if not words:
        return text
    in_string = Structure(text).in_string
    pieces, end = [], 0
    for start, stop in words:
        if not in_string[start]:
            start -= text[start - 1 : start] in (b"-", b"+")
            pieces += [text[end:start], b"null"]
            end = stop
    return b"".join([*pieces, text[end:]])


def _valid_escape(match: re.Match[bytes]) -> bytes:
    pair, lone, plain = match.groups()
    return b"\\ufffd" if lone else match[0] if pair or plain else rb"\\"
