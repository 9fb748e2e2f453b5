"""What a run of the lab keeps: what was planned, then a row per experiment, each on the disk before the next begins."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.lab.catalog import experiments
from flopwise.lab.experiment import INCONCLUSIVE, NOT_MEASURABLE, Experiment, Picture, Place, TableOf, Verdict
from flopwise.records import OK, UNSUPPORTED
from flopwise.store.files import LAB
from flopwise.store.rows import read_rows

SCHEMA = 1


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
    rows: tuple[dict[str, Any], ...] = ()
    place: Place | None = None
    quick: bool = False
    workload: str = ""
    started_at: str = ""  # ISO 8601, UTC
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """A result as this version reads it: judged, drawn and tabulated from its rows."""

    result: Result
    claim: str
    verdict: Verdict
    pictures: tuple[Picture, ...] = ()
    tables: tuple[TableOf, ...] = ()


@dataclass(frozen=True)
class LabRun:
    """A run of the lab as it is on the disk."""

    run: str
    planned: Planned
    results: tuple[Result, ...]

    def answers(self) -> list[Answer]:
        return [answer(result) for result in self.results]


def read_lab(path: Path) -> LabRun:
    """The run at this path; experiments that it did not come to are not there."""
    rows: list[Planned | Result] = read_rows(path / LAB, Planned | Result, "experiments")  # type: ignore[arg-type]
    planned = next((row for row in rows if isinstance(row, Planned)), None)
    if planned is None:
        raise FlopwiseError(f"{path.name} ended before the first experiment", "run the lab again")
    return LabRun(run=path.name, planned=planned, results=tuple(row for row in rows if isinstance(row, Result)))


def judged(
    experiment: Experiment, status: str, reason: str, rows: tuple[Mapping[str, Any], ...], place: Place | None
) -> Verdict:
    """The verdict; of what did not come to its end, why."""
    if status == UNSUPPORTED:
        return Verdict(NOT_MEASURABLE, reason)
    if status != OK or place is None:
        return Verdict(INCONCLUSIVE, f"{status}: {reason}")
    return experiment.judge(rows, place)


def answer(result: Result) -> Answer:
    """Judge, draw and tabulate a stored result again. Rows that today's code cannot read keep the verdict they had."""
    experiment = experiments().get(result.experiment)
    if experiment is None:
        return Answer(result, result.claim, result.verdict)
    place = result.place
    try:
        verdict = judged(experiment, result.status, result.reason, result.rows, place)
        if place is None or not result.rows:
            return Answer(result, experiment.claim, verdict)
        # Of an experiment that was cut off, the rows until then may be too few to draw or tabulate.
        return Answer(
            result, experiment.claim, verdict,
            pictures=tuple(experiment.draw(result.rows, place)), tables=tuple(experiment.tabulate(result.rows, place)),
        )  # fmt: skip
    except (LookupError, TypeError, ValueError, ZeroDivisionError, StopIteration):
        return Answer(result, result.claim, result.verdict)
