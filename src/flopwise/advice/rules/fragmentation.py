"""The allocator holds much more memory than the step ever uses.

Looks for: reserved memory above the peak of allocated bytes by more than {FRAGMENTED_SHARE:%} of it and {FRAGMENTED_BYTES:size}.
Saving: the difference, of memory; no time (unless the allocator frees and asks again in every step).
Fix: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or shapes that do not change from step to step.
"""

from flopwise import units
from flopwise.advice.constants import FRAGMENTED_BYTES, FRAGMENTED_SHARE
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, memory_saved
from flopwise.records.finding import Finding

CODE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True      # in the environment, before the program starts"
RULE = Rule(__name__, code=CODE)


def check(facts: Facts) -> Finding | None:
    reserved = max((m.reserved_bytes for m in facts.memory), default=0)
    peak = max((m.peak_bytes for m in facts.memory), default=0)
    lost = reserved - peak
    if lost < max(FRAGMENTED_SHARE * reserved, FRAGMENTED_BYTES):
        return None
    title = f"fragmentation: {units.size(lost)} of {units.size(reserved)} reserved are never in use at once"
    saving = memory_saved(f"{units.size(reserved)} reserved − {units.size(peak)} at the peak = {units.size(lost)}")
    evidence = (
        f"{m.phase}: peak {units.size(m.peak_bytes)}, reserved {units.size(m.reserved_bytes)}" for m in facts.memory
    )
    return RULE.finding(facts, title, saving, evidence, lost, reserved_bytes=reserved, peak_bytes=peak)
