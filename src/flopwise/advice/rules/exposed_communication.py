"""The GPU communicates while it could compute.

Looks for: communication kernels that run while no other stream is at work. A kernel that waits for another rank counts as
communication: `flopwise` sees one rank at a time.
Saving: that time, if other work covers it.
Fix: by what most of it is. All-reduce of DDP: larger buckets, gradients as views of them, `no_sync()` for all but the last of the
micro-batches. FSDP's gathers: prefetching. All-to-all of experts or embeddings: the exchange of one half of the batch while the
other half is computed. Sends between stages of a pipeline: more micro-batches. Of inference: fewer ranks for one replica.
"""

import msgspec

from flopwise import units
from flopwise.advice.facts import Evidence, Facts, describe
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.analysis.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND_RECEIVE
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import EXPOSED_COMMUNICATION
from flopwise.work.operation import COMMUNICATION

CODE = """model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True)
with model.no_sync():      # all but the last of the micro-batches
    loss.backward()"""
GATHERS = """block.set_modules_to_forward_prefetch([next_block])      # FSDP2; of FSDP: forward_prefetch=True
block.set_modules_to_backward_prefetch([previous_block])"""
EXCHANGE = """first, second = batch.chunk(2)      # exchange one half while the other is computed
work = dist.all_to_all_single(received, first, async_op=True)
local = compute(second)
work.wait()"""
PIPELINE = (
    "schedule = Schedule1F1B(stage, n_microbatches=4 * stages)      # torch.distributed.pipelining: shorter bubbles"
)
INFERENCE = (
    "# fewer GPUs for one replica; all-reduce fused with the norm after it; half of the batch computed meanwhile"
)
RULE = Rule(__name__, (EXPOSED_COMMUNICATION,))


def check(facts: Facts) -> Finding | None:
    exposed = facts.part_ns(EXPOSED_COMMUNICATION) or facts.details.exposed_communication_ns
    if exposed <= 0:
        return None
    whole = max(exposed, facts.details.communication_ns)
    amount = f"{units.duration(exposed)} of {units.duration(whole)}"
    kind = next(iter(facts.details.collectives), "")
    most = f", most of it {kind}" if kind else ""
    title = f"communication is not overlapped: {amount} ran alone{most}"
    code, confidence = _fix(facts, kind)
    saving = gpu_time_saved(facts, exposed, f"{amount} of communication ran alone", confidence)
    kernels = facts.kernels(lambda kernel: kernel.kind == COMMUNICATION)
    rule = msgspec.structs.replace(RULE, code=code)
    evidence = (*describe(kernels), Evidence("waiting for other ranks counts as communication"))
    return rule.finding(facts, title, saving, evidence, evidence_ns=exposed, exposed_ns=exposed, communication_ns=whole)


def _fix(facts: Facts, kind: str) -> tuple[str, str]:
    """The lines that help, and how sure that is."""
    if not facts.trains:
        return INFERENCE, LOW
    if kind in (ALL_GATHER, REDUCE_SCATTER):
        return GATHERS, MEDIUM
    if kind == ALL_TO_ALL:
        return EXCHANGE, LOW
    if kind == SEND_RECEIVE:
        return PIPELINE, LOW
    ddp = kind in ("", ALL_REDUCE) or facts.details.ddp
    return (CODE, MEDIUM) if ddp else ("", LOW)
