"""A step on the CPU on one screen."""

from flopwise import units
from flopwise.advice.findings import worth_most
from flopwise.analysis.host_explanation import LOADING, OUTSIDE, HostExplanation
from flopwise.analysis.reach import Reach
from flopwise.records.run import STEP
from flopwise.render.explain_screen import changes_of
from flopwise.render.names import short_paths
from flopwise.render.screen import IDLE, MEASURED, NOW, Figure, Part, Screen, changes_title, reach_figures, sentence


def host_screen(e: HostExplanation) -> Screen:
    """The verdict, the step now and with the changes, and its time by class of op; no limit of a CPU is known."""
    best = worth_most(e.findings or ())
    return Screen(
        title=f"{e.subject or short_paths([e.path])[0]}: {e.source} trace",
        where="the CPU",
        verdict=f"{e.verdict[:1].upper()}{e.verdict[1:]}.",
        figures=(_now(e), *reach_figures(e.reach or Reach(now_ns=e.step_ns))),
        parts_title=f"Where the traced {units.duration(e.window_ns)} go",
        parts=_parts(e),
        changes_title=changes_title(len(best)),
        changes=changes_of(best),
        notes=tuple(map(sentence, e.notes)),
    )


def _now(e: HostExplanation) -> Figure:
    note = "without a profiler" if STEP in e.host_ns else "traced; a profiler slows the CPU"
    return Figure(NOW, e.step_ns, MEASURED, note=note)


def _parts(e: HostExplanation) -> tuple[Part, ...]:
    kinds: dict[str, float] = {}
    for op in e.ops:
        kinds[op.kind] = kinds.get(op.kind, 0.0) + op.self_ns
    ranked = sorted(kinds.items(), key=lambda item: -item[1])
    loading = sum(one.outside_ns for one in e.phases if one.name == LOADING)  # its ops are among the others
    outside = Part(LOADING, loading, IDLE), Part(OUTSIDE, max(0.0, e.outside_ns - loading), IDLE)
    return (*(Part(kind, ns) for kind, ns in ranked), *outside)
