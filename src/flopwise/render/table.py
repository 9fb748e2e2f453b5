"""One table, several outputs: raw values under names with units, and how a person wants to read them."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flopwise.render.visible import LONGEST_CELL, LONGEST_LINE, visible


@dataclass(frozen=True)
class Column:
    """`key` names the raw value (with its unit); `title` and `show` are for people."""

    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True
    longest: int = LONGEST_CELL  # characters that are shown
    wraps: bool = False  # sentences: on a terminal too narrow for the table it is broken into lines


@dataclass(frozen=True)
class Table:
    """Rows of raw values; a value that is None shows as nothing."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = field(default=())

    def shown(self) -> "Shown":
        """As a person reads it: the only way from a table to a terminal or a page, so that no name can steer either."""
        return Shown(
            title=visible(self.title, LONGEST_LINE),
            headers=[visible(c.title, LONGEST_CELL) for c in self.columns],
            cells=[[_shown(c, row.get(c.key)) for c in self.columns] for row in self.rows],
            notes=[visible(note, LONGEST_LINE) for note in self.notes],
        )


@dataclass(frozen=True)
class Shown:
    """A table in texts of one line each, in which every character can be seen."""

    title: str
    headers: list[str]
    cells: list[list[str]]
    notes: list[str]


def _shown(column: Column, value: Any) -> str:
    return "" if value is None else visible(column.show(value), column.longest)


_MARKS = re.compile(r"[\\|*`\[\]~]")  # what Markdown would take for its own
View = tuple[list[Table], dict[str, Any]]  # for people and spreadsheets; for programs


def markdown(table: Table) -> str:
    """A GitHub table, with its title and notes.

    >>> print(markdown(Table("t", (Column("a", "A"),), ({"a": "x|y"},))))
    **t**
    <BLANKLINE>
    | A |
    | ---: |
    | x\\|y |
    <BLANKLINE>
    """
    shown = table.shown()
    lines = [f"**{escaped(shown.title)}**", "", _line(map(escaped, shown.headers))]
    lines += [_line("---:" if c.right else ":---" for c in table.columns)]
    lines += [_line(map(escaped, cells)) for cells in shown.cells]
    lines += ["", *(f"- {escaped(note)}" for note in shown.notes)] if shown.notes else []
    return "\n".join(lines) + "\n"


def csv_text(table: Table, titled: bool = False) -> str:
    """Raw values under their keys; the units are in the names. A title is a row of one cell, after a #.

    >>> csv_text(Table("t", (Column("wall_ns", "wall"),), ({"wall_ns": 5},)), titled=True)
    '# t\\r\\nwall_ns\\r\\n5\\r\\n'
    """
    out = io.StringIO()
    writer = csv.writer(out)
    if titled:
        writer.writerow([visible(f"# {table.title}")])
    writer.writerow([c.key for c in table.columns])
    for row in table.rows:
        writer.writerow(["" if row.get(c.key) is None else _csv_safe(row[c.key]) for c in table.columns])
    return out.getvalue()


def _csv_safe(value: Any) -> Any:
    """A name from outside must neither become a formula in a spreadsheet nor steer a terminal; it is kept whole."""
    if not isinstance(value, str):
        return value
    return visible(f"'{value}" if value[:1] in ("=", "+", "-", "@") else value)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def escaped(text: str) -> str:
    """A name must not become a link, a picture, a tag or emphasis.

    >>> print(escaped("![x](y) <b> blocks.*.mlp"))
    !\\[x\\](y) &lt;b> blocks.\\*.mlp
    """
    return _MARKS.sub(r"\\\g<0>", text).replace("&", "&amp;").replace("<", "&lt;")
