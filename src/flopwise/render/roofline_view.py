"""A roofline as tables and as a chart."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from flopwise import units
from flopwise.analysis.roofline import MEASURED as TRACED
from flopwise.analysis.roofline import Roofline, RooflinePoint
from flopwise.records.ceilings import MEASURED
from flopwise.records.table import Table
from flopwise.render.chart_style import LONGEST, NEUTRAL, colours_of
from flopwise.render.charts import altair
from flopwise.render.json import document
from flopwise.render.names import short_name
from flopwise.render.table import View, columns
from flopwise.render.visible import visible
from flopwise.work.operation import CLASSES
from flopwise.work.traffic import ABOUT, AT_MOST

POINTS, UNPLACED, TILES = "roofline", "unplaced", "tiles"  # keys of the tables
TOP, TOP_UNPLACED, MOST_TILES = 25, 10, 16
ON_A_PAGE = 200  # kinds: sorting them by their share of the roof finds the worst
MOST_DRAWN = 200  # dots: more would hide each other
_WIDTH, _HEIGHT = 640, 380
_MARKS = {AT_MOST: "≤ ", ABOUT: "≈ ", "": ""}
_BYTES_ARE = {
    AT_MOST: "bytes are at most these where inputs of the same sizes, types and strides may be one tensor, read once (x * x), or "
    "the same rows be asked for again",
    ABOUT: "bytes are about these of compiled kernels: a tensor updated in place moves twice, one read in part less than once; "
    "and of matmuls whose types or strides are not in the trace",
}
_COMPUTED = ("intensity", "flops_per_s", "bytes_per_s", "share")


def roofline_view(found: Roofline, most: int = TOP) -> View:
    """The operations that take longest; all of them, and every column, in files."""
    rows = tuple(msgspec.structs.asdict(p) | {key: getattr(p, key) for key in _COMPUTED} for p in found.points)
    inexact = any(point.bytes_are for point in found.points)
    shown = columns(
        "op: operation | phase | dtype | count: count | ns: time | share: of its roof | bytes_per_s: moves | intensity | "
        "flops_per_s: reaches | roof_flops: at most [flops_per_s] | bytes_are | shapes | flops | n_bytes",
        files="flops n_bytes" if inexact else "flops n_bytes bytes_are",
        labels={"op": {row["op"]: short_name(row["op"]) for row in rows}},
    )
    rest = [f"and {len(rows) - most} more kinds"] if len(rows) > most else []
    notes = (_roofs(found), *_coverage(found), *found.notes, *_points_notes(found), *_above(found), *rest)
    title = f"{found.title}, {found.how}"
    table = Table(POINTS, title, shown, rows, notes, most=most)
    content = {"title": title, "how": found.how, "ceilings": found.ceilings, "points": rows}
    if found.how == TRACED:
        content |= {"covered_share": found.covered, "unplaced": found.unplaced}
    tables = [table] if rows or not found.unplaced else []
    if found.tiles:
        content |= {"tiles": found.tiles}
        tables.append(_tiles(found))
    return View([*tables, *([_unplaced(found)] if found.unplaced else [])], document("roofline", **content))


def _tiles(found: Roofline) -> Table:
    """Of one product: the predicted cut first."""
    rows = tuple(msgspec.structs.asdict(one) for one in found.tiles)
    best, sms = found.tiles[0], found.ceilings.processors
    shown = columns("tile | grid: down × across | tiles: tiles | waves: waves | last_share: last wave full | ns: time")
    waves = "one wave" if best.waves == 1 else f"{best.waves} waves"
    notes = (
        f"the fastest takes {waves} over {sms} multiprocessors, the last {units.percent(best.last_share)} full; a library may "
        "also split K, which fills it better: the predicted time has the best of both",
        "times: by the tile model, were all rows aligned",
    )
    return Table(TILES, "Tiles of the result, and the waves they take", shown, rows, notes, most=MOST_TILES)


def _unplaced(found: Roofline) -> Table:
    """What has no point, by op and reason: an op launches kernels of several names."""

    def group(one: Any) -> tuple[str, str, str]:
        return one.op or short_name(one.kernel), one.kind, one.why

    rows: list[dict[str, Any]] = []
    for (op, kind, why), some in groupby(sorted(found.unplaced, key=group), key=group):
        alike = list(some)
        ns = sum(one.ns for one in alike)
        share = ns / found.gpu_ns if found.gpu_ns else None
        rows.append(
            {"op": op, "kind": kind, "count": sum(one.count for one in alike), "ns": ns, "share": share, "why": why}
        )
    rows.sort(key=lambda row: -row["ns"])
    notes = [f"and {len(rows) - TOP_UNPLACED} more"] if len(rows) > TOP_UNPLACED else []
    notes += [] if found.points else [f"{found.title}: no operation has a point", *found.notes[:1]]
    shown = columns("op: operation | ns: time | share: of the GPU time | why: reason | kind | count")
    title = "Not placed: operations without a point"
    return Table(UNPLACED, title, shown, tuple(rows), tuple(notes), most=TOP_UNPLACED)


def _roofs(found: Roofline) -> str:
    how = "measured" if found.ceilings.how == MEASURED else "by the datasheet and what libraries reach of it"
    rates = [_roof_name(dtype, limits.peak_flops) for dtype, limits in found.ceilings.matmul.items()]
    return f"roofs: {how}; {', '.join([*rates, units.rate(found.ceilings.bandwidth_bytes_per_s, 'B/s')])}"


def _roof_name(dtype: str, peak: float) -> str:
    return f"{dtype} {units.rate(peak, 'FLOP/s')}"


def _coverage(found: Roofline) -> list[str]:
    covered = f"points cover {units.percent(found.covered)} of the GPU time, durations added up"
    return [covered] if found.how == TRACED else []


def _points_notes(found: Roofline) -> list[str]:
    """What the reader must know of single points."""
    several = sum(point.kernels > 1 for point in found.points)
    notes = [f"{several} launch several kernels each: their time is together, with the op's bytes"] if several else []
    marks = {point.bytes_are for point in found.points}
    return [*notes, *(why for mark, why in _BYTES_ARE.items() if mark in marks)]


def _above(found: Roofline) -> list[str]:
    """Why points lie above their roof: of a trace, whether what they move fits into the cache."""
    above = [point for point in found.points if point.share > 1]
    if found.how != TRACED or not found.cache_bytes:
        why = f"{len(above)} above their roof: their data was in the cache, or the roof is set too low"
        return [why] if above else []
    small = sum(point.n_bytes <= found.cache_bytes for point in above)
    size = units.size(found.cache_bytes)
    reasons = {
        f"{small} above their roof, no larger than the L2 cache ({size}): their data was still in it": small,
        f"{len(above) - small} above their roof and larger than the L2 cache ({size}): the roof is set too low, or bytes are "
        "counted that do not move": len(above) - small,
    }
    return [reason for reason, count in reasons.items() if count]


def drawn(found: Roofline) -> Any:
    """The chart of the operations that take longest."""
    seen = [p for p in found.points if p.intensity > 0 and p.flops_per_s > 0][:MOST_DRAWN]
    used = {p.dtype for p in found.points}
    roofs = {
        _roof_name(dtype, limits.peak_flops): limits.peak_flops
        for dtype, limits in found.ceilings.matmul.items()
        if dtype in used
    }
    notes = _coverage(found)
    if len(seen) < len(found.points):
        all_ns = sum(p.ns for p in found.points)
        share = units.percent(sum(p.ns for p in seen) / all_ns if all_ns else 0.0)
        notes.append(f"drawn: the {len(seen)} longest of {len(found.points)}, {share} of their time")
    bandwidth = found.ceilings.bandwidth_bytes_per_s
    title = f"{found.title}, {found.how}"
    return roofline_chart([_dot(p) for p in seen], roofs, bandwidth, title, "; ".join(notes))


def _dot(p: RooflinePoint) -> dict[str, Any]:
    return {
        "name": visible(f"{p.op} {p.shapes}", LONGEST),
        "kind": visible(p.kind, LONGEST),
        "kernel": visible(short_name(p.kernel), LONGEST),
        "intensity": p.intensity,
        "flops_per_s": p.flops_per_s,
        "ms": p.ns / 1e6,
        "moves": _MARKS[p.bytes_are] + units.rate(p.bytes_per_s, "B/s"),
        "share": units.percent(p.share),
    }


def roofline_chart(
    dots: Sequence[Mapping[str, Any]], roofs: Mapping[str, float], bandwidth: float, title: str, subtitle: str
) -> Any:
    """Operations under their roofs: FLOPs per byte across, FLOP/s upwards, the dot's area is its time.

    `dots`: rows with name, kind, kernel, intensity, flops_per_s, ms, moves, share; `roofs`: FLOP/s by name.
    """
    alt = altair()
    low = min([0.04, *(dot["intensity"] for dot in dots)]) / 2
    high = max([1e3, *(peak / bandwidth for peak in roofs.values()), *(dot["intensity"] for dot in dots)]) * 8
    lines = [
        {"roof": name, "intensity": x, "flops_per_s": min(peak, x * bandwidth)}
        for name, peak in roofs.items()
        for x in (low, peak / bandwidth, high)
    ]
    decades = [10.0**power for power in range(-4, 19)]
    x = alt.X("intensity:Q", title="FLOPs per byte moved").scale(type="log", domain=[low, high], nice=False)
    x = x.axis(values=decades, format="~r")
    y = alt.Y("flops_per_s:Q", title="FLOP/s").scale(type="log").axis(values=decades, format="~s")
    roof = alt.Chart(alt.Data(values=lines)).mark_line(color=NEUTRAL, strokeWidth=1.5).encode(x=x, y=y, detail="roof:N")
    ends = alt.Data(values=[row for row in lines if row["intensity"] == high])
    label = alt.Chart(ends).mark_text(align="right", dy=-7, color=NEUTRAL).encode(x=x, y=y, text="roof:N")
    present = {dot["kind"] for dot in dots}
    kinds = [kind for kind in CLASSES if kind in present] + sorted(present - set(CLASSES))
    words = {"kernel": "kernel", "moves": "moves", "share": "of its roof"}
    numbers = {"intensity": "FLOPs/byte", "flops_per_s": "FLOP/s", "ms": "time, ms"}
    tooltip = [alt.Tooltip(f"{key}:N", title=name) for key, name in words.items()]
    tooltip += [alt.Tooltip(f"{key}:Q", title=name) for key, name in numbers.items()]
    circles = alt.Chart(alt.Data(values=list(dots))).mark_circle(opacity=0.7, stroke="white", strokeWidth=0.4)
    circles = circles.encode(
        x=x,
        y=y,
        size=alt.Size("ms:Q", title="time, ms").scale(range=[15, 400]),
        order=alt.Order("ms:Q", sort="descending"),  # the small ones upon the large
        color=alt.Color("kind:N", title="class", sort=kinds, scale=alt.Scale(**colours_of(kinds))),
        tooltip=["name:N", "kind:N", *tooltip],
    )
    heading = alt.TitleParams(visible(title, LONGEST), subtitle=visible(subtitle, LONGEST))
    return alt.layer(roof, label, circles).properties(width=_WIDTH, height=_HEIGHT, title=heading)
