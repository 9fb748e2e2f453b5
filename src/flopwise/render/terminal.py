"""Tables on a terminal; plain text where it is none. NO_COLOR is respected (rich does).

A table wider than the terminal first wraps its headings and its words, then leaves out its least important columns and says
so; a single row is turned into a line per column. A number is never cut: it would be a wrong number.
"""

import io
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from flopwise.records.table import BAR, Column, Table
from flopwise.render.table import ShownColumn, ShownTable, shown

PLAIN_WIDTH = 2000  # for a file or a pipe: wide enough that nothing wraps
MOST_ROWS = 1000
_GAP = 2
_NARROWEST_NAME, _NARROWEST_SENTENCE = 16, 30  # of a column of words
_LONGEST_KEY = 34  # a run's name; longer words of a key are broken
_STYLES = {"faster": "green", "slower": "red", "inconclusive": "yellow", "oom": "red", "crash": "red", "timeout": "red"}


def texts(tables: Sequence[Table], console: Console | None = None, plain_width: int = PLAIN_WIDTH) -> str:
    """All tables, those of a group together under its heading. `plain_width`: where there is no terminal."""
    groups = dict.fromkeys(table.group for table in tables)
    blocks = []
    for group in groups:
        if group:
            blocks.append(text(Table("group", f"── {group} ──", (), ()), console, plain_width))
        blocks += [text(table, console, plain_width) for table in tables if table.group == group]
    return "\n".join(blocks)


def text(table: Table, console: Console | None = None, plain_width: int = PLAIN_WIDTH) -> str:
    """The table as text; with colours, and fitted to its width, when `console` is a terminal."""
    terminal = console is not None and console.is_terminal
    width = console.width if console is not None and terminal else plain_width
    no_color = console.no_color if console is not None else True
    out = io.StringIO()
    target = Console(file=out, width=width, force_terminal=terminal, no_color=no_color)
    seen = shown(table, MOST_ROWS)
    widths = fitted(seen, width)
    if len(seen.cells) == 1 and len(widths) < len(seen.columns):
        seen = _turned(seen)
        widths = fitted(seen, width)
    target.print(Text(seen.title, style="bold", overflow="fold"))
    if not terminal and _one_line_each(seen, widths):
        out.writelines(_plain(seen, widths))
    elif widths:
        target.print(_rich(seen, widths))
    hidden = [heading for i, heading in enumerate(seen.headings) if i not in widths]
    for note in (*_more(table), *([_hidden(hidden)] if hidden else []), *seen.notes):
        target.print(Padding(Text(note, overflow="fold"), (0, 0, 0, 2)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _more(table: Table) -> list[str]:
    """What is said of the rows that nobody reads."""
    left = len(table.rows[: table.most]) - MOST_ROWS
    return [f"{left:,} rows more (--format csv shows all)"] if left > 0 else []


def _hidden(headings: Sequence[str]) -> str:
    number = "1 column" if len(headings) == 1 else f"{len(headings)} columns"
    return f"{number} hidden: {'; '.join(headings)} (a wider terminal or --format csv shows all)"


def _turned(seen: ShownTable) -> ShownTable:
    """A table of one row, with a row for each column."""
    columns = [ShownColumn(Column(key), heading, False, False) for key, heading in (("field", ""), ("value", ""))]
    return ShownTable(
        seen.title, columns, [list(pair) for pair in zip(seen.headings, seen.cells[0], strict=True)], seen.notes
    )


def _rich(seen: ShownTable, widths: dict[int, int]) -> RichTable:
    rich = RichTable(header_style="bold", box=None, pad_edge=False, show_header=any(seen.headings))
    for i, width in widths.items():
        justify = "right" if seen.columns[i].right else "left"
        rich.add_column(Text(seen.headings[i]), justify=justify, width=width, overflow="fold")  # type: ignore[arg-type]
    for row in seen.cells:
        rich.add_row(*(Text(row[i], style=_STYLES.get(row[i], ""), overflow="fold") for i in widths))
    return rich


def _one_line_each(seen: ShownTable, widths: dict[int, int]) -> bool:
    lines = [seen.headings] * any(seen.headings) + seen.cells
    return all(cell_len(line[i]) <= width for line in lines for i, width in widths.items())


def _plain(seen: ShownTable, widths: dict[int, int]) -> Iterator[str]:
    """As `_rich` without colours, for cells of one line each: it takes seconds for thousands of rows."""
    for line in [seen.headings] * any(seen.headings) + seen.cells if widths else []:
        pads = {i: " " * (width - cell_len(line[i])) for i, width in widths.items()}
        yield (" " * _GAP).join(
            pads[i] + line[i] if seen.columns[i].right else line[i] + pads[i] for i in widths
        ) + "\n"


def fitted(seen: ShownTable, width: int) -> dict[int, int]:
    """The columns that fit, in order, each with its width."""
    widest = [
        max([cell_len(heading), *(cell_len(row[i]) for row in seen.cells)]) for i, heading in enumerate(seen.headings)
    ]
    least = [_least(seen, i) for i in range(len(widest))]
    kept = list(range(len(widest)))
    for i in sorted(kept[1:], key=lambda i: (seen.columns[i].column.importance, -i)):
        if sum(least[j] + _GAP for j in kept) - _GAP <= width:
            break
        kept.remove(i)
    widths = {i: min(least[i], width) for i in kept}
    room = width + _GAP - sum(w + _GAP for w in widths.values())
    for place, i in enumerate(growing := sorted(kept, key=lambda i: widest[i] - least[i])):
        more = min(widest[i] - widths[i], room // (len(growing) - place))
        widths[i] += more
        room -= more
    return widths


def _least(seen: ShownTable, i: int) -> int:
    """How narrow a column can be: words wrap, numbers and bars do not."""
    column = seen.columns[i]
    words = [cell_len(word) for word in column.heading.split()]
    whole = max([*(cell_len(row[i]) for row in seen.cells), *words, 1])
    if column.right or column.column.unit == BAR:
        return whole
    if i == 0:  # the key of the row: what one copies is not broken
        words += [min(_LONGEST_KEY, cell_len(word)) for row in seen.cells for word in row[0].split()]
    return min(whole, max([_NARROWEST_SENTENCE if column.wraps else _NARROWEST_NAME, *words]))
