"""A trace file, read and explained with everything that is known about its step: clocks, limits, the workload."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flopwise import units
from flopwise.analysis.clocks import held_clock
from flopwise.analysis.computing import KnownWork
from flopwise.analysis.explanation import Explanation, explain_steps, with_clock
from flopwise.analysis.timings import device_of, gpu_of, timing_of
from flopwise.analysis.traced_steps import TracedSteps, traced_steps
from flopwise.analysis.waterfall import waterfall
from flopwise.errors import FlopwiseError
from flopwise.predict.machine import Machine, find_ceilings
from flopwise.predict.prediction import predict_quickly
from flopwise.records.note import Note
from flopwise.records.run import Point, Telemetry
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.workload import Workload
from flopwise.store import StoredRun, find, runs_root
from flopwise.store.files import HEADER, TRACES
from flopwise.store.sums import checked_file
from flopwise.trace.attribute import Attribution
from flopwise.trace.input_file import check_file
from flopwise.trace.read import is_trace_file, read_trace, unknown_suffix
from flopwise.trace.tables import Trace

MOST_APART = 0.02  # relative difference of the FLOPs of a workload and a trace that count as the same
_NO_TRACES = (
    "traces end in .json, .json.gz, .sqlite, .sqlite.gz or .nsys-rep; flopwise profile small captures one on a GPU"
)
_LONGEST = 255  # bytes of a file's name, and more than any run's

_WORDS = re.compile(r"(\d{1,18})")

Target = str | Path | StoredRun


@dataclass(frozen=True)
class ExplainedTrace:
    """A trace's explanation, and what it was made from."""

    explanation: Explanation
    steps: TracedSteps
    point: Point | None  # the step without a profiler, where it is the same work on the same GPU


def explain_file(
    path: Path,
    point: Point | None,
    *,
    timings: Target | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
) -> ExplainedTrace:
    """Explain the GPU work of a trace file; `point` is the measurement of the same step without a profiler."""
    return explain_gpu_work(read_trace(path), point, timings=timings, gpu=gpu, runs=runs)


def explain_gpu_work(
    trace: Trace,
    point: Point | None,
    *,
    timings: Target | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
    worker: tuple[int, int] | None = None,
    attribution: Attribution | None = None,
) -> ExplainedTrace:
    """The same of a trace that was read; `worker` and `attribution` as for `traced_steps`."""
    steps = traced_steps(trace, worker, attribution)
    workload, telemetry = (point.trial.workload, point.telemetry) if point is not None else (None, None)
    if timings is None:
        explanation = with_waterfall(explain_steps(steps, point), steps, workload, gpu, telemetry)
        return ExplainedTrace(explanation, steps, point)
    timed = timings if isinstance(timings, StoredRun) else StoredRun.load(find(timings, runs_root(runs)))
    explanation, chosen = _with_timings(explain_steps(steps), timed, point, trace)
    if explanation.untraced_step is None or not explanation.untraced_step.measured:
        return ExplainedTrace(with_waterfall(explanation, steps, workload, gpu), steps, point)
    if workload is None:
        explanation = _with_waterfall_if_same(explanation, steps, chosen.trial.workload, gpu)
    else:
        explanation = with_waterfall(explanation, steps, workload, gpu, chosen.telemetry)
    return ExplainedTrace(explanation, steps, chosen)


def _with_timings(
    explanation: Explanation, timed: StoredRun, point: Point | None, trace: Trace
) -> tuple[Explanation, Point]:
    """The explanation with the clock of another run, and the point that it is of."""
    chosen, remarks = timing_of(timed, point, trace, explanation)
    where = gpu_of(chosen)
    if where and trace.gpu and where != trace.gpu:
        remarks += (f"another GPU than the trace's {trace.gpu}",)
    measured = f"run {timed.header.id}: {chosen.trial.workload.label()} on {where or device_of(chosen)}"
    return with_clock(explanation, chosen, same=not remarks, origin="; ".join((measured, *remarks))), chosen


def trace_of(target: Target, runs: str | Path | None = None) -> tuple[Path, Point | None]:
    """The trace file that a target means, and the point it belongs to."""
    if not isinstance(target, StoredRun):
        path = Path(target).expanduser()
        if is_trace_file(path):
            return path, None
        target = run_named(target, runs)
    first, *others = _traces(target)
    if others and target.header.kind == "sweep":
        raise FlopwiseError(
            f"the run {target.header.id} has {1 + len(others)} traces",
            f"name one, like {first[0]}; flopwise course answers for all of them",
        )
    return first


def traces_of(target: Target, runs: str | Path | None = None) -> list[tuple[Path, Point | None]]:
    """All traces that a target means: those of a run's points, the files of a folder, or the file itself."""
    if not isinstance(target, StoredRun):
        path = Path(target).expanduser()
        if is_trace_file(path):
            return [(path, None)]
        if path.is_dir() and not (path / HEADER).exists():
            if is_folder_of_traces(path):
                return [(file, None) for file in traces_in(path)]
            try:
                return list(_traces(run_named(target, runs)))
            except FlopwiseError:
                raise FlopwiseError(f"{path} is a folder without a trace", _NO_TRACES) from None
        target = run_named(target, runs)
    return list(_traces(target))


def is_folder_of_traces(path: Path) -> bool:
    """Whether it is a folder with trace files in it, and no run."""
    return os.path.isdir(path) and not (path / HEADER).exists() and bool(traces_in(path))


def traces_in(folder: Path) -> list[Path]:
    """The trace files of a folder, by name; numbers in names count as numbers."""
    files = [file for file in folder.iterdir() if is_trace_file(file) and file.is_file()]
    return sorted(files, key=lambda file: _by_number(file.name))


def _by_number(name: str) -> list[tuple[int, str]]:
    """What names are sorted by, so that rank2 comes before rank10.

    >>> sorted(["rank10", "rank2"], key=_by_number)
    ['rank2', 'rank10']
    """
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in _WORDS.split(name)]


def _traces(run: StoredRun) -> Iterator[tuple[Path, Point]]:
    traced = [point for point in run.sound().points if point.trace_file]
    if not traced:
        what = run.points[0].trial.workload.target if run.points else "WORKLOAD"
        raise FlopwiseError(f"the run {run.header.id} has no trace", f"capture one: flopwise profile {what}")
    named = [(checked_file(run.path, TRACES, point.trace_file), point) for point in traced]
    there = [(path, point) for path, point in named if path.exists()]
    if not there:
        raise FlopwiseError(
            f"the trace of the run {run.header.id} was not kept: there is no {named[0][0].name} in its traces",
            "profile it again; flopwise runs show and report show what was measured",
        )
    yield from there


def run_named(target: str | Path, runs: str | Path | None = None) -> StoredRun:
    """The run that a target means; the error for a file that is not a trace is about its name."""
    try:
        path = find(target, runs_root(runs))
    except FlopwiseError:
        given = Path(target).expanduser()
        if os.path.isdir(given):
            raise FlopwiseError(f"{given} is a folder without a trace", _NO_TRACES) from None
        if os.path.isfile(given):
            raise unknown_suffix(Path(target)) from None
        if not os.path.isdir(given) and (os.path.lexists(given) or os.sep in str(target) or len(given.name) > _LONGEST):
            check_file(given, "give a trace's file, or a run: flopwise runs lists what there is")
        raise
    return StoredRun.load(path)


def with_waterfall(
    explanation: Explanation,
    steps: TracedSteps,
    workload: Workload | None = None,
    gpu: str | None = None,
    telemetry: Telemetry | None = None,
) -> Explanation:
    """The explanation with its waterfall; a note where the limits of the trace's GPU are not known.

    `workload`: what was run, where that is known. `gpu` names the machine of a trace that does not. `telemetry`: of the
    step without the profiler.
    """
    machine = gpu_named(gpu) if gpu else find_gpu(explanation.gpu)
    limits = find_ceilings(machine) if machine is not None else None
    if machine is None or limits is None:
        name = explanation.gpu
        unknown = f"the limits of '{name}' are not known" if name else "the trace names no GPU"
        return explanation.with_notes(Note("no_waterfall", f"no waterfall: {unknown}; --gpu names one"))
    itself = find_gpu(explanation.gpu)
    if itself is not None and itself.name != machine.name:
        other = f"the trace is of {itself.title}; the limits in the waterfall are those of {machine.title}"
        explanation = explanation.with_notes(Note("other_gpu", other))
    step, alone, held = explanation.untraced_step, explanation.untraced_idle, held_clock(telemetry)
    made = waterfall(
        steps,
        limits,
        machine,
        known=known_work(workload, machine) if workload is not None else None,
        untraced=(step, alone) if step is not None and alone is not None else None,
        held=held,
    )
    if held is not None:
        cap = f"the power cap held the clock at {held[0]:.0f} of {held[1]} MHz"
        slow = f"{cap}: that time is in 'matmul: other' and attention"
        made = msgspec.structs.replace(made, notes=(*made.notes, slow))
    return msgspec.structs.replace(explanation, waterfall=made, named_gpu=gpu or "")


def _with_waterfall_if_same(
    explanation: Explanation, steps: TracedSteps, workload: Workload, gpu: str | None
) -> Explanation:
    """The same by a workload that is only said to be the trace's: if their FLOPs differ, the trace alone counts."""
    alone, by_workload = (with_waterfall(explanation, steps, known, gpu) for known in (None, workload))
    traced, said = (one.waterfall.mfu if one.waterfall else None for one in (alone, by_workload))
    if traced is None or said is None or abs(said / traced - 1) <= MOST_APART:
        return by_workload
    more = units.percent(said / traced - 1)
    text = f"{workload.label()} does {more} more FLOPs than the trace: left out of the waterfall"
    return alone.with_notes(Note("other_workload", text))


def known_work(workload: Workload, gpu: Gpu) -> KnownWork | None:
    """What a step must do, if that is known at once; None: only the trace is known."""
    predicted = predict_quickly(workload, Machine(gpu=gpu))
    if predicted is None:
        return None
    return KnownWork(ops=tuple(predicted.kernels), model_flops=float(predicted.useful_flops), causal=True)
