"""A watched training loop on one screen."""

from dataclasses import replace

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.loop_notes import loop_notes
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.host_screen import host_screen
from flopwise.render.names import stored_in
from flopwise.render.run_screen import point_screen
from flopwise.render.screen import WIDTH, Screen
from flopwise.store import StoredRun, reference, runs_root


def loop_screen(run: StoredRun, explained: Explanation | HostExplanation | None, ranks: str = "") -> Screen:
    """Why its steps are slow, from its trace; without one, what was timed. `ranks`: what all of them tell together."""
    point = run.points[0]
    match explained:
        case Explanation():
            screen = explanation_screen(explained)
        case HostExplanation():
            screen = host_screen(explained)
        case _:
            screen = point_screen(point)
    together = (f"This is the first rank. Of all: {ranks}.",) if ranks else ()
    own = (*together, *loop_notes(point), stored_in(run.path))
    said = {note.rstrip(".").lower() for note in own}
    notes = (*own, *(note for note in screen.notes if note.rstrip(".").lower() not in said))
    times = point.times()
    steps = f"{len(times.wall_ns)} steps timed" if times is not None else "no step timed"
    verb = "runs show" if explained is None else "explain"
    more = f"All tables: flopwise {verb} {reference(run.path, runs_root())} --full"
    if len(more) > WIDTH:
        more = f"All tables: flopwise {verb} FOLDER --full, with the folder above"
    return replace(screen, title=f"{steps}: {point.trial.workload.target}", notes=notes, more=more)
