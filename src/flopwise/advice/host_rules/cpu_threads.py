"""On the CPU: torch uses fewer threads than the process has cores.

Looks for: a run of flopwise whose process had half as many threads as cores, or fewer, and time in matmuls or attention. The
ranks of a job on one machine share its cores. A trace alone does not say how many threads there were.
Saving: the time of matmuls and attention × (1 − threads / cores), at most: it assumes that the cores are free and that the
products grow with them.
Fix: `torch.set_num_threads`, or the environment variable OMP_NUM_THREADS, which `torchrun` sets to 1.
"""

from flopwise import units
from flopwise.advice.host_facts import HostFacts
from flopwise.records.finding import LOW, Finding
from flopwise.work.operation import ATTENTION, MATMUL

VARIABLE = "OMP_NUM_THREADS"


def check(facts: HostFacts) -> Finding | None:
    found = facts.environment
    if found is None:
        return None
    heavy, threads = facts.kinds_ns((MATMUL, ATTENTION)), found.cpu_threads
    cores = found.cpu_cores // max(1, found.local_ranks)  # of this rank
    if not 0 < 2 * threads <= cores:
        return None
    saved = heavy * (1 - threads / cores)
    if saved <= 0:
        return None
    ranks = (f"{found.local_ranks} ranks share them",) if found.local_ranks > 1 else ()
    switch = (f"{VARIABLE}={found.switches[VARIABLE]}",) if VARIABLE in found.switches else ()
    return Finding(
        rule="cpu_threads",
        title=f"torch uses {threads} of {cores} cores{' of each rank' if found.local_ranks > 1 else ''}",
        values={"threads": threads, "cores": cores},
        saving_ns=saved,
        arithmetic=(
            f"{units.duration(heavy)} of matmuls and attention × (1 − {threads}/{cores}) "
            f"= {units.duration(saved)} at most"
        ),
        evidence=(f"{threads} threads on a machine with {found.cpu_cores} cores", *ranks, *switch),
        code=f"torch.set_num_threads({cores})  # or {VARIABLE}={cores}",
        confidence=LOW,
        draws_on={"matmuls": saved},
    )
