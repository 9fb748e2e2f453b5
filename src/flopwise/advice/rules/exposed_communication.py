"""Communication that nothing covers.

Looks for: NCCL and other communication kernels with no other work beside them on the GPU.
Saving: that time, if the backward pass or the next block hid all of it.
Mend: DDP's buckets (`bucket_cap_mb`, `gradient_as_bucket_view`), FSDP's prefetching, `no_sync` while gradients accumulate.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import finding, freed
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import EXPOSED_COMMUNICATION
from flopwise.work.operation import COMMUNICATION

CODE = """model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True)
with model.no_sync():      # all but the last of the micro-batches
    loss.backward()"""


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    split = facts.waterfall.ns(EXPOSED_COMMUNICATION) if facts.waterfall is not None else 0.0
    seen = facts.details.exposed_communication_ns if facts.details is not None else 0.0
    exposed = split or seen
    if exposed <= 0:
        return None
    whole = max(exposed, facts.details.communication_ns if facts.details is not None else 0.0)
    arithmetic = f"{units.duration(exposed)} of {units.duration(whole)} of communication ran alone"
    return finding(
        facts,
        __name__,
        f"communication is not overlapped: {units.duration(exposed)} of {units.duration(whole)} ran alone",
        freed(facts, exposed, arithmetic, MEDIUM),
        (EXPOSED_COMMUNICATION,),
        evidence=measured.told(measured.kernels(facts, lambda kernel: kernel.kind == COMMUNICATION)),
        code=CODE,
    )
