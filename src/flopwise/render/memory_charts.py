"""Charts of memory: over time, and predicted compared with measured."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from flopwise import units
from flopwise.render import chart_style as style
from flopwise.render.chart_style import LONGEST, OWNER_COLOURS, PHASE_COLOURS, SPARE
from flopwise.render.charts import altair
from flopwise.render.memory_view import event_name, reserves, subject
from flopwise.render.run_charts import paired_bars
from flopwise.render.visible import visible
from flopwise.snapshot.answers import MemoryReport

_WIDTH, _HEIGHT = 640, 380


def timeline_chart(report: MemoryReport) -> Any:
    """Allocated bytes of the first device as areas stacked by owner, reserved bytes as a line, the phases as a strip below."""
    alt = altair()
    device = report.devices[0]
    line = device.timeline
    clock = line.event if line.time_us is None else [time / 1000 for time in line.time_us]
    totals = [sum(values) for values in zip(*line.owners.values(), strict=True)]
    caching = reserves(device)
    unit, size = _byte_unit(max(line.reserved_bytes if caching else totals, default=0))
    rows = [
        {"at": at, "phase": visible(phase or "", LONGEST), "total": total, "reserved": reserved / size}
        | {owner: values[i] / size for owner, values in line.owners.items()}
        for i, (at, phase, total, reserved) in enumerate(
            zip(clock, line.phase, totals, line.reserved_bytes, strict=True)
        )
    ]
    spans = _phase_spans(rows)
    rows = _highest_of_each_instant(rows)
    owners = [owner for owner in OWNER_COLOURS if owner in line.owners]
    x = alt.X("at:Q", title=None).scale(domain=[rows[0]["at"], max(rows[-1]["at"], rows[0]["at"] + 1)], nice=False)
    layers = [_areas(alt, rows, owners, x, unit)]
    if caching:
        dashed = alt.Chart(alt.Data(values=rows)).mark_line(
            interpolate="step-after", color=style.NEUTRAL, strokeWidth=1, strokeDash=[4, 2]
        )
        layers.append(dashed.encode(x=x, y=alt.Y("reserved:Q")))
    subtitle = f"peak {units.size(device.peak.allocated_bytes)} allocated, {report.obtained}"
    subtitle += "; dashed: reserved" if caching else ""
    title = alt.TitleParams(visible(subject(report), LONGEST), subtitle=subtitle)
    strip = alt.Chart(alt.Data(values=spans)).mark_rect()
    strip = strip.encode(
        x=x.title(event_name(report) if line.time_us is None else "time, ms"),
        x2="until:Q",
        color=alt.Color("phase:N", title="phase", scale=alt.Scale(**_phase_colours(spans))),
        tooltip=["phase:N"],
    )
    top = alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT, title=title)
    return alt.vconcat(top, strip.properties(width=_WIDTH, height=14), spacing=4).resolve_scale(color="independent")


def _areas(alt: Any, rows: Sequence[Mapping[str, Any]], owners: list[str], x: Any, unit: str) -> Any:
    legend = owners[::-1]  # as they are stacked
    colours = alt.Scale(domain=legend, range=[OWNER_COLOURS[owner] for owner in legend])
    folded = alt.Chart(alt.Data(values=list(rows))).transform_fold(owners, as_=["owner", "bytes"])
    folded = folded.transform_calculate(order=f"indexof({json.dumps(owners)}, datum.owner)")
    return folded.mark_area(interpolate="step-after").encode(
        x=x.axis(labels=False, ticks=False),
        y=alt.Y("bytes:Q", title=f"allocated, {unit}").stack("zero"),
        color=alt.Color("owner:N", title="owner", scale=colours, sort=legend),
        order=alt.Order("order:Q"),
        tooltip=["owner:N", alt.Tooltip("bytes:Q", title=unit), "phase:N"],
    )


def _phase_colours(spans: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The phases in the order in which they come, each with its colour.

    >>> _phase_colours([{"phase": "forward"}, {"phase": "evaluate"}, {"phase": "forward"}])
    {'domain': ['forward', 'evaluate'], 'range': ['#7FB2D9', '#6B8E23']}
    """
    phases = list(dict.fromkeys(span["phase"] for span in spans))
    others = [phase for phase in phases if phase not in PHASE_COLOURS]
    spare = {phase: SPARE[i % len(SPARE)] for i, phase in enumerate(others)}
    return {"domain": phases, "range": [PHASE_COLOURS.get(phase) or spare[phase] for phase in phases]}


def _byte_unit(largest: int) -> tuple[str, int]:
    return next(((name, 2**power) for name, power in (("GiB", 30), ("MiB", 20)) if largest >= 2**power), ("KiB", 2**10))


def _highest_of_each_instant(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moments of one and the same time would be stacked upon each other; the highest of them is drawn.

    >>> _highest_of_each_instant([{"at": 0, "total": 1}, {"at": 0, "total": 3}, {"at": 1, "total": 1}])
    [{'at': 0, 'total': 3}, {'at': 1, 'total': 1}]
    """
    highest: dict[float, dict[str, Any]] = {}
    for row in rows:
        if row["at"] not in highest or row["total"] > highest[row["at"]]["total"]:
            highest[row["at"]] = row
    return list(highest.values())


def _phase_spans(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """From when to when each phase lasts; moments outside every phase have none."""
    starts = [(phase, next(group)["at"]) for phase, group in groupby(rows, key=lambda row: row["phase"])]
    ends = [*(at for _, at in starts[1:]), rows[-1]["at"]]
    return [
        {"at": at, "until": until, "phase": phase} for (phase, at), until in zip(starts, ends, strict=True) if phase
    ]


def predicted_chart(report: MemoryReport) -> Any:
    """Bytes by owner at the peak, predicted and measured."""
    peak = report.devices[0].peak
    owners = [owner for owner, size in sorted(peak.owners.items(), key=lambda item: -item[1]) if size]
    sources = {"measured": peak.owners} | {f"predicted: {p.source}": p.peak.owners for p in report.predictions}
    rows = [
        {"name": owner, "which": which, "gib": sizes.get(owner, 0) / 2**30}
        for owner in owners
        for which, sizes in sources.items()
    ]
    colours = dict(zip(sources, (style.MEASURED, style.PREDICTED, *style.COLOURS[2:4]), strict=False))
    return paired_bars(rows, "gib", "GiB at the peak", colours)
