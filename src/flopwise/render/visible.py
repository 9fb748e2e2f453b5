"""Names from outside (traces, snapshots, configs, files) as a terminal or a page may show them."""

import re

LONGEST_CELL = 200
LONGEST_LINE = 1000  # a title, a note, or a cell that holds a sentence or a stack
_IN_JSON = re.compile(r"[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")


def visible(text: str, limit: int | None = None) -> str:
    """The text with everything in sight: what would steer a terminal, break a line or turn its order is shown, not done.

    Control characters below a space become their pictures; others, with direction marks and separators, their codes. A text
    longer than `limit` ends in …

    >>> visible("\\x1b[31mred\\n"), visible("a\\u202eb\\x9b"), visible("abcdef", 4)
    ('␛[31mred␊', 'a\\\\u202eb\\\\x9b', 'abc…')
    """
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else _shown(c) for c in text)


def _shown(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else character.encode("ascii", "backslashreplace").decode()


def visible_json(text: str) -> str:
    """JSON escapes controls below a space by itself; the others mean something to terminals, too.

    >>> visible_json('{"name": "a\\u202eb"}')
    '{"name": "a\\\\u202eb"}'
    """
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
