"""The step now, reachable and at its limit, with a view that is of something else."""

from dataclasses import replace

from flopwise.analysis.reach import Reach
from flopwise.render.screen import PREDICTED, in_a_line
from flopwise.render.table import View


def with_reach(view: View, found: Reach | None, how: str = PREDICTED) -> View:
    """As a note of the first table, and for programs."""
    if found is None or not view.tables:
        return view
    first, *others = view.tables
    noted = replace(first, notes=tuple(filter(None, (in_a_line(found, how), *first.notes))))
    return View([noted, *others], view.document | {"reach": found})
