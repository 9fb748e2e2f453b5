"""Layouts of a plan side by side: where the time of a step goes, and who holds the memory."""

from typing import Any

from flopwise.records.plan import Plan
from flopwise.records.planned import PARTS
from flopwise.render.chart_style import NEUTRAL, OWNER_COLOURS, SERIES, WIDTH
from flopwise.render.charts import altair
from flopwise.render.plan_screen import brief

_BAR, _MOST = 26, 7
_LIMIT = "#D55E00"


def plan_chart(p: Plan) -> Any:
    """Both, one below the other; the best layout first."""
    alt = altair()
    everything = (p.best, *p.others)[:_MOST]
    names = [f"{number}. {brief(one.layout)}" for number, one in enumerate(everything, 1)]
    times = [
        {"layout": name, "part": part, "amount": round(one.step.parts[part], 6), "place": PARTS.index(part)}
        for name, one in zip(names, everything, strict=True)
        for part in PARTS
        if one.step.parts.get(part)
    ]
    owners = list(dict.fromkeys(owner for one in everything for owner, size in one.memory.owners.items() if size))
    sizes = [
        {
            "layout": name,
            "part": owner,
            "amount": round(one.memory.owners[owner] / 1e9, 3),
            "place": owners.index(owner),
        }
        for name, one in zip(names, everything, strict=True)
        for owner in owners
        if one.memory.owners.get(owner)
    ]
    title = f"{p.model} on {p.gpus:,} × {p.gpu}, predicted"
    parts = [part for part in PARTS if any(row["part"] == part for row in times)]
    top = _bars(alt, times, names, parts, "seconds of a step", {}).properties(title=title)
    bottom = _bars(alt, sizes, names, owners, "GB on the fullest GPU", OWNER_COLOURS)
    limit = alt.Chart(alt.Data(values=[{"limit": p.limit_bytes / 1e9}])).mark_rule(color=_LIMIT, strokeDash=[4, 3])
    below = alt.layer(bottom, limit.encode(x="limit:Q"))
    return alt.vconcat(top, below, spacing=30).resolve_scale(color="independent")


def _bars(
    alt: Any, rows: list[dict[str, Any]], names: list[str], parts: list[str], title: str, known: dict[str, str]
) -> Any:
    spare = iter(colour for colour in (*SERIES, *[NEUTRAL] * len(parts)) if colour not in known.values())
    colours = [known.get(part) or next(spare) for part in parts]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height=_BAR - 8)
        .encode(
            x=alt.X("amount:Q", title=title).stack("zero"),
            y=alt.Y("layout:N", sort=names, title=None).axis(labelLimit=460),
            color=alt.Color("part:N", title=None, sort=parts, scale=alt.Scale(domain=parts, range=colours)),
            order=alt.Order("place:Q"),
            tooltip=["layout:N", "part:N", alt.Tooltip("amount:Q", format=",.4~r")],
        )
        .properties(width=WIDTH - 420, height=_BAR * max(3, len(names)))
    )
