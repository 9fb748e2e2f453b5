"""A run read back: the header, and the rows in the plan's order, whatever happened while they were written."""

import os
import re
import sys
import zlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from flopwise.collector import no_collector
from flopwise.errors import Damaged, FlopwiseError
from flopwise.records.possible import impossible
from flopwise.records.printed import Printed
from flopwise.records.run import INTERRUPTED, OK, SCHEMA, UNMEASURED, Point, PointHead, RunHeader
from flopwise.records.training import FINISHED
from flopwise.records.tuning import Ended
from flopwise.spec.workload import Trial
from flopwise.store import files
from flopwise.store.rows import UNREADABLE, Table, read_rows, read_table
from flopwise.store.seals import CHANGED, alone_is_sound
from flopwise.store.sums import FileSum, Sums, read_sums

MAX_HEADER_BYTES = 256 * 2**20  # ten thousand trials are about 10 MiB
LAB_KIND, TUNE_KIND, TRAIN_KIND = "lab", "tune", "train"

RowHead = PointHead[msgspec.Raw]  # the samples are skipped, which is several times faster than decoding them
_Decoded = TypeVar("_Decoded")
_Row = TypeVar("_Row", bound=Point | RowHead)


class StoredRun(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is on the disk now. `load` reads it; nothing here writes."""

    path: Path
    header: RunHeader
    points: tuple[Point, ...]  # in the plan's order; those that are not in the plan after it
    warnings: tuple[str, ...] = ()  # what was left out, or may be wrong, as the files are damaged
    repaired: tuple[str, ...] = ()  # of the warnings: what `runs check --repair` took out before

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a run; another process may be writing it."""
        path = Path(path)
        with no_collector():
            sums = read_sums(path)
            header, damage = sound_header(path, sums)
            table = read_table(path / files.POINTS, Point)
        rows = _latest(table.rows, _plan(header))
        warnings = (*damage, *table.warnings, *sums.repaired)
        return cls(path=path, header=header, points=tuple(rows.values()), warnings=warnings, repaired=sums.repaired)

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
        damaged = (one for one in self.warnings if one not in self.repaired)
        return (*damaged, *([f"{lost} of {len(self.header.trials)} points are missing"] if lost else []))

    @property
    def left_out(self) -> tuple[str, ...]:
        """What every view of the run says: what is damaged, was repaired, and is missing for it; nothing of a sound run."""
        return tuple(dict.fromkeys((*self.warnings, *self.damage()))) if self.warnings else ()

    def sound(self) -> Self:
        """The run, if nothing of it is damaged: for what shows a part of it, and would not say what is lost."""
        damaged = [one for one in self.warnings if one not in self.repaired]
        if damaged:
            hint = f"flopwise runs check --repair {self.header.id} leaves what is sound; runs show shows it"
            raise Damaged(f"the run {self.header.id} is damaged: {damaged[0]}", hint)
        return self

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


def tally(path: Path, header: RunHeader, damage: Iterable[str]) -> Tally:
    """Count a run's rows by status; of a run of the lab, its experiments. `damage`: of its header."""
    damage = [*damage, *read_sums(path).repaired]
    if header.kind == LAB_KIND:
        lab = read_rows(path / files.LAB, _LabRow, "experiments")
        ok, failed = _counts(row.status for row in lab.rows if row.status)
        planned = sum(len(row.experiments) for row in lab.rows)
        warnings = (*damage, *lab.warnings)
        return Tally(ok=ok, failed=failed, planned=planned, complete=ok + failed >= planned, warnings=warnings)
    points = read_table(path / files.POINTS, RowHead)
    damage += points.warnings
    if header.kind == TRAIN_KIND:
        steps = _training_table(path)
        finished = [row.status for row in steps.rows[-1:]] == [FINISHED]
        return Tally(ok=int(finished), failed=0, planned=1, complete=finished, warnings=(*damage, *steps.warnings))
    plan = _plan(header)
    latest = _latest(points.rows, plan)
    ok, failed = _counts(row.status for row in latest.values())
    ended = True
    if header.kind == TUNE_KIND:
        tuning = _tuning_table(path)
        ended = any(row.row == Ended.__struct_config__.tag for row in tuning.rows)
        damage += tuning.warnings
    complete = ended and not _missing(header, latest)
    return Tally(ok=ok, failed=failed, planned=len(plan), complete=complete, warnings=tuple(damage))


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
        return bool(_tuning_table(path).rows)
    if kind == TRAIN_KIND:
        return "" in [row.status for row in _training_table(path).rows[1:]]
    if kind == LAB_KIND:
        statuses = {row.status for row in read_rows(path / files.LAB, _LabRow, "experiments").rows}
        return bool(statuses & {OK, INTERRUPTED})
    table = read_table(path / files.POINTS, _Outcome)
    if table.warnings and not table.rows:
        raise FlopwiseError(f"{path.name}: {table.warnings[0]}", "flopwise runs check says more")
    rows = table.rows
    statuses = {OK if row.memory_file else row.status for row in rows}
    return OK in statuses or (statuses == {INTERRUPTED} and any(row.phases for row in rows))


class _LabRow(msgspec.Struct, frozen=True, kw_only=True):
    experiments: tuple[str, ...] = ()  # the plan: in the first row
    status: str = ""  # of one experiment: in every other


class _TrainingRow(msgspec.Struct, frozen=True):
    status: str = ""  # of the last row alone


def _training_table(path: Path) -> Table[_TrainingRow]:
    table = path / files.TRAINING
    return read_rows(table, _TrainingRow, "steps") if table.is_file() else Table()


class _TuningRow(msgspec.Struct, frozen=True):
    row: str = ""  # the tag of records.tuning


def _tuning_table(path: Path) -> Table[_TuningRow]:
    """Whether its last row was written says more than the plan of its points, which is the first step alone."""
    table = path / files.TUNING
    return read_rows(table, _TuningRow, "tuning") if table.is_file() else Table()


def read_header(path: Path) -> RunHeader:
    """The header of the run at `path`, or one line that says why there is none."""
    return _read_header(path, RunHeader)


def sound_header(path: Path, sums: Sums) -> tuple[RunHeader, list[str]]:
    """The header, made anew from the run's id and rows where it is damaged beyond reading; a line for what may be wrong."""
    try:
        return read_header(path), header_damage(path, sums)
    except _Newer:
        raise
    except FlopwiseError as error:
        header = header_from_rows(path)
        if header is None:
            raise
        return header, [f"{error.message}: made anew from its rows, without points that have none"]


def header_from_rows(path: Path) -> RunHeader | None:
    """What the header of a run can have been; None where its id or its table says too little."""
    named, table = _ID.fullmatch(path.name), path / files.POINTS
    if named is None or not table.is_file():
        return None
    begun, rows = begun_ns(path.name), read_table(table, Point).rows
    return RunHeader(
        id=path.name,
        kind=named[1],
        name=named[2],
        created_at=datetime.fromtimestamp(begun // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        created_ns=begun + _LATE_NS,
        trials=tuple({row.key: row.trial for row in rows}.values()),
    )


_ID = re.compile(r"\d{8}-\d{6}-([A-Za-z0-9.]+)-?(.*?)-?[0-9a-f]{4}")


class _Newer(FlopwiseError):
    """The header is of a later version, and as it was written."""


class _HeaderStart(msgspec.Struct, frozen=True):
    schema: int
    kind: str = ""
    created_ns: int = 0


def created_ns(path: Path) -> int:
    """When the run at `path` was begun; its plan is skipped. A damaged header is not asked: the id has the second."""
    if header_damage(path, read_sums(path)) and (begun := begun_ns(path.name)):
        return begun + _LATE_NS
    return _read_header(path, _HeaderStart).created_ns


_LATE_NS = 10**9 - 1  # of runs begun in one second, a damaged one counts as the last: it is not passed over


def begun_ns(run: str) -> int:
    """The time in a run's id; 0 where it has none."""
    try:
        return int(datetime.strptime(run[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()) * 10**9
    except ValueError:
        return 0


def header_damage(path: Path, sums: Sums) -> list[str]:
    """A line for a header, or sums, that are not as they were written."""
    found, known, file = [sums.problem] if sums.problem else [], sums.files.get(files.HEADER), path / files.HEADER
    with files.explain_errors("read", file):
        text = files.read_limited(file, MAX_HEADER_BYTES)
        if not alone_is_sound(text) or (known is not None and FileSum(len(text), zlib.crc32(text)) != known):
            found.append(f"{files.HEADER} {CHANGED}; its name, command and plan may be wrong")
    return found


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
            raise (_Newer if alone_is_sound(text) else FlopwiseError)(newer, "upgrade flopwise to read it")
        if schema < 1:
            raise FlopwiseError(f"{file} has schema = {schema}", f"allowed: 1 to {SCHEMA}")
        header = msgspec.json.decode(text, type=form)
        if odd := impossible(header):
            raise ValueError(f"{odd} is impossible")
        return header
    except _Newer:
        raise
    except FlopwiseError as error:
        message = error.message if str(path) in error.message else f"{file}: {error.message}"
        raise FlopwiseError(message, error.hint) from None
    except UNREADABLE as error:
        hint = "the file is damaged, or flopwise did not write it"
        raise FlopwiseError(f"{file} is not a run's header: {error}", hint) from None


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
