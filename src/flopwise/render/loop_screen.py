"""A watched training loop on one screen."""

from dataclasses import replace

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.host_screen import host_screen
from flopwise.render.loop_notes import loop_notes
from flopwise.render.run_screen import point_screen
from flopwise.render.screen import Screen
from flopwise.store import StoredRun


def loop_screen(run: StoredRun, explained: Explanation | HostExplanation | None) -> Screen:
    """Why its steps are slow, from its trace; without one, what was timed."""
    point, notes = run.points[0], (*loop_notes(run.points[0]), f"Stored in {run.path}")
    match explained:
        case Explanation():
            screen = explanation_screen(explained, notes=notes)
        case HostExplanation():
            screen = host_screen(explained, notes)
        case _:
            screen = point_screen(point)
            screen = replace(screen, notes=(*notes, *screen.notes))
    times = point.times()
    steps = f"{len(times.wall_ns)} steps timed" if times is not None else "no step timed"
    title, more = f"{steps}: {point.trial.workload.target}", "All tables: flopwise explain last --full"
    return replace(screen, title=title, more=more)
