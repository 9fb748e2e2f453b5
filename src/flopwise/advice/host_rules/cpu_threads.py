"""On the CPU: torch uses fewer threads than the machine has cores.

Looks for: a run of flopwise whose process had half as many threads as cores, or fewer, and time in matmuls or attention. A
trace alone does not say how many threads there were.
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
    if found is None or not 0 < 2 * found.cpu_threads <= found.cpu_cores:
        return None
    heavy, threads, cores = facts.kinds_ns((MATMUL, ATTENTION)), found.cpu_threads, found.cpu_cores
    saved = heavy * (1 - threads / cores)
    if saved <= 0:
        return None
    switch = (f"{VARIABLE}={found.switches[VARIABLE]}",) if VARIABLE in found.switches else ()
    return Finding(
        rule="cpu_threads",
        title=f"torch uses {threads} of {cores} cores",
        values={"threads": threads, "cores": cores},
        saving_ns=saved,
        arithmetic=(
            f"{units.duration(heavy)} of matmuls and attention × (1 − {threads}/{cores}) "
            f"= {units.duration(saved)} at most"
        ),
        evidence=(f"{threads} threads on a machine with {cores} cores", *switch),
        code=f"torch.set_num_threads({cores})  # or {VARIABLE}={cores}",
        confidence=LOW,
        draws_on={"matmuls": saved},
    )
