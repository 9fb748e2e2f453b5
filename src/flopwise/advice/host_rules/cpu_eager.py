"""On the CPU: op by op where compiled code would do less.

Looks for: forward, loss and backward with {HOST_EAGER_SHARE:%} of the step or more outside every op (Python) and in ops that only
move memory (elementwise, norms, reductions, softmax, casts); nothing in the trace is compiled.
Saving: the time outside the ops, of the untraced step where it was timed, and {CHAIN_SAVED} of those ops: a compiler joins them,
and part of what lies between must still be written for the backward pass.
Fix: `torch.compile` the model. A larger batch makes the Python share smaller, too.
"""

from flopwise import units
from flopwise.advice.constants import CHAIN_SAVED, HOST_EAGER_SHARE
from flopwise.advice.host_facts import MOVERS, HostFacts
from flopwise.records.finding import LOW, Finding
from flopwise.trace.phases import BACKWARD, FORWARD, LOSS

PHASES = (FORWARD, LOSS, BACKWARD)


def check(facts: HostFacts) -> Finding | None:
    e = facts.explanation
    outside, moving = facts.outside_ns(*PHASES), facts.kinds_ns(MOVERS, PHASES)
    if e.compiled or outside + moving < HOST_EAGER_SHARE * facts.step_ns:
        return None
    saved = outside + CHAIN_SAVED * moving
    calls = sum(op.count for op in e.ops)
    by_kind = sorted(((facts.kinds_ns((kind,), PHASES), kind) for kind in MOVERS), reverse=True)
    python = f"{units.duration(outside)} in Python" if outside else ""
    return Finding(
        rule="cpu_eager",
        title=" and ".join(filter(None, (python, f"{units.duration(moving)} in ops that only move memory"))),
        values={"outside_ns": outside, "moving_ns": moving},
        saving_ns=saved,
        arithmetic=(
            f"{units.duration(outside)} outside the ops + {units.duration(moving)} × {CHAIN_SAVED} (assumed) "
            f"= {units.duration(saved)} at most"
        ),
        evidence=(
            f"{calls:.0f} ops a step, {units.duration(e.outside_ns)} of the traced step outside them",
            *(f"{kind}: {units.duration(ns)}" for ns, kind in by_kind[:3] if ns),
        ),
        levers={"compile": "default"},
        code="model = torch.compile(model)",
        confidence=LOW,
        draws_on={"outside the ops": outside, "ops that move memory": CHAIN_SAVED * moving},
    )
