"""Charts of measured points: over size, side by side, compared with their prediction, and sample by sample."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from flopwise import units
from flopwise.analysis.clocks import point_mfu, step_walls, tokens_per_second
from flopwise.analysis.exchanges import exchange
from flopwise.records.run import Point
from flopwise.render import chart_style as style
from flopwise.render.axes import LONGEST_NAME, LONGEST_TOOLTIP, MESSAGE, Axes, axes_of, labels_of, settings_text
from flopwise.render.chart_style import HEIGHT, INTERVAL, MEASURED, NEUTRAL, PREDICTED, SERIES, WIDTH, milliseconds
from flopwise.render.charts import ManyRows, altair, named_rows
from flopwise.render.visible import visible
from flopwise.statistics import Estimate, estimate

Rows = Sequence[Mapping[str, Any]]
_Item = TypeVar("_Item")

_MOST_SAMPLES = 400  # dots of one row: more would hide each other
_MOST_DRAWN = 1000  # points of a chart of lines; of more, whole lines are left out
_MOST_POINT_BARS = 200
_MOST_BARS = 12  # steps that have bars, predicted and measured; more are dots
_LOG_RANGE, _LOG_RANGE_UP = 8.0, 20.0  # a range of so many times is shown on a logarithmic axis: across, upwards
_SQUARE, _LABEL_GAP, _LETTER, _LINE = 420, 8, 5.9, 13  # pixels: a side; a dot to its name; a letter, a line of names
_SIZES = ("bytes", "context", "batch", "size", "dim", "seq", "tokens", "d_model", "n_layers")
# What is drawn over the size, with its title.
MEASURES = {
    "wall_ms": "time of a step, ms",
    "peak_gib": "peak memory, GiB",
    "mfu": "MFU, of the datasheet's peak",
    "tokens_per_s": "tokens per second",
    "bus_gb_s": "bus bandwidth, GB/s",
}


def sweep_rows(points: Sequence[Point]) -> tuple[str, list[dict[str, Any]]]:
    """The axis of a sweep (a size that varies, with most values; '' where there is none), and a row per point measured."""
    axes = axes_of(points)
    axis = _axis(axes)
    shade = _shade(axis, axes)
    rows = []
    columns = (points, axes.varying, labels_of(points, axes), step_walls(points))
    for point, varying, label, wall in zip(*columns, strict=True):
        if wall is None:
            continue
        series = settings_text({n: v for n, v in varying.items() if n != axis})
        series = visible(series, LONGEST_TOOLTIP) or "all"
        rows.append(
            {
                "x": varying.get(axis) if axis else None,
                "series": series,
                "shade": visible(settings_text({shade: varying[shade]}) if shade else series, LONGEST_NAME),
                "label": label,
                "settings": visible(settings_text(varying), LONGEST_TOOLTIP),
                "tokens_per_s": tokens_per_second(point),
                "mfu": point_mfu(point),
                "bus_gb_s": (one := exchange(point)) and one.bus_bytes_per_s / 1e9,
                **interval_ms(wall, "wall"),
                **({"peak_gib": max(m.peak_bytes for m in point.memory) / 2**30} if point.memory else {}),
            }
        )
    return axis, rows


def lines_drawn(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Of many rows whole lines, evenly chosen, as many as can be told apart; and a sentence on what is not drawn."""
    if len(rows) <= _MOST_DRAWN:
        return rows, ""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(row["series"], []).append(row)
    chosen = _evenly(list(lines.values()), max(1, _MOST_DRAWN // max(map(len, lines.values()))))
    drawn = [row for line in chosen for row in _evenly(line, _MOST_DRAWN)]
    where = f"on {len(chosen)} of {len(lines)} lines" if len(lines) > 1 else "evenly chosen"
    return drawn, f" Drawn are {len(drawn):,} of {len(rows):,} points, {where}: all are in the table."


def points_drawn(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Of many rows as many as have a bar each, evenly chosen; and a sentence on the others."""
    drawn = _evenly(rows, _MOST_POINT_BARS)
    said = f" Drawn are {len(drawn)} of {len(rows):,} points: all are in the table." if len(drawn) < len(rows) else ""
    return drawn, said


def _evenly(items: list[_Item], most: int) -> list[_Item]:
    """At most so many of them, in order, the first and the last included.

    >>> _evenly([1, 2, 3, 4, 5, 6, 7], 3), _evenly([1, 2], 3), _evenly([1, 2], 1)
    ([1, 4, 7], [1, 2], [1])
    """
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / max(1, most - 1))] for i in range(most)]


def interval_ms(e: Estimate, name: str) -> dict[str, float]:
    """An estimate and its interval in milliseconds; where there is none, the median for both ends."""
    low, high = e.median if e.low is None else e.low, e.median if e.high is None else e.high
    return {f"{name}_ms": e.median / 1e6, f"{name}_low": low / 1e6, f"{name}_high": high / 1e6}


def _shade(axis: str, axes: Axes) -> str:
    """What lines are coloured by, where there are more of them than colours: what has most values of those that fit."""
    others = [name for name in axes.names if name != axis]
    values = {name: len({v[name] for v in axes.varying}) for name in others}
    if len({tuple(v[name] for name in others) for v in axes.varying}) <= len(SERIES):
        return ""
    return max((name for name in others if values[name] <= len(SERIES)), key=lambda name: values[name], default="")


def _axis(axes: Axes) -> str:
    numeric = [name for name in axes.names if all(isinstance(v.get(name), int | float) for v in axes.varying)]
    ranked = sorted(numeric, key=lambda name: (name not in _SIZES, -len({v[name] for v in axes.varying})))
    return next((name for name in ranked if name not in ("warmup", "samples")), "")


def sweep_chart(axis: str, rows: Rows, measure: str) -> Any:
    """One measure over the size, a line per series; the band is the 95 % interval of the median."""
    alt = altair()
    known = _with(measure, rows)
    sizes = sorted({row["x"] for row in known})
    numbers = ",d" if all(isinstance(x, int) for x in sizes) else "~g"
    x = alt.X("x:Q", title=axis).axis(values=sizes, format="~s" if axis == MESSAGE else numbers)
    x = x.scale(type="log", nice=False) if _wide(sizes, _LOG_RANGE) else x.scale(zero=False, nice=False)
    y = alt.Y(f"{measure}:Q", title=MEASURES[measure])
    if measure == "mfu":
        y = y.axis(format=".0%")
    elif _wide([row[measure] for row in known], _LOG_RANGE_UP):
        y = y.scale(type="log")
    shades = list(dict.fromkeys(row["shade"] for row in known))
    colour = alt.Color("shade:N", title=None, sort=shades, scale=alt.Scale(domain=shades, range=SERIES))
    colour = colour.legend(None) if len(shades) == 1 else colour.legend(symbolOpacity=1)
    base = alt.Chart(named_rows()).encode(detail="series:N")
    tooltip = ["settings:N", alt.Tooltip(f"{measure}:Q", format=",.4~r")]
    layers = [base.mark_line(point=True).encode(x=x, y=y, color=colour, tooltip=tooltip)]
    if measure == "wall_ms":
        band = base.mark_area(opacity=0.2)
        layers.insert(0, band.encode(x=x, y=alt.Y("wall_low:Q"), y2="wall_high:Q", color=colour))
    return ManyRows(alt.layer(*layers).properties(width=WIDTH - 220, height=HEIGHT - 60), known)


def _with(measure: str, rows: Rows) -> list[dict[str, Any]]:
    """The rows that have a measure, each with what its chart shows."""
    ends = ("wall_low", "wall_high") if measure == "wall_ms" else ()
    used = ("x", "series", "shade", "settings", measure, *ends)
    return [{key: row[key] for key in used} for row in rows if row.get(measure) is not None]


def points_chart(rows: Rows) -> Any:
    """Points that share no size axis, one bar each, with the median's interval."""
    alt = altair()
    names = alt.Y("label:N", sort=None, title=None, axis=alt.Axis(labelLimit=320))
    base = alt.Chart(alt.Data(values=list(rows))).encode(y=names)
    tooltip = ["label:N", "settings:N", milliseconds(alt, "wall_ms")]
    bars = base.mark_bar(color=MEASURED, height=14).encode(
        x=alt.X("wall_ms:Q", title=MEASURES["wall_ms"]), tooltip=tooltip
    )
    error = base.mark_rule(color=INTERVAL, strokeWidth=2).encode(x="wall_low:Q", x2="wall_high:Q")
    return alt.layer(bars, error).properties(width=WIDTH - 340, height=24 * len(rows))


def samples_chart(points: Sequence[Point]) -> Any:
    """Every sample of the step as a dot in the order taken, with its median and the median's interval."""
    alt = altair()
    dots: list[dict[str, Any]] = []
    middles: list[dict[str, Any]] = []
    for point, label in zip(points, labels_of(points), strict=True):
        times = point.times()
        if times is None or not times.wall_ns:
            continue
        taken = np.array(times.wall_ns) / 1e6
        chosen = np.unique(np.linspace(0, len(taken) - 1, min(len(taken), _MOST_SAMPLES)).astype(int))
        last = max(1, len(taken) - 1)
        dots += [{"label": label, "sample": int(i) + 1, "when": i / last, "ms": float(taken[i])} for i in chosen]
        middles.append({"label": label, **interval_ms(estimate(times.wall_ns), "median")})
    row = alt.Y("label:N", title=None, sort=None, axis=alt.Axis(labelLimit=300))
    x = alt.X("ms:Q", title="ms, each sample (first at the top)", scale=alt.Scale(zero=False))
    jitter = alt.YOffset("when:Q", scale=alt.Scale(domain=[0, 1], range=[6, 46]))
    cloud = alt.Chart(alt.Data(values=dots)).mark_circle(size=18, opacity=0.75, color=style.SAMPLE)
    cloud = cloud.encode(x=x, y=row, yOffset=jitter, tooltip=["label:N", "sample:Q", milliseconds(alt, "ms")])
    base = alt.Chart(alt.Data(values=middles)).encode(y=row)
    band = base.mark_bar(opacity=0.3, color=PREDICTED, height=44).encode(x="median_low:Q", x2="median_high:Q")
    tick = base.mark_tick(color=INTERVAL, thickness=2, height=44)
    tick = tick.encode(x="median_ms:Q", tooltip=["label:N", milliseconds(alt, "median_ms", "median ms")])
    return alt.layer(band, cloud, tick).properties(width=WIDTH - 320, height=52 * max(1, len(middles)))


def staircase_chart(times: Sequence[tuple[str, float]]) -> Any:
    """Bars, one below the other: the step after each change; pale beyond it, what the change took away."""
    alt = altair()
    before = [times[0][1], *(ns for _, ns in times)]
    rows: list[dict[str, Any]] = [
        {"name": visible(name, LONGEST_NAME), "ms": ns / 1e6, "from": was / 1e6, "text": units.duration(ns)}
        for (name, ns), was in zip(times, before, strict=False)
    ]
    y = alt.Y("name:N", sort=None, title=None, axis=alt.Axis(labelLimit=240, ticks=False, domain=False, labelPadding=8))
    base = alt.Chart(alt.Data(values=rows)).encode(y=y, tooltip=["name:N", milliseconds(alt, "ms")])
    highest = max(max(row["ms"], row["from"]) for row in rows)
    x = alt.X("ms:Q", title="ms a step").scale(domain=[0, highest * 1.3], nice=False).axis(grid=False)
    bars = base.mark_bar(color=MEASURED, height=17).encode(x=x)
    saved = base.mark_bar(color=MEASURED, opacity=0.35, height=17).encode(x=x, x2="from:Q")
    texts = base.transform_calculate(right="max(datum.ms, datum.from)").mark_text(align="left", dx=5)
    return alt.layer(bars, saved, texts.encode(x="right:Q", text="text:N")).properties(
        width=WIDTH - 260, height=24 * len(rows)
    )


def before_after_chart(rows: Rows) -> Any:
    """Two measurements of each thing. `rows`: name, before_ms, after_ms, and their intervals where known."""
    colours = {"before": style.BEFORE, "after": style.AFTER}
    return paired_bars(_folded(rows, list(colours)), "ms", "ms", colours, interval=True)


def predicted_measured_chart(rows: Rows) -> Any:
    """Savings as dots, predicted across and measured upwards. `rows`: name, predicted_ms, measured_ms."""
    return _diagonal(rows, "predicted to save, ms", "saved, measured, ms", named=True)


def predicted_steps_chart(rows: Rows) -> Any:
    """Step times: bars where there are few steps, dots where there are many. `rows`: name, predicted_ms, measured_ms."""
    if len(rows) > _MOST_BARS:
        return _diagonal(rows, "step, predicted, ms", "step, measured, ms", named=False)
    colours = {"measured": MEASURED, "predicted": PREDICTED}
    return paired_bars(_folded(rows, list(colours)), "ms", "ms a step", colours)


def _folded(rows: Rows, which: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each of the two values, with its interval where it has one."""
    return [
        {"name": visible(str(row["name"]), LONGEST_NAME), "which": one, "ms": row[f"{one}_ms"]}
        | {end: row.get(f"{one}_{end}", row[f"{one}_ms"]) for end in ("low", "high")}
        for row in rows
        for one in which
    ]


def paired_bars(
    rows: list[dict[str, Any]], value: str, unit: str, colours: Mapping[str, str], interval: bool = False
) -> Any:
    """Bars side by side for each name. `rows`: name, which (a key of `colours`), the value; low and high of an interval."""
    alt = altair()
    names, which = list(dict.fromkeys(row["name"] for row in rows)), list(colours)
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=240)),
        yOffset=alt.YOffset("which:N", sort=which),
    )
    bars = base.mark_bar().encode(
        x=alt.X(f"{value}:Q", title=unit),
        color=alt.Color("which:N", title=None, scale=alt.Scale(domain=which, range=list(colours.values()))),
        tooltip=["name:N", "which:N", alt.Tooltip(f"{value}:Q", format=",.4~r")],
    )
    error = base.mark_rule(color=INTERVAL, strokeWidth=2).encode(x="low:Q", x2="high:Q")
    layers = [bars, error] if interval else [bars]
    return alt.layer(*layers).properties(width=WIDTH - 260, height=16 * len(which) * len(names) + 10)


def _diagonal(rows: Rows, across: str, upwards: str, named: bool) -> Any:
    """Dots around the line on which predicted is measured; logarithmic where only that shows them all."""
    alt = altair()
    values = [row[key] for row in rows for key in ("predicted_ms", "measured_ms")]
    log = _wide(values, _LOG_RANGE)
    low, high = (min(values) / 1.2 if log else min(0.0, *values)), max(1e-3, *values) * 1.1
    shown = [{**row, "name": visible(str(row["name"]), LONGEST_TOOLTIP)} for row in rows]
    scale = alt.Scale(domain=[low, high], nice=False, type="log" if log else "linear")
    x = alt.X("predicted_ms:Q", title=across, scale=scale)
    y = alt.Y("measured_ms:Q", title=upwards, scale=scale)
    ends = [{"predicted_ms": at, "measured_ms": at} for at in (low, high)]
    right = alt.Chart(alt.Data(values=ends)).mark_line(color=NEUTRAL, strokeDash=[4, 3]).encode(x=x, y=y)
    times = [milliseconds(alt, f"{how}_ms", f"{how} ms") for how in ("predicted", "measured")]
    dots = alt.Chart(alt.Data(values=shown)).mark_circle(size=70, color=MEASURED, opacity=1 if named else 0.7)
    layers = [right, dots.encode(x=x, y=y, tooltip=["name:N", *times])]
    for side, some in _apart(shown, low, high, log).items() if named else ():
        words = alt.Chart(alt.Data(values=some)).encode(x=x, y=y, text="name:N")
        layers.append(words.mark_text(align=side, dx=_LABEL_GAP if side == "left" else -_LABEL_GAP, dy=-4))
    return alt.layer(*layers).properties(width=_SQUARE, height=HEIGHT)


def _apart(rows: Sequence[dict[str, Any]], low: float, high: float, log: bool) -> dict[str, list[dict[str, Any]]]:
    """The rows whose names overlap no other's, the largest first, by the side of the name that is at its dot.

    The names of the others are in their tooltips and in the table.

    >>> rows = [{"name": n, "predicted_ms": v, "measured_ms": v} for n, v in (("a", 1.0), ("b", 1.1), ("c", 9.0))]
    >>> {side: [row["name"] for row in found] for side, found in _apart(rows, 0.0, 10.0, False).items()}
    {'left': ['c', 'b'], 'right': ['a']}
    """

    def share(value: float) -> float:
        return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)

    found: dict[str, list[dict[str, Any]]] = {"left": [], "right": []}
    taken: list[tuple[float, float, float]] = []  # from where to where, and how high
    for row in sorted(rows, key=lambda row: -max(row["predicted_ms"], row["measured_ms"])):
        x, y = _SQUARE * share(row["predicted_ms"]), HEIGHT * share(row["measured_ms"])
        wide = _LABEL_GAP + _LETTER * len(row["name"])
        for side, begin, end in (("left", x, x + wide), ("right", x - wide, x)):
            if begin >= 0 and all(abs(y - at) > _LINE or end < a or b < begin for a, b, at in taken):
                found[side].append(row)
                taken.append((begin, end, y))
                break
    return found


def _wide(values: Sequence[float], times: float) -> bool:
    """Whether values span so many times that only a logarithm shows them all.

    >>> _wide([128, 1024], 8), _wide([1, 2], 8), _wide([0, 100], 8)
    (True, False, False)
    """
    return bool(values) and min(values) > 0 and max(values) / min(values) >= times
