"""Gradients are communicated while nothing is computed.

Looks for: all-reduces and reduce-scatters of the backward pass or the optimizer whose data moves, once all ranks are there,
while the ranks compute nothing: {EXPOSED_SHARE:%} of the step or more, mean over the ranks.
Saving: that time, no more than the ranks compute: it could be hidden behind the backward pass. Waiting is not in it.
Fix: start each bucket as soon as its gradients are there, as DDP and FSDP do, and make buckets smaller where one or two hold all
gradients: the last one can be hidden behind nothing. `no_sync()` for all but the last micro-batch.
"""

from flopwise import units
from flopwise.advice.constants import EXPOSED_SHARE
from flopwise.advice.rank_facts import RankFacts
from flopwise.records.finding import MEDIUM, Finding

CODE = """model = DistributedDataParallel(model, bucket_cap_mb=10, static_graph=True)      # several buckets, not one
with model.no_sync():      # all but the last of the micro-batches
    loss.backward()"""


def check(facts: RankFacts) -> Finding | None:
    some = facts.gradients()
    exposed = sum(map(facts.exposed_ns, some))
    compute = facts.explanation.mean_ns("compute")
    saved = min(exposed, compute)
    if saved < EXPOSED_SHARE * facts.step_ns:
        return None
    whole = sum(one.transfer_ns * one.present for one in some) / len(facts.explanation.ranks)
    return Finding(
        rule="rank_overlap",
        title=f"{units.duration(exposed)} of {units.duration(whole)} of gradients move while nothing is computed",
        values={"exposed_ns": exposed, "transfer_ns": whole},
        saving_ns=saved,
        arithmetic=f"{units.duration(exposed)}, hidden behind {units.duration(compute)} of compute",
        evidence=tuple(f"{one.kind} in {one.group}: {units.duration(facts.exposed_ns(one))}" for one in some[:4]),
        code=CODE,
        confidence=MEDIUM,
        draws_on={"transfer": saved},
        evidence_ns=exposed,
    )
