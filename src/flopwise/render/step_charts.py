"""Charts of one step: where its time went, what the GPU did, and what happened when."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from flopwise import units
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.shares import Part
from flopwise.analysis.step_timeline import LAUNCHES, WAITS, StepTimeline
from flopwise.errors import FlopwiseError
from flopwise.records import limit as limits
from flopwise.records import waterfall as w
from flopwise.records.limit import StepLimit
from flopwise.render import chart_style as style
from flopwise.render.chart_style import LONGEST, NEUTRAL, PHASE_COLOURS, WIDTH, milliseconds
from flopwise.render.charts import altair
from flopwise.render.limit_view import limit_name
from flopwise.render.visible import visible
from flopwise.render.waterfall_view import ESTIMATED_STEP, MEASURED_STEP, step_name, steps_of, utilisation

_LEVEL = 64  # height of a level of the icicle
_HOST = {LAUNCHES: NEUTRAL, WAITS: "#D9A400"}  # lanes of their own: the legend need not name them
_LEVELS = ("phase", "class", "module")
_WORTH_LISTING = 0.005  # of the step: parts that can be chosen from a list
_SMALLEST = 0.0008  # of the step: a rectangle below would not be seen; it is part of '(the rest)'
_BARS_WIDTH, _BAR_ROW = 520, 24
_LEGEND_ROW = 14
_COLOURS = (
    style.CLASS_COLOURS | style.OWNER_COLOURS | {"forward": "#0072B2", "backward": "#D55E00", "GPU works": "#009E73"}
)  # of a screen's parts
_BEYOND, _ROOM = 1.12, 0.7  # of the step: where the axis ends, and a bar up to which its time fits on the right
_WITH_SHARE = 0.7  # of the step: the room that its share needs beside it, on a page of 390 px
_MATMULS = (w.MATMUL_SHAPE, w.MATMUL_UNALIGNED, w.MATMUL_PRECISION, w.MATMUL_OTHER)
# What is useful, what the GPU computes beyond it, what it moves, what it waits for; distinct without red and green.
_PART_COLOURS = {
    w.IDEAL: "#009E73",
    **dict.fromkeys(_MATMULS, "#0072B2"),
    w.ATTENTION_PART: "#CC79A7",
    w.MEMORY_BOUND: "#E69F00",
    w.BELOW_BANDWIDTH: "#D55E00",
    w.FP8_CASTS: "#A6761D",
    w.RECOMPUTATION: "#7A5195",
    w.OPTIMIZER_PART: "#56B4E9",
    w.EXPOSED_COMMUNICATION: "#8C564B",
    w.TRANSFERS: "#BCBD22",
    **dict.fromkeys(w.IDLE_PARTS, "#999999"),
    **dict.fromkeys((MEASURED_STEP, ESTIMATED_STEP), "#6B6B6B"),
}
_CAUSE_COLOURS = {w.KEYS[part]: colour for part, colour in _PART_COLOURS.items() if part in w.KEYS} | {
    limits.MATMUL: "#0072B2",
    limits.MEMORY: "#D55E00",
    limits.COMMUNICATION: "#8C564B",
}


def waterfall_chart(found: w.Waterfall | None, title: str) -> Any:
    """Horizontal bars, one a part, each from where the one above ends, the step at the bottom."""
    if found is None:
        raise FlopwiseError("there is no waterfall to draw", "the limits of the trace's GPU are needed: --gpu h200")
    rows = [
        _bar(part.name, begin, end, found.step_ns, f" · {units.percent(part.share)}")
        for part, begin, end in steps_of(found)
    ]
    rows.append(_bar(step_name(found), 0.0, found.step_ns, found.step_ns))
    subtitle = ", ".join((f"by {found.measured_by}", *utilisation(found)[:1]))
    heading = altair().TitleParams(visible(title, LONGEST), subtitle=subtitle, anchor="start")
    return _bars(rows, found.step_ns / 1e6, "ms").properties(title=heading)


def limit_chart(found: StepLimit, title: str) -> Any:
    """From the FLOPs at the datasheet's peak to the power-capped limit, and from there cause by cause to the step."""
    whole, at, beyond = max(found.step_ns, found.limit_ns), 0.0, found.ranked()
    parts = [("FLOPs at the datasheet's peak", found.peak_ns, _PART_COLOURS[w.IDEAL])]
    parts.append(("FLOPs at the lower clock", found.capped_ns, "#7FCDB0"))
    parts.append(("bytes at full bandwidth", found.bytes_ns, _PART_COLOURS[w.MEMORY_BOUND]))
    rows = []
    for name, ns, colour in parts:
        rows += [_bar(name, at, at + ns, whole, colour=colour)] if ns else []
        at += ns
    rows.append(_bar(limit_name(found), 0.0, found.limit_ns, whole, colour="#4D4D4D"))
    for cause in beyond:
        share = f" · {units.percent(cause.beyond_ns / found.remaining_ns, 0)}" if found.remaining_ns > 0 else ""
        rows.append(_bar(cause.name, at, at + cause.beyond_ns, whole, share, colour=_CAUSE_COLOURS.get(cause.key, "")))
        at += cause.beyond_ns
    rows.append(_bar("the step", 0.0, found.step_ns, whole, colour=_PART_COLOURS[MEASURED_STEP]))
    subtitle = f"limit {units.percent(found.limit_ns / found.step_ns, 0)} of the step; shares are of the time beyond it"
    heading = altair().TitleParams(visible(title, LONGEST), subtitle=subtitle, anchor="start")
    return _bars(rows, whole / 1e6, "ms").properties(title=heading)


def parts_chart(parts: Sequence[tuple[str, float, bool]], unit: str) -> Any:
    """A screen's bar in rows: the parts of a step's time or of a peak, each from where the one above ends; idle ones grey."""
    whole = sum(amount for _, amount, _ in parts)
    scale, title = (1e6, "ms") if unit == "ns" else (2.0**20, "MiB")
    rows, at = list[dict[str, Any]](), 0.0
    for place, (name, amount, idle) in enumerate(parts):
        colour = NEUTRAL if idle else _COLOURS.get(name) or style.class_colour(name, place)
        share = f" · {units.percent(amount / whole, 0)}" if whole else ""
        rows.append(_bar(name, at, at + amount, whole, share, unit=unit, scale=scale, colour=colour))
        at += amount
    return _bars(rows, whole / scale, title)


def differences_chart(
    before: tuple[str, float], parts: Sequence[tuple[str, float]], after: tuple[str, float], title: str
) -> Any:
    """From one step's time to another's: each part's difference begins where the one above ends. All in nanoseconds."""
    (first, at), (last, end) = before, after
    whole = max(at, end, *(at + sum(ns for _, ns in parts[: n + 1]) for n in range(len(parts))))
    rows = [_bar(first, 0.0, at, whole, colour=style.PREDICTED)]
    for name, ns in parts:
        if ns:
            rows.append(_bar(name, at, at + ns, whole, colour=style.IDLE if ns > 0 else "#009E73"))
            at += ns
    rows.append(_bar(last, 0.0, end, whole, colour=style.MEASURED))
    heading = altair().TitleParams(visible(title, LONGEST), anchor="start")
    return _bars(rows, whole / 1e6, "ms").properties(title=heading)


def _bars(rows: Sequence[dict[str, Any]], whole: float, title: str) -> Any:
    """A row each, from where it begins to where it ends, with its amount."""
    alt = altair()
    order = [row["part"] for row in rows]
    x = alt.X("begin:Q", title=title).scale(domain=[0, whole * _BEYOND], nice=False).axis(grid=False, tickCount=8)
    y = alt.Y("part:N", sort=order, title=None).axis(labelLimit=0, ticks=False, domain=False, labelPadding=8)
    colour = alt.Color("part:N", scale=alt.Scale(domain=order, range=[row["colour"] for row in rows]), legend=None)
    base = alt.Chart(alt.Data(values=list(rows)))
    layers = [
        base.mark_bar(height=_BAR_ROW - 7).encode(x=x, x2="end:Q", y=y, color=colour, tooltip=["part:N", "text:N"])
    ]
    for side, align, dx in (("right", "left", 5), ("left", "right", -5), ("inside", "right", -5)):
        words = base.transform_filter(f"datum.side == '{side}'").mark_text(align=align, dx=dx)
        words = words.encode(x=alt.X("low:Q" if side == "left" else "high:Q"), y=y, text="text:N")
        layers.append(words.encode(color=alt.Color("ink:N", scale=None)) if side == "inside" else words)
    return alt.layer(*layers).properties(width=_BARS_WIDTH, height=_BAR_ROW * len(rows))


def _bar(
    part: str,
    begin: float,
    end: float,
    whole: float,
    share: str = "",
    *,
    unit: str = "ns",
    scale: float = 1e6,
    colour: str = "",
) -> dict[str, Any]:
    """A part's bar, and where its time is written: on the side that has room, or inside.

    A run may hold parts of another version, or of anybody: their names are shown, in no colour of ours.
    """
    low, high = sorted((begin, end))
    side = "right" if high <= _ROOM * whole else "left" if low >= (_BEYOND - _ROOM) * whole else "inside"
    room = {"right": _BEYOND - high / whole, "left": low / whole, "inside": 0.0}[side] if whole else 0.0
    colour, amount = colour or _PART_COLOURS.get(part, NEUTRAL), units.shown(end - begin, unit)
    return {
        "part": visible(part, LONGEST),
        "begin": begin / scale,
        "end": end / scale,
        "low": low / scale,
        "high": high / scale,
        "side": side,
        "text": amount + share if room >= _WITH_SHARE else amount,
        "colour": colour,
        "ink": style.ink_on(colour),
    }


def icicle_chart(parts: Sequence[Part]) -> Any:
    """GPU time by phase, by class within it, by module within that. A click goes into a part, a double click out again."""
    alt = altair()
    rows = icicle_rows(parts)
    total = max((row["x1"] for row in rows), default=1.0)
    left, right = "(isValid(into.x0) ? into.x0[0] : 0)", f"(isValid(into.x1) ? into.x1[0] : {total!r})"
    into = alt.selection_point(name="into", fields=["x0", "x1"], toggle=False, clear="dblclick")
    zoom = {"domainMin": alt.ExprRef(left), "domainMax": alt.ExprRef(right)}
    x = alt.X("x0:Q", title="GPU ms per step").scale(**zoom, nice=False, zero=False)
    y = alt.Y("y0:Q", title=None, axis=None).scale(domain=[len(_LEVELS), 0], nice=False)
    base = alt.Chart(alt.Data(values=rows))
    names = [f"{level}:N" for level in _LEVELS]
    boxes = base.mark_rect(clip=True, stroke="white", strokeWidth=0.7, cursor="pointer").encode(
        x=x,
        x2="x1:Q",
        y=y,
        y2="y1:Q",
        color=alt.Color("fill:N", scale=None),
        tooltip=[*names, milliseconds(alt, "ms"), alt.Tooltip("share:Q", format=".1%"), "kernels:Q"],
    )
    wide = f"(min(datum.x1, {right}) - max(datum.x0, {left})) / ({right} - {left}) * width"
    seen = alt.ExprRef(f"{wide} > 26 && datum.x1 > {left} && datum.x0 < {right} ? 1 : 0")
    words = base.transform_calculate(at=f"max(datum.x0, {left})", middle="datum.y0 + 0.5").mark_text(
        align="left", dx=4, clip=True, fontSize=11, limit=alt.ExprRef(f"max(1, {wide} - 6)"), opacity=seen
    )
    words = words.encode(x=alt.X("at:Q"), y=alt.Y("middle:Q"), text="label:N", color=alt.Color("ink:N", scale=None))
    return alt.layer(boxes.add_params(into), words).properties(width=WIDTH, height=_LEVEL * len(_LEVELS))


def icicle_parts(parts: Sequence[Part]) -> tuple[tuple[str, float, float], ...]:
    """The parts of the icicle that are worth going into: a name, and from where to where it lies."""
    return tuple(
        (
            f"{' › '.join(row[level] for level in _LEVELS[: row['y1']])}, {units.percent(row['share'])}",
            row["x0"],
            row["x1"],
        )
        for row in icicle_rows(parts)
        if row["share"] >= _WORTH_LISTING
    )


def icicle_rows(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Rectangles: each part's children lie under it, from its left edge on, and fill it."""
    total = sum(part.gpu_ns for part in parts) or 1.0
    rows: list[dict[str, Any]] = []
    left = 0.0
    for phase, of_phase in _grouped(parts, lambda part: part.phase):
        colour = PHASE_COLOURS.get(phase, PHASE_COLOURS["other"])
        rows.append(_box((phase,), left, of_phase, total, colour))
        for place, (kind, of_kind) in enumerate(_grouped(of_phase, lambda part: part.kind)):
            colour, under = style.class_colour(kind, place), left
            rows.append(_box((phase, kind), left, of_kind, total, colour))
            groups = [([part], part.module or "(no module)") for part in of_kind if part.gpu_ns >= _SMALLEST * total]
            small = [part for part in of_kind if part.gpu_ns < _SMALLEST * total]
            for some, module in [*groups, *([(small, "(the rest)")] if small else [])]:
                rows.append(_box((phase, kind, module), under, some, total, colour))
                under = rows[-1]["x1"]
            left += sum(part.gpu_ns for part in of_kind) / 1e6
    return rows


def _grouped(parts: Sequence[Part], key: Callable[[Part], str]) -> list[tuple[str, list[Part]]]:
    """The parts by a name, the largest group first."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return sorted(groups.items(), key=lambda group: -sum(part.gpu_ns for part in group[1]))


def _box(path: Sequence[str], left: float, parts: Sequence[Part], total: float, fill: str) -> dict[str, Any]:
    """`path`: the phase, its class, its module, as deep as the box lies."""
    ns, level = sum(part.gpu_ns for part in parts), len(path) - 1
    shown = dict.fromkeys(_LEVELS, "all") | {
        key: visible(name, LONGEST) for key, name in zip(_LEVELS, path, strict=False)
    }
    return shown | {
        "x0": left,
        "x1": left + ns / 1e6,
        "y0": level,
        "y1": level + 1,
        "ms": ns / 1e6,
        "share": ns / total,
        "kernels": round(sum(part.count for part in parts), 2),
        "label": shown[_LEVELS[level]],
        "fill": fill,
        "ink": style.ink_on(fill),
    }


def timeline_chart(found: StepTimeline) -> Any:
    """One step: the CPU's launches above, the streams below, and under them how idle the GPU was."""
    alt = altair()
    rows = [
        {"lane": span.lane, "kind": span.kind, "name": visible(span.name, LONGEST), "pieces": span.count}
        | {"from": _ms(span.start_ns), "until": _ms(span.end_ns), "busy": _ms(span.busy_ns)}
        for span in found.spans
    ]
    across = alt.Scale(domain=[0, found.duration_ns / 1e6], nice=False)
    lanes = [*(lane for lane in found.lanes if lane in _HOST), *(lane for lane in found.lanes if lane not in _HOST)]
    busy: dict[str, int] = {}
    for span in found.spans:
        busy[span.kind] = busy.get(span.kind, 0) + span.busy_ns
    kinds = sorted((kind for kind in busy if kind not in _HOST), key=lambda kind: -busy[kind])
    scale = alt.Scale(domain=[*kinds, *_HOST], range=[*style.colours_of(kinds)["range"], *_HOST.values()])
    times = [milliseconds(alt, "busy", "busy ms"), milliseconds(alt, "from", "at ms")]
    bars = alt.Chart(alt.Data(values=rows)).mark_bar(height=26)
    bars = bars.encode(
        x=alt.X("from:Q", title=None, scale=across, axis=alt.Axis(labels=False, ticks=False)),
        x2="until:Q",
        y=alt.Y("lane:N", sort=lanes, title=None),
        color=alt.Color("kind:N", title=None, scale=scale).legend(values=kinds),
        tooltip=["lane:N", "kind:N", "name:N", "pieces:Q", *times],
    )
    cells = [
        {"from": _ms(cell.start_ns), "until": _ms(cell.end_ns), "idle": round(cell.idle, 3), "lane": "GPU idle"}
        for cell in found.idle
    ]
    idle = alt.Chart(alt.Data(values=cells)).mark_bar(color=style.IDLE, height=22)
    idle = idle.encode(
        x=alt.X("from:Q", title="ms since the step began", scale=across),
        x2="until:Q",
        y=alt.Y("lane:N", title=None),
        opacity=alt.Opacity("idle:Q", scale=alt.Scale(domain=[0, 1], range=[0, 1]), legend=None),
        tooltip=[alt.Tooltip("idle:Q", format=".0%"), milliseconds(alt, "from", "at ms")],
    )
    both = (bars.properties(width=WIDTH - 140, height=34 * len(lanes)), idle.properties(width=WIDTH - 140, height=28))
    return alt.vconcat(*both, spacing=2).resolve_scale(color="independent", opacity="independent")


def _ms(ns: float) -> float:
    """Milliseconds, no finer than a screen shows: a page holds thousands of them."""
    return round(ns / 1e6, 4)


def phases_chart(explanations: Sequence[tuple[str, Explanation]]) -> Any:
    """Several steps side by side: GPU time by class, and idle time."""
    alt = altair()
    rows = [
        {"step": visible(name, LONGEST), "what": what, "ms": ns / 1e6}
        for name, e in explanations
        for what, ns in (*((s.name, s.gpu_ns) for s in e.classes), ("idle", max(0.0, e.step_ns - e.busy_ns)))
    ]
    ranked = sorted(rows, key=lambda row: -row["ms"])  # type: ignore[operator]
    kinds = [*dict.fromkeys(str(row["what"]) for row in ranked if row["what"] != "idle"), "idle"]
    colours = {"domain": kinds, "range": [*style.colours_of(kinds[:-1])["range"], "#DDDDDD"]}
    bars = alt.Chart(alt.Data(values=rows)).transform_calculate(order=f"indexof({json.dumps(kinds)}, datum.what)")
    bars = bars.mark_bar().encode(
        y=alt.Y("step:N", title=None, sort=None, axis=alt.Axis(labelLimit=330)),
        x=alt.X("ms:Q", title="ms per step: GPU time by class, and idle"),
        color=alt.Color("what:N", title=None, scale=alt.Scale(**colours)),
        order=alt.Order("order:Q"),
        tooltip=["step:N", "what:N", milliseconds(alt, "ms")],
    )
    return bars.properties(width=WIDTH - 330, height=max(46 * len(explanations), _LEGEND_ROW * len(kinds)))
