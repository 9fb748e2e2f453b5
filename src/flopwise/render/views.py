"""The view of every kind of result: what the command line and notebooks show."""

from collections.abc import Callable
from typing import Any

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.matching import compare_clocks, compare_points
from flopwise.analysis.roofline import Roofline
from flopwise.experiments.results import LabRun
from flopwise.predict.account import Account
from flopwise.records.ceilings import Ceilings
from flopwise.records.tuning import Tuning
from flopwise.render.account_view import account_view
from flopwise.render.comparison_view import comparison_view
from flopwise.render.explain_view import explanation_view
from flopwise.render.host_view import host_view
from flopwise.render.lab_view import lab_view
from flopwise.render.machine_view import ceilings_view
from flopwise.render.memory_view import memory_view
from flopwise.render.roofline_view import roofline_view
from flopwise.render.run_view import run_view
from flopwise.render.table import View, html_text
from flopwise.render.tune_view import tune_view
from flopwise.snapshot.answers import MemoryReport
from flopwise.store import StoredRun


def _stored_run_view(run: StoredRun) -> View:
    """The run; of two workloads that were measured against each other, also how they compare."""
    view, points = run_view(run), run.points
    if len(points) != 2 or points[1].paired_with != points[0].key or not all(point.phases for point in points):
        return view
    a, b = points
    compared = comparison_view([(a, b, compare_points(a, b))], (), (), clocks=compare_clocks(a, b))
    return View([*view.tables, *compared.tables], view.document | {"comparison": compared.document})


_VIEWS: dict[type, Callable[[Any], View]] = {
    StoredRun: _stored_run_view,
    Explanation: explanation_view,
    HostExplanation: host_view,
    Roofline: roofline_view,
    Account: account_view,
    MemoryReport: memory_view,
    Tuning: tune_view,
    LabRun: lab_view,
    Ceilings: ceilings_view,
}


def view_of(result: object) -> View:
    """A result's tables and its document."""
    return _VIEWS[type(result)](result)


def html_of(result: object) -> str:
    """A result's tables as HTML."""
    return "".join(map(html_text, view_of(result).tables))


def show_in_notebooks(formatter: Any) -> None:
    """Tell IPython's HTML formatter how to show every kind of result: as the command line does, in tables."""
    for kind in _VIEWS:
        formatter.for_type(kind, html_of)
