"""One table, several outputs: raw values under names with units, and how a person wants to read them."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Column:
    """`key` names the raw value (with its unit); `title` and `show` are for people."""

    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of raw values; a value that is None shows as nothing."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = field(default=())

    def cells(self) -> Iterable[list[str]]:
        """The rows as a person reads them."""
        for row in self.rows:
            yield ["" if row.get(c.key) is None else c.show(row[c.key]) for c in self.columns]


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
    lines = [f"**{_cell(table.title)}**", "", _line(c.title for c in table.columns)]
    lines += [_line("---:" if c.right else ":---" for c in table.columns)]
    lines += [_line(map(_cell, cells)) for cells in table.cells()]
    lines += ["", *(f"- {_cell(note)}" for note in table.notes)]
    return "\n".join(lines)


def csv_text(table: Table) -> str:
    """Raw values under their keys; the units are in the names.

    >>> csv_text(Table("t", (Column("wall_ns", "wall"),), ({"wall_ns": 5},)))
    'wall_ns\\r\\n5\\r\\n'
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([c.key for c in table.columns])
    for row in table.rows:
        writer.writerow(["" if row.get(c.key) is None else _csv_safe(row[c.key]) for c in table.columns])
    return out.getvalue()


def _csv_safe(value: Any) -> Any:
    """A name from outside must not become a formula in a spreadsheet."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
