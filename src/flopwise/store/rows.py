"""Rows that a verb keeps in a run besides its points: JSON lines, each on the disk before the next."""

import contextlib
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from flopwise.atomic import NO_FOLLOW, write_all
from flopwise.errors import FlopwiseError
from flopwise.store import files

MAX_BYTES = 64 * 2**20
_BLOCK = 1 << 20
_R = TypeVar("_R")


def append_row(path: Path, row: Any, through: bool = True) -> None:
    """Add a row; when this returns, it is on the disk. Not `through`: it survives a kill, but not a power cut."""
    line = msgspec.json.encode(row) + b"\n"
    with files.explain_errors("write to", path.parent):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW, 0o666)
        try:
            start = os.fstat(fd).st_size
            try:
                write_all(fd, line)
            except BaseException:  # a part of a row would spoil the next
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, start)
                raise
            if through:
                os.fsync(fd)
        finally:
            os.close(fd)


def end_of_last_line(path: Path) -> int:
    """How much of a file is whole lines; after it comes nothing, or what a killed writer left."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            if (at := file.read(end - start).rfind(b"\n")) >= 0:
                return start + at + 1
            end = start
    return 0


def read_rows(path: Path, kind: type[_R], what: str) -> list[_R]:
    """Every whole row; a last one that was cut off by a kill is left out."""
    if not path.is_file():
        raise FlopwiseError(f"{path.parent.name} has no {what}", "flopwise runs lists what there is")
    with files.explain_errors("read", path):
        lines = files.read_limited(path, MAX_BYTES).split(b"\n")[:-1]
    try:
        return [msgspec.json.decode(line, type=kind) for line in lines if line]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "it is damaged, or was written by a newer flopwise"
        raise FlopwiseError(f"{path}: not readable: {error}", hint) from None
