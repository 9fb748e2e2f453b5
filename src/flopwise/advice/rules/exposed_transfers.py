"""The GPU waits for copies between host and device.

Looks for: copies to or from the host while no kernel runs, and the GPU idle while the host copies out of pageable memory.
Saving: copies out of pinned memory ({PINNED_BYTES_PER_S:g} B/s are assumed) hide behind the GPU's other work, as far as there is
as much of it; what the host spends copying pageable memory is saved whole.
Fix: keep data on the device; else pinned memory, `non_blocking=True`, and the next batch copied while this one is computed.
"""

from flopwise import units
from flopwise.advice.constants import PINNED_BYTES_PER_S
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.analysis.idle import TRANSFER
from flopwise.analysis.transfers import HTOD, Transfer
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import IDLE_INPUT, IDLE_OTHER, TRANSFERS

CODE_UP = """loader = DataLoader(data, batch_size=batch, num_workers=8, pin_memory=True)
with torch.cuda.stream(copies):                       # the next batch, while this one is computed
    ahead = next_batch.to("cuda", non_blocking=True)
torch.cuda.current_stream().wait_stream(copies)       # before it is used
# what does not change from step to step is copied once, and stays on the GPU"""
CODE_DOWN = """host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
host.copy_(result, non_blocking=True)                 # read it steps later, after an event; or keep it on the GPU"""


def check(facts: Facts) -> Finding | None:
    e = facts.explanation
    moved = [one for one in (e.transfers if e is not None else ()) if one.exposed_ns]
    exposed, staged = sum(one.exposed_ns for one in moved), facts.idle_ns(TRANSFER)
    if e is None or not exposed + staged:
        return None
    others = max(0.0, e.busy_ns - exposed)
    pinned = sum(min(one.exposed_ns, one.bytes / PINNED_BYTES_PER_S * 1e9 or one.exposed_ns) for one in moved)
    left = max(0.0, pinned - others)
    saved = exposed - left + staged
    arithmetic = (
        f"{units.duration(exposed)} alone + {units.duration(staged)} out of pageable memory − what remains: "
        f"{units.duration(pinned)} at {units.rate(PINNED_BYTES_PER_S, 'B/s')}, behind {units.duration(others)} of other "
        f"work = {units.duration(saved)}"
    )
    most = max(moved, key=lambda one: one.exposed_ns, default=None)
    upload = most is None or most.kind == HTOD
    rule = Rule(__name__, (TRANSFERS, IDLE_INPUT, IDLE_OTHER), code=CODE_UP if upload else CODE_DOWN)
    way = "to the GPU" if upload else "to the host"
    title = f"the GPU waits {units.duration(exposed + staged)} for copies {way}"
    saving = idle_saved(saved, arithmetic, MEDIUM)
    both = exposed + staged
    return rule.finding(
        facts, title, saving, map(_describe, moved), evidence_ns=both, exposed_ns=exposed, pageable_ns=staged
    )


def _describe(one: Transfer) -> str:
    size = f" of {units.size(int(one.bytes))}, {units.rate(one.bytes_per_s, 'B/s')}" if one.bytes else ""
    alone = f"{units.duration(one.exposed_ns)} of {units.duration(one.gpu_ns)} with nothing beside"
    return f"{one.count:.0f} × {one.kind}{size}: {alone}"
