"""An Nsight Systems export as a file: found, unpacked, opened read-only, and read in columns.

Columns come out of sqlite3 as one text per 50,000 rows (`json_group_array`, parsed by numpy): 0.9 µs per row of four
integers, where fetching the rows alone costs 1.4 µs. ADBC takes 0.6 µs, but is two more packages and has neither a progress
handler nor limits, which a file from outside needs (measured on half a million NVTX rows, sqlite 3.40).
"""

import errno
import gzip
import math
import os
import re
import shutil
import sqlite3
import subprocess
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flopwise.capture.nsys_program import find_nsys
from flopwise.errors import FlopwiseError
from flopwise.keeper import end_kept, start_kept
from flopwise.scratch import scratch_folder
from flopwise.trace.columns import GrowingColumn
from flopwise.trace.input_file import GZIP_MAGIC, SQLITE_MAGIC, Unpacked, check_file
from flopwise.trace.spilled import ROOM
from flopwise.trace.tables import NO_ID
from flopwise.trace.window import GPU_ROWS, MOST_ROWS, Window, too_many

Ints = npt.NDArray[np.int64]

MISSING = -(2**63)  # stands for NULL while a column travels as text
GARBLED = MISSING + 1  # and this for what is no number
REPORT_SUFFIXES = (".nsys-rep", ".qdrep")

CHUNK_ROWS = 50_000
MAX_TEXT_BYTES = 64 << 20  # of one value, and so of one column of a chunk
MAX_UNPACKED_BYTES = 16 << 30
MAX_RATIO = 50  # real exports shrink 4 to 10 times; zeros a thousand times
FREE_RATIO_BYTES = 64 << 20  # below this size no ratio is suspicious
EXPORT_TIMEOUT_S = 1800
HANDLER_STEPS = 200_000  # of the SQLite machine between two looks at the clock: a few ms
MOST_STEPS = 500 * CHUNK_ROWS  # of the SQLite machine for one chunk: a row of a dozen columns takes about 60
SHORTEST_ROW = 6  # bytes in the file: its place in the page, length, rowid, header, the type of a column
MOST_HEAP_BYTES = 512 << 20  # that SQLite may take: the text of one chunk, and a cache of pages
MAX_NAME = 1 << 14  # characters that are read of a name
MAX_NAMES_CHARACTERS = 128 << 20

_GPU_WORK = re.compile(r"KIND_(?:KERNEL|MEMCPY|MEMSET|GRAPH_TRACE)", re.IGNORECASE)
_HINT = "export it again: nsys export --type sqlite REPORT.nsys-rep"


@dataclass(frozen=True)
class Export:
    """An open export: which tables and columns it really has, and how to read them in bulk."""

    db: sqlite3.Connection
    file: Path  # the SQLite file itself, unpacked
    columns: Mapping[str, tuple[str, ...]]  # of every ordinary table
    work: "Work"
    window: Window | None = None  # of a long one the part that is read

    def inside(self, table: str, *, work: bool = False) -> str:
        """The condition that a row belongs to the window; `work`: on the GPU, which may begin a little later."""
        start, end = (quoted(self.column(table, name)) for name in ("start", "end"))
        if self.window is None or start == quoted(""):
            return "1"
        low, high = self.window.low_ns, self.window.high_ns
        if work:
            return f"{start} >= {low} AND {start} < {self.window.last_work_ns}"
        around = f" OR {end} >= {high}" if end != quoted("") else ""
        return f"{start} < {high} AND ({start} >= {low}{around})"

    def table(self, base: str) -> str:
        """The table `base`, or its newest `base_V2`, `base_V3`… that has rows; '' without one."""
        pattern = re.compile(rf"{base}(?:_V(\d{{1,4}}))?", re.I)
        versions = [(int(match[1] or 1), table) for table in self.columns if (match := pattern.fullmatch(table))]
        newest_first = [table for _, table in sorted(versions, reverse=True)]
        filled = [t for t in newest_first if self.db.execute(f"SELECT 1 FROM {quoted(t)} LIMIT 1").fetchone()]
        return next(iter(filled or newest_first), "")

    def column(self, table: str, *wanted: str) -> str:
        """The first of the wanted columns that the table has; '' without one."""
        have = {c.lower(): c for c in self.columns.get(table, ())}
        return next((have[w.lower()] for w in wanted if w.lower() in have), "")

    def integers(self, table: str, wanted: Mapping[str, Sequence[str]], where: str = "1") -> dict[str, Ints]:
        """Whole columns; `wanted` maps a name to the spellings it had over the versions; a missing one is all MISSING."""
        columns = {name: GrowingColumn() for name in wanted}
        for ints, _ in self.chunks(table, wanted, where=where):
            for name, values in ints.items():
                columns[name].append(values)
        return {name: columns.pop(name).values() for name in wanted}

    def chunks(
        self, table: str, wanted: Mapping[str, Sequence[str]], text: str = "", where: str = "1"
    ) -> Iterator[tuple[dict[str, Ints], list[str]]]:
        """Integer columns, and the strings of the SQL expression `text` if one is given, of a few thousand rows at a time."""
        present = {name: c for name, spellings in wanted.items() if (c := self.column(table, *spellings))}
        condition = f"FROM {quoted(table)} WHERE rowid BETWEEN ? AND ? AND ({where})"
        steady: dict[str, int] = {}
        left = self.file.stat().st_size // SHORTEST_ROW
        for span in self._spans(table):
            values, strings, count = self._chunk([*present.values()], steady, text, condition, span)
            if not count:
                continue
            left -= count
            self.work.count_rows(table, count, self.file.name)
            if count > CHUNK_ROWS or left < 0:
                raise sqlite3.DatabaseError(f"{table} holds the same rows again and again")
            if any(len(column) != count for column in values) or (text and len(strings) != count):
                raise sqlite3.DatabaseError("columns of different length")
            ints = dict(zip(present, values, strict=True))
            steady = {present[name]: int(v[0]) for name, v in ints.items() if (v == v[0]).all()}
            yield {name: ints.get(name, np.full(count, MISSING)) for name in wanted}, strings

    def rowids(self, table: str) -> tuple[int, int]:
        """The first and the last; the last is smaller where there is no row."""
        (first,) = self.db.execute(f"SELECT min(rowid) FROM {quoted(table)}").fetchone()
        (last,) = self.db.execute(f"SELECT max(rowid) FROM {quoted(table)}").fetchone()
        return (0, -1) if first is None or last is None else (first, last)

    def _spans(self, table: str) -> Iterator[tuple[int, int]]:
        """First and last rowids of about CHUNK_ROWS rows each. Rows are numbered without gaps, except by who means harm."""
        first, last = self.rowids(table)
        sparse = last - first > self.file.stat().st_size  # a row takes more than a byte
        counted = f"SELECT max(rowid) FROM (SELECT rowid FROM {quoted(table)} WHERE rowid >= ? ORDER BY rowid LIMIT {CHUNK_ROWS})"
        while first <= last:
            end = self.db.execute(counted, (first,)).fetchone()[0] if sparse else first + CHUNK_ROWS - 1
            if end is None or end < first:
                return
            yield first, min(end, last)
            first = end + 1

    def _chunk(
        self, columns: Sequence[str], steady: Mapping[str, int], text: str, condition: str, span: tuple[int, int]
    ) -> tuple[list[Ints], list[str], int]:
        """Numbers as they are; only where something else turns up among them is each value converted by its type.

        A column that held one value throughout the chunk before (a process, a device) is only checked for it.
        """
        plain = [
            _IS_STEADY.format(quoted(c), MISSING, steady[c]) if c in steady else _AS_STORED.format(quoted(c), MISSING)
            for c in columns
        ]
        row = self._aggregated(plain, text, condition, span)
        values = _all_parsed(row, [steady.get(c) for c in columns])
        if values is None:
            by_type = [f"json_group_array(ifnull({integer_sql(c)}, {MISSING}))" for c in columns]
            row = self._aggregated(by_type, text, condition, span)
            values = _all_parsed(row, [None] * len(columns))
            if values is None:
                raise sqlite3.DatabaseError("values that are neither numbers nor text")
        try:
            strings = msgspec.json.decode(row[-1], type=list[str]) if text and row[0] else []
        except msgspec.MsgspecError as error:
            raise sqlite3.DatabaseError(f"text that cannot be decoded: {error}") from error
        return values, strings, int(row[0])

    def _aggregated(self, selected: Sequence[str], text: str, condition: str, span: tuple[int, int]) -> Any:
        """One row: how many, and each column as one JSON text; None where a value does not go into JSON (a blob)."""
        try:
            return self._select(selected, f"CAST({text} AS TEXT)" if text else "", condition, span)
        except sqlite3.DataError:  # the texts of a chunk together are too long: the beginning of each will do
            return self._select(selected, f"substr(CAST({text} AS TEXT), 1, 1000)" if text else "", condition, span)
        except sqlite3.OperationalError as error:
            if "BLOB" not in str(error):
                raise
            return None

    def _select(self, selected: Sequence[str], text: str, condition: str, span: tuple[int, int]) -> Any:
        texts = [f"json_group_array(ifnull({text}, ''))"] if text else []
        with self.work.at_most(MOST_STEPS):
            return self.db.execute(f"SELECT count(*), {', '.join([*selected, *texts])} {condition}", span).fetchone()

    def strings(self, ids: Ints) -> dict[int, str]:
        """The texts of those ids of StringIds that exist."""
        table = self.table("StringIds")
        if not (table and self.column(table, "id") and self.column(table, "value")):
            return {}
        texts: dict[int, str] = {}
        left = MAX_NAMES_CHARACTERS
        distinct = [int(i) for i in np.unique(ids)]
        for at in range(0, len(distinct), 5000):
            part = distinct[at : at + 5000]
            marks = ",".join("?" * len(part))
            name = f"substr(CAST(value AS TEXT), 1, {MAX_NAME})"
            sql = f"SELECT CAST(id AS INTEGER), {name} FROM {quoted(table)} WHERE id IN ({marks})"
            found = {i: value for i, value in self.db.execute(sql, part) if i is not None and value is not None}
            texts |= found
            left -= sum(map(len, found.values()))
            if left < 0:
                raise sqlite3.DatabaseError(f"its names take more than {MAX_NAMES_CHARACTERS >> 20} MiB")
        return texts


_AS_STORED = "json_group_array(ifnull({0}, {1}))"
_IS_STEADY = "total(ifnull({0}, {1}) IS NOT {2})"


def spellings(text: str) -> dict[str, tuple[str, ...]]:
    """Columns by the names used here, each with the names it had over the versions.

    >>> spellings("start name:demangledName|shortName")
    {'start': ('start',), 'name': ('demangledName', 'shortName')}
    """
    pairs = (word.partition(":") for word in text.split())
    return {name: tuple((others or name).split("|")) for name, _, others in pairs}


def integer_sql(column: str) -> str:
    """SQL for a column's value as an integer; GARBLED where it is none, NULL where it is NULL.

    Text is a number only if it reads so to its end: CAST would make 0 of a word, and 12 of '12 o'clock'.
    """
    whole = f"CAST({quoted(column)} AS INTEGER)"
    text = f"iif(CAST({whole} AS TEXT) = {quoted(column)}, {whole}, {GARBLED})"
    return f"CASE typeof({quoted(column)}) WHEN 'text' THEN {text} WHEN 'blob' THEN {GARBLED} ELSE {whole} END"


def _all_parsed(row: Any, steady: Sequence[int | None]) -> list[Ints] | None:
    """The columns of an aggregated row, which may be followed by a text; None if one of them is not all integers."""
    if row is None:
        return None
    values = [_parsed(text, int(row[0]), same) for text, same in zip(row[1:], steady, strict=False)] if row[0] else []
    known = [column for column in values if column is not None]
    return known if len(known) == len(values) else None


def _parsed(text: Any, count: int, steady: int | None) -> Ints | None:
    """The integers of a JSON list, or of a column that is still the same; None if it holds anything else."""
    if steady is not None:
        return None if text else np.full(count, steady)
    if '"' in text or "." in text:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns of what it could not read
            values = np.fromstring(text[1:-1], dtype=np.int64, sep=",")
    except (DeprecationWarning, ValueError):
        return None
    return values if len(values) == count else None


def quoted(identifier: str) -> str:
    """A name from the file as an SQL identifier.

    >>> quoted('a"b')
    '"a""b"'
    """
    return '"' + identifier.replace('"', '""') + '"'


@contextmanager
def open_export(path: str | os.PathLike[str]) -> Iterator[Export]:
    """The export behind a .sqlite, .sqlite.gz or .nsys-rep; any fault of the file inside the block is a FlopwiseError."""
    path = Path(path)
    check_file(path, "flopwise reads the .sqlite that nsys export writes, or an .nsys-rep where nsys is installed")
    with scratch_folder() as scratch, _faults(path):
        sqlite = as_sqlite(path, Path(scratch))
        db, work = _connect(sqlite)
        try:
            export = Export(db, sqlite, _tables(db), work)
            if not (export.table("StringIds") or export.table("NVTX_EVENTS")):
                raise FlopwiseError(f"{path.name} is an SQLite file, but not an Nsight Systems export", _HINT)
            yield export
        finally:
            db.close()


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "disk is full" in str(error):  # or a limit of ours, met by a file that repeats itself
            hint = f"{ROOM}; with room enough, the file is damaged"
            raise FlopwiseError(f"no room for what is in {path.name}: {error}", hint) from error
        if "interrupted" in str(error):
            raise FlopwiseError(f"{path.name} takes too long to read; it is probably damaged", _HINT) from error
        raise FlopwiseError(f"{path.name} cannot be read: {error}", _HINT) from error
    except (sqlite3.Error, OverflowError, UnicodeError) as error:  # the last: SQLite's message quotes the file's bytes
        raise FlopwiseError(f"{path.name} is damaged: {error}", _HINT) from error
    except MemoryError as error:
        raise FlopwiseError(f"{path.name} is damaged: its rows take too much memory", _HINT) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FlopwiseError(f"{path.name} is a damaged gzip file: {error}", "copy or download it again") from error
    except OSError as error:
        hint = ROOM if error.errno == errno.ENOSPC else "check that you may read it"
        raise FlopwiseError(f"cannot read {path}: {error.strerror or error}", hint) from error


def as_sqlite(path: Path, scratch: Path) -> Path:
    """The path of an SQLite file with the export's content: itself, or one made in `scratch`."""
    with path.open("rb") as file:
        head = file.read(100)
    if head.startswith(GZIP_MAGIC):
        return _unpacked(path, scratch / "export.sqlite")
    if head.startswith(SQLITE_MAGIC):
        size = path.stat().st_size
        if size < stated_size(head):
            raise FlopwiseError(f"{path.name} is cut off: {size:,} of {stated_size(head):,} bytes", "copy it again")
        return path
    if path.suffix in REPORT_SUFFIXES and head:
        return _exported(path, scratch / "export.sqlite")
    raise FlopwiseError(f"{path.name} is not an Nsight Systems export (SQLite)", _HINT)


def stated_size(head: bytes) -> int:
    """The size that an SQLite header claims; 0 where it claims none (file format, section 1.3: offsets 16, 24, 28, 92)."""
    page = int.from_bytes(head[16:18], "big")
    valid = len(head) >= 100 and head[24:28] == head[92:96]
    return (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big") if valid else 0


def _unpacked(path: Path, target: Path) -> Path:
    packed_bytes = path.stat().st_size
    limit = min(MAX_UNPACKED_BYTES, max(FREE_RATIO_BYTES, packed_bytes * MAX_RATIO))
    room = shutil.disk_usage(target.parent).free // 2
    with path.open("rb") as packed, Unpacked(path, packed) as source, target.open("wb") as out:
        block = source.read(1 << 20)
        if not block.startswith(SQLITE_MAGIC):
            raise FlopwiseError(f"{path.name} does not hold an SQLite file", _HINT)
        stated = stated_size(block[:100])
        limit, written = min(limit, stated or limit), 0
        while block:
            written += len(block)
            if max(written, limit if stated else 0) > room:
                folder = target.parent.parent
                raise FlopwiseError(f"no room to unpack {path.name} in the temporary folder {folder}", ROOM)
            if written > limit:
                hint = "unpack it with gunzip and check it"
                raise FlopwiseError(f"{path.name} unpacks to more than {limit:,} bytes", hint)
            out.write(block)
            block = source.read(1 << 20)
    if written < stated:
        raise FlopwiseError(f"{path.name} is cut off: {written:,} of {stated:,} bytes", "copy it again")
    return target


def _exported(path: Path, target: Path) -> Path:
    nsys = find_nsys()
    if not nsys:
        raise FlopwiseError(
            f"{path.name} can only be read by nsys, which is not installed here",
            "where it is: nsys export --type sqlite REPORT.nsys-rep, then give flopwise the .sqlite",
        )
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(target)]
    log = target.with_name("export.log")
    process = start_kept([nsys, "export", *options, str(path.absolute())], log)
    try:
        code = process.wait(EXPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise FlopwiseError(f"nsys export of {path.name} took more than {EXPORT_TIMEOUT_S} s") from error
    finally:
        end_kept(process)
    if code or not target.exists():
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        lines = lines or ["no message"]
        raise FlopwiseError(f"nsys cannot export {path.name}: {lines[-1]}", f"tried with {nsys}")
    return target


def read_only_uri(path: Path) -> str:
    """`immutable` keeps SQLite from looking for journals beside the file, or writing any."""
    return path.absolute().as_uri() + "?mode=ro&immutable=1"


class Work:
    """How much SQLite may still do; called as its progress handler, it interrupts what is more."""

    def __init__(self, seconds: float) -> None:
        self._deadline, self._steps = time.thread_time() + seconds, math.inf
        self._rows_left = MOST_ROWS + MOST_ROWS // 2  # in the weights of `trace.window`

    def __call__(self) -> bool:
        self._steps -= HANDLER_STEPS
        return self._steps < 0 or time.thread_time() > self._deadline

    def count_rows(self, table: str, count: int, file: str) -> None:
        """Refuse what is more than memory is meant for, though a part was chosen."""
        self._rows_left -= count * (GPU_ROWS if _GPU_WORK.search(table) else 1)
        if self._rows_left < 0:
            raise too_many(file)

    @contextmanager
    def at_most(self, steps: int) -> Iterator[None]:
        """Interrupt a statement that takes more steps: pages that are named again and again have rows without end."""
        self._steps = steps
        try:
            yield
        finally:
            self._steps = math.inf


def limit_work(db: sqlite3.Connection, size_bytes: int) -> Work:
    """A damaged or hostile file may not take unbounded time or memory, nor run code of its schema."""
    work = Work(10 + size_bytes / 1e7)  # of the CPU; an export of 780 MB takes 20 s
    db.set_progress_handler(work, HANDLER_STEPS)
    db.execute(f"PRAGMA hard_heap_limit = {MOST_HEAP_BYTES}")
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT_BYTES)
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    return work


def _connect(path: Path) -> tuple[sqlite3.Connection, Work]:
    db = sqlite3.connect(read_only_uri(path), uri=True)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return db, limit_work(db, path.stat().st_size)


def _tables(db: sqlite3.Connection) -> dict[str, tuple[str, ...]]:
    """Ordinary tables with a rowid: a view or a virtual table would run what its author wrote."""
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND typeof(name) = 'text'"
    names = [
        name for name, sql in db.execute(query).fetchall() if not re.search(r"\bWITHOUT\s+ROWID\b", str(sql), re.I)
    ]
    columns = {name: tuple(str(row[1]) for row in db.execute(f"PRAGMA table_info({quoted(name)})")) for name in names}
    return {name: have for name, have in columns.items() if "rowid" not in {c.lower() for c in have}}


def process_of(global_id: Ints) -> Ints:
    """The process of a serialised GlobalId: hardware 8 bits, VM 8, process 24, thread 24; a globalPid has thread 0."""
    return np.where(global_id <= GARBLED, NO_ID, (global_id >> 24) << 24)


def or_no_id(values: Ints) -> Ints:
    return np.where(values <= GARBLED, NO_ID, values)
