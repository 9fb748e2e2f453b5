"""A waterfall as a picture: bars that begin where the one above ends, from the ideal down to the measured step."""

from typing import Any

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records import waterfall as w
from flopwise.render.chart_style import NEUTRAL
from flopwise.render.charts import altair
from flopwise.render.visible import visible
from flopwise.render.waterfall_view import shares_told, steps_of

STEP = "the measured step"
_WIDTH, _ROW, _LONGEST = 520, 24, 120
# What is useful, what the GPU computes beyond it, what it moves, what it waits for; told apart without red and green.
_COLOURS = {
    w.IDEAL: "#009E73",
    w.MATMUL_SHAPE: "#0072B2", w.MATMUL_UNALIGNED: "#0072B2", w.MATMUL_PRECISION: "#0072B2", w.MATMUL_OTHER: "#0072B2",
    w.ATTENTION_PART: "#CC79A7",
    w.MEMORY_BOUND: "#E69F00", w.BELOW_BANDWIDTH: "#D55E00",
    w.RECOMPUTATION: "#7A5195", w.OPTIMIZER_PART: "#56B4E9", w.EXPOSED_COMMUNICATION: "#8C564B",
    w.IDLE_LAUNCH: "#999999", w.IDLE_SYNCHRONISATION: "#999999", w.IDLE_INPUT: "#999999", w.IDLE_OTHER: "#999999",
    STEP: "#6B6B6B",
}  # fmt: skip


def waterfall_chart(found: w.Waterfall | None, title: str) -> Any:
    """Horizontal bars, one a part, the step at the bottom; each with its time and its share."""
    if found is None:
        raise FlopwiseError("there is no waterfall to draw", "the limits of the trace's GPU are needed: --gpu h200")
    alt = altair()
    rows = [
        _row(part.name, begin, end, f"{units.duration(part.ns)} · {units.percent(part.share)}")
        for part, begin, end in steps_of(found)
    ]
    rows.append(_row(STEP, 0.0, found.step_ns, units.duration(found.step_ns)))
    order = [row["part"] for row in rows]
    across = alt.X("begin:Q", title="ms").scale(domain=[0, found.step_ns / 1e6 * 1.28], nice=False).axis(grid=False)
    down = alt.Y("part:N", sort=order, title=None).axis(labelLimit=0, ticks=False, domain=False, labelPadding=8)
    base = alt.Chart(alt.Data(values=rows))
    colours = alt.Scale(domain=order, range=[_COLOURS.get(name, NEUTRAL) for name in order])
    bars = base.mark_bar(height=_ROW - 7).encode(
        x=across,
        x2="end:Q",
        y=down,
        color=alt.Color("part:N", scale=colours, legend=None),
        tooltip=["part:N", "told:N"],
    )
    texts = base.mark_text(align="left", dx=5, color="#808080").encode(x=alt.X("right:Q"), y=down, text="told:N")
    line = ", ".join((f"by {found.measured_by}", *shares_told(found)[:1]))
    heading = alt.TitleParams(visible(title, _LONGEST), subtitle=line, anchor="start")
    return alt.layer(bars, texts).properties(width=_WIDTH, height=_ROW * len(rows), title=heading)


def _row(part: str, begin: float, end: float, told: str) -> dict[str, Any]:
    """A run may hold parts of another version, or of anybody: their names are shown, in no colour of ours."""
    part = visible(part, _LONGEST)
    return {"part": part, "begin": begin / 1e6, "end": end / 1e6, "right": max(begin, end) / 1e6, "told": told}
