"""A plan beside its ranks: on one screen, as a table, and as the way from the planned step to the measured one."""

from typing import Any

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records.ranks import BesidePlan, RanksExplanation
from flopwise.records.table import Table
from flopwise.render.listing import Heading, Listing
from flopwise.render.ranks_screen import PARTS
from flopwise.render.screen import sentence
from flopwise.render.step_charts import differences_chart
from flopwise.render.table import columns


def planned_listing(e: RanksExplanation) -> Listing:
    """What each part was to take, what it took, and the difference."""
    found = _beside(e)
    rows = [(PARTS[one.part][0], one.planned_ns, one.measured_ns) for one in found.parts]
    rows.append(("the step", found.planned_ns, found.measured_ns))
    rows.append(("hidden communication", found.hidden_planned_ns, found.hidden_measured_ns))
    headings = ("", "planned", "measured", "difference")
    return Listing(
        title=f"{e.name}: {found.model} as planned for {found.gpus:,} GPUs, and {len(e.ranks)} ranks",
        where=e.gpu or "the CPU",
        verdict=" ".join(map(sentence, (*found.notes, plan_verdict(found)))),
        headings=tuple(Heading(name, right=bool(name)) for name in headings),
        rows=tuple((name, units.duration(p), units.duration(m), signed(m - p)) for name, p, m in rows),
        notes=tuple(map(sentence, (e.verdict, "measured: the mean rank, traced; parts add up to the step"))),
    )


def plan_verdict(found: BesidePlan) -> str:
    """How far apart they are, and the part that is most of it."""
    times = f"planned {units.duration(found.planned_ns)} a step, measured {units.duration(found.measured_ns)}"
    more = found.measured_ns - found.planned_ns
    if not found.planned_ns or not more:
        return times
    most = max(found.parts, key=lambda one: (one.measured_ns - one.planned_ns) * (1 if more > 0 else -1))
    how = apart(found.planned_ns, found.measured_ns)
    return f"{times}: {how}, most by {PARTS[most.part][0]} ({signed(most.measured_ns - most.planned_ns)})"


def apart(planned: float, measured: float) -> str:
    """By a percentage, or by how many times where that says more.

    >>> apart(100, 110), apart(3.84e9, 3.43e6), apart(1, 3), apart(2, 1)
    ('10 % slower', '1120 times as fast', '3.00 times as slow', '2.00 times as fast')
    """
    times = measured / planned
    if times >= 2:
        return f"{units.significant(times)} times as slow"
    if 0 < times <= 1 / 2:
        return f"{units.significant(1 / times)} times as fast"
    return f"{units.percent(abs(times - 1), 0)} {'slower' if times > 1 else 'faster'}"


def signed(ns: float) -> str:
    """
    >>> signed(2e6), signed(-1e3), signed(0)
    ('+2.00 ms', '−1.00 µs', '0')
    """
    return f"{'+' if ns > 0 else '−'}{units.duration(abs(ns))}" if ns else "0"


def plan_table(e: RanksExplanation) -> Table:
    """The same as rows; none where there is no plan."""
    found = e.plan
    rows = [
        {"part": PARTS[one.part][0], "planned_ns": one.planned_ns, "measured_ns": one.measured_ns}
        for one in (found.parts if found is not None else ())
    ]
    if found is not None:
        rows.append({"part": "the step", "planned_ns": found.planned_ns, "measured_ns": found.measured_ns})
    shown = columns("part | planned_ns: planned [ms] | measured_ns: measured, mean of the ranks [ms]")
    notes = (*found.notes, plan_verdict(found)) if found is not None else ()
    return Table("plan", "The plan beside the ranks, per step", shown, tuple(rows), notes)


def planned_chart(e: RanksExplanation) -> Any:
    """From the planned step to the measured one."""
    found = _beside(e)
    parts = [(PARTS[one.part][0], one.measured_ns - one.planned_ns) for one in found.parts]
    return differences_chart(("planned", found.planned_ns), parts, ("measured", found.measured_ns), plan_verdict(found))


def _beside(e: RanksExplanation) -> BesidePlan:
    if e.plan is None:
        raise FlopwiseError(f"{e.name} has no plan beside it", "--plan FILE.json")
    return e.plan
