"""A plan as tables and as a document."""

from typing import Any

import msgspec

from flopwise.records.plan import SCHEMA, Plan
from flopwise.records.planned import PARTS, Planned
from flopwise.records.table import Table
from flopwise.render.plan_screen import brief, verdict
from flopwise.render.table import View, columns

_RANKS = (
    "data | tensor | context | pipeline | expert | sharded | schedule | virtual | micro_batch: micro-batch | recompute"
)


def plan_view(p: Plan) -> View:
    """The run, the layouts, and where time and memory of each go."""
    everything = (p.best, *p.others)
    return View([_summary(p), _layouts(p, everything), _time(everything), _memory(everything)], plan_document(p))


def plan_document(p: Plan) -> dict[str, Any]:
    """What a plan file holds: `read_plan` reads it back; days, hours and money follow from the rest."""
    derived = {name: getattr(p, name) for name in ("step_s", "days", "gpu_hours", "cost", "exposed_s")}
    return {"schema": SCHEMA, "obtained": "predicted", **msgspec.to_builtins(p), **derived}


def _summary(p: Plan) -> Table:
    row = {
        "model": p.model,
        "cluster": p.cluster,
        "gpus": p.gpus,
        "step_s": p.step_s,
        "mfu": p.mfu_given or p.best.step.mfu,
        "exposed_s": p.exposed_s,
        "peak_bytes": p.best.memory.peak_bytes,
        "days": p.days,
        "gpu_hours": p.gpu_hours,
        "cost": p.cost,
        "batch": p.batch,
        "context": p.context,
        "parameters": p.parameters,
        "active_parameters": p.active_parameters,
    }
    shown = columns(
        "model | cluster | gpus: GPUs [count] | step_s: step | mfu | exposed_s: exposed exchange | peak_bytes [GB] | "
        "days [days] | gpu_hours: GPU-hours [hours] | cost: dollars [count] | batch | context | parameters | "
        "active_parameters: active [count]"
    )
    fit = f"{p.fitting} of {p.tried} layouts fit {p.limit_bytes / 1e9:.0f} GB a GPU"
    return Table("plan", f"{p.model} on {p.gpus} × {p.gpu}", shown, (row,), (verdict(p), fit, *p.notes))


def _layouts(p: Plan, everything: tuple[Planned, ...]) -> Table:
    names = [part.partition(":")[0].strip() for part in _RANKS.split("|")]
    rows = tuple(
        {name: getattr(one.layout, name) for name in names}
        | {"step_s": one.step.wall_s, "mfu": one.step.mfu, "peak_bytes": one.memory.peak_bytes, "why": one.why}
        for one in everything
    )
    return Table(
        "layouts", "Layouts, the best first", columns(f"{_RANKS} | step_s: step | mfu | peak_bytes [GB] | why"), rows
    )


def _time(everything: tuple[Planned, ...]) -> Table:
    rows = tuple(
        {"layout": brief(one.layout), "part": name, "s": seconds, "share": seconds / one.step.wall_s}
        | {"hidden_s": one.step.hidden_s.get(name)}
        for one in everything
        for name in PARTS
        if (seconds := one.step.parts.get(name, 0.0)) or one.step.hidden_s.get(name)
    )
    notes = ("parts add up to the step; hidden: exchanged behind computing, besides",)
    shown = columns("layout | part | s: time | share [percent] | hidden_s: hidden")
    return Table("time", "Where a step's time goes", shown, rows, notes)


def _memory(everything: tuple[Planned, ...]) -> Table:
    rows = tuple(
        {"layout": brief(one.layout), "owner": name, "bytes": size, "share": size / (one.memory.peak_bytes or 1)}
        for one in everything
        for name, size in one.memory.owners.items()
        if size
    )
    return Table("memory", "Memory of the fullest GPU", columns("layout | owner | bytes [GB] | share [percent]"), rows)
