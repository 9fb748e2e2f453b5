"""Compiled code in several pieces, or compiled again inside the steps.

Looks for: several compiled regions in one step (`Torch-Compiled Region: 0/0`, `1/0`, …), each but the first after a graph
break; regions compiled a second time (`0/1`); TorchDynamo at work inside the steps. One region that repeats (a block compiled
once) is no break.
Saving: the host's cost of one call of a compiled graph for each break (the ceilings'; without them
{COMPILED_CALL_NS:duration} are assumed), forward and backward, and the time spent compiling. No more than the GPU was idle:
at the optimistic end, where the untraced step is an estimate.
Fix: find breaks with `TORCH_LOGS=graph_breaks`, recompilations with `TORCH_LOGS=recompiles`; `fullgraph=True` makes a break
an error.
"""

from flopwise import units
from flopwise.advice.constants import COMPILED_CALL_NS
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.analysis.idle import COMPILATION, LATE_LAUNCH
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import IDLE_COMPILATION, IDLE_LAUNCH, IDLE_OTHER

CODE = """TORCH_LOGS=graph_breaks,recompiles python train.py      # says where, and why
model = torch.compile(model, fullgraph=True)            # a break is then an error
torch._dynamo.mark_dynamic(tokens, 1)                   # a size that changes: no compilation for each"""
RULE = Rule(__name__, (IDLE_COMPILATION, IDLE_LAUNCH, IDLE_OTHER), code=CODE)


def check(facts: Facts) -> Finding | None:
    compiled = facts.details.compiled
    parts = {
        f"{compiled.breaks} graph breaks": compiled.breaks,
        f"{compiled.recompiled} regions compiled again": compiled.recompiled,
        f"{units.duration(compiled.compiling_ns)} of compiling in the step": compiled.compiling_ns,
    }
    if not any(parts.values()):
        return None
    call = (facts.ceilings.compiled_call_ns if facts.ceilings is not None else 0.0) or COMPILED_CALL_NS
    ways = 2 if facts.phase_ns("backward") else 1
    host = compiled.breaks * ways * call
    late, compiling = facts.sure_idle_ns(LATE_LAUNCH), min(compiled.compiling_ns, facts.sure_idle_ns(COMPILATION))
    saved = min(host, late) + compiling
    arithmetic = (
        f"{compiled.breaks} breaks × {ways} × {units.duration(call)} = {units.duration(host)} of the host, of which the GPU is "
        f"idle at most {units.duration(late)}; + {units.duration(compiling)} idle while it compiles = {units.duration(saved)}"
    )
    title = f"compiled in pieces: {', '.join(text for text, number in parts.items() if number)}"
    saving = idle_saved(saved, arithmetic, MEDIUM if compiled.compiling_ns else LOW)
    regions = f"regions: {', '.join(compiled.frames[:12])}; {units.several(compiled.calls, 'call')} a step"
    return RULE.finding(
        facts,
        title,
        saving,
        (regions,),
        evidence_ns=late + compiling,
        breaks=compiled.breaks,
        compiling_ns=compiled.compiling_ns,
    )
