"""An answer on one screen: at most 25 lines of 80 columns, the same text with and without colour.

Verdict; the step now, reachable and at its limit; one bar of where it goes; the changes worth most, each with the line to
type. A verb fills in a `Screen`; what it does not know it leaves out.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from flopwise import units
from flopwise.analysis.reach import Reach
from flopwise.render.visible import visible

WIDTH, LINES = 80, 25
NOW, REACHABLE, LIMIT = "now", "reachable", "limit"
BEFORE, TUNED = "before", "tuned"  # of a tuning: now and reachable, both measured
MEASURED, PREDICTED, SPECIFIED = "measured", "predicted", "specified"
USEFUL, IDLE, OTHER = "useful", "idle", "other"  # what a part of the bar is
MOST_FIGURES, MOST_CHANGES, MOST_PARTS = 3, 3, 8

_INDENT = 2
_BAR = WIDTH - 2 * _INDENT
_VERDICT_LINES, _NOTE_LINES, _PARAGRAPH_LINES = 3, 3, 6
_MOST_DAMAGE = 3
_LEGEND_NAME, _LEGEND_AMOUNT, _LEGEND_SHARE = 21, 8, 5
_LEGEND_CELL = 2 + _LEGEND_NAME + 1 + _LEGEND_AMOUNT + 1 + _LEGEND_SHARE
_REST, WORTH_A_LINE = "the rest", 0.005  # of the whole: parts below are added up
# Characters that differ from each other without colour; what is idle looks empty.
_MARKS = {
    USEFUL: (("█", "green"),),
    IDLE: (("░", "red"), ("·", "bright_red"), ("-", "red"), ("_", "bright_red")),
    OTHER: (
        *(("▓", "yellow"), ("▒", "cyan"), ("▚", "magenta"), ("▞", "blue")),
        *(("=", "bright_yellow"), ("+", "bright_cyan"), (":", "bright_magenta"), ("%", "bright_blue")),
    ),
}
_UNIT = re.compile(r"(?<=\d) (?=(?:%|ns|µs|ms|s|[KMGT]iB|B)(?:\W|$))")  # a number and its unit stay on one line
_NO_BREAK = "\ue000"
_HOW = {MEASURED: "green", PREDICTED: "yellow", SPECIFIED: "cyan"}


@dataclass(frozen=True)
class Figure:
    """One of the three numbers, and how it was obtained."""

    name: str  # NOW, REACHABLE or LIMIT
    amount: float
    how: str  # MEASURED, PREDICTED or SPECIFIED
    mfu: float | None = None
    note: str = ""  # of what, in a few words


@dataclass(frozen=True)
class Part:
    """A part of the bar; below zero where a step beats its limit: then it is in the legend alone."""

    name: str
    amount: float
    kind: str = OTHER


@dataclass(frozen=True)
class Change:
    """What to change, what that saves, and the line to type."""

    what: str
    saving: float
    line: str = ""
    shown: str = ""  # instead of the saving


@dataclass(frozen=True)
class Screen:
    """What a verb says. Amounts are of one unit: 'ns' of a step, or 'bytes' of its peak."""

    title: str
    where: str = ""  # the GPU or device
    verdict: str = ""
    damage: tuple[str, ...] = ()  # of the run: said before all else
    unit: str = "ns"
    figures: tuple[Figure, ...] = ()
    parts_title: str = ""
    parts: tuple[Part, ...] = ()
    changes_title: str = ""
    changes: tuple[Change, ...] = ()
    paragraphs: tuple[str, ...] = ()  # answers in words
    notes: tuple[str, ...] = ()  # the most important first: those that fit are shown
    more: str = "All tables: --full"


def reach_figures(found: Reach, how: str = PREDICTED) -> tuple[Figure, ...]:
    """What is reachable with all changes found, and the limit; as far as they are known."""
    figures = []
    if (ns := found.reachable_ns) is not None:
        figures.append(Figure(REACHABLE, ns, how, found.mfu(ns), with_changes(found.changes)))
    if (ns := found.limit_ns) is not None:
        note = f"its FLOPs at {units.rate(found.peak_flops or 0.0, 'FLOP/s')} {found.dtype}"
        stored = f" in {found.bytes_in}" if found.bytes_in else ""
        note = f"its bytes{stored} at {units.rate(found.bandwidth, 'B/s')}" if found.bandwidth else note
        figures.append(Figure(LIMIT, ns, SPECIFIED, found.mfu(ns), note))
    return tuple(figures)


def changes_title(changes: int) -> str:
    """Over predicted changes."""
    each = "; each with all above it made" if changes > 1 else ""
    return f"What to change (predicted{each})" if changes else ""


def with_changes(made: int) -> str:
    """Where what is reachable comes from.

    >>> with_changes(1), with_changes(5)
    ('with the change below', 'with all 5 changes, 3 below')
    """
    if made == 1:
        return "with the change below"
    return f"with all {made} changes" + (f", {MOST_CHANGES} below" if made > MOST_CHANGES else " below")


def in_a_line(found: Reach, how: str = PREDICTED) -> str:
    """The three numbers for a table's note; '' where nothing but the step is known.

    >>> in_a_line(Reach(now_ns=6e7, reachable_ns=2e7, changes=4))
    'now 60.0 ms; reachable 20.0 ms, with all 4 changes found (predicted)'
    """
    words = [f"now {units.duration(found.now_ns)}"]
    if found.reachable_ns is not None:
        which = f"all {found.changes} changes found" if found.changes > 1 else "the change found"
        words.append(f"reachable {units.duration(found.reachable_ns)}, with {which} ({how})")
    words += [f"limit {units.duration(one.amount)}, {one.note}" for one in reach_figures(found) if one.name == LIMIT]
    return "; ".join(words) if len(words) > 1 else ""


def screen_lines(screen: Screen) -> list[Text]:
    """Sections with an empty line between them where there is room; the first note has its place, others what is left."""
    head = [title_line(screen.title, screen.where), *damage_lines(screen.damage)]
    head += wrapped(screen.verdict, WIDTH, _VERDICT_LINES)
    words = [wrapped(one, WIDTH, _PARAGRAPH_LINES) for one in screen.paragraphs]
    sections = [part for part in (head, _figures(screen), _bar(screen), *words, _changes(screen)) if part]
    first, *others = [wrapped(note, WIDTH, _NOTE_LINES, "dim") for note in screen.notes] or [[]]
    foot = [*first, cut(screen.more, WIDTH, "dim")]
    room = LINES - sum(map(len, sections)) - len(foot) - len(sections)
    for note in others:
        if len(note) <= room:
            foot[-1:-1] = note
            room -= len(note)
    lines: list[Text] = []
    gaps = LINES - sum(map(len, sections)) - len(foot)
    for i, section in enumerate((*sections, foot)):
        lines += [*([Text("")] if 0 < i <= gaps else []), *section]
    for line in lines:
        line.rstrip()
    return lines


def damage_lines(damage: tuple[str, ...]) -> list[Text]:
    """What of a run is damaged: the first lines whole, the others counted."""
    more = len(damage) - _MOST_DAMAGE
    shown = [*damage[:_MOST_DAMAGE], *([f"and {more} more: --format json has them all"] if more > 0 else [])]
    return [line for one in shown for line in wrapped(f"Damaged: {one}", WIDTH, _NOTE_LINES, "bold red")]


def sentence(note: str) -> str:
    """A remark as it stands below a screen.

    >>> sentence("no waterfall: --gpu names one"), sentence("All is well.")
    ('No waterfall: --gpu names one.', 'All is well.')
    """
    return f"{note[:1].upper()}{note[1:]}{'' if note.endswith(('.', ':')) else '.'}" if note else ""


def title_line(title: str, where: str) -> Text:
    """What it is about, cut where it is long; where, whole."""
    there = cut(f" on {where}", WIDTH // 2, "bold") if where else Text()
    return cut(title, WIDTH - there.cell_len, "bold").append_text(there)


def _figures(screen: Screen) -> list[Text]:
    return [_figure(one, screen.unit) for one in screen.figures[:MOST_FIGURES]]


def _figure(one: Figure, unit: str) -> Text:
    amount = _number(one.amount, unit, 10)
    share = f"MFU {mfu}" if one.mfu is not None and (mfu := _percent(one.mfu, int(one.mfu < 1))) else ""
    line = Text(" " * _INDENT)
    line.append_text(sized(one.name, 9, "bold")).append("  ")
    line.append(f"{amount:>10}", style="bold" if one.name == NOW else "").append("  ")
    line.append(f"{share:<11}  ")
    line.append(one.how, style=_HOW.get(one.how, ""))
    if one.note:
        line.append(": ", style="dim").append_text(cut(one.note, WIDTH - line.cell_len, "dim"))
    return line


def _bar(screen: Screen) -> list[Text]:
    parts = largest(screen.parts)
    marks = list(_marked(parts))
    cells = _shared(_BAR, [max(0.0, part.amount) for part in parts])
    if not any(cells):
        return []
    bar = Text(" " * _INDENT)
    for (mark, style), n in zip(marks, cells, strict=True):
        bar.append(mark * n, style=style)
    whole = sum(part.amount for part in parts)
    legend = [_legend(part, mark, screen.unit, whole) for part, mark in zip(parts, marks, strict=True)]
    half = (len(legend) + 1) // 2  # read down the first column, then the second
    lines = []
    for i, left in enumerate(legend[:half]):
        line = Text(" " * _INDENT).append_text(left)
        lines.append(line.append("  ").append_text(legend[half + i]) if half + i < len(legend) else line)
    return [cut(screen.parts_title, WIDTH, "bold"), bar, *lines]


_MOST = 1e300  # what several of can still be added up


def largest(parts: Sequence[Part]) -> list[Part]:
    """The parts in their order; the smallest, if there are several or too many, are added up."""
    some = [part for part in parts if part.amount and abs(part.amount) < _MOST]  # a NaN is not
    least = WORTH_A_LINE * sum(abs(part.amount) for part in some)
    order = sorted(range(len(some)), key=lambda i: -abs(some[i].amount))
    kept = [i for i in order if abs(some[i].amount) >= least][:MOST_PARTS]
    if len(some) - len(kept) == 1 and len(some) <= MOST_PARTS:
        kept = order
    kept = kept if len(kept) == len(some) else kept[: MOST_PARTS - 1]
    rest = sum(some[i].amount for i in order if i not in kept)
    return [*(some[i] for i in sorted(kept)), *([Part(_REST, rest)] if len(kept) < len(some) else [])]


def _marked(parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
    """A mark and a colour for each part, none twice."""
    left = {kind: list(marks) for kind, marks in _MARKS.items()}
    for part in parts:
        kind = part.kind if left.get(part.kind) else OTHER
        yield left[kind].pop(0) if left[kind] else ("?", "")


def _shared(cells: int, amounts: Sequence[float]) -> list[int]:
    """Cells of a bar by amount, all of them: at least one for what is there.

    >>> _shared(10, [50.0, 49.0, 1.0]), _shared(4, [0.0, 0.0])
    ([5, 4, 1], [0, 0])
    """
    whole = sum(amounts)
    if not whole:
        return [0] * len(amounts)
    exact = [cells * amount / whole for amount in amounts]
    found = [max(1, int(share)) if share else 0 for share in exact]
    while sum(found) != cells:
        more = 1 if sum(found) < cells else -1
        place = max(
            range(len(found)), key=lambda i: (exact[i] - found[i]) * more if found[i] > 1 or more > 0 else -cells
        )
        found[place] += more
    return found


def _legend(part: Part, mark: tuple[str, str], unit: str, whole: float) -> Text:
    amount = _number(part.amount, unit, _LEGEND_AMOUNT)
    share = _percent(part.amount / whole) if whole > 0 else ""
    share = share if len(share) <= _LEGEND_SHARE else ""
    cell = Text().append(mark[0], style=mark[1]).append(" ").append_text(sized(part.name, _LEGEND_NAME))
    return cell.append(f" {amount:>{_LEGEND_AMOUNT}}").append(f" {share:>{_LEGEND_SHARE}}", style="dim")


def _changes(screen: Screen) -> list[Text]:
    lines = [cut(screen.changes_title, WIDTH, "bold")] if screen.changes_title else []
    for number, one in enumerate(screen.changes[:MOST_CHANGES], 1):
        saving = saves(one, screen)
        room = WIDTH - _INDENT - 3 - 2 - len(saving)
        head = Text(f"{' ' * _INDENT}{number}. ").append_text(sized(one.what, room))
        lines.append(head.append("  ").append(saving, style="green"))
        if one.line:
            indent = " " * (_INDENT + 3)
            lines.append(Text(indent).append_text(_typed(one.line, WIDTH - len(indent))))
    return lines


def saves(one: Change, screen: Screen) -> str:
    """What a change saves, and its share of the first number."""
    if one.shown:
        return one.shown
    if one.saving <= 0:
        return "needed for the others"
    now = screen.figures[0].amount if screen.figures else 0.0
    share = _percent(one.saving / now) if now > 0 else ""
    return f"saves {_number(one.saving, screen.unit, 10)}" + (f" ({share})" if share else "")


def _typed(line: str, width: int) -> Text:
    """A line to type; without its comment where that does not fit."""
    code = line.partition("  #")[0]
    return cut(line if len(line) <= width else code, width, "cyan")


def _number(amount: float, unit: str, width: int) -> str:
    """A number is shown whole or not at all: a part of it would be another number."""
    shown = units.shown(amount, unit) if math.isfinite(amount) else "…"
    return shown if len(shown) <= width else "…"


def _percent(share: float, digits: int = 0) -> str:
    """A share below a thousand per cent; '' for what no step has."""
    return units.percent(share, digits) if abs(share) < 10 else ""


def cut(words: str, width: int, style: str = "") -> Text:
    """Words from anywhere in one line of at most so many columns."""
    shown = visible(words, 2 * width)  # marks over letters take no column of their own
    if cell_len(shown) <= width:
        return Text(shown, style=style)
    return Text(set_cell_size(shown, max(0, width - 1)).rstrip() + "…", style=style)


def sized(words: str, width: int, style: str = "") -> Text:
    """As `cut`, and filled up to the width."""
    short = cut(words, width, style)
    return short.append(" " * (width - short.cell_len))


def wrapped(words: str, width: int, most: int, style: str = "") -> list[Text]:
    """Words in several lines; what does not fit into `most` is cut."""
    if not words:
        return []
    shown = Text(_UNIT.sub(_NO_BREAK, visible(words, 2 * most * width)))
    wrapped = shown.wrap(Console(file=io.StringIO(), width=width), width, overflow="fold")
    lines = [line.plain.replace(_NO_BREAK, " ") for line in wrapped]
    if len(lines) > most:
        return [*(Text(line, style) for line in lines[: most - 1]), cut("".join(lines[most - 1 :]), width, style)]
    return [Text(line, style) for line in lines]
