"""A trace's file, read and explained with all that is known of its step."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flopwise.analysis.explained import Explained, explained
from flopwise.analysis.explanation import Explanation, explain_part, with_clock
from flopwise.analysis.timings import device_of, gpu_of, timing_of
from flopwise.analysis.with_limits import with_waterfall, with_waterfall_of
from flopwise.errors import FlopwiseError
from flopwise.records.run import Point
from flopwise.store import StoredRun, find, runs_root
from flopwise.trace.given_file import check_file
from flopwise.trace.read import is_trace_file, read_trace, unknown_suffix

_LONGEST = 255  # bytes of a file's name, and more than any run's


@dataclass(frozen=True)
class Read:
    """A trace, explained, and what it was explained from."""

    explanation: Explanation
    part: Explained
    point: Point | None  # the step without a profiler, where it is the same work on the same GPU


def explain_all(
    target: str | Path | StoredRun,
    *,
    timings: str | Path | StoredRun | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
) -> Read:
    """`explain`, and what it has read on the way."""
    path, point = trace_of(target, runs)
    return read_and_explain(path, point, timings=timings, gpu=gpu, runs=runs)


def read_and_explain(
    path: Path,
    point: Point | None,
    *,
    timings: str | Path | StoredRun | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
) -> Read:
    """A trace's file explained; `point` is what was measured of the same step without a profiler."""
    trace = read_trace(path)
    if point is not None and point.ran is not None and point.ran.device == "cpu" and not trace.kernels.height:
        raise FlopwiseError(
            f"the run {path.parents[1].name} was on the CPU: there is no GPU work in it to explain",
            "profile it on a GPU (--device cuda); of a CPU run, flopwise bench and runs show give the times by phase",
        )
    part, workload = explained(trace), point.trial.workload if point is not None else None
    if timings is None:
        telemetry = point.telemetry if point is not None else None
        return Read(with_waterfall(explain_part(part, point), part, workload, gpu, telemetry), part, point)
    timed = timings if isinstance(timings, StoredRun) else StoredRun.load(find(timings, runs_root(runs)))
    found = explain_part(part)
    chosen, notes = timing_of(timed, point, trace, found)
    there = gpu_of(chosen)
    if there and trace.gpu and there != trace.gpu:
        notes += (f"another GPU than the trace's {trace.gpu}",)
    found = with_clock(found, chosen, same=not notes)
    where = "; ".join(
        (f"run {timed.header.id}: {chosen.trial.workload.label()} on {there or device_of(chosen)}", *notes)
    )
    if workload is None and found.untraced_idle is not None:
        found = with_waterfall_of(found, part, chosen.trial.workload, gpu)
    else:
        found = with_waterfall(found, part, workload, gpu)
    if not found.host_ns:  # left out, as the last note says: it is to say of which clock, too
        found = msgspec.structs.replace(found, notes=(*found.notes[:-1], f"{found.notes[-1]} ({where})"))
        return Read(found, part, point)
    same = chosen if found.untraced_idle is not None else point
    return Read(msgspec.structs.replace(found, timings=where), part, same)


def trace_of(target: str | Path | StoredRun, runs: str | Path | None = None) -> tuple[Path, Point | None]:
    """The trace file that a target means, and the point it belongs to."""
    if not isinstance(target, StoredRun):
        path = Path(target).expanduser()
        if is_trace_file(path):
            return path, None
        target = run_named(target, runs)
    traced = next((point for point in target.points if point.trace_file), None)
    if traced is None:
        raise FlopwiseError(f"the run {target.header.id} has no trace", "capture one: flopwise profile WORKLOAD")
    path = target.path / "traces" / Path(traced.trace_file).name
    if not path.exists():
        raise FlopwiseError(
            f"the trace of the run {target.header.id} was not kept: there is no {path.name} in its traces",
            "profile it again; flopwise runs show and report tell what was measured",
        )
    return path, traced


def run_named(target: str | Path, runs: str | Path | None = None) -> StoredRun:
    """The run that a target means; of a file that is none, its name is what is wrong."""
    try:
        path = find(target, runs_root(runs))
    except FlopwiseError:
        given = Path(target).expanduser()
        if os.path.isfile(given):
            raise unknown_suffix(Path(target)) from None
        if not os.path.isdir(given) and (os.path.lexists(given) or os.sep in str(target) or len(given.name) > _LONGEST):
            check_file(given, "give a trace's file, or a run: flopwise runs lists what there is")
        raise
    return StoredRun.load(path)
