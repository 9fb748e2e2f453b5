"""Some iterations of decoding run without the CUDA graph that others have.

Looks for: a server's iterations that only decode, most of their work launched kernel by kernel, beside others that replay a graph
and are shorter.
Saving: the medians' difference, for as many of the iterations.
Fix: capture graphs for the batch sizes that occur; a batch between two sizes is padded to the larger.
"""

from statistics import median

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import IDLE_LAUNCH, IDLE_OTHER
from flopwise.trace.iterations import DECODE

CODE = "# engine: capture CUDA graphs for these batch sizes, too"
RULE = Rule(__name__, (IDLE_LAUNCH, IDLE_OTHER), code=CODE)


def check(facts: Facts) -> Finding | None:
    times = facts.explanation.step_times if facts.explanation is not None else ()
    decoding = [(one, one.batch) for one in times if one.batch is not None and one.batch.kind == DECODE]
    took = {held: [one.ns for one, _ in decoding if one.in_graphs == held] for held in (False, True)}
    if not took[False] or not took[True] or median(took[False]) <= median(took[True]):
        return None
    slow, fast, share = median(took[False]), median(took[True]), len(took[False]) / len(times)
    sizes = sorted({batch.decode_requests for one, batch in decoding if not one.in_graphs})
    arithmetic = f"({units.duration(slow)} − {units.duration(fast)}) in {units.percent(share, 0)} of the iterations"
    title = f"{len(took[False])} of {len(decoding)} iterations of decoding run without a CUDA graph"
    line = f"batches of {', '.join(map(str, sizes[:8]))}: {units.duration(slow)}; with a graph {units.duration(fast)}"
    saving, counts = idle_saved(share * (slow - fast), arithmetic, MEDIUM), {"without": len(took[False])}
    return RULE.finding(facts, title, saving, (line,), evidence_ns=share * slow, iterations=len(decoding), **counts)
