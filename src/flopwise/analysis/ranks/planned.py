"""A plan beside what the ranks of a job did."""

import msgspec

from flopwise.records.plan import Plan
from flopwise.records.planned import BUBBLE, COMPUTED, EXCHANGED, IMBALANCE, LAUNCHES, SLOWED
from flopwise.records.ranks import BesidePlan, PlannedPart, RanksExplanation

# What of a plan a rank's trace shows as each of its parts: whoever has nothing to do waits for others.
_PARTS = {
    "compute": (*COMPUTED, SLOWED),
    "transfer": EXCHANGED,
    "waiting": (IMBALANCE, BUBBLE),
    "input": (),
    "idle": (LAUNCHES,),
}


def beside_plan(e: RanksExplanation, plan: Plan) -> RanksExplanation:
    """The explanation with the plan's step next to the mean rank's."""
    step = plan.best.step
    parts = tuple(
        PlannedPart(
            part=part, planned_ns=1e9 * sum(step.parts.get(name, 0.0) for name in names), measured_ns=e.mean_ns(part)
        )
        for part, names in _PARTS.items()
    )
    ranks = e.world or len(e.ranks)
    other = (f"the plan is for {plan.gpus:,} GPUs, the traces are of a job of {ranks:,}",) if ranks != plan.gpus else ()
    compared = BesidePlan(
        model=plan.model,
        gpus=plan.gpus,
        planned_ns=sum(one.planned_ns for one in parts),
        measured_ns=sum(one.measured_ns for one in parts),
        parts=parts,
        hidden_planned_ns=1e9 * sum(step.hidden_s.values()),
        hidden_measured_ns=e.mean_ns("hidden"),
        notes=other,
    )
    return msgspec.structs.replace(e, plan=compared)
