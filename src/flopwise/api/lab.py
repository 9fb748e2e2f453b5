"""The lab: each experiment in a process of its own; however one ends, it is a row, and the rest go on."""

import contextlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flopwise.api.report import report
from flopwise.capture.isolate import Worker
from flopwise.errors import FlopwiseError, one_line
from flopwise.experiments.catalog import chosen
from flopwise.experiments.experiment import INCONCLUSIVE, Experiment, Verdict
from flopwise.experiments.results import LabRun, Planned, Result, Running, judged, read_lab
from flopwise.records.events import Done, ExperimentProgress, ExperimentRequest
from flopwise.records.experiment import Place
from flopwise.records.run import INTERRUPTED, OK
from flopwise.render.charts import save
from flopwise.render.lab_charts import stacked
from flopwise.spec import fields
from flopwise.spec.workload import Workload, workload
from flopwise.store import Run, StoredRun, find, runs_root
from flopwise.store.files import LAB, LAB_RUNNING, TRACES
from flopwise.store.rows import append_row


class LabProgress(Protocol):
    """Follows a run of the lab. Every call is cheap and may be ignored."""

    def begin(self, names: list[str]) -> None:
        """These experiments will run, in this order."""

    def doing(self, name: str, text: str) -> None:
        """One of them is at this."""

    def result(self, result: Result) -> None:
        """One of them has ended."""

    def end(self) -> None:
        """The run is over."""


class Unwatched:
    """Progress that nobody watches."""

    def begin(self, names: list[str]) -> None:
        pass

    def doing(self, name: str, text: str) -> None:
        pass

    def result(self, result: Result) -> None:
        pass

    def end(self) -> None:
        pass


def lab(
    *names: str,
    quick: bool = False,
    device: str = "auto",
    workload: str | Workload | None = None,
    timeout: float = 600.0,
    runs: str | Path | None = None,
    command: str = "",
    progress: LabProgress | None = None,
) -> LabRun:
    """Run experiments by name, or `all`. What each found is in `.answers()`: a claim, a verdict, pictures, tables.

    `quick` takes fewer sizes and samples. `timeout` is in seconds, for each experiment. `workload` is for the experiments
    that look at a model.

    >>> flopwise.lab("data-types", quick=True).answers()[0].verdict.word        # doctest: +SKIP
    'confirmed'
    """
    wanted = chosen(names)
    if not wanted:
        raise FlopwiseError("there is nothing to run", "name an experiment, or all: flopwise lab lists them")
    fields.number("timeout", timeout, 1.0, 7 * 86_400)
    given = _workload(workload, wanted)
    watcher = progress or Unwatched()
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(Worker())
        worker.look(device)  # no such device: say so before there is a run
        title = wanted[0].name if len(wanted) == 1 else f"{len(wanted)} experiments"
        run = stack.enter_context(Run.create(runs_root(runs), "lab", title, command, ()))
        planned = tuple(one.name for one in wanted)
        append_row(run.path / LAB, Planned(experiments=planned, quick=quick, device=device))
        stack.callback(watcher.end)
        watcher.begin(list(planned))
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))  # between two experiments: what is done is kept
        for one in wanted:
            takes = given if one.takes_workload else None
            result = _run(
                one,
                ExperimentRequest(experiment=one.name, device=device, quick=quick, workload=takes),
                worker,
                run,
                timeout,
                watcher,
            )
            append_row(run.path / LAB, result)
            (run.path / LAB_RUNNING).unlink(missing_ok=True)
            watcher.result(result)
            if result.status == INTERRUPTED:
                break
    return read_lab(run.path)


def interrupted(found: LabRun) -> bool:
    """Whether the user stopped it."""
    return len(found.results) < len(found.planned.experiments) or found.results[-1].status == INTERRUPTED


def outcome(found: LabRun) -> int:
    """The exit code: 130 stopped by the user; raises if nothing at all could be measured; a refuted claim is no failure."""
    if interrupted(found):
        return 130
    if all(result.status != OK for result in found.results):
        first = found.results[0]
        raise FlopwiseError(f"{first.experiment}: {first.status}: {first.reason}", first.hint)
    return 0


def _workload(given: str | Workload | None, wanted: list[Experiment]) -> Workload | None:
    """The workload, for those that take one; refused where none does."""
    if given is None:
        return None
    if not any(one.takes_workload for one in wanted):
        raise FlopwiseError(f"the experiment '{wanted[0].name}' takes no workload", "leave out --workload")
    return given if isinstance(given, Workload) else workload(given)


def _run(
    one: Experiment, asked: ExperimentRequest, worker: Worker, run: Run, timeout: float, watcher: LabProgress
) -> Result:
    begun, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    rows: list[dict[str, Any]] = []
    place: Place | None = None

    def listen(word: ExperimentProgress) -> None:
        nonlocal place
        place = word.place or place
        if word.row is not None:
            rows.append(word.row)
        if word.row is not None or word.place is not None:
            kept = Running(experiment=one.name, place=word.place, row=word.row)
            append_row(
                run.path / LAB_RUNNING, kept, through=False
            )  # waiting for the disk would disturb the measurement
        if word.doing:
            watcher.doing(one.name, word.doing)

    watcher.doing(one.name, "starting")
    asked = msgspec.structs.replace(asked, folder=str(run.path.resolve() / TRACES / one.name))
    try:
        ended = worker.experiment(asked, timeout, run.log_path(one.name), listen)
    except FlopwiseError as error:  # the worker itself could not be started again
        ended = Done(status="crash", reason=error.message, hint=error.hint)
    return Result(
        experiment=one.name,
        claim=one.claim,
        status=ended.status,
        reason=ended.reason,
        hint=ended.hint,
        verdict=_judged(one, ended, rows, place),
        rows=tuple(rows),
        place=place,
        quick=asked.quick,
        workload=asked.workload.label() if asked.workload else "",
        started_at=started_at,
        elapsed_s=round(time.monotonic() - begun, 3),
    )


def _judged(one: Experiment, ended: Done, rows: list[dict[str, Any]], place: Place | None) -> Verdict:
    """What was measured is kept, even where our own judgement fails on it."""
    try:
        return judged(one, ended.status, ended.reason, tuple(rows), place)
    except Exception as error:  # noqa: BLE001  a fault of ours, told in the row
        return Verdict(INCONCLUSIVE, one_line(f"the rows could not be judged: {type(error).__name__}: {error}"))


def write_pictures(found: LabRun, output: str | Path, runs: str | Path | None = None, command: str = "") -> Path:
    """Write the charts; the suffix decides: .html is the whole report, .svg and .png are the charts below each other."""
    place = Path(output).expanduser()
    if place.suffix == ".html":
        return report(StoredRun.load(find(found.run, runs_root(runs))), output=place, command=command)
    pictures = [picture for answer in found.answers() for picture in answer.pictures]
    if not pictures:
        raise FlopwiseError("there is nothing to draw", "none of the experiments measured anything")
    save(stacked(pictures), place)
    return place
