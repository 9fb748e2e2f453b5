"""The ranks wait for each other in turn.

Looks for: waiting of {UNEVEN_SHARE:%} of the step or more, mean over the ranks, beyond what the slowest rank causes.
Saving: that waiting, if all ranks had the mean of their work: at most, as some of it is chance.
Fix: share the work out evenly, and let fewer collectives be points at which all must meet.
"""

from flopwise import units
from flopwise.advice.constants import UNEVEN_SHARE
from flopwise.advice.rank_facts import RankFacts
from flopwise.records.finding import LOW, Finding
from flopwise.records.ranks import LINK

CODE = "# share out tokens, experts or embedding tables by their cost, not by their number"


def check(facts: RankFacts) -> Finding | None:
    e = facts.explanation
    named = e.straggler.saving_ns if e.straggler is not None and e.straggler.cause != LINK else 0.0
    rest = facts.waiting_ns - named
    if rest < UNEVEN_SHARE * facts.step_ns or e.missing:  # they may wait for a rank that is not here
        return None
    waits = sorted(e.ranks, key=lambda one: one.waiting_ns)
    last = sorted(e.ranks, key=lambda one: -one.last)[:3]
    return Finding(
        rule="uneven_ranks",
        title=f"the ranks wait for each other {units.percent(rest / facts.step_ns, 0)} of the step, not for one alone",
        values={"waiting_ns": facts.waiting_ns},
        saving_ns=rest,
        arithmetic=(
            f"{units.duration(facts.waiting_ns)} of waiting, mean over the ranks, − {units.duration(named)} by the slowest "
            f"rank = {units.duration(rest)} at most"
        ),
        evidence=(
            f"rank {waits[0].rank} waits {units.duration(waits[0].waiting_ns)}, "
            f"rank {waits[-1].rank} {units.duration(waits[-1].waiting_ns)} of a step",
            "last: " + ", ".join(f"rank {one.rank} in {one.last} of {one.collectives}" for one in last if one.last),
        ),
        code=CODE,
        confidence=LOW,
        draws_on={"waiting in turn": rest},
        evidence_ns=facts.waiting_ns,
    )
