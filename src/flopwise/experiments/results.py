"""What a run of the lab keeps: what was planned, then a row per experiment, each on the disk before the next begins.

What the running experiment has measured so far lies in a file of its own, so that a kill loses nothing; it goes when the
experiment has its row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from flopwise.errors import Damaged, FlopwiseError
from flopwise.experiments.catalog import experiments
from flopwise.experiments.experiment import Experiment, Picture
from flopwise.experiments.rows import contradiction
from flopwise.experiments.verdict import INCONCLUSIVE, NOT_MEASURABLE, VERDICTS, Verdict
from flopwise.records.experiment import Place
from flopwise.records.printed import Printed
from flopwise.records.run import INTERRUPTED, OK, UNSUPPORTED
from flopwise.records.table import Table
from flopwise.store import StoredRun
from flopwise.store.files import LAB, LAB_RUNNING
from flopwise.store.rows import Table as Stored
from flopwise.store.rows import read_rows

SCHEMA = 1
CUT_OFF = "it was ended from outside, or still runs; these are the rows until then"
AS_STORED = "as stored; could not be judged again"
_Shown = TypeVar("_Shown", Picture, Table)


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="planned"):
    """The first row: what was asked for."""

    schema: int = SCHEMA
    experiments: tuple[str, ...]
    quick: bool = False
    device: str = "auto"


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """One experiment, however it ended. Claim and verdict are kept for readers that do not have the experiment's code."""

    experiment: str
    claim: str
    status: str
    reason: str = ""  # why it is not ok, in one line
    hint: str = ""
    verdict: Verdict
    rows: tuple[dict[str, Any], ...] = ()  # as they are stored; they may hold anything
    place: Place | None = None
    quick: bool = False
    workload: str = ""
    started_at: str = ""  # ISO 8601, UTC
    elapsed_s: float = 0.0


class Running(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the running experiment has reported: its place, or a row."""

    experiment: str
    place: Place | None = None
    row: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """A result as this version reads it: judged, drawn and tabulated from its rows."""

    result: Result
    claim: str
    verdict: Verdict
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    problems: tuple[str, ...] = ()  # a line for what could not be shown
    as_stored: bool = False  # today's code could not judge it again


@dataclass(frozen=True, repr=False)
class LabRun(Printed):
    """A run of the lab as it is on the disk."""

    run: str
    planned: Planned
    results: tuple[Result, ...]
    warnings: tuple[str, ...] = ()  # what was left out, as the run is damaged

    def headline(self) -> str:
        return f"{self.run}, {len(self.results)} of {len(self.planned.experiments)} experiments"

    def answers(self) -> list[Answer]:
        return list(self._answers)

    @cached_property
    def _answers(self) -> tuple[Answer, ...]:
        return tuple(map(answer, self.results))

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped it."""
        return len(self.results) < len(self.planned.experiments) or self.results[-1].status == INTERRUPTED


def read_lab(target: Path | StoredRun) -> LabRun:
    """The run at this path; experiments that it did not come to are not there."""
    path, of_run = (target.path, target.warnings) if isinstance(target, StoredRun) else (target, ())
    table: Stored[Planned | Result] = read_rows(path / LAB, Planned | Result, "experiments")  # type: ignore[arg-type]
    rows, warnings = table.rows, [*of_run, *table.warnings]
    planned = next((row for row in rows if isinstance(row, Planned)), None)
    if planned is None:
        if warnings:
            raise Damaged(f"{path.name} cannot be shown: {warnings[0]}", "run the lab again")
        raise FlopwiseError(f"{path.name} ended before the first experiment", "run the lab again")
    results = [row for row in rows if isinstance(row, Result)]
    try:
        cut_off, left_out = _cut_off(path, planned, {result.experiment for result in results})
        results += cut_off
        warnings += left_out
    except FlopwiseError as error:  # what had ended is shown all the same
        warnings.append(f"what the experiment that was cut off had measured cannot be read: {error.message}")
    return LabRun(run=path.name, planned=planned, results=tuple(results), warnings=tuple(warnings))


def _cut_off(path: Path, planned: Planned, ended: set[str]) -> tuple[list[Result], list[str]]:
    """The experiment that a killed run was in, with the rows it had; none where all have their row."""
    there = (path / LAB_RUNNING).is_file()
    table = read_rows(path / LAB_RUNNING, Running, "rows") if there else Stored[Running]()
    reports = [report for report in table.rows if report.experiment not in ended]
    if not reports:
        return [], table.warnings
    name = reports[-1].experiment
    known = experiments().get(name)
    cut_off = [
        Result(
            experiment=name,
            claim=known.claim if known else "",
            status=INTERRUPTED,
            reason=CUT_OFF,
            verdict=Verdict(INCONCLUSIVE, f"{INTERRUPTED}: {CUT_OFF}"),
            rows=tuple(report.row for report in reports if report.row is not None),
            place=next((report.place for report in reports if report.place), None),
            quick=planned.quick,
        )
    ]
    return cut_off, table.warnings


def verdict_of(
    experiment: Experiment[Any], status: str, reason: str, rows: Callable[[], Sequence[Any]], place: Place | None
) -> Verdict:
    """The verdict on the rows; of what did not come to its end, why. Raises where the rows cannot be read or judged."""
    if status == UNSUPPORTED:
        return Verdict(NOT_MEASURABLE, reason)
    if status != OK or place is None:
        return Verdict(INCONCLUSIVE, f"{status}: {reason}")
    if odd := contradiction(rows()):
        return Verdict(INCONCLUSIVE, f"these rows are no evidence: {odd}")
    return experiment.verdict(rows(), place)


def answer(result: Result) -> Answer:
    """Judge, draw and tabulate a stored result again. Rows that today's code cannot judge keep the verdict they had."""
    experiment, place = experiments().get(result.experiment), result.place
    if experiment is None:
        return Answer(result, result.claim, _as_stored(result.verdict), as_stored=True)
    rows = cache(partial(experiment.read, result.rows))
    claim, as_stored = experiment.claim, False
    try:
        verdict = verdict_of(experiment, result.status, result.reason, rows, place)
    except Exception:  # noqa: BLE001  a file may hold anything
        claim, verdict, as_stored = result.claim, _as_stored(result.verdict), True
    if place is None or not result.rows:
        return Answer(result, claim, verdict, as_stored=as_stored)
    pictures, no_pictures = _shown(lambda: experiment.draw(rows(), place), "charts")
    tables, no_tables = _shown(lambda: experiment.tabulate(rows(), place), "tables")
    # Of an experiment that was cut off, a picture or a table may have nothing in it yet.
    drawn = tuple(picture for picture in pictures if picture.has_points)
    filled = tuple(table for table in tables if table.rows)
    return Answer(result, claim, verdict, drawn, filled, (*no_pictures, *no_tables), as_stored)


def _as_stored(verdict: Verdict) -> Verdict:
    return Verdict(verdict.word if verdict.word in VERDICTS else INCONCLUSIVE, f"{AS_STORED}: {verdict.why}")


def _shown(make: Callable[[], list[_Shown]], what: str) -> tuple[list[_Shown], tuple[str, ...]]:
    """The pictures or tables of the rows; where these cannot be read, none, and a line that says so."""
    try:
        return make(), ()
    except Exception:  # noqa: BLE001  a file may hold anything
        return [], (f"The {what} could not be made: the rows are not as this version writes them.",)
