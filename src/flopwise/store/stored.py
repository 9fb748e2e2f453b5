"""A run read back: the header, and the rows in the plan's order, whatever happened while they were written."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, Self, TypeVar

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.records.run import INTERRUPTED, OK, SCHEMA, Point, RunHeader
from flopwise.spec.workload import Trial
from flopwise.store import files
from flopwise.store.rows import read_rows

MAX_ROW_BYTES = 64 * 2**20  # a million samples of four phases are about this much
MAX_HEADER_BYTES = 256 * 2**20  # ten thousand trials are about 10 MiB
LAB_KIND = "lab"
# What decoding a hostile file may raise; the checks of spec raise FlopwiseError.
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, FlopwiseError)

_Decoded = TypeVar("_Decoded")


class RowHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a row is about; the samples are passed over, which is several times faster than decoding them."""

    key: str
    trial: msgspec.Raw
    status: str


_Row = TypeVar("_Row", Point, RowHead)


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is on the disk now. `load` reads it; nothing here writes."""

    path: Path
    header: RunHeader
    points: tuple[Point, ...]  # in the plan's order; those that are not in the plan after it
    warnings: tuple[str, ...] = ()  # rows that could not be read

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a run; another process may be writing it."""
        path = Path(path)
        header = read_header(path)
        table = Table.read(path / files.POINTS, Point)
        rows = _settled(table.rows, _plan(header))
        return cls(path=path, header=header, points=tuple(rows.values()), warnings=tuple(table.warnings))

    def missing(self) -> tuple[Trial, ...]:
        """The planned trials that still have to be measured, each once, in the plan's order."""
        return _missing(self.header, _settled(self.points, _plan(self.header)))

    @property
    def complete(self) -> bool:
        """Whether every planned trial has its final row."""
        return not self.missing()


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come, without its samples."""

    ok: int
    failed: int
    planned: int
    complete: bool
    warnings: tuple[str, ...]


class _LabRow(msgspec.Struct, frozen=True, kw_only=True):
    experiments: tuple[str, ...] = ()  # the plan: in the first row
    status: str = ""  # of one experiment: in every other


def _lab_tally(path: Path) -> Tally:
    """A run of the lab counts experiments."""
    rows = read_rows(path / files.LAB, _LabRow, "experiments")
    statuses = [row.status for row in rows if row.status and row.status != INTERRUPTED]
    planned = sum(len(row.experiments) for row in rows)
    ok = statuses.count(OK)
    return Tally(
        ok=ok, failed=len(statuses) - ok, planned=planned, complete=len(statuses) >= planned, warnings=()
    )  # fmt: skip


class _TuningRow(msgspec.Struct, frozen=True, kw_only=True):
    row: str = ""


def _has_ended(path: Path) -> bool:
    """Whether a tuning's last row was written: the plan of its points is its first step alone."""
    table = path / files.TUNING
    return table.is_file() and any(one.row == "ended" for one in read_rows(table, _TuningRow, "tuning"))


def tally(path: Path, header: RunHeader) -> Tally:
    """Count a run's rows by status."""
    if header.kind == LAB_KIND:
        return _lab_tally(path)
    table = Table.read(path / files.POINTS, RowHead)
    plan = _plan(header)
    rows = _settled(table.rows, plan)
    statuses = [row.status for row in rows.values() if row.status != INTERRUPTED]
    return Tally(
        ok=statuses.count(OK),
        failed=len(statuses) - statuses.count(OK),
        planned=len(plan),
        complete=not _missing(header, rows) and (header.kind != "tune" or _has_ended(path)),
        warnings=tuple(table.warnings),
    )


def read_header(path: Path) -> RunHeader:
    """The header of the run at `path`, or one line that says why there is none."""
    return _read_header(path, RunHeader)


class _Birth(msgspec.Struct, frozen=True):
    created_ns: int


def created_ns(path: Path) -> int:
    """When the run at `path` was begun; its plan is passed over."""
    return _read_header(path, _Birth).created_ns


class _Schema(msgspec.Struct, frozen=True):
    schema: int


def _read_header(path: Path, form: type[_Decoded]) -> _Decoded:
    file = path / files.HEADER
    if not os.path.lexists(file):
        what = "is not a run: it has no run.json" if os.path.isdir(path) else "is not a folder"
        raise FlopwiseError(f"{path} {what}", "flopwise runs lists what there is")
    with files.explained("read", file):
        text = files.read_whole(file, MAX_HEADER_BYTES)
    try:
        schema = msgspec.json.decode(text, type=_Schema).schema
        if schema > SCHEMA:
            raise FlopwiseError(
                f"{path} was written by a newer flopwise (schema {schema}, this one reads up to {SCHEMA})",
                "upgrade flopwise to read it",
            )
        if schema < 1:
            raise FlopwiseError(f"{file} has schema = {schema}", f"allowed: 1 to {SCHEMA}")
        return msgspec.json.decode(text, type=form)
    except FlopwiseError as error:
        raise FlopwiseError(
            error.message if str(path) in error.message else f"{file}: {error.message}", error.hint
        ) from None
    except UNREADABLE as error:
        raise FlopwiseError(
            f"{file} is not a run's header: {error}", "the file is damaged, or flopwise did not write it"
        ) from None


class _Line(NamedTuple):
    number: int
    end: int  # offset of the byte after it
    text: bytes  # with its newline; a line that is too long is cut
    whole: bool  # it ends in a newline
    too_long: bool


def _lines(table: BinaryIO) -> Iterator[_Line]:
    """The lines of a file, never more than one of them in memory, and never more than MAX_ROW_BYTES of it."""
    number = end = 0
    while text := table.readline(MAX_ROW_BYTES + 1):
        number, end, last = number + 1, end + len(text), text
        while not last.endswith(b"\n") and (last := table.readline(2**20)):
            end += len(last)
        too_long = len(text) > MAX_ROW_BYTES
        yield _Line(number, end, text, (last or text).endswith(b"\n"), too_long)


class Table(Generic[_Row]):
    """The readable rows of a `points.jsonl`, in the order written, and what could not be read."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.warnings: list[str] = []
        self.end = 0  # of the last readable row

    @classmethod
    def read(cls, path: Path, form: type[_Row]) -> "Table[_Row]":
        """Read as far as it goes; a row that is torn or damaged costs a warning, not the run."""
        table: Table[_Row] = Table()
        decode = msgspec.json.Decoder(form).decode
        if not path.exists():
            table.warnings.append(f"{path.name} is missing: no rows")
            return table
        if not path.is_file():
            raise FlopwiseError(f"{path} is not a plain file", "a run is a folder that flopwise wrote")
        with files.explained("read", path), path.open("rb") as file:
            for line in _lines(file):
                table._take(line, decode, path.name)
        return table

    def _take(self, line: _Line, decode: Callable[[bytes], _Row], name: str) -> None:
        if not line.whole:
            self.warnings.append(f"{name}: the last row is torn (line {line.number}): ignored")
        elif line.too_long:
            self.warnings.append(f"{name}: line {line.number} is longer than {MAX_ROW_BYTES >> 20} MiB: refused")
        elif line.text != b"\n":
            try:
                self.rows.append(decode(line.text))
                self.end = line.end
            except UNREADABLE as error:
                self.warnings.append(f"{name}: line {line.number} cannot be read: skipped ({error})")


def end_of_last_row(points: Path) -> int:
    """How much of a table is whole rows; after it comes nothing, or what a killed writer left."""
    return Table.read(points, RowHead).end


def keys(trials: Iterable[Trial]) -> tuple[str, ...]:
    """The trials' keys, in order: two plans are the same when these are."""
    return tuple(trial.key() for trial in trials)


def _plan(header: RunHeader) -> dict[str, int]:
    """Each planned key with its place."""
    plan: dict[str, int] = {}
    for place, key in enumerate(keys(header.trials)):
        plan.setdefault(key, place)
    return plan


def _settled(rows: Iterable[_Row], plan: dict[str, int]) -> dict[str, _Row]:
    """One row per key, the last one written, in the plan's order."""
    latest: dict[str, _Row] = {}
    for row in rows:
        latest[_planned_key(row, plan)] = row
    return dict(
        sorted(latest.items(), key=lambda item: plan.get(item[0], sys.maxsize))
    )  # stable: the others as written


def _planned_key(row: Point | RowHead, plan: dict[str, int]) -> str:
    """The row's key as this version computes it: one that knows more levers gives the same trial another key."""
    if row.key in plan:
        return row.key
    try:
        trial = row.trial if isinstance(row, Point) else msgspec.json.decode(row.trial, type=Trial)
    except UNREADABLE:
        return row.key
    key = trial.key()
    return key if key in plan else row.key


def _missing(header: RunHeader, rows: dict[str, _Row]) -> tuple[Trial, ...]:
    open_trials: dict[str, Trial] = {}
    for key, trial in zip(keys(header.trials), header.trials, strict=True):
        if key not in rows or rows[key].status == INTERRUPTED:
            open_trials.setdefault(key, trial)
    return tuple(open_trials.values())
