"""`lab`: measure claims about GPUs on this machine."""

from contextlib import ExitStack, suppress
from pathlib import Path

from flopwise.api.report import report
from flopwise.capture.isolate import Worker
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.experiments.catalog import chosen
from flopwise.experiments.results import LabRun, Planned, read_lab
from flopwise.experiments.runner import LabProgress, run_experiment
from flopwise.records.events import ExperimentRequest
from flopwise.records.run import INTERRUPTED, OK
from flopwise.render.charts import save
from flopwise.render.lab_charts import stacked
from flopwise.spec import fields
from flopwise.spec.workload import Workload
from flopwise.spec.workload import workload as parsed
from flopwise.store import Run, StoredRun, find, runs_root
from flopwise.store.files import LAB, LAB_RUNNING
from flopwise.store.rows import append_row


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
    """Run experiments by name, or `all`, each in a process of its own. `.answers()` has for each a claim, a verdict, pictures
    and tables.

    `quick` takes fewer sizes and samples. `timeout` is in seconds, for each experiment. `workload` is for the experiments
    that look at a model.

    >>> flopwise.lab("data-types", quick=True).answers()[0].verdict.word        # doctest: +SKIP
    'confirmed'
    """
    wanted = chosen(names)
    if not wanted:
        raise FlopwiseError("there is nothing to run", "name an experiment, or all: flopwise lab lists them")
    if workload is not None and not any(one.takes_workload for one in wanted):
        raise FlopwiseError(f"the experiment '{wanted[0].name}' takes no workload", "omit --workload")
    fields.number("timeout", timeout, 1.0, 7 * 86_400)
    given = parsed(workload) if isinstance(workload, str) else workload
    watcher = progress or LabProgress()
    with ExitStack() as stack:
        worker = stack.enter_context(Worker())
        worker.look(device)  # no such device: say so before there is a run
        title = wanted[0].name if len(wanted) == 1 else f"{len(wanted)} experiments"
        run = stack.enter_context(Run.create(runs_root(runs), "lab", title, command, ()))
        planned = tuple(one.name for one in wanted)
        append_row(run.path / LAB, Planned(experiments=planned, quick=quick, device=device))
        stack.callback(watcher.end)
        watcher.begin(list(planned))
        stack.enter_context(suppress(KeyboardInterrupt))  # between two experiments: what is done is kept
        for one in wanted:
            takes = given if one.takes_workload else None
            asked = ExperimentRequest(experiment=one.name, device=device, quick=quick, workload=takes)
            result = run_experiment(one, asked, worker, run, timeout, watcher)
            append_row(run.path / LAB, result)
            (run.path / LAB_RUNNING).unlink(missing_ok=True)
            watcher.result(result)
            if result.status == INTERRUPTED:
                break
    found = read_lab(run.path)
    if found.interrupted:
        raise Interrupted(found)
    return found


def outcome(found: LabRun) -> int:
    """The exit code: 130 stopped by the user; raises if nothing at all could be measured; a refuted claim is no failure."""
    if found.interrupted:
        return 130
    if all(result.status != OK for result in found.results):
        first = found.results[0]
        raise FlopwiseError(f"{first.experiment}: {first.status}: {first.reason}", first.hint)
    return 0


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
