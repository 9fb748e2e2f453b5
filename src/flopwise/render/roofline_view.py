"""A roofline as a table and as a chart."""

from typing import Any

from flopwise import units
from flopwise.analysis.roofline import MEASURED as TRACED
from flopwise.analysis.roofline import Roofline, RooflinePoint
from flopwise.records.ceilings import MEASURED
from flopwise.render.charts import roofline_chart
from flopwise.render.json import document
from flopwise.render.kernel_names import shortened
from flopwise.render.table import Column, Table, View
from flopwise.work.traffic import ABOUT, AT_MOST

TOP = 25
TOP_UNPLACED = 10
ON_A_PAGE = 200  # kinds: whoever sorts them by their share of the roof finds the worst
MOST_DRAWN = 200  # dots: more would hide each other
_MARKS = {AT_MOST: "≤ ", ABOUT: "≈ ", "": ""}
_WHY = {
    AT_MOST: "bytes are at most these where inputs of the same sizes, types and strides may be one tensor, read once (x * x), or "
    "the same rows be asked for again",
    ABOUT: "bytes are about these of compiled kernels: a tensor that is updated in place moves twice, one that is read in part "
    "less than once; and of matmuls whose types or strides are not in the trace",
}


def roofline_view(found: Roofline, most: int = TOP, for_programs: bool = False) -> View:
    """The operations that take longest; all of them, and every column, for programs."""
    rows = [_row(point) for point in found.points]
    bounds = for_programs or any(point.bytes_are for point in found.points)
    columns = (
        Column("op", "operation", shortened, right=False),
        Column("phase", "phase", right=False),
        Column("dtype", "in", right=False),
        Column("count", "count"),
        Column("ns", "time", units.duration),
        Column("share", "of its roof", units.percent),
        *((Column("flops", "FLOPs"), Column("n_bytes", "bytes")) if for_programs else ()),
        *((Column("bytes_are", "bytes are", right=False),) if bounds else ()),
        Column("bytes_per_s", "moves", _bytes),
        Column("intensity", "FLOPs/byte", units.significant),
        Column("flops_per_s", "reaches", _flops),
        Column("roof_flops", "of at most", _flops),
        Column("shapes", "shapes", right=False, longest=70),
    )
    most = len(rows) if for_programs else most
    roofs = "measured" if found.ceilings.how == MEASURED else "by the datasheet and what libraries reach of it"
    notes = [f"roofs: {roofs}; {_roofs(found)}", *_coverage(found), *found.notes, *_several(found), *_above(found)]
    notes += [f"and {len(rows) - most} kinds more"] if len(rows) > most else []
    table = Table(title=found.title, columns=columns, rows=tuple(rows[:most]), notes=tuple(notes))
    content = {"title": found.title, "how": found.how, "ceilings": found.ceilings, "points": rows}
    if found.how == TRACED:
        content |= {"covered_share": found.covered, "unplaced": found.unplaced}
    rest = [_unplaced(found, len(found.unplaced) if for_programs else TOP_UNPLACED)] if found.unplaced else []
    return [*([table] if rows or not rest else []), *rest], document("roofline", **content)


def _unplaced(found: Roofline, most: int) -> Table:
    """What has no point, by op and reason: an op launches kernels of several names."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in found.unplaced:
        name = one.op or shortened(one.kernel)
        row = rows.setdefault(
            (name, one.kind, one.why), {"op": name, "kind": one.kind, "why": one.why, "count": 0, "ns": 0.0}
        )
        row["count"] += one.count
        row["ns"] += one.ns
    columns = (
        Column("op", "operation", shortened, right=False),
        Column("kind", "class", right=False),
        Column("count", "count"),
        Column("ns", "time", units.duration),
        Column("share", "of the GPU time", units.percent),
        Column("why", "why", right=False),
    )
    longest = sorted(rows.values(), key=lambda row: -row["ns"])
    notes = (f"and {len(longest) - most} more",) if len(longest) > most else ()
    if not found.points:
        notes = (*notes, f"{found.title}: no operation has a point", *found.notes[:1])
    shown = tuple(row | {"share": row["ns"] / found.gpu_ns if found.gpu_ns else None} for row in longest[:most])
    return Table(title="not placed", columns=columns, rows=shown, notes=notes)


def _coverage(found: Roofline) -> list[str]:
    if found.how != TRACED:
        return []
    return [f"points cover {units.percent(found.covered)} of the GPU time, durations added up"]


def _several(found: Roofline) -> list[str]:
    """What the reader must know of single points."""
    several = sum(point.kernels > 1 for point in found.points)
    notes = [f"{several} launch several kernels each: their time is together, with the op's bytes"] if several else []
    marks = {point.bytes_are for point in found.points}
    return [*notes, *(why for mark, why in _WHY.items() if mark in marks)]


def _above(found: Roofline) -> list[str]:
    """Why points lie above their roof: of a trace, whether what they move fits into the cache."""
    above = [point for point in found.points if point.share > 1]
    if found.how != TRACED or not found.cache_bytes:
        return (
            [f"{len(above)} above their roof: their data lay in the cache, or the roof is set too low"] if above else []
        )
    small = sum(point.n_bytes <= found.cache_bytes for point in above)
    large = len(above) - small
    size = units.size(found.cache_bytes)
    reasons = {
        f"{small} above their roof, no larger than the L2 cache ({size}): what was just written lay in it": small,
        f"{large} above their roof and larger than the L2 cache ({size}): the roof is set too low, or bytes are counted "
        "that do not move": large,
    }
    return [reason for reason, count in reasons.items() if count]


def drawn(found: Roofline) -> Any:
    """The chart of the operations that take longest."""
    seen = [p for p in found.points if p.intensity > 0 and p.flops_per_s > 0][:MOST_DRAWN]
    points = [
        {
            "name": f"{p.op} {p.shapes}",
            "kind": p.kind,
            "intensity": p.intensity,
            "flops_per_s": p.flops_per_s,
            "ms": p.ns / 1e6,
            "kernel": shortened(p.kernel),
            "moves": _MARKS[p.bytes_are] + _bytes(p.bytes_per_s),
            "share": units.percent(p.share),
        }
        for p in seen
    ]
    used = {p.dtype for p in found.points}
    roofs = [
        (f"{dtype} {_flops(limits.peak_flops)}", limits.peak_flops)
        for dtype, limits in found.ceilings.matmul.items()
        if dtype in used
    ]
    told = "; ".join([*_coverage(found), *_left_out(seen, found)])
    return roofline_chart(points, roofs, found.ceilings.bandwidth_bytes_per_s, found.title, told)


def _left_out(seen: list[RooflinePoint], found: Roofline) -> list[str]:
    if len(seen) == len(found.points):
        return []
    all_ns = sum(p.ns for p in found.points)
    share = units.percent(sum(p.ns for p in seen) / all_ns if all_ns else 0.0)
    return [f"drawn: the {len(seen)} longest of {len(found.points)}, {share} of their time"]


def _row(p: RooflinePoint) -> dict[str, Any]:
    fields = (
        "op", "kind", "phase", "dtype", "shapes", "count", "ns", "flops", "n_bytes", "bytes_are", "roof_flops", "how",
        "kernel", "kernels", "intensity", "flops_per_s", "bytes_per_s", "share",
    )  # fmt: skip
    return {name: getattr(p, name) for name in fields}


def _roofs(found: Roofline) -> str:
    rates = [f"{dtype} {_flops(limits.peak_flops)}" for dtype, limits in found.ceilings.matmul.items()]
    return ", ".join([*rates, units.rate(found.ceilings.bandwidth_bytes_per_s, "B/s")])


def _flops(per_second: float) -> str:
    return units.rate(per_second, "FLOP/s")


def _bytes(per_second: float) -> str:
    return units.rate(per_second, "B/s")
