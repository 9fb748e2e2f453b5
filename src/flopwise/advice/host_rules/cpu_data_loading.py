"""On the CPU: the step waits for the next batch.

Looks for: time of the thread that computes in the data loader (`enumerate(DataLoader)…__next__`, ranges named after loading).
Saving: that time, measured in the untraced loop, or by its share of the traced step. With workers the next batch is made while
this one is computed; they need cores of their own.
Fix: `num_workers` where the loader has none, more of them or cheaper batches where it has.
"""

from flopwise import units
from flopwise.advice.host_facts import HostFacts
from flopwise.records.finding import LOW, MEDIUM, Finding

CODE = "loader = DataLoader(data, batch_size=batch, num_workers=2, prefetch_factor=4, persistent_workers=True)"
SINGLE = "_SingleProcessDataLoaderIter"  # PyTorch's name of a loader without workers


def check(facts: HostFacts) -> Finding | None:
    e = facts.explanation
    loading = e.untraced_loading_ns
    if loading <= 0:
        return None
    alone = any(SINGLE in name for name in e.loaders)
    where = "in the thread that computes: the loader has no workers" if alone else "waiting for the loader"
    return Finding(
        rule="cpu_data_loading",
        title=f"{units.duration(loading)} of each step is data loading",
        values={"loading_ns": loading},
        saving_ns=loading,
        arithmetic=f"at most all of it: {units.duration(loading)}",
        evidence=(f"{units.duration(loading)} a step {where}", *e.loaders[:3]),
        code=CODE,
        confidence=MEDIUM if alone else LOW,
        draws_on={"data loading": loading},
    )
