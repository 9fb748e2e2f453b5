"""The course's five questions of traces, one or a grid of them, with the timings of a run without a profiler."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from flopwise.advice.explained import with_captures
from flopwise.analysis.course import CourseReport, CourseTrace, Untraced, course_trace, with_untraced
from flopwise.analysis.csv_match import with_timings
from flopwise.analysis.csv_timings import BACKWARD, FORWARD, STEP, read_timings
from flopwise.analysis.explanation import explain_steps
from flopwise.analysis.reading import Target, traces_of
from flopwise.analysis.traced_model import traced_model
from flopwise.analysis.traced_steps import traced_steps
from flopwise.errors import FlopwiseError
from flopwise.records.run import Point
from flopwise.spec import fields
from flopwise.trace.read import read_trace


def course(
    targets: Target | Sequence[Target],
    *,
    csv: str | Path | None = None,
    batch: int | None = None,
    context: int | None = None,
    runs: str | Path | None = None,
) -> CourseReport:
    """Answer the five questions for every trace: a file, a run with traces, or a folder of files.

    `csv` has times without a profiler; each trace takes the row of its size and context. These come from the trace's run,
    the sizes of its ops, or its file's name; `batch` and `context` are for a trace that tells neither. Of a run the untraced
    times are its own. A trace among others that cannot be read is left out, and is one of the `notes`.

    >>> flopwise.course("traces/small_ctx512.sqlite", csv="timings.csv")        # doctest: +SKIP
    """
    given = [targets] if isinstance(targets, str | Path) or not isinstance(targets, Sequence) else list(targets)
    for name, size in (("batch", batch), ("context", context)):
        if size is not None:
            fields.whole(name, size, 1, 100_000_000)
    timings = read_timings(csv) if csv is not None else None
    found = [pair for target in given for pair in traces_of(target, runs)]
    if not found:
        raise FlopwiseError("no trace is given", "give trace files, a run, or a folder with traces")
    traces, failures = list[CourseTrace](), list[FlopwiseError]()
    for path, point in found:
        try:
            traces.append(_answered(path, point, batch, context))
        except FlopwiseError as error:
            failures.append(error)
    if not traces:
        raise failures[0]
    if timings is not None:
        traces = with_timings(traces, timings)
    notes = tuple(f"left out: {error.message}" for error in failures)
    return CourseReport(traces=tuple(traces), csv=timings.path if timings is not None else "", notes=notes)


def _answered(path: Path, point: Point | None, batch: int | None, context: int | None) -> CourseTrace:
    part = traced_steps(with_captures(read_trace(path), path))
    explained = explain_steps(part, point)
    model, remark = traced_model(part, path, point, batch=batch, context=context)
    trace = course_trace(part, explained, model)
    trace = msgspec.structs.replace(trace, notes=(*([remark] if remark else []), *explained.notes))
    host_ns = explained.host_ns
    if not host_ns:
        return trace
    run = Untraced(
        forward_ns=host_ns.get(FORWARD), backward_ns=host_ns.get(BACKWARD), step_ns=host_ns.get(STEP), source="its run"
    )
    return with_untraced(trace, run)
