"""Charts: one Vega-Lite definition each, whether it becomes a page to explore or a picture. Needs the extra `charts`.

A chart is an Altair object, typed as Any: the package is there only where charts are drawn.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flopwise.errors import FlopwiseError
from flopwise.render.chart_style import colours_of
from flopwise.render.vega import HINT, vega_javascript
from flopwise.render.visible import visible
from flopwise.work.operation import CLASSES

SUFFIXES = (".svg", ".png", ".html")
# Okabe and Ito's colours first: told apart by people who do not see red or green.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000", "#999999", "#7A5195",
    "#8C564B", "#17BECF", "#BCBD22", "#E377C2",
)  # fmt: skip
# Whose bytes: what stays at the bottom, what comes and goes above it.
_OWNER_COLOURS = {
    "parameters": "#0072B2", "buffers": "#3B2A6B", "optimizer state": "#009E73", "gradients": "#E69F00",
    "inputs": "#8C6D31", "activations": "#D55E00", "attention scores": "#CC79A7", "logits": "#F0E442",
    "temporary": "#56B4E9", "workspace": "#666666", "unknown": "#BBBBBB",
}  # fmt: skip
# Pale, so that the strip of phases is not taken for owners; the same in every chart.
_PHASE_COLOURS = {
    "setup": "#DDDDDD", "data": "#FFFFCC", "forward": "#B3CDE3", "loss": "#CCEBC5", "backward": "#FBB4AE",
    "recompute": "#FED9A6", "optimizer": "#DECBE4",
}  # fmt: skip
_OTHER_PHASES = ("#E5D8BD", "#FDDAEC", "#F2F2F2")
_WIDTH, _HEIGHT, _DPI_SCALE = 640, 380, 2.0
_LONGEST = 120  # of a title or a name
# A picture's width is measured in one font and shown in another, up to a fifth wider: room for the legend to grow into.
_PADDING = {
    "left": 24,
    "top": 5,
    "bottom": 5,
    "right": 45,
}  # for a viewer whose letters are wider than those measured with
_FONT = "Arial, Helvetica, Liberation Sans, sans-serif"


def roofline_chart(
    points: Sequence[Mapping[str, Any]],
    roofs: Sequence[tuple[str, float]],
    bandwidth_bytes_per_s: float,
    title: str,
    subtitle: str = "",
) -> Any:
    """Operations as dots under their roofs: FLOPs per byte across, FLOP/s upwards, the dot's area is its time.

    `points`: rows with name, kind, intensity, flops_per_s, ms, and words for the tooltip: kernel, moves, share; `roofs`: names of
    precisions and their FLOP/s.
    """
    alt = altair()
    low = min([0.04, *(p["intensity"] for p in points if p["intensity"] > 0)]) / 2
    high = max([1e3, *(peak / bandwidth_bytes_per_s for _, peak in roofs), *(p["intensity"] for p in points)]) * 8
    lines = [
        {"roof": name, "intensity": x, "flops_per_s": min(peak, x * bandwidth_bytes_per_s)}
        for name, peak in roofs
        for x in (low, peak / bandwidth_bytes_per_s, high)
    ]
    ends = [row for row in lines if row["intensity"] == high]
    decades = [10.0**power for power in range(-4, 19)]
    present = {p["kind"] for p in points}
    kinds = [kind for kind in CLASSES if kind in present] + sorted(present - set(CLASSES))
    titles = {"kernel": "kernel", "moves": "moves", "share": "of its roof"}
    words = [
        alt.Tooltip(f"{word}:N", title=title) for word, title in titles.items() if any(p.get(word) for p in points)
    ]
    rates = [
        alt.Tooltip(f"{field}:Q", title=title)
        for field, title in (("intensity", "FLOPs/byte"), ("flops_per_s", "FLOP/s"), ("ms", "time, ms"))
    ]
    across = alt.X("intensity:Q", title="FLOPs per byte moved").scale(type="log", domain=[low, high], nice=False)
    across = across.axis(values=decades, format="~r")
    upwards = alt.Y("flops_per_s:Q", title="FLOP/s").scale(type="log").axis(values=decades, format="~s")
    roof = alt.Chart(alt.Data(values=lines)).mark_line(color="#888888", strokeWidth=1.5)
    roof = roof.encode(x=across, y=upwards, detail="roof:N")
    label = alt.Chart(alt.Data(values=ends)).mark_text(align="right", dy=-7, color="#888888")
    rows = [{k: visible(v, _LONGEST) if isinstance(v, str) else v for k, v in p.items()} for p in points]
    dots = alt.Chart(alt.Data(values=rows)).mark_circle(opacity=0.7, stroke="white", strokeWidth=0.4)
    dots = dots.encode(
        x=across,
        y=upwards,
        size=alt.Size("ms:Q", title="time, ms").scale(range=[15, 400]),
        order=alt.Order("ms:Q", sort="descending"),  # the small ones upon the large
        color=alt.Color("kind:N", title="class", sort=kinds, scale=alt.Scale(**colours_of(kinds))),
        tooltip=["name:N", "kind:N", *words, *rates],
    )
    layers = alt.layer(roof, label.encode(x=across, y=upwards, text="roof:N"), dots)
    heading = alt.TitleParams(visible(title, _LONGEST), subtitle=visible(subtitle, _LONGEST))
    return layers.properties(width=_WIDTH, height=_HEIGHT, title=heading)


def memory_chart(
    rows: Sequence[Mapping[str, Any]], owners: Sequence[str], unit: str, title: str, subtitle: str = ""
) -> Any:
    """Allocated bytes over time as areas stacked by owner, reserved bytes as a line above them, the phases as a strip below.

    `rows`: moments with `at` (in `unit`: 'ms', or what is counted), `phase`, one field for each owner, and `reserved`
    where the device's allocator reserves.
    """
    alt = altair()
    reserves = "reserved" in rows[0]
    name, size = _byte_unit(max(row["reserved"] if reserves else sum(row[o] for o in owners) for row in rows))
    rows = [{key: v / size if key in owners or key == "reserved" else v for key, v in row.items()} for row in rows]
    spans = _phase_spans(rows)
    rows = _highest_of_each_instant(rows, owners)
    known = [owner for owner in _OWNER_COLOURS if owner in owners]
    across = alt.X("at:Q", title=None).scale(domain=[rows[0]["at"], max(rows[-1]["at"], rows[0]["at"] + 1)], nice=False)
    upwards = alt.Y("bytes:Q", title=f"allocated, {name}").stack("zero")
    folded = alt.Chart(alt.Data(values=rows)).transform_fold(known, as_=["owner", "bytes"])
    folded = folded.transform_calculate(order=f"indexof({json.dumps(known)}, datum.owner)")
    legend = known[::-1]  # as they lie upon each other
    colours = alt.Scale(domain=legend, range=[_OWNER_COLOURS[owner] for owner in legend])
    areas = folded.mark_area(interpolate="step-after").encode(
        x=across.axis(labels=False, ticks=False),
        y=upwards,
        color=alt.Color("owner:N", title="owner", scale=colours, sort=legend),
        order=alt.Order("order:Q"),
        tooltip=["owner:N", alt.Tooltip("bytes:Q", title=name), "phase:N"],
    )
    layers = [areas]
    if reserves:
        line = alt.Chart(alt.Data(values=[{"at": row["at"], "reserved": row["reserved"]} for row in rows]))
        line = line.mark_line(interpolate="step-after", color="#888888", strokeWidth=1, strokeDash=[4, 2])
        layers.append(line.encode(x=across, y=alt.Y("reserved:Q")))
    strip = alt.Chart(alt.Data(values=spans)).mark_rect()
    strip = strip.encode(
        x=across.title(f"time, {unit}" if unit == "ms" else unit),
        x2="until:Q",
        color=alt.Color("phase:N", title="phase", scale=alt.Scale(**_phase_colours(spans))),
        tooltip=["phase:N"],
    )
    below = [one for one in (visible(subtitle, _LONGEST), "dashed: reserved" if reserves else "") if one]
    heading = alt.TitleParams(visible(title, _LONGEST), subtitle="; ".join(below))
    top = alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT, title=heading)
    return alt.vconcat(top, strip.properties(width=_WIDTH, height=14), spacing=4).resolve_scale(color="independent")


def _phase_colours(spans: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The phases in the order in which they come, each with its colour.

    >>> _phase_colours([{"phase": "forward"}, {"phase": "evaluate"}, {"phase": "forward"}])
    {'domain': ['forward', 'evaluate'], 'range': ['#B3CDE3', '#E5D8BD']}
    """
    phases = list(dict.fromkeys(span["phase"] for span in spans))
    others = [phase for phase in phases if phase not in _PHASE_COLOURS]
    other = {phase: _OTHER_PHASES[i % len(_OTHER_PHASES)] for i, phase in enumerate(others)}
    return {"domain": phases, "range": [_PHASE_COLOURS.get(phase) or other[phase] for phase in phases]}


def _byte_unit(largest: int) -> tuple[str, int]:
    return next(((name, 2**power) for name, power in (("GiB", 30), ("MiB", 20)) if largest >= 2**power), ("KiB", 2**10))


def _highest_of_each_instant(rows: Sequence[Mapping[str, Any]], owners: Sequence[str]) -> list[Mapping[str, Any]]:
    """Moments of one and the same time would be stacked upon each other; the highest of them is drawn.

    >>> _highest_of_each_instant([{"at": 0, "a": 1}, {"at": 0, "a": 3}, {"at": 0, "a": 2}, {"at": 1, "a": 1}], ["a"])
    [{'at': 0, 'a': 3}, {'at': 1, 'a': 1}]
    """
    highest: dict[float, Mapping[str, Any]] = {}
    for row in rows:
        other = highest.get(row["at"])
        if other is None or sum(row[owner] for owner in owners) > sum(other[owner] for owner in owners):
            highest[row["at"]] = row
    return list(highest.values())


def _phase_spans(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """From when to when each phase lasts; moments outside every phase have none."""
    spans: list[dict[str, Any]] = []
    for row in rows:
        if spans:
            spans[-1]["until"] = row["at"]
        if not spans or spans[-1]["phase"] != row["phase"]:
            spans.append({"at": row["at"], "until": row["at"], "phase": row["phase"]})
    return [span for span in spans if span["phase"]]


NOT_DRAWN = "This chart could not be drawn; its numbers are in the tables."


def save(chart: Any, path: str | Path) -> None:
    """Write a chart; the suffix decides: .svg and .png are pictures, .html a page that needs nothing from outside."""
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise FlopwiseError(f"the suffix '{target.suffix}' of {target} names no picture", f"use {', '.join(SUFFIXES)}")
    try:
        import vl_convert
    except ImportError:
        raise FlopwiseError("charts need the packages altair and vl-convert-python", HINT) from None
    spec = roomy(chart.to_dict(format="vega-lite"))
    match target.suffix:
        case ".svg":
            content = vl_convert.vegalite_to_svg(spec).encode()
        case ".png":
            content = vl_convert.vegalite_to_png(spec, scale=_DPI_SCALE)
        case _:
            content = _page(spec, vega_javascript()).encode()
    try:
        target.write_bytes(content)
    except OSError as error:
        raise FlopwiseError(f"cannot write {target}: {error.strerror}", "choose another place with -o") from None


def readable(draw: Callable[[], Any]) -> dict[str, Any] | None:
    """The chart's definition; None where its rows, which come from files, are such that it cannot be drawn."""
    try:
        spec: dict[str, Any] = roomy(draw().to_dict(format="vega-lite"))
        json.dumps(spec, allow_nan=False)
    except FlopwiseError:  # the package is missing
        raise
    except Exception:  # noqa: BLE001  one chart must not take the page down
        return None
    return spec


def roomy(spec: dict[str, Any]) -> dict[str, Any]:
    """The chart with room at its right edge, and no name in the legend cut short."""
    config = spec.get("config", {})
    legend = {"labelLimit": 0, "titleLimit": 0, **config.get("legend", {})}
    axis = {"titlePadding": 10, **config.get("axisY", {})}
    return {"padding": _PADDING, **spec, "config": {"font": _FONT, **config, "legend": legend, "axisY": axis}}


def _page(spec: Mapping[str, Any], javascript: str) -> str:
    """A page of one chart. Names in the spec come from traces: none of them can end the script they are in."""
    safe = json.dumps(spec).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    options = '{actions: false, ast: true, renderer: "svg", defaultStyle: false, tooltip: {disableDefaultStyle: true}}'
    script = f"""{javascript}
vegaEmbed("#chart", {safe}, {options});
"""
    style = (
        "body { font-family: sans-serif; margin: min(2em, 3vw) } #chart svg { max-width: 100%; height: auto } "
        "#vg-tooltip-element { position: fixed; background: #fff; color: #000 }"
    )
    policy = f"default-src 'none'; script-src {csp_hash(script)}; style-src {csp_hash(style)}; img-src data:"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>flopwise</title>
<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>
<body><div id="chart"></div><script type="module">{script}</script></body></html>
"""


def csp_hash(content: str) -> str:
    """What a content-security policy calls an inline script or style by, so that it may run and no other.

    >>> csp_hash("")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def altair() -> Any:
    """The package, or how to get it."""
    try:
        import altair as package
    except ImportError:
        raise FlopwiseError("charts need the packages altair and vl-convert-python", HINT) from None
    return package
