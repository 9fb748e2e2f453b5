"""One step of a trace as a picture needs it: what each stream did when, in as many pieces as a screen can show."""

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.explained import Explained
from flopwise.analysis.idle import gpu_work
from flopwise.analysis.intervals import Times, covered_ns
from flopwise.analysis.steps import Steps, launch_times
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


def step_timeline(part: Explained, pixels: int = PIXELS) -> StepTimeline | None:
    """The step of median length; None where it has no work that lasts."""
    work, mine, device, steps = part.work, part.trace, part.device, part.steps
    number = _usual(steps)
    own = work.filter(pl.Series(steps.of(launch_times(work)) == number))
    if not own.height:
        return None
    low = min(_opens(steps, number), int(own["start_ns"].to_numpy().min()))
    high = int((own["start_ns"] + own["duration_ns"]).to_numpy().max())
    if high <= low:
        return None
    work = _clipped(work, low, high)  # with what the GPU still had of the step before
    pixel = max(1, (high - low) // pixels)
    streams = work.group_by("stream").agg(pl.col("duration_ns").sum()).sort("duration_ns", descending=True)["stream"]
    spans: list[Span] = []
    for stream in streams[:MOST_STREAMS]:
        spans += _stream(work.filter(pl.col("stream") == stream), f"stream {stream}", low, pixel)
    host = [
        *_calls(mine, pl.concat([mine.launches, mine.graph_launches]), LAUNCHES, low, high, pixel),
        *_calls(mine, mine.syncs, WAITS, low, high, pixel),
    ]
    shown = dict.fromkeys(span.lane for span in (*host, *spans))
    everything = gpu_work(mine, device)
    return StepTimeline(
        step=number,
        steps=len(steps),
        duration_ns=high - low,
        lanes=tuple(shown),
        spans=(*host, *spans),
        idle=_idle(everything["start_ns"].to_numpy(), everything["end_ns"].to_numpy(), low, high),
        pixel_ns=pixel,
        streams_left_out=max(0, len(streams) - MOST_STREAMS),
    )


def _clipped(work: pl.DataFrame, low: int, high: int) -> pl.DataFrame:
    end = pl.col("start_ns") + pl.col("duration_ns")
    inside = work.filter(end > low, pl.col("start_ns") < high)
    start = pl.col("start_ns").clip(low)
    return inside.with_columns(start_ns=start, duration_ns=end.clip(upper_bound=high) - start)


def _opens(steps: Steps, number: int) -> int:
    return steps.starts_ns[number] if steps.how != "whole trace" else 2**62


def _usual(steps: Steps) -> int:
    """The number of the step whose length is the median's; of two, the later, which is warmer.

    >>> _usual(Steps(starts_ns=(0, 50, 60, 71), end_ns=82, how="ranges"))
    3
    """
    lengths = np.diff(np.array([*steps.starts_ns, steps.end_ns]))
    middle = float(np.median(lengths))
    return int(len(lengths) - 1 - np.argmin(np.abs(lengths - middle)[::-1]))


def _stream(work: pl.DataFrame, lane: str, low: int, pixel: int) -> list[Span]:
    rows = work.select(
        (pl.col("start_ns") - low).alias("start"),
        pl.col("duration_ns").alias("busy"),
        pl.col("class").cast(pl.String).alias("kind"),
        pl.col("name").cast(pl.String).fill_null(""),
    )
    return _merged(rows, lane, pixel)


def _calls(trace: Trace, calls: pl.DataFrame, lane: str, low: int, high: int, pixel: int) -> list[Span]:
    inside = calls.filter(pl.col("end_ns") > low, pl.col("start_ns") < high)
    names = pl.Series("names", trace.names, dtype=pl.String)
    rows = inside.select(
        (pl.col("start_ns").clip(low) - low).alias("start"),
        (pl.col("end_ns").clip(upper_bound=high) - pl.col("start_ns").clip(low)).alias("busy"),
        pl.lit(lane).alias("kind"),
    ).with_columns(names.gather(inside["name"]).alias("name"))
    return _merged(rows, lane, pixel)


def _merged(rows: pl.DataFrame, lane: str, pixel: int) -> list[Span]:
    """Pieces shorter than a pixel that begin in the same one are one; then neighbours of one class less than a pixel apart."""
    if not rows.height:
        return []
    rows = rows.sort("start").with_columns(
        cell=pl.when(pl.col("busy") < pixel).then(pl.col("start") // pixel).otherwise(-1 - pl.int_range(pl.len()))
    )
    by_kind = rows.group_by("cell", "kind").agg(pl.col("busy").sum().alias("of_kind"))
    kinds = by_kind.sort("of_kind", "kind", descending=[True, False]).group_by("cell").agg(pl.col("kind").first())
    cells = rows.group_by("cell").agg(
        pl.col("start").min(),
        (pl.col("start") + pl.col("busy")).max().alias("end"),
        pl.col("busy").sum(),
        pl.len().alias("count"),
        pl.col("name").sort_by("busy", descending=True).first(),
    )
    found: list[Span] = []
    longest = 0  # of the pieces in the last span: whose name it has
    for row in cells.join(kinds, on="cell").sort("start").iter_rows(named=True):
        last = found[-1] if found else None
        if last is not None and row["kind"] == last.kind and row["start"] - last.end_ns < pixel:
            found[-1] = Span(
                lane=lane,
                start_ns=last.start_ns,
                end_ns=max(last.end_ns, row["end"]),
                kind=last.kind,
                name=row["name"] if row["busy"] > longest else last.name,
                count=last.count + row["count"],
                busy_ns=last.busy_ns + row["busy"],
            )
            longest = max(longest, row["busy"])
            continue
        longest = row["busy"]
        found.append(
            Span(
                lane=lane,
                start_ns=row["start"],
                end_ns=max(row["end"], row["start"] + 1),
                kind=row["kind"],
                name=row["name"],
                count=row["count"],
                busy_ns=row["busy"],
            )
        )
    return found


def _idle(start: Times, end: Times, low: int, high: int) -> tuple[IdleCell, ...]:
    """The idle share of equal slices; together they are the idle time."""
    edges = np.linspace(low, high, IDLE_CELLS + 1).astype(np.int64)
    near = (end > low) & (start < high)
    start, end = start[near], end[near]
    cells = []
    for left, right in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if right <= left:
            continue
        inside = (end > left) & (start < right)
        busy = covered_ns(np.maximum(start[inside], left), np.minimum(end[inside], right))
        cells.append(IdleCell(start_ns=left - low, end_ns=right - low, idle=1 - busy / (right - left)))
    return tuple(cells)
