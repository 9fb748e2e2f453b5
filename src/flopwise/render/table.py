"""A table as Markdown, CSV and HTML; the terminal's is in `terminal.py`. All read it through `shown`."""

import csv
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from flopwise import units
from flopwise.records.table import BAR, FILES_ONLY, SENTENCE, TEXT, AtMost, Column, Table
from flopwise.render.visible import LONGEST_CELL, LONGEST_LINE, visible

_HEADING = re.compile(r"(\w+)(?:: (.+?))?(?: \[(\w+)\])?")  # of a column: key: title [unit]
_NO_WIDTH = "&#8203;"
# A user or an address of mail, an issue or a merge request, an address; then a commit, of which six digits are not enough.
_LIVE = re.compile(r"@(?=[\w-])|(?<!&)[#!](?=\d)|GH-(?=\d)|:(?=//)|(?:mailto|xmpp):|www(?=\.)", re.IGNORECASE)
_COMMIT = re.compile(r"\b(?!\d+\b)[0-9a-f]{7,64}\b", re.IGNORECASE)
WARNINGS = "warnings"  # the key of a document for what was left out
_MARKDOWN = re.compile(r"[\\|*`\[\]~]")  # characters that Markdown would interpret


class View(NamedTuple):
    """An answer, for people and spreadsheets, and for programs."""

    tables: list[Table]
    document: dict[str, Any]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out of damaged runs: a format without notes says it elsewhere."""
        return tuple(self.document.get(WARNINGS, ()))


def saying(view: View, lost: tuple[str, ...]) -> View:
    """The same, with what was left out as notes and in the document."""
    if not lost or view.warnings:
        return view
    first, *others = view.tables or [Table("lost", "Nothing is left", (), ())]
    notes = tuple(dict.fromkeys((*lost, *first.notes)))
    return View([replace(first, notes=notes), *others], view.document | {WARNINGS: lost})


@dataclass(frozen=True)
class ShownColumn:
    """A column as people see it."""

    column: Column
    heading: str
    right: bool  # numbers
    wraps: bool  # sentences


@dataclass(frozen=True)
class ShownTable:
    """A table in texts of one line each, in which every character can be seen."""

    title: str
    columns: list[ShownColumn]
    cells: list[list[str]]
    notes: list[str]

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]


def shown(table: Table, most: int | None = None) -> ShownTable:
    """As a person reads it: the only way from a table to a terminal or a page, so that no name can steer either.

    Columns without any value are left out, and so are rows beyond the table's `most`; of the others the first `most` are made.
    """
    rows = table.rows[: table.most]
    used = [
        c for c in table.columns if c.importance > FILES_ONLY and (not rows or any(_given(r.get(c.key)) for r in rows))
    ]
    columns = [_column(column, table) for column in used]
    return ShownTable(
        title=visible(table.title, LONGEST_LINE),
        columns=columns,
        cells=[[_cell(column.column, row.get(column.column.key)) for column in columns] for row in rows[:most]],
        notes=[visible(note, LONGEST_LINE) for note in table.notes],
    )


def _given(value: Any) -> bool:
    return value is not None and value != ""


def _column(column: Column, table: Table) -> ShownColumn:
    values = [value for row in table.rows if (value := row.get(column.key)) is not None]
    words = (
        column.unit in (TEXT, SENTENCE, BAR)
        or column.labels is not None
        or any(isinstance(v, str | bool) for v in values)
    )
    return ShownColumn(column, visible(column.heading, LONGEST_CELL), right=not words, wraps=column.unit == SENTENCE)


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return ""
    text = units.shown(value, column.unit) if column.labels is None else column.labels.get(value, str(value))
    longest = LONGEST_LINE if column.unit == SENTENCE else LONGEST_CELL
    return visible(f"≤ {text}" if isinstance(value, AtMost) else text, longest)


# Titles and units of columns that several tables have, where they do not follow from the key.
_KNOWN = {
    "kind": ("class", ""),
    "dtype": ("in", ""),
    "gpu": ("GPU", ""),
    "count": ("count", "count"),
    "kernels": ("kernels", "count"),
    "parameters": ("parameters", "count"),
    "tokens": ("tokens", "count"),
    "intensity": ("FLOPs/byte", "number"),
    "flops": ("FLOPs", "flops"),
    "forward_flops": ("forward FLOPs", "flops"),
    "backward_flops": ("backward FLOPs", "flops"),
    "peak_bytes": ("peak memory", "bytes"),
    "mfu": ("MFU", "share"),
    "verdict": ("verdict", ""),
    "why": ("reason", SENTENCE),
    "reason": ("reason", SENTENCE),
    "stack": ("stack", SENTENCE),
}


def columns(
    heading: str, *, keep: str = "", files: str = "", labels: Mapping[str, Mapping[Any, str]] | None = None
) -> tuple[Column, ...]:
    """Columns as they head the table, the most important first: `key: title [unit] | key | …`; what is usual is left out.

    `keep`: keys that are left out last, whatever their place. `files`: those that only files have. `labels`: what to show for
    the values of a column.

    >>> [(c.heading, c.unit) for c in columns("kind | gpu_ns: GPU [ms] | peak_bytes: most | idle_share [percent]")]
    [('class', ''), ('GPU ms', 'ms'), ('most', 'bytes'), ('idle', 'percent')]
    """
    kept, made = keep.split()[::-1], []
    for part in heading.split("|"):
        key, title, unit = _HEADING.fullmatch(part.strip()).groups()  # type: ignore[union-attr]
        usual = _KNOWN.get(key, ("", ""))
        importance = FILES_ONLY if key in files.split() else kept.index(key) + 1 if key in kept else 0
        made.append(Column(key, title or usual[0], unit or usual[1], importance, (labels or {}).get(key)))
    return tuple(made)


def grouped(tables: Sequence[Table], groups: Mapping[str, str]) -> list[Table]:
    """The tables, each with its group: `groups` has the keys of each, `finding-*` for all that begin so.

    >>> [t.group for t in grouped([Table("a", "A", (), ()), Table("b-1", "B", (), ())], {"Details": "b-*"})]
    ['', 'Details']
    """
    wanted = [(group, pattern) for group, keys in groups.items() for pattern in keys.split()]
    found = {t.key: next((group for group, key in wanted if fnmatchcase(t.key, key)), "") for t in tables}
    return [replace(table, group=found[table.key]) for table in tables]


def markdown(table: Table) -> str:
    """A GitHub table, with its title and notes.

    >>> print(markdown(Table("t", "A table", (Column("a"),), ({"a": "x|y"},))))
    **A table**
    <BLANKLINE>
    | a |
    | :--- |
    | x\\|y |
    <BLANKLINE>
    """
    seen = shown(table)
    lines = [f"**{escaped(seen.title)}**", "", _line(map(escaped, seen.headings))]
    lines += [_line("---:" if column.right else ":---" for column in seen.columns)]
    lines += [_line(map(escaped, cells)) for cells in seen.cells]
    lines += ["", *(f"- {escaped(note)}" for note in seen.notes)] if seen.notes else []
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def escaped(text: str) -> str:
    """A name must not become a link, a picture, a tag or emphasis.

    >>> print(escaped("![x](y) <b> blocks.*.mlp"))
    !\\[x\\](y) &lt;b> blocks.\\*.mlp
    """
    return inert(_MARKDOWN.sub(r"\\\g<0>", text).replace("&", "&amp;").replace("<", "&lt;"))


def inert(text: str) -> str:
    """Markdown or HTML in which GitHub and GitLab find no user to call, no issue, no commit and no address to link to.

    What they look for is parted by a space of no width; numbers stay as they are.

    >>> inert("@eve fixes o/r#12, GH-3 and 1234567 at www.x.org").replace("&#8203;", "_")
    '@_eve fixes o/r#_12, GH-_3 and 1234567 at www_.x.org'
    >>> inert("see https://x.org/0123abc9").replace("&#8203;", "_")
    'see https:_//x.org/0123ab_c9'
    """
    text = _LIVE.sub(rf"\g<0>{_NO_WIDTH}", text)
    return _COMMIT.sub(lambda found: _NO_WIDTH.join(re.findall(".{1,6}", found[0])), text)


def csv_text(table: Table, titled: bool = False) -> str:
    """Raw values of every row under their keys; the units are in the names. A title is a row of one cell, after a #.

    >>> csv_text(Table("t", "A table", (Column("wall_ns"),), ({"wall_ns": 5},)), titled=True)
    '# A table\\r\\nwall_ns\\r\\n5\\r\\n'
    """
    out = io.StringIO()
    writer = csv.writer(out)
    if titled:
        writer.writerow([visible(f"# {table.title}")])
    writer.writerow([c.key for c in table.columns])
    writer.writerows([_csv_safe(row.get(c.key)) for c in table.columns] for row in table.rows)
    return out.getvalue()


def _csv_safe(value: Any) -> Any:
    """A name from outside must neither become a formula in a spreadsheet nor steer a terminal; it is kept whole."""
    if not isinstance(value, str):
        return "" if value is None else value
    return visible(f"'{value}" if value[:1] in ("=", "+", "-", "@") else value)


def html_text(table: Table) -> str:
    """Plain HTML that a notebook's own style fits.

    >>> html_text(Table("t", "<t>", (Column("a"),), ({"a": "<b>"},)))
    '<table><caption>&lt;t&gt;</caption><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    seen = shown(table)
    heads = "".join(f"<th>{html.escape(heading)}</th>" for heading in seen.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in seen.cells)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in seen.notes)
    head = f"<caption>{html.escape(seen.title)}</caption><thead><tr>{heads}</tr></thead>"
    return f"<table>{head}<tbody>{rows}</tbody></table>" + (f"<ul>{notes}</ul>" if notes else "")
