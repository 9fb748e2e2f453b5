"""Several ranks of a job on one screen."""

from flopwise import units
from flopwise.advice.findings import counted_ns, worth_most
from flopwise.analysis.ranks.explained import numbers_text
from flopwise.records.ranks import GroupKind, RanksExplanation
from flopwise.render.explain_screen import changes_of
from flopwise.render.screen import (
    IDLE,
    MEASURED,
    NOW,
    PREDICTED,
    REACHABLE,
    USEFUL,
    Figure,
    Part,
    Screen,
    changes_title,
    sentence,
    with_changes,
)

PARTS = {
    "compute": ("compute", USEFUL),
    "transfer": ("communication", "other"),
    "waiting": ("waiting for ranks", IDLE),
    "input": ("input", "other"),
    "idle": ("idle", IDLE),
}
NOTHING = "Nothing to change among the ranks: flopwise explain FILE explains one of them."


def ranks_screen(e: RanksExplanation) -> Screen:
    """Who waits for whom and why; the step now and with the changes; where the mean rank's time goes."""
    best = worth_most(e.findings)
    of = f" of {e.world}" if e.world > len(e.ranks) else ""
    return Screen(
        title=f"{e.name}: {len(e.ranks)}{of} ranks, {units.several(len(e.steps), 'step')}",
        where=e.gpu or "the CPU",
        verdict=sentence(e.verdict),
        figures=_figures(e),
        parts_title=f"Where the {units.duration(e.mean_ns('step'))} of the mean rank go",
        parts=tuple(Part(name, e.mean_ns(part), kind) for part, (name, kind) in PARTS.items()),
        changes_title=changes_title(len(best)) or NOTHING,
        changes=changes_of(best),
        notes=tuple(map(sentence, (*_told(e), *_links(e), *_apart(e)))),
    )


def _figures(e: RanksExplanation) -> tuple[Figure, ...]:
    now = Figure(NOW, e.step_ns, MEASURED, note="the whole job's step, traced")
    saved = counted_ns(e.findings)
    if saved <= 0:
        return (now,)
    n = sum((one.counted_ns or 0.0) > 0 for one in e.findings)
    return now, Figure(REACHABLE, max(0.0, e.step_ns - saved), PREDICTED, note=with_changes(n))


def _told(e: RanksExplanation) -> list[str]:
    """What was left out or is missing, the first thing to know; then what began before the trace."""
    one = e.straggler
    began = one.began_late_ns if one is not None else 0.0
    text = f"it began the first traced step {units.duration(began)} after the median rank; starting the profiler may be why"
    return [*e.notes, *([f"rank {one.rank}: {text}"] if one is not None and began else [])]


def _links(e: RanksExplanation) -> list[str]:
    """The group that takes most time, with its bandwidth."""
    known = [one for one in e.groups if one.bus_bytes_s is not None]
    return [bandwidth_text(max(known, key=lambda one: one.transfer_ns))] if known else []


def bandwidth_text(one: GroupKind) -> str:
    """
    >>> times = {"waiting_ns": 1.0, "transfer_ns": 1.0, "exposed_ns": 1.0, "hidden_ns": 0.0}
    >>> what = {"group": "0", "kind": "all-reduce", "phase": "backward", "ranks": 8, "present": 8, "count": 3.0, "bytes": 3e6}
    >>> bandwidth_text(GroupKind(**what, **times, bus_bytes_s=45e9, link_bytes_s=450e9))
    'all-reduce in group 0: 45.0 GB/s bus bandwidth, 10 % of the link'
    """
    limit = one.link_bytes_s
    share = f", {units.percent((one.bus_bytes_s or 0.0) / limit, 0)} of the link" if limit else ""
    return f"{one.kind} in group {one.group}: {units.rate(one.bus_bytes_s or 0.0, 'B/s')} bus bandwidth{share}"


def _apart(e: RanksExplanation) -> list[str]:
    """Who else is late, and how far apart the clocks are."""
    late = [one.rank for one in e.stragglers if one.rank >= 0]
    ahead = [abs(one.clock_ahead_ns) for one in e.ranks]
    far = f"clocks differ by up to {units.duration(max(ahead))}, aligned by the collectives"
    return [*([f"also late: {numbers_text(late)}"] if late else []), far]
