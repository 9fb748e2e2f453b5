"""On the CPU: the optimizer updates tensor by tensor, op by op.

Looks for: time in the optimizer, with no fused op in it; not of a class that has no fused form.
Saving: its time outside the ops, and {CHAIN_SAVED} of its ops that only move memory: the fused one reads and writes each tensor
once.
Fix: `fused=True` for the class that the trace names; PyTorch's Adam, AdamW, SGD and Adagrad have it on the CPU.
"""

from flopwise import units
from flopwise.advice.constants import CHAIN_SAVED
from flopwise.advice.host_facts import MOVERS, HostFacts
from flopwise.records.finding import LOW, Finding
from flopwise.trace.phases import OPTIMIZER

FUSED = ("AdamW", "Adam", "SGD", "Adagrad")  # of torch.optim, those with a fused form on the CPU


def check(facts: HostFacts) -> Finding | None:
    e = facts.explanation
    outside, moving = facts.outside_ns(OPTIMIZER), facts.kinds_ns(MOVERS, (OPTIMIZER,))
    name = next((one for one in FUSED if one in (e.optimizers or FUSED)), "")
    if e.fused_optimizer or moving <= 0 or not name:
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
        levers={"optimizer": "fused"} if name == "AdamW" else {},
        code=f"optimizer = torch.optim.{name}(model.parameters(), lr=lr, fused=True)",
        confidence=LOW,
        draws_on={"optimizer": saved},
    )
