"""Charts of measured points: over size, beside each other, beside their prediction, and sample by sample."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flopwise.analysis.clocks import point_mfu, summarise, tokens_per_second
from flopwise.records.run import Point
from flopwise.render.axes import Axes, axes_of
from flopwise.render.chart_style import (
    AFTER,
    BEFORE,
    HEIGHT,
    INTERVAL,
    MEASURED,
    NEUTRAL,
    PREDICTED,
    SAMPLE,
    WIDTH,
    milliseconds,
)
from flopwise.render.charts import COLOURS, altair
from flopwise.render.visible import visible
from flopwise.snapshot.answers import MemoryReport
from flopwise.statistics import estimate

_LONGEST, _LONGEST_TOLD = 60, 200  # characters of a name beside an axis; of one in a tooltip
_MOST_SAMPLES = 400  # dots of one row: more would hide each other
_MOST_BARS = 12  # steps that have bars, predicted beside measured; more are dots
_MOST_BESIDE = 30  # points that are named by what tells them from another; of more, nobody looks the other up
_DECADE = 8.0  # a range of this many times or more is shown on a logarithmic axis
_SQUARE, _BESIDE, _LETTER, _LINE = 420, 8, 5.9, 13  # pixels: a side; from a dot to its name; a letter, a line of names
_SIZES = ("context", "batch", "size", "dim", "seq", "tokens", "d_model", "n_layers")
# What is drawn over the size: key, title, whether more is worse, the interval's keys.
MEASURES = {
    "wall_ms": "time of a step, ms", "peak_gib": "peak memory, GiB", "mfu": "MFU, of the datasheet's peak",
    "tokens_per_s": "tokens per second",
}  # fmt: skip
_SERIES = [colour for colour in COLOURS if colour not in ("#000000", "#F0E442")]


def sweep_rows(points: Sequence[Point]) -> tuple[str, list[dict[str, Any]]]:
    """The axis of a sweep (a size that varies, with most values; '' where there is none), and a row per point measured."""
    axes = axes_of(points)
    axis = _axis(axes.names, axes.varying)
    shade = _shade(axis, axes)
    rows = []
    for point, varying, label in zip(points, axes.varying, labels_of(points), strict=True):
        if not (summaries := summarise(point)):
            continue
        wall = summaries[0].wall
        series = visible(_told({n: v for n, v in varying.items() if n != axis}), _LONGEST_TOLD) or "all"
        row: dict[str, Any] = {
            "x": varying.get(axis) if axis else None,
            "series": series,
            "shade": visible(_told({shade: varying[shade]}), _LONGEST) if shade else visible(series, _LONGEST),
            "label": label,
            "settings": visible(_told(varying), _LONGEST_TOLD),
            "wall_ms": wall.median / 1e6,
            "wall_low": (wall.low if wall.low is not None else wall.median) / 1e6,
            "wall_high": (wall.high if wall.high is not None else wall.median) / 1e6,
            "tokens_per_s": tokens_per_second(point),
            "mfu": point_mfu(point),
        }
        if point.memory:
            row["peak_gib"] = max(m.peak_bytes for m in point.memory) / 2**30
        rows.append(row)
    return axis, rows


def labels_of(points: Sequence[Point]) -> list[str]:
    """What tells each point from the others; no two are the same, or a chart would draw them as one."""
    varying = axes_of(points).varying
    whole = [_told(v) or point.trial.workload.label() for point, v in zip(points, varying, strict=True)]
    if len(points) <= _MOST_BESIDE and any(len(label) > _LONGEST for label in whole):
        return [visible(label, _LONGEST) for label in _beside_another(whole, varying)]
    found: list[str] = []
    for one in whole:
        label = visible(one, _LONGEST_TOLD)
        same = sum(other == label or other.startswith(f"{label} #") for other in found)
        found.append(f"{label} #{same + 1}" if same else label)
    return found


def _told(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" if name != "workload" else str(value) for name, value in settings.items())


def _beside_another(whole: Sequence[str], varying: Sequence[Mapping[str, Any]]) -> list[str]:
    """Points that differ in much, each by what tells it from the one before it that is most like it.

    >>> _beside_another(["a=1 b=1", "a=1 b=2", "a=2 b=2"], [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}])
    ['1. a=1 b=1', '2. as 1 with b=2', '3. as 2 with a=2']
    """
    found = [f"1. {whole[0]}"]
    for place, now in enumerate(varying[1:], 1):
        changes = [{n: v for n, v in now.items() if other.get(n) != v} for other in varying[:place]]
        like = min(range(place), key=lambda i: (len(changes[i]), i))
        found.append(f"{place + 1}. as {like + 1} {f'with {_told(changes[like])}' if changes[like] else 'again'}")
    return found


def _shade(axis: str, axes: Axes) -> str:
    """What the lines are coloured by, where there are more of them than colours: what has most values of those that fit."""
    others = [name for name in axes.names if name != axis]
    values = {name: len({v[name] for v in axes.varying}) for name in others}
    if len({tuple(v[name] for name in others) for v in axes.varying}) <= len(_SERIES):
        return ""
    return max((name for name in others if values[name] <= len(_SERIES)), key=lambda name: values[name], default="")


def _axis(names: Sequence[str], varying: Sequence[Mapping[str, Any]]) -> str:
    numeric = [
        n for n in names if all(isinstance(v.get(n), int | float) for v in varying) and n not in ("warmup", "samples")
    ]
    ranked = sorted(numeric, key=lambda n: (n not in _SIZES, -len({v[n] for v in varying})))
    return ranked[0] if ranked else ""


def sweep_chart(axis: str, rows: Sequence[Mapping[str, Any]], measure: str, title: str = "") -> Any:
    """One measure over the size, a line per series; the band is the 95 % interval of the median."""
    alt = altair()
    known = [row for row in rows if row.get(measure) is not None]
    log_x = _spans([row["x"] for row in known])
    log_y = measure != "mfu" and _spans([row[measure] for row in known], 20.0)
    sizes = sorted({row["x"] for row in known})
    x = alt.X("x:Q", title=axis).axis(values=sizes, format=",d" if all(isinstance(x, int) for x in sizes) else "~g")
    x = x.scale(type="log", nice=False) if log_x else x.scale(zero=False, nice=False)
    y = alt.Y(f"{measure}:Q", title=MEASURES[measure])
    y = y.scale(type="log") if log_y else y
    y = y.axis(format=".0%") if measure == "mfu" else y
    shades = list(dict.fromkeys(row["shade"] for row in known))
    colour = alt.Color("shade:N", title=None, sort=shades, scale=alt.Scale(domain=shades, range=_SERIES))
    colour = colour.legend(None) if len(shades) == 1 else colour.legend(symbolOpacity=1)
    base = alt.Chart(alt.Data(values=known)).encode(detail="series:N")
    lines = base.mark_line(point=True).encode(
        x=x, y=y, color=colour, tooltip=["settings:N", alt.Tooltip(f"{measure}:Q", format=",.4~r")]
    )
    layers = [lines]
    if measure == "wall_ms":
        layers.insert(0, base.mark_area(opacity=0.2).encode(x=x, y=alt.Y("wall_low:Q"), y2="wall_high:Q", color=colour))
    return alt.layer(*layers).properties(width=WIDTH - 220, height=HEIGHT - 60, title=visible(title, _LONGEST))


def points_chart(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Points that share no size axis, one bar each, with the median's interval."""
    alt = altair()
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        y=alt.Y("label:N", sort=None, title=None, axis=alt.Axis(labelLimit=320))
    )
    bars = base.mark_bar(color=MEASURED, height=14).encode(
        x=alt.X("wall_ms:Q", title=MEASURES["wall_ms"]), tooltip=["label:N", "settings:N", milliseconds(alt, "wall_ms")]
    )
    error = base.mark_rule(color=INTERVAL, strokeWidth=2).encode(x="wall_low:Q", x2="wall_high:Q")
    return alt.layer(bars, error).properties(width=WIDTH - 340, height=24 * len(rows), title=visible(title, _LONGEST))


def samples_chart(points: Sequence[Point], title: str = "") -> Any:
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
        e = estimate(times.wall_ns)
        low, high = e.low or e.median, e.high or e.median
        middles.append({"label": label, "ms": e.median / 1e6, "low": low / 1e6, "high": high / 1e6})
    row = alt.Y("label:N", title=None, sort=None, axis=alt.Axis(labelLimit=300))
    jitter = alt.YOffset("when:Q", scale=alt.Scale(domain=[0, 1], range=[6, 46]))
    cloud = alt.Chart(alt.Data(values=dots)).mark_circle(size=18, opacity=0.75, color=SAMPLE)
    cloud = cloud.encode(
        x=alt.X("ms:Q", title="ms, each sample (first at the top)", scale=alt.Scale(zero=False)),
        y=row, yOffset=jitter, tooltip=["label:N", "sample:Q", milliseconds(alt, "ms")],
    )  # fmt: skip
    base = alt.Chart(alt.Data(values=middles)).encode(y=row)
    band = base.mark_bar(opacity=0.3, color=PREDICTED, height=44).encode(x="low:Q", x2="high:Q")
    middle = base.mark_tick(color="#D55E00", thickness=2, height=44).encode(
        x="ms:Q", tooltip=["label:N", milliseconds(alt, "ms", "median ms")]
    )
    height = 52 * max(1, len(middles))
    return alt.layer(band, cloud, middle).properties(width=WIDTH - 320, height=height, title=visible(title, _LONGEST))


def before_after_chart(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Two measurements of each thing beside each other. `rows`: name, before_ms, after_ms, and their intervals where known."""
    alt = altair()
    folded = [
        {
            "name": visible(str(row["name"]), _LONGEST), "which": which, "ms": row[f"{which}_ms"],
            "low": row.get(f"{which}_low", row[f"{which}_ms"]), "high": row.get(f"{which}_high", row[f"{which}_ms"]),
        }
        for row in rows
        for which in ("before", "after")
    ]  # fmt: skip
    return _pairs(alt, folded, "ms:Q", "ms", ["before", "after"], [BEFORE, AFTER], title, interval=True)


def predicted_chart(report: MemoryReport, title: str = "") -> Any:
    """Whose bytes at the peak: predicted beside measured."""
    alt = altair()
    peak = report.devices[0].peak
    owners = [owner for owner, size in sorted(peak.owners.items(), key=lambda item: -item[1]) if size]
    sources = {"measured": peak.owners} | {f"predicted: {p.source}": p.peak.owners for p in report.predictions}
    rows = [
        {"name": owner, "which": which, "gib": found.get(owner, 0) / 2**30}
        for owner in owners
        for which, found in sources.items()
    ]
    colours = [MEASURED, PREDICTED, "#009E73", "#CC79A7"][: len(sources)]
    return _pairs(alt, rows, "gib:Q", "GiB at the peak", list(sources), colours, title)


def predicted_measured_chart(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Savings as dots, predicted across and measured upwards. `rows`: name, predicted_ms, measured_ms."""
    return _diagonal(rows, "predicted to save, ms", "saved, measured, ms", title)


def predicted_steps_chart(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Step times: bars where there are few steps, dots where there are many. `rows`: name, predicted_ms, measured_ms."""
    if len(rows) > _MOST_BARS:
        return _diagonal(rows, "step, predicted, ms", "step, measured, ms", title, named=False)
    folded = [
        {"name": visible(str(row["name"]), _LONGEST), "which": which, "ms": row[f"{which}_ms"]}
        for row in rows
        for which in ("measured", "predicted")
    ]
    return _pairs(altair(), folded, "ms:Q", "ms a step", ["measured", "predicted"], [MEASURED, PREDICTED], title)


def _diagonal(rows: Sequence[Mapping[str, Any]], across: str, upwards: str, title: str, named: bool = True) -> Any:
    """Dots beside the line on which predicted is measured; logarithmic where only that shows them all."""
    alt = altair()
    values = [row[key] for row in rows for key in ("predicted_ms", "measured_ms")]
    log = _spans(values)
    low, high = (min(values) / 1.2 if log else min(0.0, *values)), max(1e-3, *values) * 1.1
    shown = [{**row, "name": visible(str(row["name"]), _LONGEST_TOLD)} for row in rows]
    scale = alt.Scale(domain=[low, high], nice=False, type="log" if log else "linear")
    x = alt.X("predicted_ms:Q", title=across, scale=scale)
    y = alt.Y("measured_ms:Q", title=upwards, scale=scale)
    ends = [{"predicted_ms": at, "measured_ms": at} for at in (low, high)]
    right = alt.Chart(alt.Data(values=ends)).mark_line(color=NEUTRAL, strokeDash=[4, 3]).encode(x=x, y=y)
    base = alt.Chart(alt.Data(values=shown)).encode(x=x, y=y)
    dots = base.mark_circle(size=70, color=MEASURED, opacity=1 if named else 0.7).encode(
        tooltip=[
            "name:N",
            milliseconds(alt, "predicted_ms", "predicted ms"),
            milliseconds(alt, "measured_ms", "measured ms"),
        ]
    )
    layers = [right, dots]
    if named:
        for side, named_rows in _apart(shown, low, high, log).items():
            words = alt.Chart(alt.Data(values=named_rows)).encode(x=x, y=y, text="name:N", color=alt.value(NEUTRAL))
            layers.append(words.mark_text(align=side, dx=_BESIDE if side == "left" else -_BESIDE, dy=-4))
    return alt.layer(*layers).properties(width=_SQUARE, height=HEIGHT, title=visible(title, _LONGEST))


def _apart(rows: Sequence[dict[str, Any]], low: float, high: float, log: bool) -> dict[str, list[dict[str, Any]]]:
    """The rows whose names lie upon no other's, the largest first, by the side of the name that is at its dot.

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
        wide = _BESIDE + _LETTER * len(row["name"])
        for side, begin, end in (("left", x, x + wide), ("right", x - wide, x)):
            if begin >= 0 and all(abs(y - at) > _LINE or end < a or b < begin for a, b, at in taken):
                found[side].append(row)
                taken.append((begin, end, y))
                break
    return found


def _pairs(
    alt: Any, rows: list[dict[str, Any]], value: str, unit: str, which: list[str], colours: list[str], title: str,
    interval: bool = False,
) -> Any:  # fmt: skip
    names = list(dict.fromkeys(row["name"] for row in rows))
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=240)),
        yOffset=alt.YOffset("which:N", sort=which),
    )
    bars = base.mark_bar().encode(
        x=alt.X(value, title=unit),
        color=alt.Color("which:N", title=None, scale=alt.Scale(domain=which, range=colours)),
        tooltip=["name:N", "which:N", alt.Tooltip(value, format=",.4~r")],
    )
    layers = [bars]
    if interval:
        layers.append(base.mark_rule(color=INTERVAL, strokeWidth=2).encode(x="low:Q", x2="high:Q"))
    height = 16 * len(which) * len(names) + 10
    return alt.layer(*layers).properties(width=WIDTH - 260, height=height, title=visible(title, _LONGEST))


def _spans(values: Sequence[float], times: float = _DECADE) -> bool:
    """Whether values reach over so many times that only a logarithm shows them all.

    >>> _spans([128, 1024]), _spans([1, 2]), _spans([0, 100])
    (True, False, False)
    """
    return bool(values) and min(values) > 0 and max(values) / min(values) >= times
