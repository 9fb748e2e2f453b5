"""Which row of a CSV of timings belongs to which trace: by size and context; by batch, precision and pass where it says them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from flopwise.analysis.course import CourseTrace, Untraced, with_untraced
from flopwise.analysis.csv_timings import BACKWARD, BOTH, FORWARD, NS, STEP, CsvRow, CsvTimings
from flopwise.analysis.traced_model import TracedModel, named_model

_MOST_NAMED = 4  # columns in which rows differ


def with_timings(traces: Sequence[CourseTrace], timings: CsvTimings) -> list[CourseTrace]:
    """Each trace with its row's times, or with a note of why it has none."""
    contexts: dict[str, set[int | None]] = {}
    for trace in traces:
        contexts.setdefault(trace.model.size, set()).add(trace.model.context)
    return [_with_row(trace, timings, alone=len(contexts[trace.model.size]) == 1) for trace in traces]


def _with_row(trace: CourseTrace, timings: CsvTimings, alone: bool) -> CourseTrace:
    name = Path(timings.path).name
    rows = [row for row in timings.rows if row.times and _same(row, trace.model, trace.precision)]
    if problem := _no_row(rows, trace, alone, name):
        return _noted(trace, problem)
    times: dict[str, float] = {}
    used: dict[int, str] = {}
    for phase in (FORWARD, BACKWARD, BOTH, STEP):
        some = _timed(rows, phase, trace.trains)
        if len({row.times[phase] for row in some}) > 1:
            which = _differing(some)
            return _noted(trace, f"{len(some)} rows of {name} are of {trace.model.label}{which}: none is taken")
        for row in some[:1]:
            value, unit = row.times[phase]
            used[row.number] = unit or _likely_unit(row, trace)
            times[phase] = value * NS[used[row.number]]
    timed = with_untraced(trace, _untraced(times, trace.trains, f"{name}, row {', '.join(map(str, used))}"))
    if all(unit for row in rows for _, unit in row.times.values()):
        return timed
    units = ", ".join(dict.fromkeys(used.values()))
    return _noted(timed, f"{name} names no unit: read as {units}, the nearest to the trace")


def _no_row(rows: Sequence[CsvRow], trace: CourseTrace, alone: bool, name: str) -> str:
    if not alone and any(_context(row) is None for row in rows):
        return f"{name} has no context, and several traces are of {trace.model.size}"
    model = trace.model.label or "this trace: its name does not tell the model's size"
    return "" if rows else f"no row of {name} is of {model}"


def _timed(rows: Sequence[CsvRow], phase: str, trains: bool) -> list[CsvRow]:
    """The rows with a phase's time; those of the same kind of step, where there are such."""
    some = [row for row in rows if phase in row.times]
    return [row for row in some if row.trains in (None, trains)] or some


def _untraced(times: dict[str, float], trains: bool, source: str) -> Untraced:
    """Backward is the difference where only both together were timed; a step of inference is its forward pass."""
    backward = times.get(BACKWARD)
    if backward is None and times.get(BOTH, 0.0) > times.get(FORWARD, float("inf")):
        backward = times[BOTH] - times[FORWARD]
    forward = times.get(FORWARD, None if trains else times.get(STEP))
    return Untraced(forward_ns=forward, backward_ns=backward, step_ns=times.get(STEP), source=source)


def _noted(trace: CourseTrace, note: str) -> CourseTrace:
    return msgspec.structs.replace(trace, notes=(*trace.notes, note))


def _context(row: CsvRow) -> int | None:
    return row.context or named_model(row.size).context


def _same(row: CsvRow, model: TracedModel, precision: str) -> bool:
    named = named_model(row.size)
    context, batch, size = _context(row), row.batch or named.batch, named.size or row.size
    return (
        size.lower() == model.size.lower()
        and (context is None or model.context is None or context == model.context)
        and (batch is None or model.batch is None or batch == model.batch)
        and _precision_fits(row.precision, precision)
    )


def _precision_fits(said: str, used: str) -> bool:
    """
    >>> [_precision_fits(*pair) for pair in (("fp32", "tf32"), ("bf16", "fp32"), ("", "bf16"), ("bfloat16", "bf16"))]
    [True, False, True, True]
    """
    if not said or not used:
        return True
    words = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half")}.get(used, ("32", "full"))
    return any(word in said for word in words)


def _likely_unit(row: CsvRow, trace: CourseTrace) -> str:
    """The unit in which a row's time is nearest to the trace's."""
    phase, (value, _) = next(iter(row.times.items()))
    reference = {FORWARD: trace.forward_ns, BACKWARD: trace.backward_ns}.get(phase) or trace.step_ns
    return min(NS, key=lambda unit: max(value * NS[unit], reference) / max(min(value * NS[unit], reference), 1e-9))


def _differing(rows: Sequence[CsvRow]) -> str:
    """In which columns rows differ, in words."""
    names = dict.fromkeys(name for row in rows for name in row.others)
    differ = [name for name in names if len({row.others.get(name) for row in rows}) > 1]
    differ += [name for name in ("context", "batch", "precision") if len({getattr(row, name) for row in rows}) > 1]
    return f" and differ in {', '.join(differ[:_MOST_NAMED])}" if differ else ""
