"""The tables of a run: JSON lines, each sealed and on the disk before the next. Every row is written and read here."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Generic, NamedTuple, Self, TypeVar

import msgspec

from flopwise.atomic import NO_FOLLOW, write_all, write_atomically
from flopwise.errors import FlopwiseError
from flopwise.records.possible import impossible
from flopwise.store import files
from flopwise.store.seals import CHANGED, NO_SEAL, Seal, last_seal, looks_sealed, seal_of, sealed
from flopwise.store.sums import TableSum, read_sums

MAX_ROW_BYTES = 64 * 2**20  # a million samples of four phases are about this much
MOST_DAMAGED = 10_000  # lines that say nothing: of more, the table is no longer read
_SHOWN = 20  # damaged lines that have a warning of their own
# What decoding a hostile file may raise; the checks of spec raise FlopwiseError.
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, FlopwiseError)
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0) | NO_FOLLOW
_R = TypeVar("_R")


class Appender:
    """A table being written. A row is on the disk when `append` returns; when it raises, the table reads as before."""

    def __init__(self, path: Path, alone: bool = True) -> None:
        """`alone`: no other process writes it, so that a part of a row may be cut away."""
        self._alone, self._last = alone, last_seal(path)
        self._fd = os.open(path, _FLAGS, 0o666)
        self._torn = not _ends_in_newline(path)

    def append(self, record: bytes, through: bool = True) -> None:
        """Add a JSON object. Not `through`: it survives a kill, but not a power cut."""
        line, seal = sealed(record, self._last)
        start, was_torn = os.fstat(self._fd).st_size, self._torn
        self._torn = True
        try:
            # After a torn row a newline first: the torn one then is a line of its own, which readers skip.
            write_all(self._fd, b"%b%b\n" % (b"\n" if was_torn else b"", line))
            if through:
                os.fsync(self._fd)
            self._torn, self._last = False, seal
        except BaseException:
            if self._alone:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, start)
                    self._torn = was_torn
            raise

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def append_row(path: Path, row: Any, through: bool = True) -> None:
    """Add a row to a table that a verb keeps besides its points."""
    with files.explain_errors("write to", path.parent), Appender(path) as table:
        table.append(msgspec.json.encode(row), through)


def _ends_in_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")


class _Line(NamedTuple):
    end: int  # offset of the byte after it
    text: bytes  # with its newline; a line that is too long is cut
    whole: bool  # it ends in a newline


def _lines(table: BinaryIO) -> Iterator[_Line]:
    """The lines of a file, never more than one of them in memory, and never more than MAX_ROW_BYTES of it."""
    end = 0
    while text := table.readline(MAX_ROW_BYTES + 1):
        end, last = end + len(text), text
        while not last.endswith(b"\n") and (last := table.readline(2**20)):
            end += len(last)
        yield _Line(end, text, (last or text).endswith(b"\n"))


class Table(msgspec.Struct, Generic[_R]):
    """The sound rows of a table, in the order written, and what was left out."""

    rows: list[_R] = []
    warnings: list[str] = []
    torn: str = ""  # of the warnings: a last row that is cut off, as a kill leaves it
    end: int = 0  # of the last sound row
    lines: list[bytes] = []  # of the sound rows, where they were asked for


class _Row(NamedTuple):
    line: int
    seal: Seal | None
    value: Any
    end: int
    text: bytes


class _Read(NamedTuple):
    """The lines of a table by themselves; what they are to each other is not looked at yet."""

    rows: list[_Row]
    warnings: dict[int, str]  # by line
    torn: str = ""


def read_table(path: Path, form: Any, keep_lines: bool = False) -> Table[Any]:
    """Read as far as it is sound; a row that is torn or damaged, and one that is missing, costs a warning, not the run."""
    known = read_sums(path.parent).tables.get(path.name)
    if not path.exists():
        lost = f": {known.rows} rows are lost" if known is not None else ": no rows"
        return Table(warnings=[f"{path.name} is missing{lost}"])
    if not path.is_file():
        return Table(warnings=[f"{path.name} is not a plain file: no rows"])
    linked = ["it is a link to another file"] if path.is_symlink() else []
    with files.explain_errors("read", path), path.open("rb") as file:
        found = _each(file, msgspec.json.Decoder(form).decode, keep_lines)
    older = _older(found, known)
    chain, order = _in_order([row for row in found.rows if row.seal])
    order += _breaks([row.seal for row in chain if row.seal], len(older), len(found.warnings), known)
    said = [*linked, *_said(found.warnings), *order, *filter(None, [found.torn])]
    rows = [*older, *chain]
    return Table(
        rows=[row.value for row in rows],
        warnings=[f"{path.name}: {warning}" for warning in said],
        torn=f"{path.name}: {found.torn}" if found.torn else "",
        end=max((row.end for row in rows), default=0),
        lines=[row.text for row in rows] if keep_lines else [],
    )


def _said(warnings: dict[int, str]) -> list[str]:
    """Of the damaged lines the first ones, and how many more there are."""
    lines = [warnings[line] for line in sorted(warnings)]
    more = [f"{len(lines) - _SHOWN:,} more lines cannot be read: skipped"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def _check_damage(file: BinaryIO, damaged: int) -> None:
    if damaged > MOST_DAMAGED:
        problem = f"{file.name} is damaged: more than {MOST_DAMAGED:,} of its lines cannot be read"
        raise FlopwiseError(problem, "restore it from a copy, or measure again")


def _possible(value: Any) -> Any:
    if odd := impossible(value):
        raise ValueError(f"{odd} is impossible")
    return value


def _each(file: BinaryIO, decode: Callable[[bytes], Any], keep_lines: bool) -> _Read:
    rows, warnings, torn = list[_Row](), dict[int, str](), ""
    for number, line in enumerate(_lines(file), start=1):
        _check_damage(file, number - len(rows))
        seal = seal_of(line.text)
        if line.text == b"\n":
            continue
        if not line.whole:
            torn = f"the last row is torn (line {number}): ignored"
        elif len(line.text) > MAX_ROW_BYTES:
            warnings[number] = f"line {number} is longer than {MAX_ROW_BYTES >> 20} MiB: refused"
        elif seal is None and looks_sealed(line.text):
            warnings[number] = f"line {number} {CHANGED}: skipped"
        else:
            try:
                value = _possible(decode(line.text))
                rows.append(_Row(number, seal, value, line.end, line.text if keep_lines else b""))
            except UNREADABLE as error:
                warnings[number] = f"line {number} cannot be read: skipped ({error})"
    return _Read(rows, warnings, torn)


def _older(found: _Read, known: TableSum | None) -> list[_Row]:
    """Rows of an earlier version, which come before the first that has a seal and follows none; others have lost theirs."""
    first = min((row.seal for row in found.rows if row.seal), default=None)
    plain = [row for row in found.rows if not row.seal]
    if known is None if first is None else first.before == 0 and first.number > 1:
        return plain
    found.warnings.update({row.line: f"line {row.line} has lost its checksum: skipped" for row in plain})
    return []


def _in_order(rows: list[_Row]) -> tuple[list[_Row], list[str]]:
    """Rows with seals by their numbers, each once, and a line where they were not."""
    chain = sorted(rows, key=lambda row: row.seal or NO_SEAL)
    once = list({row.seal: row for row in chain}.values())
    moved = [row.line for row in chain] != [row.line for row in rows]
    said = ["its rows are not in the order in which they were written"] if moved else []
    return once, [*said, *(["rows are there twice"] if len(once) < len(chain) else [])]


def _breaks(seals: list[Seal], older: int, damaged: int, known: TableSum | None) -> list[str]:
    """What is missing among rows that are in order."""
    last = max(seals[-1].number if seals else 0, known.rows if known is not None else 0)
    missing = last - older - len({seal.number for seal in seals}) - damaged
    pairs = list(itertools.pairwise(seals))
    foreign = any(b.number == a.number or (b.number == a.number + 1 and b.before != a.own) for a, b in pairs)
    foreign |= known is not None and any(one.number == known.rows and one.own != known.crc32 for one in seals)
    said = [] if missing <= 0 else ["1 row is missing" if missing == 1 else f"{missing} rows are missing"]
    return said + (["its rows do not follow each other: one is not of this table"] if foreign else [])


def read_rows(path: Path, kind: type[_R], what: str) -> Table[_R]:
    """The rows that a verb keeps besides its points; raises if there is no such table, or nothing of it can be read."""
    if not path.is_file():
        raise FlopwiseError(f"{path.parent.name} has no {what}", "flopwise runs lists what there is")
    table = read_table(path, kind)
    table.warnings = [one for one in table.warnings if one != table.torn]  # it may be being written
    if table.warnings and not table.rows:
        hint = "it is damaged, or was written by a newer flopwise"
        raise FlopwiseError(f"{path}: not readable: {table.warnings[0]}", hint)
    return table


def repair_table(path: Path, form: Any) -> list[str]:
    """Leave the sound rows of a table, numbered anew; the table as it was is kept beside it. Says what was taken out."""
    table = read_table(path, form, keep_lines=True)
    if not table.warnings:
        return []
    aside = path.with_name(f"{path.stem}.damaged-{1 + len(list(path.parent.glob(f'{path.stem}.damaged-*')))}")
    kept = f" (as it was: {aside.name})" if path.exists() else ""
    if path.is_symlink():
        path.rename(aside)
    elif kept:
        os.link(path, aside)
    content, last = list[bytes](), NO_SEAL
    for line in table.lines:
        text, last = sealed(msgspec.json.encode(_without_seal(line)), last)
        content.append(text + b"\n")
    write_atomically(path, b"".join(content))
    return [f"repaired: {warning}{kept}" for warning in table.warnings]


def _without_seal(line: bytes) -> dict[str, msgspec.Raw]:
    fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    fields.pop("seal", None)
    return fields
