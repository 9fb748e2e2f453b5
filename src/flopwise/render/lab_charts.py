"""An experiment's pictures, drawn: one definition for the page and for a file. Needs the extra `charts`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flopwise.errors import FlopwiseError
from flopwise.experiments.experiment import Picture
from flopwise.render.chart_style import NEUTRAL
from flopwise.render.charts import COLOURS, altair, readable
from flopwise.render.visible import visible

_WIDTH, _HEIGHT, _COLUMN_WIDTH = 640, 300, 250
_LONGEST = 120
_LARGEST = 1e300  # of what a browser can still scale
_TICKS = 8  # across, about
_FEW = 9  # sizes on an axis, each of which has a tick
_SERIES = [
    colour for colour in COLOURS if colour not in ("#000000", "#F0E442")
]  # a dark page hides one, a white one the other
# A field's ending, and the units it may be drawn in, the largest first.
_UNITS: dict[str, tuple[tuple[str, float], ...]] = {
    "_bytes_per_s": (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)),
    "_flops_per_s": (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)),
    "_bytes": (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0)),
    "_ns": (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0)),
    "_share": (("%", 0.01),),
}


def picture_chart(picture: Picture, titled: bool = True) -> Any:
    """The picture as an Altair chart; on a page, whose caption says it, without its title."""
    alt = altair()
    rows, titles = _scaled(picture)
    data = alt.Data(values=rows)
    x, y = _axis(alt.X, picture, "x", rows, titles), _axis(alt.Y, picture, "y", rows, titles)
    marks = [_marks(alt, alt.Chart(data), picture, x, y, rows, titles), *_rules(alt, picture, titles)]
    title = visible(picture.title, _LONGEST) if titled else ""
    if picture.column:
        width = _COLUMN_WIDTH
        both = alt.layer(*marks[:1], data=data).properties(width=width, height=_HEIGHT)
        return both.facet(alt.Column(f"{picture.column}:N", title=None, sort=_order(rows, picture.column))).properties(
            title=title
        )
    words = any(isinstance(row[picture.y], str) for row in rows)
    height = max(60, 26 * len({row.get(picture.y) for row in rows})) if words else _HEIGHT
    return alt.layer(*marks).properties(width=_WIDTH, height=height, title=title)


def stacked(pictures: Sequence[Picture]) -> Any:
    """Several pictures in one file, below each other."""
    charts = [picture_chart(picture) for picture in pictures if readable(partial(picture_chart, picture))]
    if not charts:
        raise FlopwiseError("none of the charts could be drawn", "the run's rows are not as this version writes them")
    return charts[0] if len(charts) == 1 else altair().vconcat(*charts).resolve_scale(color="independent")


def unit_of(field: str, largest: float) -> tuple[str, float]:
    """The unit to draw a field in, from the ending of its name and its largest value; '' for a plain number.

    >>> unit_of("wall_ns", 2.5e6), unit_of("n", 7.0)
    (('ms', 1000000.0), ('', 1.0))
    """
    for ending, units in _UNITS.items():
        if field.endswith(ending):
            return next((unit for unit in units if largest >= unit[1]), units[-1])
    return "", 1.0


def _scaled(picture: Picture) -> tuple[list[dict[str, Any]], dict[str, tuple[str, float]]]:
    """The rows in units that can be read, and the unit of each axis. What was not measured is left out."""
    rows: list[dict[str, Any]] = [{key: _drawable(value) for key, value in row.items()} for row in picture.rows]
    logs = [name for name, log in ((picture.x, picture.x_log), (picture.y, picture.y_log)) if log]
    rows = [
        row
        for row in rows
        if row.get(picture.x) is not None
        and row.get(picture.y) is not None
        and all(not _is_number(row[name]) or row[name] > 0 for name in logs)  # a logarithm has no place for the others
    ]
    unit: dict[str, tuple[str, float]] = {}
    for axis, fields in (("x", (picture.x, picture.x2)), ("y", (picture.y, picture.low, picture.high))):
        numbers = [abs(row[fields[0]]) for row in rows if _is_number(row[fields[0]])]
        unit[axis] = unit_of(fields[0], max(numbers, default=0.0))
        for row in rows:
            for name in set(fields):
                if _is_number(row.get(name)):
                    row[name] /= unit[axis][1]
    return rows, unit


def _drawable(value: Any) -> Any:
    """A value as it may stand in a chart: a text that steers nothing, a number that a browser can hold, else None.

    >>> _drawable(10**400), _drawable(float("nan")), _drawable(2), _drawable([1])
    (None, None, 2, None)
    """
    if isinstance(value, str):
        return visible(value, _LONGEST)
    if isinstance(value, int | float):
        return value if abs(value) < _LARGEST else None
    return None


def _axis(
    kind: Any, picture: Picture, which: str, rows: list[dict[str, Any]], unit: Mapping[str, tuple[str, float]]
) -> Any:
    field, title = (picture.x, picture.x_title) if which == "x" else (picture.y, picture.y_title)
    log = picture.x_log if which == "x" else picture.y_log
    named = f"{title}, {unit[which][0]}" if unit[which][0] else title
    words = any(not _is_number(row[field]) for row in rows) or (picture.kind == "bar" and which == "x")
    if words:
        axis = kind(f"{field}:N", title=named, sort=_order(rows, field))
        return axis.axis(labelAngle=0, labelLimit=160) if which == "x" else axis.axis(labelLimit=200)
    axis = kind(f"{field}:Q", title=named)
    if log:
        fields = (field, picture.x2) if which == "x" else (field, picture.low, picture.high)
        values = [row[name] for row in rows for name in fields if name and _is_number(row.get(name))]
        ticks = log_ticks(values)
        sizes = sorted(set(values))
        if which == "x" and len(sizes) <= _FEW and all(float(size).is_integer() for size in sizes):  # 512, 1024, …
            ticks = {"format": ticks["format"] if ticks["format"] != "~s" else "d", "values": sizes}
        return axis.scale(type="log", nice=False, padding=6).axis(labelOverlap=True, **ticks)
    return axis.scale(zero=which == "y").axis(
        format=".6~g" if max((abs(r[field]) for r in rows), default=0) < 1e5 else "~s",
        **({"tickCount": _TICKS, "labelFlush": False} if which == "x" else {}),  # else the outer labels run into others
    )


def log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Which ticks a logarithmic axis has, and how they are written: decades, where there are several.

    >>> log_ticks([1, 2_000_000])["format"], log_ticks([1e-38, 1e38])["format"], log_ticks([0.01, 20.0])["values"]
    ('~s', '.0e', [0.01, 0.1, 1.0, 10.0, 100.0])
    """
    low, high = min(values, default=1.0), max(values, default=1.0)
    form = ".0e" if low < 1e-4 or high > 1e10 else "~s" if low >= 1 and high >= 1e4 else ".6~g"
    if low <= 0 or high < 30 * low:
        return {"format": form}
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 12)
    return {"format": form, "values": [10.0**power for power in range(first, last + 1, every)]}


def _marks(
    alt: Any,
    chart: Any,
    picture: Picture,
    x: Any,
    y: Any,
    rows: list[dict[str, Any]],
    unit: Mapping[str, tuple[str, float]],
) -> Any:
    colours: dict[str, Any] = {}
    if picture.colour:
        there = _order(rows, picture.colour)
        known = list(dict.fromkeys((*picture.words, *there)))
        range_of = {word: _SERIES[i % len(_SERIES)] for i, word in enumerate(known) if word in there}
        scale = alt.Scale(domain=list(range_of), range=list(range_of.values()))
        colours = {"color": alt.Color(f"{picture.colour}:N", title=None, scale=scale)}
    told = {**colours, "x": x, "y": y, "tooltip": _tooltip(alt, picture, rows)}
    plain = {} if picture.colour else {"color": _SERIES[0]}
    match picture.kind:
        case "line":
            drawn = chart.mark_line(point=True, **plain).encode(**told)
        case "scatter":
            drawn = chart.mark_circle(size=60, opacity=0.8, **plain).encode(**told)
        case "bar":
            side = (
                {"xOffset": alt.XOffset(f"{picture.colour}:N", sort=_order(rows, picture.colour))}
                if picture.colour
                else {}
            )
            drawn = chart.mark_bar(**plain).encode(**told, **(side if picture.colour != picture.x else {}))
        case "span":
            drawn = chart.mark_bar(height=12, **plain).encode(**told, x2=picture.x2)
    ends = (picture.low, picture.high)
    if not all(ends) or not all(_is_number(row.get(end)) for row in rows for end in ends):
        return drawn
    low = _axis(alt.Y, replace(picture, y=picture.low), "y", rows, unit)
    interval = chart.mark_rule(strokeWidth=1.5, **(plain if picture.kind != "bar" else {"color": NEUTRAL}))
    return alt.layer(drawn, interval.encode(**(colours if picture.kind != "bar" else {}), x=x, y=low, y2=picture.high))


def _tooltip(alt: Any, picture: Picture, rows: list[dict[str, Any]]) -> list[Any]:
    fields = (picture.colour, picture.column, picture.x, picture.x2, picture.y, picture.low, picture.high)
    names = [name for name in dict.fromkeys(fields) if name]
    numbers = {name for name in names if all(_is_number(row.get(name)) for row in rows)}
    return [alt.Tooltip(f"{n}:Q", format=",.4~g") if n in numbers else alt.Tooltip(f"{n}:N") for n in names]


def _rules(alt: Any, picture: Picture, unit: Mapping[str, tuple[str, float]]) -> list[Any]:
    """Lines across, each with its word at its end."""
    drawn = []
    for rule in (rule for rule in picture.rules if _is_number(_drawable(rule.value))):
        data = alt.Data(values=[{"at": rule.value / unit[rule.axis][1], "word": visible(str(rule.label), _LONGEST)}])
        across = {rule.axis: alt.Y("at:Q") if rule.axis == "y" else alt.X("at:Q")}
        line = alt.Chart(data).mark_rule(color=NEUTRAL, strokeDash=[5, 3])
        beside = "width" if not picture.colour else 0  # where a legend is, the word stands inside
        above = picture.kind == "span"  # its bars would hide the word
        where = {"x": alt.value(beside)} if rule.axis == "y" else {"y": alt.value(-8 if above else 10)}
        shifted = {"align": "center"} if above else {"align": "left", "dx": 4}
        word = alt.Chart(data).mark_text(dy=-6 if rule.axis == "y" else 0, color=NEUTRAL, **shifted)
        drawn += [line.encode(**across), word.encode(**across, **where, text="word:N")]
    return drawn


def _order(rows: Sequence[Mapping[str, Any]], field: str) -> list[Any]:
    """The values in the order in which they come: a chart sorts by those of one kind, and not by None.

    >>> _order([{"a": "x"}, {"a": None}, {"a": "y"}], "a"), _order([{"a": 2}, {"a": "x"}], "a")
    (['x', 'y'], ['2', 'x'])
    """
    values = [value for row in rows if (value := row.get(field)) is not None]
    same = all(isinstance(value, str) for value in values) or all(_is_number(value) for value in values)
    return list(dict.fromkeys(values if same else map(str, values)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
