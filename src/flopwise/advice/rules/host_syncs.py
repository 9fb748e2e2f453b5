"""The host waits for the GPU inside the step, and the GPU then waits for the host.

Looks for: calls that synchronise (`.item()`, `.tolist()`, `nonzero`, `.cpu()`, copies to pageable memory) between the
launches of a step, after which the GPU was idle.
Saving: the idle time that follows such waits, as the trace tells it (of the untraced step where its clock is known).
Mend: keep numbers on the GPU, read them every hundred steps, copy with `non_blocking=True` into pinned memory.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Saving, finding
from flopwise.analysis.idle import SYNCHRONISATION, HostWait
from flopwise.records.finding import HIGH, Finding
from flopwise.records.waterfall import IDLE_OTHER, IDLE_SYNCHRONISATION

CODE = """losses.append(loss.detach())                    # not loss.item(): stays on the GPU
if step % 100 == 0:
    print(torch.stack(losses).mean().item())     # one wait in a hundred steps
batch = batch.pin_memory().to("cuda", non_blocking=True)"""


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    idle = measured.idle_ns(facts, SYNCHRONISATION)
    waits = facts.details.waits if facts.details is not None else ()
    if not idle:
        return None
    arithmetic = f"the GPU is idle {units.duration(idle)} after the host had waited"
    saving = Saving(alone_ns=idle, freed_ns=idle, arithmetic=arithmetic, confidence=HIGH)
    number = sum(wait.count for wait in waits)
    what = next((wait.op or wait.call for wait in waits), "")
    told = f" ({number:.0f} waits a step, most in {what})" if what else ""
    title = f"synchronisation in the step: the GPU is idle {units.duration(idle)} after it{told}"
    evidence = tuple(_told(wait) for wait in waits[:5])
    if waits and not any(wait.line for wait in waits):
        evidence += ("the functions that wait: profile with --stacks",)
    return finding(facts, __name__, title, saving, (IDLE_SYNCHRONISATION, IDLE_OTHER), evidence=evidence, code=CODE)


def _told(wait: HostWait) -> str:
    where = f" in {wait.line or wait.where}" if wait.line or wait.where else ""
    by = f"{wait.op} → {wait.call}" if wait.op else wait.call
    return f"{wait.count:.0f} × {by}{where}: the host waits {units.duration(wait.waited_ns)}"
