"""Requests that decode wait for a long prefill.

Looks for: iterations of a server that read prompts while other requests decode: in the same batch, or between their iterations,
for twice as long as an iteration that only decodes; where none does, with {LONG_PREFILL} tokens of prompts or more.
Saving: of the time between two tokens of a request: half of what such an iteration takes longer, as prefill in chunks half as
long has half of it.
Fix: smaller chunks of prefill (the engine's limit on tokens in a batch), or prefill on other GPUs. The prompts themselves are
read a little later.
"""

from flopwise import units
from flopwise.advice.constants import LONG_PREFILL
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.analysis.serving import IterationKind, Serving
from flopwise.records.finding import LOW, Finding
from flopwise.trace.iterations import DECODE, MIXED, PREFILL

CODE = "# engine: chunked prefill with fewer tokens in a batch, or prefill and decode on GPUs of their own"
RULE = Rule(__name__, code=CODE)


def check(facts: Facts) -> Finding | None:
    served = facts.explanation.serving if facts.explanation is not None else None
    found = _waited_for(served) if served is not None else None
    if served is None or found is None:
        return None
    long, alone_ns = found
    beyond, share = long.ns - alone_ns, long.count / sum(one.count for one in served.kinds)
    tokens = f" of {long.prefill_tokens:,.0f} tokens" if long.prefill_tokens else ""
    title = f"requests that decode wait {units.duration(long.ns)} for a prefill{tokens}"
    alone = f"; an iteration that only decodes takes {units.duration(alone_ns)}" if alone_ns else ""
    arithmetic = f"{units.duration(beyond)} / 2, in {units.percent(share, 0)} of the iterations"
    number, requests = units.several(long.count, "iteration"), units.several(long.requests, "request")
    line = f"{number} ({long.kind}) of {requests}, {units.duration(long.ns)} each{alone}"
    saving, all_ns = idle_saved(min(share * beyond / 2, facts.step_ns), arithmetic, LOW), share * long.ns
    return RULE.finding(facts, title, saving, (line,), evidence_ns=all_ns, iteration_ns=long.ns, beyond_ns=beyond)


def _waited_for(served: Serving) -> tuple[IterationKind, float] | None:
    """The iterations that read prompts while others wait to decode, and what one takes that only decodes (0: not known)."""
    decode, mixed, prefill = (served.of(kind) for kind in (DECODE, MIXED, PREFILL))
    if decode is None:
        return (mixed, 0.0) if mixed is not None and (mixed.prefill_tokens or 0) >= LONG_PREFILL else None
    long = [one for one in (mixed, prefill) if one is not None and one.ns >= 2 * decode.ns]
    return (max(long, key=lambda one: one.count * (one.ns - decode.ns)), decode.ns) if long else None
