"""Checks on a file that a user named: a regular one (a pipe would block, a folder cannot be read), and no gzip bomb."""

import gzip
import os
from pathlib import Path
from typing import BinaryIO, cast

from flopwise.errors import FlopwiseError

SQLITE_MAGIC = b"SQLite format 3\0"
GZIP_MAGIC = b"\x1f\x8b"
# Profilers' traces shrink 15 to 40 times, snapshots of memory 10 to 25; deflate's most is 1032. Small files may do as they like.
INFLATED_RATIO, INFLATED_FREE = 100, 32 << 20
MEMBERS_FREE = 4 << 20  # a file that does not shrink at all grows by a thousandth


def check_file(path: Path, hint: str) -> None:
    """Raise unless `path` is a regular file; `hint` says which files are accepted."""
    if os.path.isfile(path):
        return
    if os.path.isdir(path):
        problem = "it is a folder, not a file"
    elif os.path.exists(path):
        problem, hint = "it is not a regular file", f"write it to a file first; {hint}"
    elif os.path.islink(path):
        problem, hint = f"it is a link to {os.readlink(path)}, which does not exist", "fix the link"
    elif len(os.fsencode(path.name)) > 255 or len(os.fsencode(path)) > 4095:  # NAME_MAX, PATH_MAX
        raise FlopwiseError(f"cannot open {str(path)[:100]}…: the name is too long for a file", hint)
    else:
        problem, hint = "there is no such file", f"check the path; {hint}"
    raise FlopwiseError(f"cannot open {path}: {problem}", hint)


class Unpacked(gzip.GzipFile):
    """What a gzip file holds; one of millions of members that hold next to nothing is refused."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._packed = _PackedBytes(path, file)
        super().__init__(fileobj=cast(BinaryIO, self._packed), mode="rb")

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._packed.unpacked += len(data)
        return data


class _PackedBytes:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.unpacked = 0  # so far
        self._path, self._file = path, file

    def read(self, size: int = -1) -> bytes:
        if (packed := self._file.tell()) > MEMBERS_FREE and 2 * self.unpacked < packed:
            problem = f"{self._path} unpacks to less than half of its size: refused"
            raise FlopwiseError(problem, "it is made of empty parts: compress it again, whole")
        return self._file.read(size)


def check_inflated(path: Path, packed_bytes: int, unpacked_bytes: int, most_bytes: int) -> None:
    """Refuse a gzip file that has unpacked to more than `most_bytes`, or to far more than it shrank from.

    >>> check_inflated(Path("trace.json.gz"), 10 << 20, 400 << 20, 1 << 30)
    >>> check_inflated(Path("trace.json.gz"), 1 << 20, 400 << 20, 1 << 30)
    Traceback (most recent call last):
    flopwise.errors.FlopwiseError: trace.json.gz unpacks to more than 400 MiB, 400 times its size: refused
    hint: unpack it with gunzip, then read that
    """
    ratio = unpacked_bytes / max(1, packed_bytes)
    if unpacked_bytes > most_bytes or (unpacked_bytes > INFLATED_FREE and ratio > INFLATED_RATIO):
        unpacked = f"more than {unpacked_bytes >> 20:,} MiB, {ratio:.0f} times its size"
        raise FlopwiseError(f"{path} unpacks to {unpacked}: refused", "unpack it with gunzip, then read that")
