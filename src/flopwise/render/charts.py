"""Charts as files and as definitions for a page: one Vega-Lite definition each. Needs the extra `charts`.

A chart is an Altair object, typed as Any: the package is there only where charts are drawn.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwise.errors import FlopwiseError
from flopwise.render.chart_style import COLOURS as COLOURS
from flopwise.render.drawing import MOST_BYTES, Drawing
from flopwise.render.vega import HINT, vega_javascript

SUFFIXES = (".svg", ".png", ".html")
NOT_DRAWN = "This chart could not be drawn; its numbers are in the tables."
# A viewer's font may be a fifth wider than the one that widths are computed with: room for the legend to grow into.
_PADDING = {"left": 24, "top": 5, "bottom": 5, "right": 45}
_ROWS = "rows"
_FONT = "Arial, Helvetica, Liberation Sans, sans-serif"


def save(chart: Any, path: str | Path) -> None:
    """Write a chart; the suffix decides: .svg and .png are pictures, .html a page that needs nothing from outside."""
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise FlopwiseError(f"the suffix '{target.suffix}' of {target} names no picture", f"use {', '.join(SUFFIXES)}")
    if target.suffix == ".html":
        content = _page(roomy(chart.to_dict(format="vega-lite")), vega_javascript()).encode()
    else:
        with Drawing() as drawing:
            content = drawing.picture(roomy(chart.to_dict(format="vega-lite")), target.suffix)
    try:
        target.write_bytes(content)
    except OSError as error:
        raise FlopwiseError(f"cannot write {target}: {error.strerror}", "choose another place with -o") from None


def readable(draw: Callable[[], Any]) -> dict[str, Any] | None:
    """The chart's definition; None where its rows, which come from files, are such that it cannot be drawn."""
    try:
        spec: dict[str, Any] = roomy(draw().to_dict(format="vega-lite"))
        too_large = len(json.dumps(spec, allow_nan=False)) > MOST_BYTES
    except FlopwiseError:  # the package is missing
        raise
    except Exception:  # noqa: BLE001  one chart must not take the page down
        return None
    return None if too_large else spec


@dataclass(frozen=True)
class ManyRows:
    """A chart over `named_rows`. They are put into its definition as they are: Altair would check each value on its own."""

    chart: Any
    rows: Sequence[Mapping[str, Any]]

    def to_dict(self, **options: Any) -> dict[str, Any]:
        return {**self.chart.to_dict(**options), "datasets": {_ROWS: list(self.rows)}}


def named_rows() -> Any:
    """The data of a chart that is given its rows by `ManyRows`."""
    return altair().NamedData(_ROWS)


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
