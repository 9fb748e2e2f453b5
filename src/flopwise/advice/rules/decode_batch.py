"""A larger batch decodes more tokens for the same read of the weights.

Looks for: a trace of a server in which all iterations decode, in batches of which twice as many requests would still wait for the
weights to be read, not for the matmuls' arithmetic.
Saving: of the time that today's tokens take, with twice the requests in an iteration: all but attention is done once for both:
(busy time − attention) / 2.
Fix: more requests at a time (the engine's limit on running requests, the memory for its cache), and graphs captured for such
batches. Each request still gets its tokens at the pace of an iteration.
"""

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, MATMUL_OTHER, MATMUL_SHAPE, MEMORY_BOUND
from flopwise.trace.iterations import DECODE
from flopwise.work.operation import ATTENTION

CODE = "# engine: allow more running requests, leave memory for their cache, capture graphs for the larger batches"
RULE = Rule(__name__, (MATMUL_OTHER, MATMUL_SHAPE, MEMORY_BOUND, BELOW_BANDWIDTH), code=CODE)


def check(facts: Facts) -> Finding | None:
    served, e = facts.decoding, facts.explanation
    found = served.of(DECODE) if served is not None else None
    if e is None or found is None or not facts.decodes_by_bandwidth(2):
        return None
    shared = max(0.0, e.busy_ns - facts.class_ns(ATTENTION))
    arithmetic = f"({units.duration(e.busy_ns)} busy − {units.duration(e.busy_ns - shared)} of attention) / 2, for today's tokens"
    batch = f"{found.decode_requests:.0f}"
    title = (
        f"a batch of {batch} leaves the matmuls waiting for memory: twice the requests share one read of the weights"
    )
    requests = units.several(found.decode_requests, "request")
    evidence = (f"{units.several(found.count, 'iteration')} of {requests} on average, {units.duration(found.ns)} each",)
    saving = gpu_time_saved(facts, shared / 2, arithmetic, LOW)
    return RULE.finding(
        facts, title, saving, evidence, evidence_ns=shared, requests=found.decode_requests, shared_ns=shared
    )
