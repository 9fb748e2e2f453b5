"""The GPU waits for the next batch.

Looks for: the GPU idle while the host is in the dataloader (`enumerate(DataLoader)…__next__`, ranges named after loading).
Saving: that idle time, by the waterfall or the trace.
Fix: more workers, pinned memory, prefetching; copy the next batch on a stream of its own while this one is computed.
"""

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.analysis.idle import INPUT
from flopwise.records.finding import HIGH, Finding
from flopwise.records.waterfall import IDLE_INPUT, IDLE_LAUNCH, IDLE_OTHER

CODE = """loader = DataLoader(data, num_workers=8, pin_memory=True, prefetch_factor=4)
for tokens in loader:
    tokens = tokens.to("cuda", non_blocking=True)"""
RULE = Rule(__name__, (IDLE_INPUT, IDLE_OTHER, IDLE_LAUNCH), code=CODE)


def check(facts: Facts) -> Finding | None:
    e, loading = facts.explanation, facts.details.loading_ns
    idle = facts.idle_ns(INPUT)
    if idle <= 0:
        return None
    saving = idle_saved(idle, f"the GPU is idle {units.duration(idle)} while the host fetches a batch", HIGH)
    title = f"the GPU waits {units.duration(idle)} for the next batch"
    evidence = [f"the host fetches for {units.duration(loading)} of each step"] if loading else []
    blamed = [one for one in (e.blame if e is not None else ()) if one.cause == INPUT]
    evidence += [f"{units.duration(one.idle_ns)} in {' → '.join((*one.stack[-2:], one.what))}" for one in blamed[:3]]
    return RULE.finding(facts, title, saving, evidence, evidence_ns=idle, idle_ns=idle, loading_ns=loading)
