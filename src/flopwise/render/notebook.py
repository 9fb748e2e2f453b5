"""What a notebook shows of a result: its tables, as plain HTML that the notebook's own style fits."""

import html
from collections.abc import Iterable

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.roofline import Roofline
from flopwise.render.explain_view import explanation_view
from flopwise.render.roofline_view import roofline_view
from flopwise.render.run_view import run_view
from flopwise.render.table import Table
from flopwise.store import StoredRun


def run_html(run: StoredRun) -> str:
    """A run as `flopwise runs show` has it."""
    return tables_html(run_view(run)[0])


def explanation_html(explanation: Explanation) -> str:
    """A trace as `flopwise explain` has it."""
    return tables_html(explanation_view(explanation)[0])


def roofline_html(found: Roofline) -> str:
    """Operations as `flopwise roofline` has them."""
    return tables_html(roofline_view(found)[0])


def tables_html(tables: Iterable[Table]) -> str:
    """
    >>> from flopwise.render.table import Column
    >>> tables_html([Table("<t>", (Column("a", "A"),), ({"a": "<b>"},))])
    '<table><caption>&lt;t&gt;</caption><thead><tr><th>A</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    return "".join(map(_table, tables))


def _table(table: Table) -> str:
    shown = table.shown()
    heads = "".join(f"<th>{html.escape(header)}</th>" for header in shown.headers)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in shown.cells)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in shown.notes)
    body = f"<table><caption>{html.escape(shown.title)}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return body + (f"<ul>{notes}</ul>" if notes else "")
