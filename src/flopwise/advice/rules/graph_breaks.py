"""Compiled code in several pieces, or compiled again inside the steps.

Looks for: several compiled regions in one step (`Torch-Compiled Region: 0/0`, `1/0`, …), each but the first after a graph
break; regions compiled a second time (`0/1`); TorchDynamo at work inside the steps. One region that repeats (a block compiled
once) is no break.
Saving: the host's cost of one call of a compiled graph for each break (the ceilings'; without them 100 µs are assumed), forward
and backward, and the time spent compiling; of that what the GPU was idle.
Mend: find breaks with `TORCH_LOGS=graph_breaks`, recompilations with `TORCH_LOGS=recompiles`; `fullgraph=True` makes a break
an error.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Saving, finding
from flopwise.analysis.idle import LATE_LAUNCH
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import IDLE_LAUNCH, IDLE_OTHER

CALL_NS = 100_000.0  # where no ceilings tell
CODE = """TORCH_LOGS=graph_breaks,recompiles python train.py      # says where, and why
model = torch.compile(model, fullgraph=True)            # a break is then an error
torch._dynamo.mark_dynamic(tokens, 1)                   # a size that changes: no compilation for each"""


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    compiled = facts.details.compiled if facts.details is not None else None
    if compiled is None or not (compiled.breaks or compiled.compiling_ns or compiled.recompiled):
        return None
    call = (facts.ceilings.compiled_call_ns if facts.ceilings is not None else 0.0) or CALL_NS
    ways = 2 if measured.phase_ns(facts, "backward") else 1
    host = compiled.breaks * ways * call + compiled.compiling_ns
    idle = measured.idle_ns(facts, LATE_LAUNCH)
    gone = min(host, idle)
    arithmetic = (
        f"{compiled.breaks} breaks × {ways} × {units.duration(call)} + compiling {units.duration(compiled.compiling_ns)} = "
        f"{units.duration(host)} of the host, of which the GPU is idle at most {units.duration(idle)}"
    )
    sure = MEDIUM if compiled.compiling_ns else LOW
    parts = [f"{compiled.breaks} graph breaks"] if compiled.breaks else []
    parts += [f"{compiled.recompiled} regions compiled again"] if compiled.recompiled else []
    parts += [f"{units.duration(compiled.compiling_ns)} of compiling in the step"] if compiled.compiling_ns else []
    return finding(
        facts,
        __name__,
        f"compiled in pieces: {', '.join(parts)}",
        Saving(alone_ns=gone, freed_ns=gone, arithmetic=arithmetic, confidence=sure),
        (IDLE_LAUNCH, IDLE_OTHER),
        evidence=(f"regions: {', '.join(compiled.frames[:12])}; {compiled.calls:.0f} calls a step",),
        code=CODE,
    )
