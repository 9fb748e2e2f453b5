"""The host waits for the GPU inside the step, and the GPU then waits for the host.

Looks for: calls that synchronise (`.item()`, `.tolist()`, `nonzero`, `.cpu()`, copies to pageable memory) between the
launches of a step, after which the GPU was idle.
Saving: the idle time during and after such waits, of the untraced step: after a wait no more than the host had waited, which is
how much earlier it would have been there. Where the step is an estimate, there must be some at its optimistic end, too.
Fix: keep numbers on the GPU, read them every hundred steps, copy with `non_blocking=True` into pinned memory. Of a server:
schedule the next batch while this one runs.
"""

import msgspec

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.analysis.host_waits import HostWait
from flopwise.analysis.idle import SYNCHRONISATION
from flopwise.records.finding import HIGH, Finding
from flopwise.records.waterfall import IDLE_OTHER, IDLE_SYNCHRONISATION
from flopwise.trace.phases import FORWARD

CODE = """losses.append(loss.detach())                    # not loss.item(): stays on the GPU
if step % 100 == 0:
    print(torch.stack(losses).mean().item())     # one wait in a hundred steps
batch = batch.pin_memory().to("cuda", non_blocking=True)"""
CODE_INFERENCE = """done = logits.argmax(-1).eq(end)                 # stays on the GPU; not .item() for every token
if step % 16 == 0 and bool(done.all()):          # one wait in sixteen steps
    break
batch = batch.pin_memory().to("cuda", non_blocking=True)"""
CODE_ANY = """value = value.detach()                           # not .item(), .tolist() or .cpu() in every step
batch = batch.pin_memory().to("cuda", non_blocking=True)"""
CODE_SERVING = (
    "# schedule the next batch while this one runs: vLLM --async-scheduling; SGLang's overlap scheduler by default"
)
RULE = Rule(__name__, (IDLE_SYNCHRONISATION, IDLE_OTHER), code=CODE)


def check(facts: Facts) -> Finding | None:
    idle, waits = facts.idle_ns(SYNCHRONISATION), facts.details.waits
    if not idle or not facts.sure_idle_ns(SYNCHRONISATION):
        return None
    number, waited = sum(wait.count for wait in waits), sum(wait.waited_ns for wait in waits)
    idle = min(idle, waited) if waits else idle
    first = next((wait.op or wait.call for wait in waits), "")
    counted = f" ({units.several(number, 'wait')} a step, most in {first})" if first else ""
    evidence = tuple(_describe(wait) for wait in waits[:5])
    if waits and not any(wait.line for wait in waits):
        evidence += ("the functions that wait: profile with --stacks",)
    title = f"synchronisation in the step: the GPU is idle {units.duration(idle)} after it{counted}"
    arithmetic = f"the GPU is idle {units.duration(idle)} after the host had waited {units.duration(waited)}"
    rule = msgspec.structs.replace(RULE, code=_code(facts))
    saving = idle_saved(idle, arithmetic, HIGH)
    return rule.finding(facts, title, saving, evidence, evidence_ns=idle, idle_ns=idle, waits=number, waited_ns=waited)


def _code(facts: Facts) -> str:
    """For what the step does; without phases it may be anything."""
    if facts.trains or facts.serves:
        return CODE if facts.trains else CODE_SERVING
    return CODE_INFERENCE if facts.phase_ns(FORWARD) else CODE_ANY


def _describe(wait: HostWait) -> str:
    where = f" in {wait.line or wait.where}" if wait.line or wait.where else ""
    by = f"{wait.op} → {wait.call}" if wait.op else wait.call
    return f"{wait.count:.0f} × {by}{where}: the host waits {units.duration(wait.waited_ns)}"
