"""A waterfall as a table: each part begins where the one before it ends."""

from collections.abc import Iterator, Mapping

from flopwise import units
from flopwise.records.table import Column, Table
from flopwise.records.waterfall import IDLE_OTHER, PARTS, Waterfall, WaterfallPart
from flopwise.render.table import columns

_BAR_WIDTH = 32  # characters for the whole step
_MOST_CLASSES = 3  # that are named, of a part with several
MEASURED_STEP, ESTIMATED_STEP = "the measured step", "the estimated step"


def steps_of(found: Waterfall) -> Iterator[tuple[WaterfallPart, float, float]]:
    """Each part with where it begins and ends, in nanoseconds."""
    at = 0.0
    for part in found.parts:
        yield part, at, at + part.ns
        at += part.ns


def waterfall_table(found: Waterfall, bars: bool = True) -> Table:
    """The parts with MFU; `bars`: drawn in letters, where there is no picture of it."""
    placed = list(steps_of(found))
    rows = tuple(
        {"part": part.name, "ns": part.ns, "share": part.share, "ends_at_ns": end, "how": part.how, "why": reason(part)}
        for part, _, end in placed
    )
    labels = {end: _bar(begin, end, found.step_ns) for _, begin, end in placed}
    bar = "ends_at_ns: from start to end [bar] | " if bars else ""
    heading = f"part | ns: time [ms] | share | {bar}why: because | how: limit"
    shown = columns(heading, keep="ns share why", labels={"ends_at_ns": labels})
    title = f"From the ideal to {step_name(found)}: {units.duration(found.step_ns)}, by {found.measured_by}"
    return Table("waterfall", title, shown, rows, (*utilisation(found), *found.notes))


def step_name(found: Waterfall) -> str:
    """What the parts add up to."""
    return MEASURED_STEP if found.untraced is None or found.untraced.measured else ESTIMATED_STEP


def waterfalls_table(found: Mapping[str, Waterfall]) -> Table:
    """The same parts of several steps side by side."""
    names = [name for name in PARTS if any(fall.ns(name) for fall in found.values())]
    rows = [{"part": name} | {which: fall.ns(name) or None for which, fall in found.items()} for name in names]
    rows.append({"part": "step"} | {which: fall.step_ns for which, fall in found.items()})
    notes = tuple(f"{which}: {line}" for which, fall in found.items() for line in (*utilisation(fall)[:1], *fall.notes))
    shown = (Column("part"), *(Column(which, which, "ms") for which in found))
    return Table("waterfalls", "From the ideal to the measured step", shown, tuple(rows), notes, total=True)


def reason(part: WaterfallPart) -> str:
    """Why a part takes its time, with the classes that have most of it."""
    ranked = sorted(part.by_class.items(), key=lambda item: -abs(item[1]))
    if len(ranked) < 2 or part.name == IDLE_OTHER:  # its line names the causes
        return part.why
    named = ", ".join(f"{kind} {units.duration(ns)}" for kind, ns in ranked[:_MOST_CLASSES])
    more = ", …" if len(ranked) > _MOST_CLASSES else ""
    return "; ".join(words for words in (part.why, named + more) if words)


def utilisation(found: Waterfall) -> tuple[str, ...]:
    """MFU, HFU and the share of the roofline in one line, and how FLOPs are counted."""
    shares = (("MFU", found.mfu), ("HFU", found.hfu), ("share of the roofline", found.roofline_share))
    words = ", ".join(f"{name} {units.percent(share)}" for name, share in shares if share is not None)
    return tuple(line for line in (words, f"FLOPs: {found.convention}" if found.convention else "") if line)


def _bar(begin: float, end: float, whole: float) -> str:
    """From where a part begins to where it ends; one that takes time off is drawn pale.

    >>> _bar(50.0, 100.0, 100.0), _bar(100.0, 75.0, 100.0)
    ('                ████████████████', '                        ░░░░░░░░')
    """
    low, high = (round(_BAR_WIDTH * min(max(at / whole, 0.0), 1.0)) for at in sorted((begin, end)))
    mark = "█" if high > low else "▏"
    return " " * low + ("░" if end < begin else mark) * max(1, high - low)
