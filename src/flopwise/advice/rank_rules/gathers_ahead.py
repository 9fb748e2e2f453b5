"""Parameters are gathered when they are needed, not before.

Looks for: all-gathers whose data moves while the ranks compute nothing, {EXPOSED_SHARE:%} of the step or more: FSDP without
enough prefetching.
Saving: that time, no more than the ranks compute.
Fix: prefetch the next block's parameters while this one computes.
"""

from flopwise import units
from flopwise.advice.constants import EXPOSED_SHARE
from flopwise.advice.rank_facts import RankFacts
from flopwise.analysis.collectives import ALL_GATHER
from flopwise.records.finding import MEDIUM, Finding

CODE = """block.set_modules_to_forward_prefetch([next_block])      # FSDP2; of FSDP: forward_prefetch=True
block.set_modules_to_backward_prefetch([previous_block])"""


def check(facts: RankFacts) -> Finding | None:
    some = [one for one in facts.explanation.groups if one.kind == ALL_GATHER]
    exposed = sum(map(facts.exposed_ns, some))
    saved = min(exposed, facts.explanation.mean_ns("compute"))
    if saved < EXPOSED_SHARE * facts.step_ns:
        return None
    return Finding(
        rule="gathers_ahead",
        title=f"all-gathers move data for {units.duration(exposed)} of a step while nothing is computed",
        values={"exposed_ns": exposed},
        saving_ns=saved,
        arithmetic=f"{units.duration(exposed)} of all-gather that prefetching would hide behind compute",
        evidence=tuple(f"in {one.group}: {one.count:.0f} a step" for one in some[:4]),
        code=CODE,
        confidence=MEDIUM,
        draws_on={"transfer": saved},
        evidence_ns=exposed,
    )
