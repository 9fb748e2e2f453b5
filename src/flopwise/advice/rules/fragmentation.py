"""The allocator holds much more memory than the step ever uses.

Looks for: reserved memory above the peak of allocated bytes by more than 10 % of it and 1 GiB.
Saving: the difference, of memory; no time (unless the allocator frees and asks again in every step).
Mend: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or shapes that do not change from step to step.
"""

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.records.finding import MEDIUM, Finding

LEAST_SHARE, LEAST_BYTES = 0.10, 2**30
CODE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True      # in the environment, before the program starts"


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    memory = facts.point.memory if facts.point is not None else ()
    if not memory:
        return None
    reserved, peak = max(m.reserved_bytes for m in memory), max(m.peak_bytes for m in memory)
    lost = reserved - peak
    if lost < max(LEAST_SHARE * reserved, LEAST_BYTES):
        return None
    return Finding(
        rule=__name__.rpartition(".")[2],
        title=f"fragmentation: {units.size(lost)} of {units.size(reserved)} reserved are never in use at once",
        saving_bytes=lost,
        arithmetic=f"{units.size(reserved)} reserved − {units.size(peak)} at the peak = {units.size(lost)}",
        evidence=tuple(
            f"{m.phase}: peak {units.size(m.peak_bytes)}, reserved {units.size(m.reserved_bytes)}" for m in memory
        ),
        code=CODE,
        confidence=MEDIUM,
    )
