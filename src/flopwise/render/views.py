"""The view of every kind of result: what the command line, `print` and notebooks show."""

import dataclasses
import html
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from flopwise.advice.explained import explained_run
from flopwise.advice.measured_levers import measured_reach
from flopwise.analysis.course import CourseReport
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.matching import Compared, compare_within
from flopwise.analysis.roofline import Roofline
from flopwise.experiments.results import LabRun
from flopwise.predict.account import Account
from flopwise.records.ceilings import Ceilings
from flopwise.records.generated import Generated
from flopwise.records.plan import Plan
from flopwise.records.ranks import RanksExplanation
from flopwise.records.training import Training
from flopwise.records.tuning import Tuning
from flopwise.render import one_screen, terminal
from flopwise.render.account_listing import account_shown
from flopwise.render.account_view import account_view
from flopwise.render.comparison_view import comparison_view
from flopwise.render.course_view import course_screen, course_view
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.explain_view import explanation_view
from flopwise.render.generate_view import generate_screen, generate_view
from flopwise.render.host_screen import host_screen
from flopwise.render.host_view import host_view
from flopwise.render.lab_view import lab_view
from flopwise.render.listing import Listing
from flopwise.render.listings import points_listing
from flopwise.render.loop_screen import loop_screen
from flopwise.render.machine_view import ceilings_view
from flopwise.render.memory_screen import memory_screen
from flopwise.render.memory_view import memory_view
from flopwise.render.one_screen import Shown
from flopwise.render.plan_screen import plan_screen
from flopwise.render.plan_view import plan_view
from flopwise.render.ranks_screen import ranks_screen
from flopwise.render.ranks_view import ranks_view
from flopwise.render.reach_view import with_reach
from flopwise.render.roofline_view import roofline_view
from flopwise.render.run_screen import run_screen
from flopwise.render.run_view import implementations_view, run_view
from flopwise.render.screen import WIDTH, Screen
from flopwise.render.table import View, html_text, saying
from flopwise.render.train_view import train_screen, train_view
from flopwise.render.tune_screen import tune_screen
from flopwise.render.tune_view import tune_view
from flopwise.snapshot.answers import MemoryReport
from flopwise.snapshot.stored import stored_report
from flopwise.spec.operations import OpSpec
from flopwise.store import StoredRun

_Made = TypeVar("_Made")


def _stored_run_view(run: StoredRun) -> View:
    """The run: of one point what is reachable, of two measured against each other how they compare; implementations together."""
    view, within = run_view(run), compare_within(run.points)
    if len(run.points) == 1 and run.points[0].phases:
        return with_reach(view, measured_reach(run.points[0])[0])
    if within is None:
        return implementations_view(run, view.document) if _of_implementations(run) else view
    compared = comparison_view(within)
    return View([*view.tables, *compared.tables], view.document | {"comparison": compared.document})


def _of_implementations(run: StoredRun) -> bool:
    """Whether its points are one operation, each implemented otherwise; collectives have bandwidths of their own."""
    works = [point.trial.workload for point in run.points if not point.trial.workload.many]
    ops = [replace(work.subject, impl="") for work in works if isinstance(work.subject, OpSpec) and work.subject.impl]
    alike = {msgspec.json.encode(replace(work, subject=op)) for work, op in zip(works, ops, strict=False)}
    return len(run.points) == len(ops) > 1 and len(alike) == 1


def _stored_run_screen(run: StoredRun) -> Shown | None:
    """Implementations side by side are a table of their own."""
    if run.header.kind == "memory" and run.points:
        return memory_screen(stored_report(run))
    if len(run.points) == 1 and run.points[0].loop is not None:
        return loop_screen(run, explained_run(run))
    several = len(run.points) > 1 and not _of_implementations(run)
    return run_screen(run) or (points_listing(run) if several else None)


_VIEWS: dict[type, Callable[[Any], View]] = {
    StoredRun: _stored_run_view,
    Compared: comparison_view,
    CourseReport: course_view,
    Explanation: explanation_view,
    HostExplanation: host_view,
    RanksExplanation: ranks_view,
    Roofline: roofline_view,
    Account: account_view,
    Plan: plan_view,
    MemoryReport: memory_view,
    Tuning: tune_view,
    Training: train_view,
    Generated: generate_view,
    LabRun: lab_view,
    Ceilings: ceilings_view,
}
# Those that answer on one screen; others are their tables.
_SCREENS: dict[type, Callable[[Any], Shown | None]] = {
    StoredRun: _stored_run_screen,
    Explanation: explanation_screen,
    HostExplanation: host_screen,
    RanksExplanation: ranks_screen,
    Account: account_shown,
    Plan: plan_screen,
    CourseReport: course_screen,
    MemoryReport: memory_screen,
    Tuning: tune_screen,
    Training: train_screen,
    Generated: generate_screen,
}


def _made_by(table: dict[type, Callable[[Any], _Made]], result: object) -> Callable[[Any], _Made] | None:
    return next((table[kind] for kind in type(result).__mro__ if kind in table), None)


def view_of(result: object) -> View:
    """A result's tables and its document."""
    make = _made_by(_VIEWS, result)
    assert make is not None, type(result)
    return saying(make(result), _left_out(result))


def screen_of(result: object) -> Shown | None:
    """A result on one screen; None of one that is shown as tables."""
    make = _made_by(_SCREENS, result)
    screen, lost = make(result) if make is not None else None, _left_out(result)
    return dataclasses.replace(screen, damage=lost) if lost and isinstance(screen, Screen | Listing) else screen


def _left_out(result: object) -> tuple[str, ...]:
    """What a result lacks because its run is damaged."""
    match result:
        case StoredRun():
            return result.left_out
        case Tuning() | Training() | LabRun():
            return result.warnings
    return ()


def text_of(result: object) -> str:
    """A result as the command line prints it into a file: its screen, else its tables."""
    screen = screen_of(result)
    if screen is not None:
        return one_screen.text(screen)
    width = WIDTH if isinstance(result, Compared | Ceilings) else terminal.PLAIN_WIDTH
    return terminal.texts(view_of(result).tables, plain_width=width)


def html_of(result: object) -> str:
    """A result for a notebook: its screen, and its tables below it, folded away where there is a screen."""
    screen, tables = screen_of(result), "".join(map(html_text, view_of(result).tables))
    if screen is None:
        return tables
    shown = html.escape(one_screen.text(screen))
    return f"<pre>{shown}</pre><details><summary>All tables</summary>{tables}</details>"
