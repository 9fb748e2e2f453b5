"""A step on the CPU as tables: what to change, the host's time by phase, module and op, and the other threads."""

from collections.abc import Sequence

import msgspec

from flopwise import units
from flopwise.analysis.host_explanation import HostExplanation, HostOp, HostShare
from flopwise.records.run import STEP
from flopwise.records.table import Table
from flopwise.render.findings_view import findings_view
from flopwise.render.json import document, picked
from flopwise.render.names import short_paths
from flopwise.render.screen import in_a_line
from flopwise.render.table import View, columns

TOP = 12  # modules, ops


def host_view(e: HostExplanation) -> View:
    """The verdict, the findings, and the time by phase, module and op; each table adds up to the step."""
    tables, details = [_summary(e)], list[Table]()
    content = document("explain-host", trace=e)
    if e.findings is not None:
        (overview, *details), found = findings_view(e.findings, e.step_ns)
        tables.append(overview)
        content["findings"] = found["findings"]
    tables.append(_shares("phases", "phase", "CPU time by phase", e.phases))
    if e.modules:
        tables.append(_shares("modules", "module", "CPU time by module (layers together)", e.modules))
    tables.append(_ops(e))
    if e.threads:
        tables.append(_threads(e))
    return View([*tables, *details], content)


def _summary(e: HostExplanation) -> Table:
    row = picked(e, "window_ns outside_ns loading_ns") | {
        "untraced_ns": e.host_ns.get(STEP),
        "op_ns": e.window_ns - e.outside_ns,
        "calls": sum(op.count for op in e.ops),
        "loading_ns": e.loading_ns or None,
    }
    shown = columns(
        "window_ns: step, traced [ms] | untraced_ns: untraced [ms] | op_ns: in ops [ms] | outside_ns: outside ops [ms] | "
        "loading_ns: data loading [ms] | calls: ops [count]"
    )
    number = "1 step" if e.steps == 1 else f"{e.steps} steps"
    measured = f"measured: {number}, found by {e.steps_found_by}; times are of one step, on one thread"
    title = f"{short_paths([e.path])[0]}: {e.source} trace on the CPU"
    reached = in_a_line(e.reach) if e.reach is not None else ""
    return Table("summary", title, shown, (row,), tuple(filter(None, (e.verdict, reached, measured, *e.notes))))


def _shares(key: str, what: str, title: str, shares: Sequence[HostShare]) -> Table:
    rows = tuple({what: one.name or "(none)"} | picked(one, "wall_ns outside_ns share") for one in shares)
    shown = columns(f"{what} | wall_ns: time [ms] | share | outside_ns: outside ops [ms]")
    rest = sum(one.wall_ns for one in shares[TOP:])
    notes = (f"and {len(shares) - TOP} more: {units.milliseconds(rest)} ms",) if shares[TOP:] else ()
    return Table(key, title, shown, rows, notes, most=TOP)


def _ops(e: HostExplanation) -> Table:
    rest: Sequence[HostOp] = e.ops[TOP:]
    share = sum(one.share for one in rest)
    notes = [f"and {len(rest)} more: {units.percent(share)}"] if rest else []
    notes.append(
        f"outside every op: {units.milliseconds(e.outside_ns)} ms, {units.percent(e.outside_ns / e.window_ns)}"
    )
    rows = tuple(msgspec.structs.asdict(op) for op in e.ops)
    shown = columns("name: op | kind | count: calls | self_ns: self [ms] | total_ns: total [ms] | mean_ns | share")
    return Table("ops", f"Ops by self time, {len(rows)} in all", shown, rows, tuple(notes), most=TOP)


def _threads(e: HostExplanation) -> Table:
    rows = tuple(msgspec.structs.asdict(thread) for thread in e.threads)
    shown = columns("thread | busy_ns: in ops [ms] | share: of the step | largest_op")
    notes = ("these ran at the same time as the step, and are not part of it",)
    return Table("threads", "Other threads that ran ops", shown, rows, notes, most=TOP)
