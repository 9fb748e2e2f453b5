"""On the CPU: the step waits for the next batch.

Looks for: time of the thread that computes in the data loader (`enumerate(DataLoader)…__next__`, ranges named after loading).
Saving: that time, measured in the untraced loop, or by its share of the traced step. With workers the next batch is made while
this one is computed; they need cores of their own.
Fix: `num_workers` where the loader has none; where it has some, more of them as far as there are cores, else cheaper batches.
"""

from flopwise import units
from flopwise.advice.host_facts import HostFacts
from flopwise.records.finding import LOW, MEDIUM, Finding

SINGLE = "_SingleProcessDataLoaderIter"  # PyTorch's name of a loader without workers


def check(facts: HostFacts) -> Finding | None:
    e = facts.explanation
    loading = e.untraced_loading_ns
    if loading <= 0:
        return None
    alone = any(SINGLE in name for name in e.loaders) or e.loader_workers == 0
    where = "in the thread that computes: the loader has no workers" if alone else "waiting for the loader"
    where += f" and its {e.loader_workers} workers" if e.loader_workers else ""
    return Finding(
        rule="cpu_data_loading",
        title=f"{units.duration(loading)} of each step is data loading",
        values={"loading_ns": loading},
        saving_ns=loading,
        arithmetic=f"at most all of it: {units.duration(loading)}",
        evidence=(f"{units.duration(loading)} a step {where}", *e.loaders[:3]),
        code=_code(alone, e.loader_workers, facts.environment.cpu_cores if facts.environment is not None else 0),
        confidence=MEDIUM if alone else LOW,
        draws_on={"data loading": loading},
    )


def _code(alone: bool, workers: int | None, cores: int) -> str:
    """
    >>> _code(True, 0, 8)
    'loader = DataLoader(data, num_workers=2, persistent_workers=True)'
    >>> _code(False, 2, 8), _code(False, 2, 2)
    ('loader = DataLoader(data, num_workers=4)  # now 2', 'data = prepared(data)  # once, before training: no core is left')
    """
    if alone:
        return "loader = DataLoader(data, num_workers=2, persistent_workers=True)"
    if workers is None:
        return "loader = DataLoader(data, num_workers=n)  # more than now"
    if cores and workers >= cores:
        return "data = prepared(data)  # once, before training: no core is left"
    return f"loader = DataLoader(data, num_workers={min(2 * workers, cores or 2 * workers)})  # now {workers}"
