"""What a run held when it was last closed: how far each table went, and the checksum of every file that a row names."""

import contextlib
import os
import zlib
from pathlib import Path

import msgspec

from flopwise.atomic import write_atomically
from flopwise.errors import FlopwiseError
from flopwise.store import files
from flopwise.store.partials import PARTIAL
from flopwise.store.seals import CHANGED, alone_is_sound, last_seal, sealed

SUMS = "sums.json"
TABLES = (files.POINTS, files.TUNING, files.TRAINING, files.LAB)
_FOLDERS = (files.TRACES, files.MEMORY)
_MAX_BYTES = 16 * 2**20
_BLOCK = 1 << 20


class TableSum(msgspec.Struct, frozen=True):
    """How far a table went: its last row's number and checksum."""

    rows: int
    crc32: int


class FileSum(msgspec.Struct, frozen=True):
    """A whole file."""

    size_bytes: int
    crc32: int


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """`sums.json`. A run that was killed has the one of its last closing, or none."""

    schema: int = 1
    tables: dict[str, TableSum] = {}
    files: dict[str, FileSum] = {}
    repaired: tuple[str, ...] = ()  # a line for what `runs check --repair` took out
    problem: str = ""  # never written: why there are none


def read_sums(run: Path) -> Sums:
    """A run's sums; none where it has no such file, and none with a `problem` where that is damaged."""
    try:
        text = files.read_limited(run / SUMS, _MAX_BYTES)
        if not alone_is_sound(text):
            return Sums(problem=f"{SUMS} {CHANGED}")
        return msgspec.json.decode(text, type=Sums)
    except FileNotFoundError:
        return Sums()
    except (OSError, FlopwiseError, msgspec.MsgspecError, ValueError, RecursionError):
        return Sums(problem=f"{SUMS} {CHANGED}")


def write_sums(run: Path, repaired: tuple[str, ...] | None = None) -> None:
    """Write down what the run holds now. What cannot be written is not: rows carry their own checksums."""
    with contextlib.suppress(OSError):
        known = read_sums(run)
        tables = {name: last_seal(run / name) for name in TABLES if (run / name).is_file()}
        found = Sums(
            tables={name: TableSum(seal.number, seal.own) for name, seal in tables.items() if seal.own},
            files={name: _sum_of(run, name, known) for name in (files.HEADER, *_raw_files(run))},
            repaired=known.repaired if repaired is None else repaired,
        )
        write_atomically(run / SUMS, sealed(msgspec.json.encode(found))[0])


def _raw_files(run: Path) -> list[str]:
    """What the folders of raw files hold; links are left out."""
    found = []
    for folder in _FOLDERS:
        for place, folders, names in os.walk(run / folder):
            folders[:] = [name for name in folders if not name.startswith(PARTIAL)]
            paths = [Path(place, name) for name in sorted(names) if not name.startswith(PARTIAL)]
            found += [one.relative_to(run).as_posix() for one in paths if one.is_file() and not one.is_symlink()]
    return found


def _sum_of(run: Path, name: str, known: Sums) -> FileSum:
    """The sum that is known, unless the file was written since: one that was damaged must not become the right one."""
    before = known.files.get(name)
    if before is not None and (run / name).stat().st_mtime_ns <= (run / SUMS).stat().st_mtime_ns:
        return before
    return file_sum(run / name)


def file_sum(path: Path) -> FileSum:
    """The size and checksum of a file, read a block at a time."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return FileSum(size, checksum)


def damaged_files(run: Path, sums: Sums) -> list[str]:
    """A line for each file that is missing or has changed; the header is judged by its own seal, too."""
    found = []
    for name, known in sums.files.items():
        try:
            if os.path.lexists(run / name) and not (run / name).is_file():
                found.append(f"{name} is not a plain file")
            elif file_sum(run / name) != known:
                found.append(f"{name} {CHANGED}")
        except OSError:
            found.append(f"{name} is missing")
    return found


def checked_file(run: Path, folder: str, name: str) -> Path:
    """The path of a raw file in a run; raises if it is not as it was written. A name from a row never leads elsewhere."""
    path = run / folder / Path(name).name
    known = read_sums(run).files.get(f"{folder}/{path.name}")
    if known is not None and path.is_file():
        with files.explain_errors("read", path):
            if file_sum(path) != known:
                raise FlopwiseError(f"{path} {CHANGED}", "measure again, or restore the file from a copy")
    return path
