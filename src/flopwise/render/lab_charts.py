"""An experiment's pictures, drawn: one definition for the page and for a file. Needs the extra `charts`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flopwise.errors import FlopwiseError
from flopwise.experiments.experiment import Axis, Picture, Values
from flopwise.render.chart_style import NEUTRAL
from flopwise.render.charts import COLOURS, altair, readable
from flopwise.render.visible import visible

_WIDTH, _HEIGHT, _COLUMN_WIDTH = 640, 300, 250
_LONGEST = 120
_LARGEST = 1e300  # what a browser can still scale
_TICKS = 8  # across, about
_FEW = 9  # sizes on an axis, each of which has a tick
_SERIES = [
    colour for colour in COLOURS if colour not in ("#000000", "#F0E442")
]  # visible on a dark and on a white page
# A field's ending, and the units it may be drawn in, the largest first.
_UNITS: dict[str, tuple[tuple[str, float], ...]] = {
    "_bytes_per_s": (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)),
    "_flops_per_s": (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)),
    "_bytes": (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0)),
    "_ns": (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0)),
    "_share": (("%", 0.01),),
}
Points = list[dict[str, Any]]


def picture_chart(picture: Picture, titled: bool = True) -> Any:
    """The picture as an Altair chart; on a page, whose caption says it, without its title."""
    alt = altair()
    rows, (x_unit, y_unit) = _drawable_rows(picture), _axis_units(picture)
    rows = _in_units(_in_units(rows, picture.x, x_unit[1]), picture.y, y_unit[1])
    data = alt.Data(values=rows)
    words_on_x = picture.kind == "bar"
    x = _x_axis(alt, picture.x, rows, x_unit[0], words_on_x)
    y = _y_axis(alt, picture.y, rows, y_unit[0])
    marks = _marks(alt, alt.Chart(data), picture, x, y, rows)
    if picture.y.interval is not None and all(_is_number(row.get(end)) for row in rows for end in picture.y.interval):
        marks = alt.layer(marks, _intervals(alt, alt.Chart(data), picture, x, rows, y_unit[0]))
    title = visible(picture.title, _LONGEST) if titled else ""
    if picture.column:
        column = alt.Column(f"{picture.column}:N", title=None, sort=_order(rows, picture.column))
        one = alt.layer(marks, data=data).properties(width=_COLUMN_WIDTH, height=_HEIGHT)
        return one.facet(column).properties(title=title)
    words = any(isinstance(row[picture.y.field], str) for row in rows)
    height = max(60, 26 * len({row.get(picture.y.field) for row in rows})) if words else _HEIGHT
    rules = _rules(alt, picture, {"x": x_unit[1], "y": y_unit[1]})
    return alt.layer(marks, *rules).properties(width=_WIDTH, height=height, title=title)


def stacked(pictures: Sequence[Picture]) -> Any:
    """Several pictures in one file, below each other."""
    charts = [picture_chart(picture) for picture in pictures if readable(partial(picture_chart, picture))]
    if not charts:
        raise FlopwiseError("none of the charts could be drawn", "the run's rows are not as this version writes them")
    return (
        charts[0]
        if len(charts) == 1
        else altair().vconcat(*charts).resolve_scale(color="independent", xOffset="independent")
    )


# --- rows and units


def unit_of(field: str, largest: float) -> tuple[str, float]:
    """The unit to draw a field in, from the ending of its name and its largest value; '' for a plain number.

    >>> unit_of("wall_ns", 2.5e6), unit_of("n", 7.0)
    (('ms', 1000000.0), ('', 1.0))
    """
    for ending, units in _UNITS.items():
        if field.endswith(ending):
            return next((unit for unit in units if largest >= unit[1]), units[-1])
    return "", 1.0


def _drawable_rows(picture: Picture) -> Points:
    """The rows with both values; a logarithm has a place only for positive ones."""
    rows = [{key: _drawable(value) for key, value in row.items()} for row in picture.rows]
    return [row for row in rows if _has_place(row, picture.x) and _has_place(row, picture.y)]


def _has_place(row: Mapping[str, Any], axis: Axis) -> bool:
    value = row.get(axis.field)
    return value is not None and not (axis.log and _is_number(value) and value <= 0)


def _axis_units(picture: Picture) -> tuple[tuple[str, float], tuple[str, float]]:
    rows = _drawable_rows(picture)

    def unit(axis: Axis) -> tuple[str, float]:
        numbers = [abs(row[axis.field]) for row in rows if _is_number(row[axis.field])]
        return unit_of(axis.field, max(numbers, default=0.0))

    return unit(picture.x), unit(picture.y)


def _in_units(rows: Points, axis: Axis, unit: float) -> Points:
    names = set(axis.fields)
    return [{k: v / unit if k in names and _is_number(v) else v for k, v in row.items()} for row in rows]


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _order(rows: Values, field: str) -> list[Any]:
    """The values in the order in which they come: a chart sorts by those of one kind, and not by None.

    >>> _order([{"a": "x"}, {"a": None}, {"a": "y"}], "a"), _order([{"a": 2}, {"a": "x"}], "a")
    (['x', 'y'], ['2', 'x'])
    """
    values = [value for row in rows if (value := row.get(field)) is not None]
    same = all(isinstance(value, str) for value in values) or all(_is_number(value) for value in values)
    return list(dict.fromkeys(values if same else map(str, values)))


# --- axes


def _x_axis(alt: Any, axis: Axis, rows: Points, unit: str, words: bool) -> Any:
    title = _axis_title(axis, unit)
    if words or _has_words(axis, rows):
        return alt.X(f"{axis.field}:N", title=title, sort=_order(rows, axis.field)).axis(labelAngle=0, labelLimit=160)
    encoding = alt.X(f"{axis.field}:Q", title=title)
    if axis.log:
        numbers = _numbers(axis, rows)
        ticks, sizes = log_ticks(numbers), sorted(set(numbers))
        if len(sizes) <= _FEW and all(float(size).is_integer() for size in sizes):  # 512, 1024, …
            ticks = {"format": ticks["format"] if ticks["format"] != "~s" else "d", "values": sizes}
        return _log_axis(encoding, ticks)
    # Not flush: the outer labels would run into others.
    return encoding.scale(zero=False).axis(format=_number_format(axis, rows), tickCount=_TICKS, labelFlush=False)


def _y_axis(alt: Any, axis: Axis, rows: Points, unit: str) -> Any:
    title = _axis_title(axis, unit)
    if _has_words(axis, rows):
        return alt.Y(f"{axis.field}:N", title=title, sort=_order(rows, axis.field)).axis(labelLimit=200)
    encoding = alt.Y(f"{axis.field}:Q", title=title)
    if axis.log:
        return _log_axis(encoding, log_ticks(_numbers(axis, rows)))
    return encoding.scale(zero=True).axis(format=_number_format(axis, rows))


def _axis_title(axis: Axis, unit: str) -> str:
    return f"{axis.title}, {unit}" if unit else axis.title


def _has_words(axis: Axis, rows: Points) -> bool:
    return any(not _is_number(row[axis.field]) for row in rows)


def _numbers(axis: Axis, rows: Points) -> list[float]:
    return [row[name] for row in rows for name in axis.fields if _is_number(row.get(name))]


def _number_format(axis: Axis, rows: Points) -> str:
    return ".6~g" if max((abs(row[axis.field]) for row in rows), default=0) < 1e5 else "~s"


def _log_axis(encoding: Any, ticks: dict[str, Any]) -> Any:
    return encoding.scale(type="log", nice=False, padding=6).axis(labelOverlap=True, **ticks)


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


# --- marks


def _marks(alt: Any, chart: Any, picture: Picture, x: Any, y: Any, rows: Points) -> Any:
    encoding = {**_colours(alt, picture, rows), "x": x, "y": y, "tooltip": _tooltip(alt, picture, rows)}
    plain = {} if picture.colour else {"color": _SERIES[0]}
    match picture.kind:
        case "line":
            return chart.mark_line(point=True, **plain).encode(**encoding)
        case "scatter":
            return chart.mark_circle(size=60, opacity=0.8, **plain).encode(**encoding)
        case "bar":
            if picture.colour and picture.colour != picture.x.field:  # side by side
                encoding["xOffset"] = alt.XOffset(f"{picture.colour}:N", sort=_order(rows, picture.colour))
            return chart.mark_bar(**plain).encode(**encoding)
        case "span":
            return chart.mark_bar(height=12, **plain).encode(**encoding, x2=picture.x.to)


def _colours(alt: Any, picture: Picture, rows: Points) -> dict[str, Any]:
    if not picture.colour:
        return {}
    there = _order(rows, picture.colour)
    known = list(dict.fromkeys((*picture.words, *there)))
    colours = {word: _SERIES[i % len(_SERIES)] for i, word in enumerate(known) if word in there}
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return {"color": alt.Color(f"{picture.colour}:N", title=None, scale=scale)}


def _intervals(alt: Any, chart: Any, picture: Picture, x: Any, rows: Points, unit: str) -> Any:
    low, high = picture.y.interval or ("", "")
    ends = {"x": x, "y": _y_axis(alt, replace(picture.y, field=low), rows, unit), "y2": high}
    if picture.kind == "bar":
        return chart.mark_rule(strokeWidth=1.5, color=NEUTRAL).encode(**ends)
    plain = {} if picture.colour else {"color": _SERIES[0]}
    return chart.mark_rule(strokeWidth=1.5, **plain).encode(**_colours(alt, picture, rows), **ends)


def _tooltip(alt: Any, picture: Picture, rows: Points) -> list[Any]:
    fields = (picture.colour, picture.column, *picture.x.fields, *picture.y.fields)
    names = [name for name in dict.fromkeys(fields) if name]
    numbers = {name for name in names if all(_is_number(row.get(name)) for row in rows)}
    return [alt.Tooltip(f"{n}:Q", format=",.4~g") if n in numbers else alt.Tooltip(f"{n}:N") for n in names]


def _rules(alt: Any, picture: Picture, units: Mapping[str, float]) -> list[Any]:
    """Lines across, each with its word at its end."""
    drawn = []
    for rule in (rule for rule in picture.rules if _is_number(_drawable(rule.value))):
        data = alt.Data(values=[{"at": rule.value / units[rule.axis], "word": visible(str(rule.label), _LONGEST)}])
        across = {rule.axis: alt.Y("at:Q") if rule.axis == "y" else alt.X("at:Q")}
        line = alt.Chart(data).mark_rule(color=NEUTRAL, strokeDash=[5, 3])
        outside = "width" if not picture.colour else 0  # where a legend is, the word stands inside
        above = picture.kind == "span"  # its bars would hide the word
        where = {"x": alt.value(outside)} if rule.axis == "y" else {"y": alt.value(-8 if above else 10)}
        shifted = {"align": "center"} if above else {"align": "left", "dx": 4}
        word = alt.Chart(data).mark_text(dy=-6 if rule.axis == "y" else 0, color=NEUTRAL, **shifted)
        drawn += [line.encode(**across), word.encode(**across, **where, text="word:N")]
    return drawn
