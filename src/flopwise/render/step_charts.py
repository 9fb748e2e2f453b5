"""Charts of one step: where the GPU's time went, and what happened when."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.shares import Part
from flopwise.analysis.step_timeline import LAUNCHES, WAITS, StepTimeline
from flopwise.render.chart_style import (
    IDLE,
    NEUTRAL,
    PHASE_COLOURS,
    WIDTH,
    class_colour,
    colours_of,
    ink_on,
    milliseconds,
)
from flopwise.render.charts import altair
from flopwise.render.visible import visible

_LONGEST = 90
_LEVEL = 64  # height of a level of the icicle
_HOST = {LAUNCHES: NEUTRAL, WAITS: "#D9A400"}  # lanes of their own: the legend need not name them
_LEVELS = ("phase", "class", "module")
_WORTH_LISTING = 0.005  # of the step: parts that can be chosen from a list
_SMALLEST = 0.0008  # of the step: a rectangle below would not be seen; it is part of '(the rest)'


def icicle_chart(parts: Sequence[Part], title: str = "") -> Any:
    """GPU time by phase, by class within it, by module within that. A click goes into a part, a double click out again."""
    alt = altair()
    rows = icicle_rows(parts)
    total = max((row["x1"] for row in rows), default=1.0)
    left, right = "(isValid(into.x0) ? into.x0[0] : 0)", f"(isValid(into.x1) ? into.x1[0] : {total!r})"
    into = alt.selection_point(name="into", fields=["x0", "x1"], toggle=False, clear="dblclick")
    x = alt.X("x0:Q", title="GPU ms per step").scale(
        domainMin=alt.ExprRef(left), domainMax=alt.ExprRef(right), nice=False, zero=False
    )
    y = alt.Y("y0:Q", title=None, axis=None).scale(domain=[len(_LEVELS), 0], nice=False)
    base = alt.Chart(alt.Data(values=rows))
    boxes = base.mark_rect(clip=True, stroke="white", strokeWidth=0.7, cursor="pointer").encode(
        x=x,
        x2="x1:Q",
        y=y,
        y2="y1:Q",
        color=alt.Color("fill:N", scale=None),
        tooltip=[
            "phase:N",
            "class:N",
            "module:N",
            milliseconds(alt, "ms"),
            alt.Tooltip("share:Q", format=".1%"),
            "kernels:Q",
        ],
    )
    wide = f"(min(datum.x1, {right}) - max(datum.x0, {left})) / ({right} - {left}) * {WIDTH}"
    words = (
        base.transform_calculate(at=f"max(datum.x0, {left})", middle="datum.y0 + 0.5")
        .mark_text(
            align="left", dx=4, clip=True, fontSize=11, limit=alt.ExprRef(f"max(1, {wide} - 6)"),
            opacity=alt.ExprRef(f"{wide} > 26 && datum.x1 > {left} && datum.x0 < {right} ? 1 : 0"),
        )
        .encode(x=alt.X("at:Q"), y=alt.Y("middle:Q"), text="label:N", color=alt.Color("ink:N", scale=None))
    )  # fmt: skip
    chart = alt.layer(boxes.add_params(into), words)
    return chart.properties(width=WIDTH, height=_LEVEL * len(_LEVELS), title=visible(title, _LONGEST))


def icicle_parts(parts: Sequence[Part]) -> tuple[tuple[str, float, float], ...]:
    """The parts of the icicle that are worth going into: its name, and from where to where it lies."""
    found = []
    for row in icicle_rows(parts):
        if row["share"] >= _WORTH_LISTING:
            name = " › ".join(row[level] for level in _LEVELS[: row["y1"]])
            found.append((f"{name}, {row['share']:.1%}", row["x0"], row["x1"]))
    return tuple(found)


def icicle_rows(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Rectangles: each part's children lie under it, from its left edge on, and fill it."""
    phases = _grouped(parts, lambda part: part.phase)
    total = sum(part.gpu_ns for part in parts) or 1.0
    rows: list[dict[str, Any]] = []
    left = 0.0
    for phase, of_phase in phases:
        kinds = _grouped(of_phase, lambda part: part.kind)
        colour = PHASE_COLOURS.get(phase, PHASE_COLOURS["other"])
        rows.append(_box(0, left, of_phase, total, phase, colour, phase=phase))
        under = left
        for place, (kind, of_kind) in enumerate(kinds):
            colour = class_colour(kind, place)
            rows.append(_box(1, under, of_kind, total, kind, colour, phase=phase, kind=kind))
            inner = under
            large = [part for part in of_kind if part.gpu_ns >= _SMALLEST * total]
            small = [part for part in of_kind if part.gpu_ns < _SMALLEST * total]
            groups = [([part], part.module or "(no module)") for part in large] + (
                [(small, "(the rest)")] if small else []
            )
            for some, module in groups:
                rows.append(_box(2, inner, some, total, module, colour, phase=phase, kind=kind, module=module))
                inner = rows[-1]["x1"]
            under += sum(part.gpu_ns for part in of_kind) / 1e6
        left += sum(part.gpu_ns for part in of_phase) / 1e6
    return rows


def _grouped(parts: Sequence[Part], key: Any) -> list[tuple[str, list[Part]]]:
    """The parts by a name, the largest group first."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return sorted(groups.items(), key=lambda group: -sum(part.gpu_ns for part in group[1]))


def _box(
    level: int, left: float, parts: Iterable[Part], total: float, label: str, fill: str,
    *, phase: str, kind: str = "", module: str = "",
) -> dict[str, Any]:  # fmt: skip
    parts = list(parts)
    ns = sum(part.gpu_ns for part in parts)
    named = {"phase": phase, "class": kind or "all", "module": visible(module, _LONGEST) or "all"}
    return named | {
        "x0": left, "x1": left + ns / 1e6, "y0": level, "y1": level + 1, "ms": ns / 1e6, "share": ns / total,
        "kernels": round(sum(part.count for part in parts), 2), "label": visible(label, _LONGEST), "fill": fill,
        "ink": ink_on(fill),
    }  # fmt: skip


def timeline_chart(found: StepTimeline, title: str = "") -> Any:
    """One step: the host's launches above, the streams below, and under them how idle the GPU was."""
    alt = altair()
    rows = [
        {
            "lane": span.lane, "from": span.start_ns / 1e6, "until": span.end_ns / 1e6, "kind": span.kind,
            "name": visible(span.name, _LONGEST), "pieces": span.count, "busy": span.busy_ns / 1e6,
        }
        for span in found.spans
    ]  # fmt: skip
    across = alt.Scale(domain=[0, found.duration_ns / 1e6], nice=False)
    order = sorted(found.lanes, key=lambda lane: lane.startswith("stream"))
    busy: dict[str, int] = {}
    for span in found.spans:
        busy[span.kind] = busy.get(span.kind, 0) + span.busy_ns
    kinds = sorted((kind for kind in busy if kind not in _HOST), key=lambda kind: -busy[kind])
    scale = colours_of(kinds)
    scale = {"domain": [*kinds, *_HOST], "range": [*scale["range"], *_HOST.values()]}
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height=26)
        .encode(
            x=alt.X("from:Q", title=None, scale=across, axis=alt.Axis(labels=False, ticks=False)),
            x2="until:Q",
            y=alt.Y("lane:N", sort=order, title=None),
            color=alt.Color("kind:N", title=None, scale=alt.Scale(**scale)).legend(values=kinds),
            tooltip=[
                "lane:N",
                "kind:N",
                "name:N",
                "pieces:Q",
                milliseconds(alt, "busy", "busy ms"),
                milliseconds(alt, "from", "at ms"),
            ],
        )
        .properties(width=WIDTH - 140, height=34 * len(order), title=visible(title, _LONGEST))
    )
    idle = [
        {"from": cell.start_ns / 1e6, "until": cell.end_ns / 1e6, "idle": round(cell.idle, 4), "lane": "GPU idle"}
        for cell in found.idle
    ]
    below = (
        alt.Chart(alt.Data(values=idle))
        .mark_bar(color=IDLE, height=22)
        .encode(
            x=alt.X("from:Q", title="ms since the step began", scale=across),
            x2="until:Q",
            y=alt.Y("lane:N", title=None),
            opacity=alt.Opacity("idle:Q", scale=alt.Scale(domain=[0, 1], range=[0, 1]), legend=None),
            tooltip=[alt.Tooltip("idle:Q", format=".0%"), milliseconds(alt, "from", "at ms")],
        )
        .properties(width=WIDTH - 140, height=28)
    )
    return alt.vconcat(bars, below, spacing=2).resolve_scale(color="independent", opacity="independent")


def phases_chart(explanations: Sequence[tuple[str, Explanation]], title: str = "") -> Any:
    """Several steps beside each other: GPU time by class, and what the GPU was idle."""
    alt = altair()
    rows: list[Mapping[str, Any]] = []
    for name, e in explanations:
        rows += [{"step": visible(name, _LONGEST), "what": share.name, "ms": share.gpu_ns / 1e6} for share in e.classes]
        rows.append({"step": visible(name, _LONGEST), "what": "idle", "ms": max(0.0, e.window_ns - e.busy_ns) / 1e6})
    kinds = [
        *dict.fromkeys(row["what"] for row in sorted(rows, key=lambda row: -row["ms"]) if row["what"] != "idle"),
        "idle",
    ]
    scale = colours_of(kinds)
    scale["range"][-1] = "#DDDDDD"
    bars = alt.Chart(alt.Data(values=rows)).transform_calculate(order=f"indexof({json.dumps(kinds)}, datum.what)")
    return (
        bars.mark_bar()
        .encode(
            y=alt.Y("step:N", title=None, sort=None, axis=alt.Axis(labelLimit=330)),
            x=alt.X("ms:Q", title="ms per step: GPU time by class, and idle"),
            color=alt.Color("what:N", title=None, scale=alt.Scale(**scale)),
            order=alt.Order("order:Q"),
            tooltip=["step:N", "what:N", milliseconds(alt, "ms")],
        )
        .properties(width=WIDTH - 330, height=46 * len(explanations), title=visible(title, _LONGEST))
    )
