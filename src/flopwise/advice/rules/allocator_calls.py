"""The host asks the driver for memory inside the step, and the GPU waits.

Looks for: the GPU idle while the host is in `cudaMalloc`, `cudaFree` and their like. `cudaFree` waits for all work on the GPU.
Saving: that idle time: PyTorch's caching allocator makes no such calls once it has what a step needs.
Fix: with {CACHING_OFF} calls a step or more, switch the caching allocator on again; with fewer, leave `empty_cache()` out of the
loop, keep shapes the same, and leave some memory free: an allocator that runs out gives everything back and asks again.
"""

from flopwise import units
from flopwise.advice.constants import CACHING_OFF
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.analysis.idle import ALLOCATOR
from flopwise.records.finding import HIGH, Finding
from flopwise.records.waterfall import IDLE_ALLOCATOR, IDLE_OTHER

CODE_ON = "unset PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NO_HIP_MEMORY_CACHING      # the caching allocator is off"
CODE = """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True      # in the environment, before the program starts
# no torch.cuda.empty_cache() inside the loop; a smaller batch, where the memory is full"""


def check(facts: Facts) -> Finding | None:
    idle, calls = facts.idle_ns(ALLOCATOR), facts.details.allocator_calls
    if not idle:
        return None
    number = sum(calls.values())
    rule = Rule(__name__, (IDLE_ALLOCATOR, IDLE_OTHER), code=CODE_ON if number >= CACHING_OFF else CODE)
    most = f" ({units.several(number, 'call')} a step, most in {next(iter(calls))})" if calls else ""
    title = f"memory is asked of the driver inside the step: the GPU waits {units.duration(idle)}{most}"
    saving = idle_saved(idle, f"the GPU is idle {units.duration(idle)} during these calls", HIGH)
    lines = [f"{count:.0f} × {name} a step" for name, count in calls.items()]
    return rule.finding(facts, title, saving, lines[:4], evidence_ns=idle, idle_ns=idle, calls=number)
