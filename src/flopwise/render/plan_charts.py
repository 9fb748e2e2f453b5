"""Layouts of a plan side by side: where the time of a step goes, and who holds the memory."""

from typing import Any

from flopwise import units
from flopwise.records.plan import Plan
from flopwise.records.planned import PARTS, Planned
from flopwise.render.chart_style import NEUTRAL, OWNER_COLOURS, SERIES, WIDTH
from flopwise.render.charts import altair
from flopwise.render.plan_screen import brief

_BAR, _MOST = 26, 7
_ROOM = 1.15
_LIMIT = "#B00020"  # no part's and no owner's
_TOO_LARGE = "does not fit: "


def plan_chart(p: Plan) -> Any:
    """Both, one below the other; the best layout first."""
    alt = altair()
    shown = {_name(n, one, p): one for n, one in enumerate((p.best, *p.others)[:_MOST], 1)}
    times = _rows({name: one.step.parts for name, one in shown.items()}, PARTS)
    owners = list(dict.fromkeys(owner for one in shown.values() for owner, size in one.memory.owners.items() if size))
    sizes = _rows(
        {name: {k: v / 1e9 for k, v in one.memory.owners.items()} for name, one in shown.items()}, tuple(owners)
    )
    parts = [part for part in PARTS if any(row["part"] == part for row in times)]
    limit = p.limit_bytes / 1e9
    took = {name: one.step.wall_s for name, one in shown.items()}
    held = {name: one.memory.peak_bytes / 1e9 for name, one in shown.items()}
    ends = [{"layout": name, "at": s, "shown": units.duration(1e9 * s)} for name, s in took.items()]
    most = max(limit, *held.values())  # figures stand right of the limit's line, which would cross them
    peaks = [{"layout": name, "at": most, "shown": f"{gb:.1f} GB"} for name, gb in held.items()]
    names = list(shown)
    top = alt.layer(
        _bars(alt, times, names, parts, ("seconds of a step", max(took.values())), {}), _ends(alt, ends, names)
    )
    bottom = _bars(alt, sizes, names, owners, ("GB on the fullest GPU", most), OWNER_COLOURS)
    below = alt.layer(bottom, _ends(alt, peaks, names), *_limit(alt, limit))
    title = f"{p.model} on {p.gpus:,} × {p.gpu}, predicted"
    return alt.vconcat(top.properties(title=title), below, spacing=40).resolve_scale(color="independent")


def _name(number: int, one: Planned, p: Plan) -> str:
    return f"{number}. {'' if one.memory.peak_bytes <= p.limit_bytes else _TOO_LARGE}{brief(one.layout)}"


def _rows(amounts: dict[str, dict[str, float]], order: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"layout": name, "part": part, "amount": round(parts[part], 6), "place": place}
        for name, parts in amounts.items()
        for place, part in enumerate(order)
        if parts.get(part)
    ]


def _ends(alt: Any, rows: list[dict[str, Any]], names: list[str]) -> Any:
    """What a bar is, in figures, at its end."""
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_text(align="left", dx=4, color=NEUTRAL)
        .encode(x="at:Q", y=alt.Y("layout:N", sort=names), text="shown:N")
    )


def _limit(alt: Any, limit: float) -> tuple[Any, Any]:
    """A line, and what it is, above the bars."""
    there = alt.Chart(alt.Data(values=[{"limit": limit, "shown": f"limit: {limit:.0f} GB"}])).encode(x="limit:Q")
    line = there.mark_rule(color=_LIMIT, strokeDash=[4, 3], strokeWidth=2)
    return line, there.mark_text(color=_LIMIT, baseline="bottom", dy=-4).encode(y=alt.value(0), text="shown:N")


def _bars(
    alt: Any,
    rows: list[dict[str, Any]],
    names: list[str],
    parts: list[str],
    axis: tuple[str, float],
    known: dict[str, str],
) -> Any:
    """A stack for each layout. `axis`: its title, and the longest bar, beyond which there is room for figures."""
    taken = {known[part] for part in parts if part in known}
    spare = iter(colour for colour in (*SERIES, *[NEUTRAL] * len(parts)) if colour not in taken)
    colours = [known.get(part) or next(spare) for part in parts]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height=_BAR - 8)
        .encode(
            x=alt.X("amount:Q", title=axis[0]).stack("zero").scale(domain=[0, _ROOM * axis[1]], nice=False),
            y=alt.Y("layout:N", sort=names, title=None).axis(labelLimit=460),
            color=alt.Color("part:N", title=None, sort=parts, scale=alt.Scale(domain=parts, range=colours)),
            order=alt.Order("place:Q"),
            tooltip=["layout:N", "part:N", alt.Tooltip("amount:Q", format=",.4~r")],
        )
        .properties(width=WIDTH - 420, height=_BAR * max(3, len(names)))
    )
