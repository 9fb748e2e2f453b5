"""What several results have in common, a line each: traces, points of a run, stored runs."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flopwise import units
from flopwise.analysis.clocks import GPU, HOST_SYNC, LAUNCH, MIXED, gpu_name, point_mfu, step_level, tokens_per_second
from flopwise.analysis.explanation import Explanation, changes
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.hosts import several_environments, several_hosts
from flopwise.analysis.loop_notes import doubt
from flopwise.analysis.reach import Reach
from flopwise.analysis.together import together
from flopwise.analysis.verdict import in_two_words
from flopwise.records.run import OK, Point
from flopwise.render.account_listing import REACH, reach_cells
from flopwise.render.axes import MESSAGE, Axes, axes_of, labels_of
from flopwise.render.exchanges_view import describe_fits, rates
from flopwise.render.listing import Heading, Listing
from flopwise.render.names import apart, short_paths, stored_in, unique_names
from flopwise.store import RunSummary, StoredRun

_NAMES = 50  # columns of what differs between points, at most
_BOUND = {GPU: "GPU", LAUNCH: "launches", MIXED: "mixed", HOST_SYNC: "host waits"}
_MOST_KERNELS = 12
_ESTIMATED = "Untraced times that no run measured are estimates: a trace alone shows the range."


def explanations_listing(explained: Sequence[Explanation | HostExplanation]) -> Listing:
    """Traces: now, reachable, limit and the verdict in two words."""
    names = apart(short_paths([e.path for e in explained]))
    rows = tuple(
        (name, *reach_cells(e.reach or Reach(now_ns=e.step_ns)), _bound(e))
        for name, e in zip(names, explained, strict=True)
    )
    gpus = {e.gpu if isinstance(e, Explanation) else "the CPU" for e in explained}
    estimated = any(isinstance(e, Explanation) and e.untraced_step and not e.untraced_step.measured for e in explained)
    return Listing(
        title=f"{len(rows)} traces, a step of each",
        where=gpus.pop() if len(gpus) == 1 else "",
        headings=(Heading("trace", right=False), *REACH, Heading("verdict", right=False)),
        rows=rows,
        notes=(*_waits(names, explained), *((_ESTIMATED,) if estimated else ())),
        more="One of them: flopwise explain TRACE. All tables: --full",
    )


def _waits(names: Sequence[str], explained: Sequence[Explanation | HostExplanation]) -> tuple[str, ...]:
    """Of ranks of one job: who the others wait for."""
    ranks = [e for e in explained if isinstance(e, Explanation)]
    waits = together(names, ranks).describe() if len(ranks) == len(explained) else ""
    return (f"If they are ranks of one job, {waits}.",) if waits else ()


def changes_listing(before: Explanation, after: Explanation) -> Listing:
    """Two traces: the kernels that changed most, the largest saving first; the rows add up to the GPU's time."""
    found = changes(before, after)
    most = sorted(found, key=lambda one: -abs(one.saved_ns))[:_MOST_KERNELS]
    shown = [(one.name, one.before_ns, one.after_ns) for one in found if one in most]
    whole = before.gpu_ns, after.gpu_ns
    left = whole[0] - sum(one.before_ns for one in most), whole[1] - sum(one.after_ns for one in most)
    names = unique_names(one[0] for one in shown)
    rows = [(names[name], old, new) for name, old, new in shown]
    rows += [("everything else", max(0.0, left[0]), max(0.0, left[1])), ("all GPU time", *whole)]
    newer, older = apart(short_paths([after.path, before.path]))
    times = [f"{units.duration(a)} → {units.duration(b)}" for a, b in zip(*map(_traced, (before, after)), strict=True)]
    return Listing(
        title=f"{newer} compared with {older}",
        verdict=f"The traced step takes {times[0]}, and the GPU is busy for {times[1]} of it.",
        headings=(Heading("kernel, per step", right=False), Heading("before"), Heading("after"), Heading("saved")),
        rows=tuple((name, *map(_duration, (old, new, old - new))) for name, old, new in rows),
        notes=(f"The {len(most)} of {len(found)} kernels that changed most.",) if len(found) > len(most) else (),
    )


def _traced(e: Explanation) -> tuple[float, float]:
    return e.window_ns, e.busy_ns


def _duration(ns: float) -> str:
    """With its sign; '–' for none."""
    return "–" if round(ns) == 0 else f"−{units.duration(-ns)}" if ns < 0 else units.duration(ns)


def _bound(e: Explanation | HostExplanation) -> str:
    return in_two_words(e.bound) if isinstance(e, Explanation) else f"{e.bound}-bound"


def points_listing(run: StoredRun) -> Listing:
    """Points of a run, each by what differs: its step, MFU, tokens per second, peak, and what sets its time."""
    axes = axes_of(run.points)
    exchanged = any(map(rates, run.points))
    one, other = ("algorithm", "bus") if exchanged else ("MFU", "tokens/s")
    numbers = (Heading("step"), Heading(one, worth=3), Heading(other, worth=2), Heading("peak", worth=1))
    names, told = _names(run.points, axes)
    rows = tuple((*name, *_measured(point)) for name, point in zip(told, run.points, strict=True))
    timed = [step.wall_ns for point in run.points if (step := step_level(point)) is not None]
    failed = sum(point.status != OK for point in run.points)
    span = f": {units.duration(min(timed))} to {units.duration(max(timed))} a step" if timed else ""
    gpus = {gpu_name(point) for point in run.points}
    fixed = ", ".join(f"{name} {value}" for name, value in axes.fixed.items())
    return Listing(
        title=f"{run.header.kind} {run.header.name}".strip(),
        where=gpus.pop() if len(gpus) == 1 else "",
        verdict=f"{len(timed)} points measured{f', {failed} failed' if failed else ''}{span}.",
        headings=(*(Heading(name, right=False) for name in names), *numbers, Heading("bound by", right=False, worth=4)),
        rows=rows,
        notes=(
            *(() if run.left_out else run.damage()),
            *_doubts(run.points),
            f"All of them: {fixed}" if fixed else "",
            several_hosts(run.points),
            several_environments(run.points),
            *describe_fits(run.points),
            stored_in(run.path),
        ),
        more="All tables: --full. A page: flopwise report RUN",
    )


def _doubts(points: Sequence[Point]) -> list[str]:
    said = Counter(filter(None, map(doubt, points)))
    return [f"{line} ({n} of {len(points)} points)" for line, n in said.items()]


def _names(points: Sequence[Point], axes: Axes) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What differs in a column each; in one, where it is too much."""
    told = [tuple(_value(name, one[name]) for name in axes.names) for one in axes.varying]
    widths = (max(map(len, column)) for column in zip(axes.names, *told, strict=True))
    if axes.names and sum(width + 2 for width in widths) <= _NAMES:
        return axes.names, told
    return ("point",), [(label,) for label in labels_of(points)]


def _value(axis: str, value: object) -> str:
    """
    >>> _value("bytes", 10_000_000), _value("ranks", 2), _value("impl", None)
    ('10.0 MB', '2', '')
    """
    if axis == MESSAGE and isinstance(value, int):
        return units.rate(value, "B")
    return "" if value is None else str(value)


def _measured(point: Point) -> tuple[str, ...]:
    """Of a point that failed, why."""
    if (step := step_level(point)) is None:
        return (point.status, "", "", "", "")
    share, rate, bandwidths = point_mfu(point), tokens_per_second(point), rates(point)
    peak = max((one.peak_bytes for one in point.memory), default=0)
    return (
        units.duration(step.wall_ns),
        *(
            [units.rate(one, "B/s") for one in bandwidths.values()]
            or ["" if share is None else units.percent(share), "" if rate is None else units.count(rate)]
        ),
        units.size(peak) if peak else "",
        _BOUND.get(step.bound, ""),
    )


def runs_listing(summaries: Sequence[RunSummary], root: Path) -> Listing:
    """Stored runs, newest first."""
    rows = tuple((one.id, " ".join(one.tags), _points(one), units.size(one.size_bytes)) for one in summaries)
    return Listing(
        title=f"{len(rows)} run{'s' if len(rows) != 1 else ''} in {root}",
        headings=(
            Heading("run", right=False),
            Heading("tags", right=False, worth=2),
            Heading("points"),
            Heading("size", worth=1),
        ),
        rows=rows,
        damage=tuple(f"{one.id}: {warning}" for one in summaries for warning in one.warnings),
        more="One of them: flopwise runs show RUN (last, an id or its start, a tag). Every column: --format csv",
    )


def _points(one: RunSummary) -> str:
    failed = f", {one.failed} failed" if one.failed else ""
    return f"{one.ok} of {one.planned}{failed}" if not one.complete else f"{one.ok}{failed}"
