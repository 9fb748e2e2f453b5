"""Colours and sizes that all charts share: distinct without red or green, on white and on black."""

from typing import Any

# Okabe and Ito's colours first: distinct for people who do not see red or green.
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
COLOURS = (*_OKABE_ITO, "#999999", "#7A5195", "#8C564B", "#17BECF", "#BCBD22", "#E377C2")
SERIES = [colour for colour in COLOURS if colour not in ("#000000", "#F0E442")]  # a dark or a white page hides those
CLASS_COLOURS = {
    "matmul": "#0072B2",
    "attention": "#CC79A7",
    "elementwise": "#E69F00",
    "normalisation": "#009E73",
    "softmax": "#D55E00",
    "reduction": "#56B4E9",
    "copy/cast": "#8C8C8C",
    "optimizer": "#7A5195",
    "loss": "#A3A500",
    "communication": "#8C564B",
    "embedding/index": "#17A2B8",
    "memory": "#C9B38C",
    "random": "#E7A6C4",
    "other": "#BBBBBB",
}
SPARE = ("#6B8E23", "#4682B4", "#B8860B", "#A0522D", "#708090")
# Pale, so that a strip of phases is not taken for classes or owners.
PHASE_COLOURS = {
    "forward": "#7FB2D9",
    "loss": "#A5D6A7",
    "backward": "#F2A28C",
    "recompute": "#FBC97F",
    "optimizer": "#C3A6D8",
    "data": "#E6D96B",
    "setup": "#CFCFCF",
    "other": "#C8C8C8",
}
# What stays at the bottom, what comes and goes above it.
OWNER_COLOURS = {
    "parameters": "#0072B2",
    "buffers": "#3B2A6B",
    "optimizer state": "#009E73",
    "gradients": "#E69F00",
    "inputs": "#8C6D31",
    "activations": "#D55E00",
    "attention scores": "#CC79A7",
    "logits": "#F0E442",
    "temporary": "#56B4E9",
    "workspace": "#666666",
    "unknown": "#BBBBBB",
}
IDLE = "#D55E00"
BEFORE, AFTER = "#999999", "#0072B2"
MEASURED, PREDICTED = "#0072B2", "#E69F00"
INTERVAL = "#D55E00"
SAMPLE = "#4FA3DC"  # many small dots: light enough for a dark page
NEUTRAL = "#888888"  # lines and words on either ground
WIDTH, HEIGHT = 860, 320
LONGEST = 120  # characters of a title or a name


def class_colour(kind: str, place: int = 0) -> str:
    """A class's colour; an unknown one gets a spare one.

    >>> class_colour("matmul"), class_colour("my own", 1)
    ('#0072B2', '#4682B4')
    """
    return CLASS_COLOURS.get(kind) or SPARE[place % len(SPARE)]


def colours_of(kinds: list[str]) -> dict[str, list[str]]:
    """A colour scale of these classes."""
    return {"domain": kinds, "range": [class_colour(kind, place) for place, kind in enumerate(kinds)]}


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on this colour.

    >>> ink_on("#0072B2"), ink_on("#F0E442")
    ('#ffffff', '#000000')
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def milliseconds(alt: Any, field: str, title: str = "ms") -> Any:
    """A tooltip's time."""
    return alt.Tooltip(f"{field}:Q", title=title, format=",.4~r")
