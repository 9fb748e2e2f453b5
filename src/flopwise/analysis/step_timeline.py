"""One step of a trace as a picture needs it: what each stream did when, in as many pieces as a screen can show."""

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.gpu_gaps import gpu_work
from flopwise.analysis.intervals import Times, covered_within
from flopwise.analysis.steps import WHOLE_TRACE, Steps, launch_times
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.trace.tables import Trace

PIXELS = 900  # what lies closer together than one of these is one piece
IDLE_CELLS = 180
MOST_STREAMS = 6
LAUNCHES, WAITS = "launches", "waits for the GPU"


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Work on one lane, from when to when since the step's beginning; several pieces of work, if they lie close together."""

    lane: str
    start_ns: int
    end_ns: int
    kind: str  # class of most of its time
    name: str  # of its longest piece
    count: int
    busy_ns: int


class IdleCell(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of the step, and the share of it in which no stream worked."""

    start_ns: int
    end_ns: int
    idle: float


class StepTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what the host launched, what each stream did, and when the GPU was idle."""

    step: int  # which one, from 0
    steps: int
    duration_ns: int
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    idle: tuple[IdleCell, ...]
    pixel_ns: int
    streams_left_out: int = 0


def step_timeline(part: TracedSteps, pixels: int = PIXELS) -> StepTimeline | None:
    """The step of median length; None where it has no work that lasts."""
    work, trace, steps = part.work, part.trace, part.steps
    number = _median_step(steps)
    own = work.filter(pl.Series(steps.of(launch_times(work)) == number))
    if not own.height:
        return None
    low = int(own["start_ns"].to_numpy().min())
    if steps.how != WHOLE_TRACE:
        low = min(low, steps.starts_ns[number])
    high = int((own["start_ns"] + own["duration_ns"]).to_numpy().max())
    if high <= low:
        return None
    # With what the GPU still had of the step before.
    work = _inside(work.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns")), low, high)
    pixel = max(1, (high - low) // pixels)
    busiest = work.group_by("stream").agg(pl.col("busy").sum()).sort("busy", "stream", descending=[True, False])
    streams = busiest["stream"]
    spans = [
        *_calls(trace, pl.concat([trace.launches, trace.graph_launches]), LAUNCHES, low, high, pixel),
        *_calls(trace, trace.syncs, WAITS, low, high, pixel),
    ]
    texts = pl.col("class", "name").cast(pl.String).fill_null("")
    rows = work.select("stream", "start", "busy", texts).rename({"class": "kind"})
    for stream in streams[:MOST_STREAMS]:
        spans += _merged(rows.filter(pl.col("stream") == stream), f"stream {stream}", pixel)
    everything = gpu_work(trace, part.device)
    return StepTimeline(
        step=number,
        steps=len(steps),
        duration_ns=high - low,
        lanes=tuple(dict.fromkeys(span.lane for span in spans)),
        spans=tuple(spans),
        idle=_idle(everything["start_ns"].to_numpy(), everything["end_ns"].to_numpy(), low, high),
        pixel_ns=pixel,
        streams_left_out=max(0, len(streams) - MOST_STREAMS),
    )


def _inside(spans: pl.DataFrame, low: int, high: int) -> pl.DataFrame:
    """The spans inside a window, clipped to it: `start` since its beginning, and `busy`."""
    start, end = pl.col("start_ns").clip(low), pl.col("end_ns").clip(upper_bound=high)
    inside = spans.filter(pl.col("end_ns") > low, pl.col("start_ns") < high)
    return inside.with_columns(start=start - low, busy=end - start)


def _median_step(steps: Steps) -> int:
    """The number of the step whose length is the median's; of two, the later, which is warmer.

    >>> _median_step(Steps(starts_ns=(0, 50, 60, 71), end_ns=82, how="ranges"))
    3
    """
    lengths = np.diff(np.array([*steps.starts_ns, steps.end_ns]))
    middle = float(np.median(lengths))
    return int(len(lengths) - 1 - np.argmin(np.abs(lengths - middle)[::-1]))


def _calls(trace: Trace, calls: pl.DataFrame, lane: str, low: int, high: int, pixel: int) -> list[Span]:
    names = pl.Series("names", trace.names, dtype=pl.String)
    inside = _inside(calls, low, high)
    rows = inside.select("start", "busy", pl.lit(lane).alias("kind"))
    return _merged(rows.with_columns(names.gather(inside["name"]).alias("name")), lane, pixel)


def _merged(rows: pl.DataFrame, lane: str, pixel: int) -> list[Span]:
    """Pieces shorter than a pixel that begin in the same one are one; then neighbours of one class less than a pixel apart."""
    if not rows.height:
        return []
    short = pl.col("busy") < pixel
    cell = pl.when(short).then(pl.col("start") // pixel).otherwise(-1 - pl.int_range(pl.len()))
    rows = rows.sort("start", maintain_order=True).with_columns(cell=cell)
    by_kind = rows.group_by("cell", "kind").agg(pl.col("busy").sum().alias("of_kind"))
    kinds = by_kind.sort("of_kind", "kind", descending=[True, False]).group_by("cell", maintain_order=True).first()
    cells = rows.group_by("cell", maintain_order=True).agg(
        pl.col("start").min(),
        (pl.col("start") + pl.col("busy")).max().alias("end"),
        pl.col("busy").sum(),
        pl.len().alias("count"),
        pl.col("name").get(pl.col("busy").arg_max()),
    )
    spans: list[Span] = []
    longest = 0  # of the pieces in the last span, which has its name
    ordered = cells.join(kinds.select("cell", "kind"), on="cell").sort("start", "cell")
    for _, start, end, busy, count, name, kind in ordered.iter_rows():
        last = spans[-1] if spans else None
        if last is not None and kind == last.kind and start - last.end_ns < pixel:
            del spans[-1]
            name = name if busy > longest else last.name
            start, end, count, total = last.start_ns, max(last.end_ns, end), last.count + count, last.busy_ns + busy
            longest = max(longest, busy)
        else:
            end, total, longest = max(end, start + 1), busy, busy
        spans.append(Span(lane=lane, start_ns=start, end_ns=end, kind=kind, name=name, count=count, busy_ns=total))
    return spans


def _idle(start: Times, end: Times, low: int, high: int) -> tuple[IdleCell, ...]:
    """The idle share of equal slices; together they are the idle time."""
    edges = np.unique(np.linspace(low, high, IDLE_CELLS + 1).astype(np.int64))
    near = (end > low) & (start < high)
    left, right = edges[:-1], edges[1:]
    idle = 1 - covered_within(left, right, start[near], end[near]) / (right - left)
    cells = zip((left - low).tolist(), (right - low).tolist(), idle.tolist(), strict=True)
    return tuple(IdleCell(start_ns=begin, end_ns=close, idle=share) for begin, close, share in cells)
