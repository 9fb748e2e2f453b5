"""On the CPU: the optimizer updates tensor by tensor, op by op.

Looks for: time in the optimizer, with no fused op in it.
Saving: its time outside the ops, and {CHAIN_SAVED} of its ops that only move memory: the fused one reads and writes each tensor
once.
Fix: `fused=True`; PyTorch's Adam, AdamW, SGD and Adagrad have it on the CPU.
"""

from flopwise import units
from flopwise.advice.constants import CHAIN_SAVED
from flopwise.advice.host_facts import MOVERS, HostFacts
from flopwise.records.finding import LOW, Finding
from flopwise.trace.phases import OPTIMIZER

CODE = "optimizer = torch.optim.AdamW(model.parameters(), fused=True)"


def check(facts: HostFacts) -> Finding | None:
    e = facts.explanation
    outside, moving = facts.outside_ns(OPTIMIZER), facts.kinds_ns(MOVERS, (OPTIMIZER,))
    if e.fused_optimizer or moving <= 0:
        return None
    saved = outside + CHAIN_SAVED * moving
    spent = next((one.wall_ns for one in e.phases if one.name == OPTIMIZER), 0.0)
    return Finding(
        rule="cpu_optimizer",
        title=f"the optimizer takes {units.duration(spent)}, and is not fused",
        values={"optimizer_ns": spent},
        saving_ns=saved,
        arithmetic=(
            f"{units.duration(outside)} outside the ops + {units.duration(moving)} × {CHAIN_SAVED} (assumed) "
            f"= {units.duration(saved)} at most"
        ),
        evidence=(f"{units.duration(spent)} in the optimizer, no fused op in the trace",),
        levers={"optimizer": "fused"},
        code=CODE,
        confidence=LOW,
        draws_on={"optimizer": saved},
    )
