"""A roofline as a table and as a chart."""

from typing import Any

from flopwise import units
from flopwise.analysis.roofline import Roofline, RooflinePoint
from flopwise.ceilings import MEASURED
from flopwise.render.charts import roofline_chart
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View

TOP = 25


def roofline_view(found: Roofline) -> View:
    """The operations that take longest; all of them for programs."""
    rows = [_row(point) for point in found.points]
    columns = (
        Column("op", "operation", right=False),
        Column("shapes", "shapes", right=False),
        Column("phase", "phase", right=False),
        Column("dtype", "in", right=False),
        Column("count", "count"),
        Column("ns", "time", units.duration),
        Column("intensity", "FLOPs/byte", units.significant),
        Column("flops_per_s", "reaches", _flops),
        Column("roof_flops", "of at most", _flops),
        Column("share", "share", units.percent),
    )
    above = sum(point.share > 1 for point in found.points)
    roofs = "measured" if found.ceilings.how == MEASURED else "by the datasheet and what libraries reach of it"
    notes = [f"roofs: {roofs}; {_roofs(found)}", *found.notes]
    notes += [f"{above} above their roof: their data lay in the cache, or the roof is set too low"] if above else []
    notes += [f"and {len(rows) - TOP} kinds more"] if len(rows) > TOP else []
    table = Table(title=found.title, columns=columns, rows=tuple(rows[:TOP]), notes=tuple(notes))
    return [table], document("roofline", title=found.title, how=found.how, ceilings=found.ceilings, points=rows)


def drawn(found: Roofline) -> Any:
    """The chart of the operations that take a thousandth of the time or more: the rest would hide under them."""
    least = sum(p.ns for p in found.points) / 1000
    points = [
        {
            "name": f"{p.op} {p.shapes}",
            "kind": p.kind,
            "intensity": p.intensity,
            "flops_per_s": p.flops_per_s,
            "ms": p.ns / 1e6,
        }
        for p in found.points
        if p.intensity > 0 and p.flops_per_s > 0 and p.ns >= least
    ]
    used = {p.dtype for p in found.points}
    roofs = [
        (f"{dtype} {_flops(limits.peak_flops)}", limits.peak_flops)
        for dtype, limits in found.ceilings.matmul.items()
        if dtype in used
    ]
    return roofline_chart(points, roofs, found.ceilings.bandwidth_bytes_per_s, found.title)


def _row(p: RooflinePoint) -> dict[str, Any]:
    fields = ("op", "kind", "phase", "dtype", "shapes", "count", "ns", "flops", "n_bytes", "roof_flops", "how")
    return {name: getattr(p, name) for name in fields} | {
        "intensity": p.intensity, "flops_per_s": p.flops_per_s, "share": p.share,
    }  # fmt: skip


def _roofs(found: Roofline) -> str:
    rates = [f"{dtype} {_flops(limits.peak_flops)}" for dtype, limits in found.ceilings.matmul.items()]
    return ", ".join([*rates, units.rate(found.ceilings.bandwidth_bytes_per_s, "B/s")])


def _flops(per_second: float) -> str:
    return units.rate(per_second, "FLOP/s")
