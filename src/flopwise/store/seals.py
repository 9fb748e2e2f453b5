"""Seals: what every stored record ends with, so that a reader sees whether it, or its place among the others, has changed.

A seal is the last field of a JSON object, which readers that do not know it ignore: the record's number, the checksum of the
record before it, and its own, which covers all bytes before it. A record that is not a row stands alone: it has number 1.
"""

import errno
import os
import re
import zlib
from pathlib import Path
from typing import NamedTuple

CHANGED = "is damaged: it is not as it was written"
_SEAL = re.compile(rb'[,{]"seal":"(\d{1,9})-([0-9a-f]{8})-([0-9a-f]{8})"}\n?$')
_MOST_BYTES = 48  # of a seal with its field's name and the end of its line


class Seal(NamedTuple):
    """Which record it is, after which one, and the checksum of both and of its content."""

    number: int
    before: int
    own: int


NO_SEAL = Seal(0, 0, 0)  # before the first record


def sealed(record: bytes, before: Seal = NO_SEAL) -> tuple[bytes, Seal]:
    """A JSON object with its seal, and the seal.

    >>> line, seal = sealed(b'{"a":1}')
    >>> line, seal_of(line) == seal, seal_of(line.replace(b"1", b"2", 1))
    (b'{"a":1,"seal":"1-00000000-7b972856"}', True, None)
    """
    number = before.number + 1
    content = b'%b%b"seal":"%d-%08x-' % (record[:-1], b"," if len(record) > 2 else b"", number, before.own)
    own = zlib.crc32(content)
    return b'%b%08x"}' % (content, own), Seal(number, before.own, own)


def seal_of(line: bytes) -> Seal | None:
    """The seal of a record that is as it was written; None where it has changed, or never had one."""
    found = _SEAL.search(line, max(0, len(line) - _MOST_BYTES))
    if found is None:
        return None
    seal = _parsed(found)
    return seal if zlib.crc32(memoryview(line)[: found.start(3)]) == seal.own else None


def looks_sealed(line: bytes) -> bool:
    """Whether a record has, or had before it was damaged, a seal; one of an earlier version has none."""
    return b'"seal":"' in line[-2 * _MOST_BYTES :]


def alone_is_sound(record: bytes) -> bool:
    """Whether a record that is not a row is as it was written, or is of an earlier version."""
    return seal_of(record) is not None or not looks_sealed(record)


def last_seal(path: Path) -> Seal:
    """The seal that the next row of a table follows. Rows of an earlier version have none, and are counted."""
    try:
        if not path.is_file() and os.path.lexists(path):  # a pipe would wait for ever
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MOST_BYTES))
            if found := _SEAL.search(file.read()):
                return _parsed(found)
            file.seek(0)
            last, unsealed = NO_SEAL, 0
            for line in file:
                found = _SEAL.search(line, max(0, len(line) - _MOST_BYTES))
                last = _parsed(found) if found else last
                unsealed += not found and line != b"\n"
            return last if last != NO_SEAL else Seal(unsealed, 0, 0)
    except FileNotFoundError:
        return NO_SEAL


def _parsed(found: re.Match[bytes]) -> Seal:
    return Seal(int(found[1]), int(found[2], 16), int(found[3], 16))
