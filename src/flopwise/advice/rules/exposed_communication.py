"""Communication that nothing overlaps.

Looks for: NCCL and other communication kernels with no other work running on the GPU.
Saving: that time, if the backward pass or the next block hid all of it.
Fix: DDP's buckets (`bucket_cap_mb`, `gradient_as_bucket_view`), FSDP's prefetching, `no_sync` while gradients accumulate.
"""

from flopwise import units
from flopwise.advice.facts import Facts, describe
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.records.finding import Finding
from flopwise.records.waterfall import EXPOSED_COMMUNICATION
from flopwise.work.operation import COMMUNICATION

CODE = """model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True)
with model.no_sync():      # all but the last of the micro-batches
    loss.backward()"""
RULE = Rule(__name__, (EXPOSED_COMMUNICATION,), code=CODE)


def check(facts: Facts) -> Finding | None:
    exposed = facts.part_ns(EXPOSED_COMMUNICATION) or facts.details.exposed_communication_ns
    if exposed <= 0:
        return None
    whole = max(exposed, facts.details.communication_ns)
    amount = f"{units.duration(exposed)} of {units.duration(whole)}"
    title = f"communication is not overlapped: {amount} ran alone"
    saving = gpu_time_saved(facts, exposed, f"{amount} of communication ran alone")
    kernels = facts.kernels(lambda kernel: kernel.kind == COMMUNICATION)
    return RULE.finding(facts, title, saving, describe(kernels), exposed_ns=exposed, communication_ns=whole)
