"""Tables on a terminal; plain text where it is none. NO_COLOR is respected (rich does).

A table wider than the terminal is cut between columns, never inside one: a cut number would be a wrong number. Sentences
are broken into lines.
"""

import io
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from flopwise.render.table import Shown, Table

PLAIN_WIDTH = 2000  # for a file or a pipe: wide enough that nothing wraps
_GAP = 2
_NARROWEST = 18  # of a column of sentences
_STYLES = {"faster": "green", "slower": "red", "inconclusive": "yellow", "oom": "red", "crash": "red", "timeout": "red"}


def text(table: Table, console: Console | None = None) -> str:
    """The table as text; with colours, and cut to its width, when `console` is a terminal."""
    width = console.width if console is not None and console.is_terminal else PLAIN_WIDTH
    coloured = console is not None and console.is_terminal
    no_color = console.no_color if console is not None else True
    target = Console(file=io.StringIO(), width=PLAIN_WIDTH, force_terminal=coloured, no_color=no_color)
    shown = table.shown()
    target.print(Text(shown.title, style="bold"), soft_wrap=True)
    sizes = _sizes(table, shown, width)
    for block in _blocks(table, sizes, width):
        target.print(_rich(table, shown, block, sizes))
    for note in shown.notes:
        target.print(Text(f"  {note}"), soft_wrap=True)
    file = target.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _rich(table: Table, shown: Shown, block: list[int], sizes: list[int]) -> RichTable:
    rich = RichTable(header_style="bold", box=None, pad_edge=False)
    for i in block:
        justify: Literal["left", "right"] = "right" if table.columns[i].right else "left"
        wraps = table.columns[i].wraps
        rich.add_column(
            Text(shown.headers[i]), justify=justify, no_wrap=not wraps, width=sizes[i] - _GAP if wraps else None
        )
    for row in shown.cells:
        rich.add_row(*(Text(row[i], style=_STYLES.get(row[i], "")) for i in block))
    return rich


def _sizes(table: Table, shown: Shown, width: int) -> list[int]:
    """How wide each column is, with the gap after it; sentences share what the others leave."""
    sizes = [
        max(cell_len(header), *(cell_len(row[i]) for row in shown.cells), 0) + _GAP
        for i, header in enumerate(shown.headers)
    ]
    wrapped = [i for i, column in enumerate(table.columns) if column.wraps]
    left = width + _GAP - sum(size for i, size in enumerate(sizes) if i not in wrapped)
    for i in wrapped:
        sizes[i] = min(sizes[i], max(_NARROWEST + _GAP, left // len(wrapped)))
    return sizes


def _blocks(table: Table, sizes: list[int], width: int) -> list[list[int]]:
    """The columns of each block: the leading names in every block, as many others beside them as fit, at least one."""
    n_keys = next((i for i, c in enumerate(table.columns) if c.right), len(sizes))
    while n_keys > 1 and sum(sizes[:n_keys]) > width // 2:
        n_keys -= 1
    keys = list(range(n_keys))
    blocks, block = [], list(keys)
    for i in range(n_keys, len(sizes)):
        if len(block) > n_keys and sum(sizes[j] for j in (*block, i)) - _GAP > width:
            blocks.append(block)
            block = list(keys)
        block.append(i)
    return [*blocks, block] if block else []
