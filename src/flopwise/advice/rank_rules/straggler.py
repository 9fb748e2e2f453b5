"""One rank comes last, and the others wait for it.

Looks for: the rank whose late arrivals at collectives cost the step most, {STRAGGLER_SHARE:%} of it or more, and what it did
before it arrived: more compute, the same kernels more slowly, idle because its host launches late, waiting for input.
Saving: the step replayed with the rank's own time between collectives as long as the median of its group's other ranks.
Fix: by the cause. More compute: shard evenly, pack sequences to equal lengths. A slower clock: power, heat, another process on
that GPU. A late host: its cores, what else runs on them, a CUDA graph. Input: more workers, the same storage for all.
"""

from flopwise import units
from flopwise.advice.rank_facts import RankFacts
from flopwise.records.finding import HIGH, MEDIUM, Finding
from flopwise.records.ranks import BEGAN_LATE, HOST_LATE, INPUT, LINK, MORE_COMPUTE, SLOWER_CLOCK

CODE = {
    MORE_COMPUTE: "# give every rank as many tokens: pack sequences, or sort them by length before they are shared out",
    SLOWER_CLOCK: "nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER      # on the host of that rank",
    HOST_LATE: "numactl --cpunodebind=N --membind=N python train.py      # cores next to its GPU; or capture a CUDA graph",
    INPUT: "loader = DataLoader(data, num_workers=8, pin_memory=True, prefetch_factor=4)",
}


def check(facts: RankFacts) -> Finding | None:
    one = facts.explanation.straggler
    if one is None or one.cause in (LINK, BEGAN_LATE) or one.rank < 0:  # when a trace began is the profiler's doing
        return None
    saved = units.duration(one.saving_ns)
    began = f"{units.duration(one.began_late_ns)} of its lateness is from before the first traced step"
    return Finding(
        rule="straggler",
        title=f"the others wait for rank {one.rank}: {one.because}",
        values={"rank": one.rank, "last": one.last, "collectives": one.collectives, "late_ns": one.late_ns},
        saving_ns=one.saving_ns,
        arithmetic=f"the step replayed with rank {one.rank} as fast as the median of the others: {saved} less",
        evidence=(f"last in {one.last} of {one.collectives} collectives", *((began,) if one.began_late_ns else ())),
        code=CODE.get(one.cause, ""),
        confidence=MEDIUM if one.began_late_ns else HIGH,
        draws_on={"waiting": one.saving_ns},
    )
