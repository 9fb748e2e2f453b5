"""Runs one experiment in a process of its own: however it ends, it is a row, and what it measured is kept."""

import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from flopwise.capture.isolate import Worker
from flopwise.errors import FlopwiseError, one_line
from flopwise.experiments.experiment import Experiment
from flopwise.experiments.results import Result, Running, verdict_of
from flopwise.experiments.verdict import INCONCLUSIVE, Verdict
from flopwise.records.events import Done, ExperimentProgress, ExperimentRequest
from flopwise.records.experiment import Place
from flopwise.records.run import CRASH
from flopwise.store import Run
from flopwise.store.files import LAB_RUNNING, TRACES
from flopwise.store.rows import append_row


class LabProgress:
    """Follows a run of the lab. Every call is cheap; these do nothing."""

    def begin(self, names: list[str]) -> None:
        """These experiments will run, in this order."""

    def doing(self, name: str, text: str) -> None:
        """One of them is at this."""

    def result(self, result: Result) -> None:
        """One of them has ended."""

    def end(self) -> None:
        """The run is over."""


def run_experiment(
    experiment: Experiment[Any],
    asked: ExperimentRequest,
    worker: Worker,
    run: Run,
    timeout: float,
    progress: LabProgress,
) -> Result:
    """The result of one experiment; its rows so far are in the run until it has ended."""
    name = experiment.name
    begun, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    rows: list[dict[str, Any]] = []
    places: list[Place] = []

    def listen(event: ExperimentProgress) -> None:
        places.extend([event.place] if event.place else [])
        rows.extend([event.row] if event.row is not None else [])
        if event.place or event.row is not None:
            kept = Running(experiment=name, place=event.place, row=event.row)
            # Not through to the disk: waiting for it would disturb the measurement.
            append_row(run.path / LAB_RUNNING, kept, through=False)
        if event.doing:
            progress.doing(name, event.doing)

    progress.doing(name, "starting")
    asked = msgspec.structs.replace(asked, folder=str(run.path.resolve() / TRACES / name))
    try:
        ended = worker.experiment(asked, timeout, run.log_path(name), listen)
    except FlopwiseError as error:  # the worker itself could not be started again
        ended = Done(status=CRASH, reason=error.message, hint=error.hint)
    place = places[-1] if places else None
    return Result(
        experiment=name,
        claim=experiment.claim,
        status=ended.status,
        reason=ended.reason,
        hint=ended.hint,
        verdict=_verdict(experiment, ended, rows, place),
        rows=tuple(rows),
        place=place,
        quick=asked.quick,
        workload=asked.workload.label() if asked.workload else "",
        started_at=started_at,
        elapsed_s=round(time.monotonic() - begun, 3),
    )


def _verdict(experiment: Experiment[Any], ended: Done, rows: list[dict[str, Any]], place: Place | None) -> Verdict:
    """What was measured is kept, even where our own judgement fails on it."""
    try:
        return verdict_of(experiment, ended.status, ended.reason, lambda: experiment.read(rows), place)
    except Exception as error:  # noqa: BLE001  a fault of ours, reported in the row
        return Verdict(INCONCLUSIVE, one_line(f"the rows could not be judged: {type(error).__name__}: {error}"))
