"""Several ranks of a job as tables, and as a record for programs."""

from typing import Any

import msgspec

from flopwise import units
from flopwise.records.ranks import RanksExplanation, Straggler
from flopwise.records.table import Table
from flopwise.render.findings_view import findings_view
from flopwise.render.json import document
from flopwise.render.ranks_plan import plan_table
from flopwise.render.table import View, columns, grouped

RANKS, GROUPS, COLLECTIVES, STRAGGLERS, COMMUNICATION = "ranks", "groups", "collectives", "stragglers", "communication"
TOP = 12  # collectives
MOST_RANKS = 64  # rows that people are shown; files have all
_GROUPS = {
    "What to change": "findings finding-*",
    "Who waits for whom": f"{STRAGGLERS} {RANKS} {COMMUNICATION}",
    "Collectives": f"{GROUPS} {COLLECTIVES}",
}


def ranks_view(e: RanksExplanation) -> View:
    """The findings, the ranks, their groups, and the collectives that take longest."""
    (overview, *details), found = findings_view(e.findings, e.step_ns)
    tables = [
        _summary(e),
        plan_table(e),
        overview,
        stragglers_table(e),
        ranks_table(e),
        _communication(e),
        groups_table(e),
    ]
    tables += [collectives_table(e), *details]
    content = document("ranks", ranks=e, findings=found["findings"])
    return View(grouped([table for table in tables if table.rows], _GROUPS), content)


def _summary(e: RanksExplanation) -> Table:
    row = {"step_ns": e.step_ns} | {
        f"{part}_ns": e.mean_ns(part) for part in ("compute", "transfer", "waiting", "input", "idle")
    }
    shown = columns(
        "step_ns: step [ms] | compute_ns: compute, mean of the ranks [ms] | transfer_ns: transfer [ms] | "
        "waiting_ns: waiting [ms] | input_ns: input [ms] | idle_ns: idle [ms]"
    )
    clocks = f"clocks aligned by collectives, which then end {units.duration(e.clock_residual_ns)} apart (median)"
    matched = f"{e.collectives_found} collectives found on several ranks, {e.unmatched} on one alone"
    steps = f"measured: {units.several(len(e.steps), 'step')} of {len(e.ranks)} ranks: {', '.join(e.steps[:4])}"
    return Table("summary", f"{e.name}: ranks together", shown, (row,), (e.verdict, steps, matched, clocks, *e.notes))


def stragglers_table(e: RanksExplanation) -> Table:
    """Ranks and links that cost the step most."""
    found = [one for one in (e.straggler, *e.stragglers) if one is not None]
    rows = tuple({"who": _who(one), **msgspec.structs.asdict(one)} for one in found)
    shown = columns(
        "who | cause | because [sentence] | saving_ns: saves [ms] | last [count] | collectives [count] | "
        "began_late_ns: began late [ms]"
    )
    note = "saves: of a step, if it were as fast as the median rank, by replay"
    return Table(STRAGGLERS, "For whom the others wait", shown, rows, (note,))


def _who(one: Straggler) -> str:
    return f"rank {one.rank}" if one.rank >= 0 else f"group {one.group}"


def ranks_table(e: RanksExplanation, most: int = MOST_RANKS) -> Table:
    """Where each rank's step went."""
    rows = tuple({"name": str(one.rank), **_flat(one)} for one in e.ranks)
    shown = columns(
        "name: rank | step_ns: step [ms] | compute_ns: compute [ms] | transfer_ns: transfer [ms] | waiting_ns: waiting [ms] | "
        "input_ns: input [ms] | idle_ns: idle [ms] | hidden_ns: hidden communication [ms] | last [count] | "
        "collectives [count] | clock_ahead_ns: clock ahead [ms] | host | gpu: GPU"
    )
    notes = (
        "compute, transfer, waiting, input and idle add up to the step; transfer and waiting are what compute does not hide",
        "last: collectives to which the rank came last",
    )
    return Table(RANKS, "Ranks, per step", shown, rows, notes, most=most)


def _flat(record: msgspec.Struct) -> dict[str, Any]:
    return {key: value for key, value in msgspec.structs.asdict(record).items() if key != "communication"}


def _communication(e: RanksExplanation) -> Table:
    rows = tuple(
        {"name": str(one.rank), **msgspec.structs.asdict(part)} for one in e.ranks for part in one.communication
    )
    shown = columns("name: rank | group | phase | exposed_ns: exposed [ms] | hidden_ns: hidden [ms]")
    return Table(COMMUNICATION, "Communication by rank, group and phase, per step", shown, rows, most=MOST_RANKS)


def groups_table(e: RanksExplanation) -> Table:
    """Kinds of collectives in each process group."""
    rows = tuple(
        msgspec.structs.asdict(one)
        | {"bus": _rate(one.bus_bytes_s), "link": _rate(one.link_bytes_s)}
        | {"of_link": one.bus_bytes_s / one.link_bytes_s if one.bus_bytes_s and one.link_bytes_s else None}
        for one in e.groups
    )
    shown = columns(
        "group | kind: collective | ranks [count] | count: times | bytes | waiting_ns: waiting [ms] | "
        "transfer_ns: transfer [ms] | exposed_ns: exposed [ms] | hidden_ns: hidden [ms] | bus: bus bandwidth [text] | "
        "link [text] | of_link: of the link [share] | phase"
    )
    notes = (
        "waiting: until the last rank arrives; transfer: from then on; mean over the ranks, hidden or not, of one step",
        "bus bandwidth as NCCL's tests define it, over transfer alone; that of small messages is latency",
    )
    return Table(GROUPS, "Collectives by process group, per step", shown, rows, notes, most=MOST_RANKS)


def _rate(bytes_s: float | None) -> str | None:
    return units.rate(bytes_s, "B/s") if bytes_s is not None else None


def collectives_table(e: RanksExplanation, most: int = TOP) -> Table:
    """Those that take longest."""
    rows = tuple(
        msgspec.structs.asdict(one)
        | {"algorithm": _rate(one.algorithm_bytes_s), "bus": _rate(one.bus_bytes_s), "last": f"rank {one.last_rank}"}
        for one in e.collectives
    )
    shown = columns(
        "kind: collective | group | step | bytes | longest_waiting_ns: longest waiting [ms] | "
        "waiting_ns: mean waiting [ms] | transfer_ns: transfer [ms] | last: last to arrive | cause | "
        "algorithm: algorithm bandwidth [text] | bus: bus bandwidth [text]"
    )
    title = f"Collectives that take longest, {e.collectives_found} in all"
    return Table(COLLECTIVES, title, shown, rows, most=most)
