"""Ranks of a job over time: one step, a lane for each."""

from typing import Any

from flopwise.errors import FlopwiseError
from flopwise.records.ranks import RanksExplanation, RanksTimeline
from flopwise.render.chart_style import WIDTH
from flopwise.render.charts import altair

# Distinct without red or green; what is idle is pale.
COLOURS = {"compute": "#0072B2", "transfer": "#8C564B", "waiting": "#E69F00", "input": "#56B4E9", "idle": "#D9D9D9"}
_LANE = 22


def ranks_chart(e: RanksExplanation) -> Any:
    """The chart of an explanation."""
    if e.timeline is None:
        raise FlopwiseError(f"{e.name} has no step to draw", "use another suffix")
    return ranks_timeline_chart(e.timeline)


def ranks_timeline_chart(found: RanksTimeline) -> Any:
    """What each rank did, from the beginning of the first one's step to the end of the last one's."""
    alt = altair()
    rows = [
        {
            "lane": f"rank {span.rank}",
            "state": span.state,
            "from": round(span.start_ns / 1e6, 4),
            "until": round(span.end_ns / 1e6, 4),
            "ms": round((span.end_ns - span.start_ns) / 1e6, 4),
        }
        for span in found.spans
    ]
    there = [state for state in COLOURS if any(row["state"] == state for row in rows)]
    scale = alt.Scale(domain=there, range=[COLOURS[state] for state in there])
    across = alt.Scale(domain=[0, found.duration_ns / 1e6], nice=False)
    bars = alt.Chart(alt.Data(values=rows)).mark_bar(height=_LANE - 5)
    bars = bars.encode(
        x=alt.X("from:Q", title="ms since the first rank began the step", scale=across),
        x2="until:Q",
        y=alt.Y("lane:N", sort=[f"rank {rank}" for rank in found.ranks], title=None),
        color=alt.Color("state:N", title=None, scale=scale),
        tooltip=["lane:N", "state:N", alt.Tooltip("ms:Q", format=",.4~r"), alt.Tooltip("from:Q", title="at ms")],
    )
    return bars.properties(width=WIDTH - 150, height=_LANE * max(4, len(found.ranks)))
