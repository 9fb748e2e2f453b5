"""One page over runs, traces and snapshots: the verdict, what to change, and the evidence."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flopwise.advice.explained import explain_host_work, with_findings
from flopwise.advice.explained_ranks import explained_ranks
from flopwise.analysis.clocks import step_level
from flopwise.analysis.host_explanation import without_gpu_work
from flopwise.analysis.matching import compare_within
from flopwise.analysis.ranks.files import rank_files
from flopwise.analysis.ranks.selection import NotTogether
from flopwise.analysis.reading import explain_gpu_work, run_named
from flopwise.analysis.step_timeline import step_timeline
from flopwise.api.memory import SUFFIXES as SNAPSHOTS
from flopwise.api.roofline import traced_roofline
from flopwise.collector import no_collector
from flopwise.errors import FlopwiseError
from flopwise.experiments.results import read_lab
from flopwise.predict.machine import gpu_of, machine_with
from flopwise.predict.prediction import predict_quickly
from flopwise.records.run import Point
from flopwise.render.axes import labels_of
from flopwise.render.charts import readable
from flopwise.render.drawing import Drawing, NotDrawn
from flopwise.render.report import Report, ReportPart, html_report, markdown_report
from flopwise.render.report.evidence import StepPrediction
from flopwise.render.report.markdown import pictures_of
from flopwise.snapshot.read import read_snapshot
from flopwise.snapshot.report import report as memory_report
from flopwise.snapshot.stored import stored_report
from flopwise.store import StoredRun
from flopwise.store.files import TRACES, write_output
from flopwise.store.sums import checked_file
from flopwise.store.training import read_training
from flopwise.store.tuning import read_tuning
from flopwise.trace.read import is_trace_file, read_trace

SUFFIXES = (".html", ".md")
MOST_PREDICTED, FEW_PREDICTED = (
    60,
    12,
)  # points of a run, and of a large one: each prediction takes a fraction of a second
LARGE = 1000  # points


def report(
    *targets: str | Path | StoredRun,
    output: str | Path,
    pictures: bool = False,
    runs: str | Path | None = None,
    command: str = "",
) -> Path:
    """Write one page over all targets; the suffix of `output` decides: .html, which needs nothing from outside, or .md.

    A target is a run (`last`, an id, a tag, a path), a trace, or a memory snapshot; traces of a job's ranks, or a folder of them,
    are one target. With `pictures`, a folder of pictures is
    written next to the Markdown.

    >>> flopwise.report("last", output="report.html")        # doctest: +SKIP
    PosixPath('report.html')
    """
    place = Path(output).expanduser()
    check_suffix(place)
    if not targets:
        raise FlopwiseError(
            "there is nothing to report on", "give a run or a trace: flopwise report last -o report.html"
        )
    with no_collector():
        together = _ranks(targets)
        parts = (together,) if together is not None else tuple(gather(target, runs) for target in targets)
        found = Report(parts=parts, command=command)
        text = html_report(found) if place.suffix == ".html" else _markdown(found, place, pictures)
    _write(place, text)
    return place


def _markdown(found: Report, place: Path, pictures: bool) -> str:
    return markdown_report(found, _drawn(found, place) if pictures else None)


def check_suffix(place: Path) -> None:
    """Raise if the page's name does not say what it is to be."""
    if place.suffix not in SUFFIXES:
        raise FlopwiseError(f"the suffix '{place.suffix}' of {place} names no report", f"use {' or '.join(SUFFIXES)}")


def _ranks(targets: Sequence[str | Path | StoredRun]) -> ReportPart | None:
    """The files of a job's ranks, or a folder of them, as one part; None where they are something else."""
    files = rank_files(targets)
    if not files:
        return None
    try:
        found = explained_ranks(files, name=Path(str(targets[0])).name if len(targets) == 1 else "")
    except NotTogether:
        if len(targets) == 1:
            raise
        return None
    return ReportPart(name=found.name, ranks=found, findings=found.findings)


def gather(target: str | Path | StoredRun, runs: str | Path | None = None) -> ReportPart:
    """All that is known of one target; what it does not hold is left out, and what was damaged is said."""
    part = _gathered(target, runs)
    of_rows = part.tuning or part.training or part.lab
    lost = (*(part.run.left_out if part.run is not None else ()), *(of_rows.warnings if of_rows is not None else ()))
    return replace(part, damage=tuple(dict.fromkeys(lost)))


def _gathered(target: str | Path | StoredRun, runs: str | Path | None) -> ReportPart:
    if not isinstance(target, StoredRun):
        path = Path(target).expanduser()
        if is_trace_file(path):
            return _traced(path.name, None, None, path)
        if path.name.lower().endswith(SNAPSHOTS):
            return ReportPart(name=path.name, memory=memory_report(read_snapshot(path)))
        target = run_named(target, runs)
    name = f"{target.header.kind} {target.header.name}".strip()
    if target.header.kind == "memory" and target.points:
        return ReportPart(name=name, run=target, memory=stored_report(target))
    if target.header.kind == "tune":
        return _tuned(name, target)
    if target.header.kind == "train":
        return ReportPart(name=name, run=target, training=read_training(target))
    if target.header.kind == "lab":
        return ReportPart(name=name, run=target, lab=read_lab(target))
    traced = next((point for point in target.points if point.trace_file), None)
    if traced is not None:
        return _traced(name, target, traced)
    within = compare_within(target.points)
    return ReportPart(name=name, run=target, pairs=within.pairs if within else (), predictions=predictions(target))


def predictions(run: StoredRun) -> tuple[StepPrediction, ...]:
    """The run's steps of known models on known GPUs, each with its predicted time."""
    points = [point for point in run.points if point.phases]
    if len(points) > LARGE:  # over its whole range
        points = points[:: len(points) // FEW_PREDICTED]
    points = points[:MOST_PREDICTED]
    found = (_prediction(point, name) for point, name in zip(points, labels_of(points), strict=True))
    return tuple(one for one in found if one is not None)


def _prediction(point: Point, name: str) -> StepPrediction | None:
    workload, step, gpu = point.trial.workload, step_level(point), gpu_of(point.environment)
    if gpu is None or gpu.name == "cpu" or step is None:
        return None
    whole = predict_quickly(workload, machine_with(gpu))
    predicted = whole.time if whole is not None else None
    if predicted is None:
        return None
    return StepPrediction(
        workload=workload.label(),
        name=name,
        measured_ns=step.wall_ns,
        predicted_ns=predicted.wall_ns,
        gpu_ns=step.gpu_ns if step.gpu_exact else None,
        predicted_gpu_ns=predicted.gpu_ns,
        bound=predicted.bound,
        how=predicted.how,
    )


def _traced(name: str, run: StoredRun | None, point: Point | None, path: Path = Path()) -> ReportPart:
    """The trace is read once, and everything is computed from it."""
    try:
        if run is not None and point is not None:
            path = checked_file(run.path, TRACES, point.trace_file)
        trace = read_trace(path)
        if without_gpu_work(trace):
            host = explain_host_work(trace, point)
            return ReportPart(name=name, run=run, host=host, findings=host.findings or ())
        read = explain_gpu_work(trace, point)
    except FlopwiseError as error:
        if run is None:
            raise
        return ReportPart(name=name, run=run, notes=(error.message,))  # it has its times, all the same
    try:
        roofline, no_roofline = traced_roofline(read.steps.whole, path), ""
    except FlopwiseError as error:
        roofline, no_roofline = None, f"{error.message.replace(str(path), path.name)}; {error.hint}"
    explanation = with_findings(read)
    return ReportPart(
        name=name,
        run=run,
        explanation=explanation,
        waterfall=explanation.waterfall,
        findings=explanation.findings or (),
        timeline=step_timeline(read.steps),
        roofline=roofline,
        no_roofline=no_roofline,
        predictions=predictions(run) if run else (),
    )


def _tuned(name: str, run: StoredRun) -> ReportPart:
    tuning = read_tuning(run)
    begun = tuning.begun
    return ReportPart(name=name, run=run, waterfall=begun.waterfall, findings=begun.findings, tuning=tuning)


def _drawn(found: Report, place: Path) -> dict[str, str]:
    """Each chart as a picture in a folder beside the page, and its address there."""
    folder = place.with_suffix(".pictures")
    folder.mkdir(exist_ok=True)
    drawn = {}
    with Drawing() as drawing:
        for name, picture in pictures_of(found).items():
            with suppress(NotDrawn):  # the page says so in its place
                if (spec := readable(picture.draw)) is not None:
                    _write(folder / f"{name}.svg", drawing.picture(spec, ".svg").decode())
                    drawn[name] = f"{folder.name}/{name}.svg"
    return drawn


def _write(place: Path, text: str) -> None:
    try:
        write_output(place, text)
    except OSError as error:
        raise FlopwiseError(f"cannot write {place}: {error.strerror}", "choose another place with -o") from None
