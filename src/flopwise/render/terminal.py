"""Tables on a terminal; plain text where it is none. NO_COLOR is respected (rich does)."""

import io

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from flopwise.render.table import Table

PLAIN_WIDTH = 2000  # for a file or a pipe: wide enough that nothing wraps


def text(table: Table, console: Console | None = None) -> str:
    """The table as text; with colours when `console` is a terminal."""
    target = Console(file=io.StringIO(), width=PLAIN_WIDTH, no_color=True)
    if console is not None and console.is_terminal:
        target = Console(file=io.StringIO(), width=console.width, force_terminal=True, no_color=console.no_color)
    rich = RichTable(header_style="bold", box=None, pad_edge=False)
    for column in table.columns:
        # Names fold, numbers never do: a cut number would be a wrong number.
        rich.add_column(
            Text(column.title), justify="right" if column.right else "left", no_wrap=column.right, overflow="fold"
        )
    for cells in table.cells():
        rich.add_row(*(Text(cell, style=_style(cell)) for cell in cells))
    target.print(Text(table.title, style="bold"), soft_wrap=True)
    target.print(rich)
    for note in table.notes:
        target.print(Text(f"  {note}"), soft_wrap=not target.is_terminal)
    file = target.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _style(cell: str) -> str:
    return {
        "faster": "green",
        "slower": "red",
        "inconclusive": "yellow",
        "oom": "red",
        "crash": "red",
        "timeout": "red",
    }.get(cell, "")
