"""A waterfall as a table: each part begins where the one before it ends."""

from collections.abc import Iterator, Mapping

from flopwise import units
from flopwise.records.waterfall import IDLE_OTHER, PARTS, Waterfall, WaterfallPart
from flopwise.render.table import Column, Table
from flopwise.render.visible import LONGEST_LINE

_BAR = 32  # characters for the whole step
_CLASSES = 3  # that are named, of a part with several


def steps_of(found: Waterfall) -> Iterator[tuple[WaterfallPart, float, float]]:
    """Each part with where it begins and ends, in nanoseconds."""
    at = 0.0
    for part in found.parts:
        yield part, at, at + part.ns
        at += part.ns


def waterfall_table(found: Waterfall) -> Table:
    """The parts, and MFU beside them."""
    placed = list(steps_of(found))
    begins = {end: begin for _, begin, end in placed}
    rows = tuple(
        {"part": part.name, "ns": part.ns, "share": part.share, "ends_at_ns": end, "how": part.how, "why": told(part)}
        for part, _, end in placed
    )
    columns = (
        Column("part", "part", right=False),
        Column("ns", "ms", units.milliseconds),
        Column("share", "share", units.percent),
        Column("ends_at_ns", "", lambda end: _bar(begins[end], end, found.step_ns), right=False),
        Column("how", "limit", right=False),
        Column("why", "because", right=False, longest=LONGEST_LINE),
    )
    title = f"from the ideal to the measured step: {units.duration(found.step_ns)}, by {found.measured_by}"
    return Table(title=title, columns=columns, rows=rows, notes=(*shares_told(found), *found.notes))


def waterfalls_table(found: Mapping[str, Waterfall]) -> Table:
    """The same parts of several steps side by side."""
    names = [name for name in PARTS if any(fall.ns(name) for fall in found.values())]
    rows = [{"part": name} | {which: fall.ns(name) or None for which, fall in found.items()} for name in names]
    rows.append({"part": "step"} | {which: fall.step_ns for which, fall in found.items()})
    columns = [Column("part", "part", right=False)]
    columns += [Column(which, f"{which}, ms", units.milliseconds) for which in found]
    notes = tuple(f"{which}: {line}" for which, fall in found.items() for line in (*shares_told(fall)[:1], *fall.notes))
    return Table(title="From the ideal to the measured step", columns=tuple(columns), rows=tuple(rows), notes=notes)


def told(part: WaterfallPart) -> str:
    """Why, with the classes that have most of it."""
    ranked = sorted(part.by_class.items(), key=lambda item: -abs(item[1]))
    if len(ranked) < 2 or part.name == IDLE_OTHER:  # its line names the causes
        return part.why
    named = ", ".join(f"{kind} {units.duration(ns)}" for kind, ns in ranked[:_CLASSES])
    more = ", …" if len(ranked) > _CLASSES else ""
    return "; ".join(words for words in (part.why, named + more) if words)


def shares_told(found: Waterfall) -> tuple[str, ...]:
    """MFU, HFU and the share of the roofline in one line, and how FLOPs are counted."""
    shares = (("MFU", found.mfu), ("HFU", found.hfu), ("share of the roofline", found.roofline_share))
    words = ", ".join(f"{name} {units.percent(share)}" for name, share in shares if share is not None)
    return tuple(line for line in (words, f"FLOPs: {found.convention}" if found.convention else "") if line)


def _bar(begin: float, end: float, whole: float) -> str:
    """From where a part begins to where it ends; one that takes time off is drawn pale.

    >>> _bar(50.0, 100.0, 100.0), _bar(100.0, 75.0, 100.0)
    ('                ████████████████', '                        ░░░░░░░░')
    """
    low, high = (round(_BAR * min(max(at / whole, 0.0), 1.0)) for at in sorted((begin, end)))
    mark = "█" if high > low else "▏"
    return " " * low + ("░" if end < begin else mark) * max(1, high - low)
