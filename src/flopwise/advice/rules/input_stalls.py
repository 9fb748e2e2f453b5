"""The GPU waits for the next batch.

Looks for: the GPU idle while the host is in the dataloader (`enumerate(DataLoader)…__next__`, ranges named after loading).
Saving: that idle time, as the waterfall or the trace tells it.
Mend: more workers, pinned memory, prefetching; copy the next batch on a stream of its own while this one is computed.
"""

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Saving, finding
from flopwise.records.finding import HIGH, Finding
from flopwise.records.waterfall import IDLE_INPUT, IDLE_LAUNCH, IDLE_OTHER

CODE = """loader = DataLoader(data, batch_size=batch, num_workers=8, pin_memory=True, prefetch_factor=4, persistent_workers=True)
for tokens in loader:
    tokens = tokens.to("cuda", non_blocking=True)"""


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    split = facts.waterfall.ns(IDLE_INPUT) if facts.waterfall is not None else 0.0
    idle = split or (facts.details.loading_idle_ns if facts.details is not None else 0.0)
    if idle <= 0:
        return None
    loading = facts.details.loading_ns if facts.details is not None else 0.0
    arithmetic = f"the GPU is idle {units.duration(idle)} while the host fetches a batch"
    saving = Saving(alone_ns=idle, freed_ns=idle, arithmetic=arithmetic, confidence=HIGH)
    return finding(
        facts,
        __name__,
        f"the GPU waits {units.duration(idle)} for the next batch",
        saving,
        (IDLE_INPUT, IDLE_OTHER, IDLE_LAUNCH),
        evidence=(f"the host fetches for {units.duration(loading)} of each step",) if loading else (),
        code=CODE,
    )
