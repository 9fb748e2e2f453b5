"""Several answers on one screen: a line each, in 80 columns; one of them whole is another command."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from flopwise.render.screen import LINES, WIDTH, cut, damage_lines, title_line, wrapped
from flopwise.render.visible import visible

_INDENT, _GAP, _NAME = 2, 2, 34  # columns; of a name before a number is left out for it
_VERDICT_LINES, _NOTE_LINES = 2, 2


@dataclass(frozen=True)
class Heading:
    """A column: numbers stand right; where not all fit, those of the lowest worth are left out first, never those of 0."""

    name: str
    right: bool = True
    worth: int = 0


@dataclass(frozen=True)
class Listing:
    """A title, a verdict on all, and a row of texts for each; the first column is cut where it is long."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[str, ...], ...]
    where: str = ""
    verdict: str = ""
    damage: tuple[str, ...] = ()  # of the run: said before all else
    notes: tuple[str, ...] = ()
    more: str = "All tables: --full"


def listing_lines(shown: Listing) -> list[Text]:
    """All rows, however many; notes while they fit on the screen."""
    lines = [title_line(shown.title, shown.where), *damage_lines(shown.damage)]
    lines += [*wrapped(shown.verdict, WIDTH, _VERDICT_LINES), Text("")]
    lines += [*_table(shown), Text("")]
    for note in shown.notes:
        some = wrapped(note, WIDTH, _NOTE_LINES, "dim")
        lines += some if len(lines) + len(some) < LINES else []
    lines += wrapped(shown.more, WIDTH, _NOTE_LINES, "dim")
    for line in lines:
        line.rstrip()
    return lines


def _table(shown: Listing) -> list[Text]:
    chosen = _chosen(shown)
    widths = [min(_width(shown, place), WIDTH // 2) for place in chosen]
    room = WIDTH - _INDENT - sum(widths[1:]) - _GAP * (len(chosen) - 1)
    widths[0] = min(widths[0], max(room, 0))
    heads = [shown.headings[place] for place in chosen]
    lines = [_line([one.name for one in heads], heads, widths, "bold")]
    lines += [_line([row[place] for place in chosen], heads, widths) for row in shown.rows]
    return lines


def _chosen(shown: Listing) -> list[int]:
    """Columns that have a value and fit next to each other."""
    chosen = [place for place in range(len(shown.headings)) if not place or any(row[place] for row in shown.rows)]

    def whole() -> int:
        first = min(_width(shown, chosen[0]), _NAME)
        return _INDENT + first + sum(_GAP + _width(shown, place) for place in chosen[1:])

    while whole() > WIDTH and (least := [p for p in chosen if shown.headings[p].worth]):
        chosen.remove(min(least, key=lambda place: shown.headings[place].worth))
    return chosen


def _width(shown: Listing, place: int) -> int:
    texts = (shown.headings[place].name, *(row[place] for row in shown.rows))
    return max(cell_len(visible(one, 2 * WIDTH)) for one in texts)


def _line(cells: Sequence[str], heads: Sequence[Heading], widths: Sequence[int], style: str = "") -> Text:
    words = (" " * _GAP).join(_cell(*one) for one in zip(cells, heads, widths, strict=True))
    return cut(" " * _INDENT + words, WIDTH, style)


def _cell(words: str, head: Heading, width: int) -> str:
    short = cut(words, width)
    pad = " " * (width - short.cell_len)
    return pad + short.plain if head.right else short.plain + pad
