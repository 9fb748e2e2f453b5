"""Many small collectives take the place of few large ones.

Looks for: {SMALL_COUNT} or more collectives of one kind in one group and step, of less than {SMALL_BYTES:size} each on average.
Saving: their transfers that nothing hides × (1 − buckets of {BUCKET_BYTES:size} ÷ collectives): each pays a latency, and so small
ones take about as long as larger ones.
Fix: larger buckets. DDP: `bucket_cap_mb`; FSDP: shard larger units; by hand: one flat tensor.
"""

import math

from flopwise import units
from flopwise.advice.constants import BUCKET_BYTES, SMALL_BYTES, SMALL_COUNT
from flopwise.advice.rank_facts import RankFacts
from flopwise.analysis.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from flopwise.records.finding import MEDIUM, Finding

CODE = "model = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)"


def check(facts: RankFacts) -> Finding | None:
    kinds = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
    some = [one for one in facts.explanation.groups if one.kind in kinds and one.bytes and one.count >= SMALL_COUNT]
    small = [one for one in some if (one.bytes or 0.0) / one.count < SMALL_BYTES]
    if not small:
        return None
    most = max(small, key=facts.exposed_ns)
    exposed, total = facts.exposed_ns(most), most.bytes or 0.0
    buckets = math.ceil(total / BUCKET_BYTES)
    saved = exposed * (1 - buckets / most.count)
    mean = units.size(total / most.count)
    return Finding(
        rule="small_collectives",
        title=f"{most.count:.0f} × {most.kind} of {mean} on average in a step, in {most.group}",
        values={"count": most.count, "bytes": total},
        saving_ns=saved,
        arithmetic=(
            f"{units.duration(exposed)} of transfers that nothing hides × (1 − {buckets} ÷ {most.count:.0f}) "
            f"= {units.duration(saved)}"
        ),
        evidence=(f"{units.size(total)} in all would fit {units.several(buckets, 'bucket')}",),
        code=CODE,
        confidence=MEDIUM,
        draws_on={"transfer": saved},
        evidence_ns=exposed,
    )
