"""A run read back: the header, and the rows in the plan's order, whatever happened while they were written."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, Self, TypeVar

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.records.printed import Printed
from flopwise.records.run import INTERRUPTED, OK, SCHEMA, UNMEASURED, Point, PointHead, RunHeader
from flopwise.records.training import FINISHED
from flopwise.records.tuning import Ended
from flopwise.spec.workload import Trial
from flopwise.store import files
from flopwise.store.rows import read_rows

MAX_ROW_BYTES = 64 * 2**20  # a million samples of four phases are about this much
MAX_HEADER_BYTES = 256 * 2**20  # ten thousand trials are about 10 MiB
LAB_KIND, TUNE_KIND, TRAIN_KIND = "lab", "tune", "train"
# What decoding a hostile file may raise; the checks of spec raise FlopwiseError.
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, FlopwiseError)

RowHead = PointHead[msgspec.Raw]  # the samples are skipped, which is several times faster than decoding them
_Decoded = TypeVar("_Decoded")
_Row = TypeVar("_Row", bound=Point | RowHead)


class StoredRun(Printed, msgspec.Struct, frozen=True, kw_only=True):
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
        table = read_table(path / files.POINTS, Point)
        rows = _latest(table.rows, _plan(header))
        return cls(path=path, header=header, points=tuple(rows.values()), warnings=tuple(table.warnings))

    def missing(self) -> tuple[Trial, ...]:
        """The planned trials that still have to be measured, each once, in the plan's order."""
        return _missing(self.header, _latest(self.points, _plan(self.header)))

    @property
    def complete(self) -> bool:
        """Whether every planned trial has its final row."""
        return not self.missing()

    def damage(self) -> tuple[str, ...]:
        """What of the run is lost: rows that cannot be read, and planned points that have none."""
        lost = len(self.missing())
        return (*self.warnings, *([f"{lost} of {len(self.header.trials)} points are missing"] if lost else []))

    def headline(self) -> str:
        ok = sum(point.status == OK for point in self.points)
        return f"{self.header.id}, {ok} of {max(len(self.points), len(self.header.trials))} measured"


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come, without its samples."""

    ok: int
    failed: int
    planned: int
    complete: bool
    warnings: tuple[str, ...] = ()


def tally(path: Path, header: RunHeader) -> Tally:
    """Count a run's rows by status; of a run of the lab, its experiments."""
    if header.kind == LAB_KIND:
        rows = read_rows(path / files.LAB, _LabRow, "experiments")
        ok, failed = _counts(row.status for row in rows if row.status)
        planned = sum(len(row.experiments) for row in rows)
        return Tally(ok=ok, failed=failed, planned=planned, complete=ok + failed >= planned)
    if header.kind == TRAIN_KIND:
        finished = _statuses_of_training(path)[-1:] == [FINISHED]
        return Tally(ok=int(finished), failed=0, planned=1, complete=finished)
    table = read_table(path / files.POINTS, RowHead)
    plan = _plan(header)
    latest = _latest(table.rows, plan)
    ok, failed = _counts(row.status for row in latest.values())
    complete = not _missing(header, latest) and (header.kind != TUNE_KIND or _has_ended(path))
    return Tally(ok=ok, failed=failed, planned=len(plan), complete=complete, warnings=tuple(table.warnings))


def _counts(statuses: Iterable[str]) -> tuple[int, int]:
    """How many are ok, and how many failed; what was interrupted is neither."""
    final = [status for status in statuses if status != INTERRUPTED]
    return final.count(OK), len(final) - final.count(OK)


class _Outcome(PointHead[msgspec.Raw], frozen=True, kw_only=True):
    phases: tuple[msgspec.Raw, ...] = ()
    memory_file: str = ""


def has_measured(path: Path) -> bool:
    """Whether a run holds anything to look at: not if its steps failed, nor if it was ended before its first measurement.

    What was interrupted counts where it has samples. A snapshot that was written before a failure is something: it shows
    why there was too little memory.
    """
    kind = _read_header(path, _HeaderStart).kind
    if kind == TUNE_KIND:
        return (path / files.TUNING).is_file() and bool(read_rows(path / files.TUNING, _TuningRow, "tuning"))
    if kind == TRAIN_KIND:
        return "" in _statuses_of_training(path)[1:]
    if kind == LAB_KIND:
        statuses = {row.status for row in read_rows(path / files.LAB, _LabRow, "experiments")}
        return bool(statuses & {OK, INTERRUPTED})
    rows = read_table(path / files.POINTS, _Outcome).rows
    statuses = {OK if row.memory_file else row.status for row in rows}
    return OK in statuses or (statuses == {INTERRUPTED} and any(row.phases for row in rows))


class _LabRow(msgspec.Struct, frozen=True, kw_only=True):
    experiments: tuple[str, ...] = ()  # the plan: in the first row
    status: str = ""  # of one experiment: in every other


class _TrainingRow(msgspec.Struct, frozen=True):
    status: str = ""  # of the last row alone


def _statuses_of_training(path: Path) -> list[str]:
    table = path / files.TRAINING
    return [row.status for row in read_rows(table, _TrainingRow, "steps")] if table.is_file() else []


class _TuningRow(msgspec.Struct, frozen=True):
    row: str = ""  # the tag of records.tuning


def _has_ended(path: Path) -> bool:
    """Whether a tuning's last row was written: the plan of its points is its first step alone."""
    table, ended = path / files.TUNING, Ended.__struct_config__.tag
    return table.is_file() and any(one.row == ended for one in read_rows(table, _TuningRow, "tuning"))


def read_header(path: Path) -> RunHeader:
    """The header of the run at `path`, or one line that says why there is none."""
    return _read_header(path, RunHeader)


class _HeaderStart(msgspec.Struct, frozen=True):
    schema: int
    kind: str = ""
    created_ns: int = 0


def created_ns(path: Path) -> int:
    """When the run at `path` was begun; its plan is skipped."""
    return _read_header(path, _HeaderStart).created_ns


def _read_header(path: Path, form: type[_Decoded]) -> _Decoded:
    file = path / files.HEADER
    if not os.path.lexists(file):
        problem = "is not a run: it has no run.json" if os.path.isdir(path) else "is not a folder"
        raise FlopwiseError(f"{path} {problem}", "flopwise runs lists what there is")
    with files.explain_errors("read", file):
        text = files.read_limited(file, MAX_HEADER_BYTES)
    try:
        schema = msgspec.json.decode(text, type=_HeaderStart).schema
        if schema > SCHEMA:
            newer = f"{path} was written by a newer flopwise (schema {schema}, this one reads up to {SCHEMA})"
            raise FlopwiseError(newer, "upgrade flopwise to read it")
        if schema < 1:
            raise FlopwiseError(f"{file} has schema = {schema}", f"allowed: 1 to {SCHEMA}")
        return msgspec.json.decode(text, type=form)
    except FlopwiseError as error:
        message = error.message if str(path) in error.message else f"{file}: {error.message}"
        raise FlopwiseError(message, error.hint) from None
    except UNREADABLE as error:
        hint = "the file is damaged, or flopwise did not write it"
        raise FlopwiseError(f"{file} is not a run's header: {error}", hint) from None


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


class Table(msgspec.Struct, Generic[_Row]):
    """The readable rows of a `points.jsonl`, in the order written, and what could not be read."""

    rows: list[_Row] = []
    warnings: list[str] = []
    end: int = 0  # of the last readable row


def read_table(path: Path, form: type[_Row]) -> Table[_Row]:
    """Read as far as possible; a row that is torn or damaged costs a warning, not the run."""
    table: Table[_Row] = Table()
    if not path.exists():
        return Table(warnings=[f"{path.name} is missing: no rows"])
    if not path.is_file():
        raise FlopwiseError(f"{path} is not a plain file", "a run is a folder that flopwise wrote")
    decode = msgspec.json.Decoder(form).decode
    with files.explain_errors("read", path), path.open("rb") as file:
        for number, line in enumerate(_lines(file), start=1):
            if not line.whole:
                table.warnings.append(f"{path.name}: the last row is torn (line {number}): ignored")
            elif len(line.text) > MAX_ROW_BYTES:
                limit = f"{MAX_ROW_BYTES >> 20} MiB"
                table.warnings.append(f"{path.name}: line {number} is longer than {limit}: refused")
            elif line.text != b"\n":
                try:
                    table.rows.append(decode(line.text))
                    table.end = line.end
                except UNREADABLE as error:
                    table.warnings.append(f"{path.name}: line {number} cannot be read: skipped ({error})")
    return table


def end_of_last_row(points: Path) -> int:
    """How much of a table is whole rows; after it comes nothing, or what a killed writer left."""
    return read_table(points, RowHead).end


def keys(trials: Iterable[Trial]) -> tuple[str, ...]:
    """The trials' keys, in order: two plans are the same when these are."""
    return tuple(trial.key() for trial in trials)


def _plan(header: RunHeader) -> dict[str, int]:
    """Each planned key with its place."""
    plan: dict[str, int] = {}
    for place, key in enumerate(keys(header.trials)):
        plan.setdefault(key, place)
    return plan


def _latest(rows: Iterable[_Row], plan: dict[str, int]) -> dict[str, _Row]:
    """One row per key, the last one written, in the plan's order; the others after it, as written."""
    latest = {_planned_key(row, plan): row for row in rows}
    return dict(sorted(latest.items(), key=lambda item: plan.get(item[0], sys.maxsize)))


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
    missing: dict[str, Trial] = {}
    for key, trial in zip(keys(header.trials), header.trials, strict=True):
        if key not in rows or rows[key].status in UNMEASURED:
            missing.setdefault(key, trial)
    return tuple(missing.values())
