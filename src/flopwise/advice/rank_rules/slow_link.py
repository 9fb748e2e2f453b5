"""A link is slower than the others.

Looks for: groups, or pairs of ranks, whose transfers take longer than those of others for as many bytes. Where all of them share
one rank, that is where the link is.
Saving: the step replayed with their transfers as fast as the median of the others.
Fix: look at the link: a cable, a port that came up at a lower rate, a GPU without its NVLink, a neighbour on the same switch.
"""

from flopwise import units
from flopwise.advice.rank_facts import RankFacts
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.ranks import LINK

CODE = "nvidia-smi topo -m; nvidia-smi nvlink --status; ibstat      # on its host"


def check(facts: RankFacts) -> Finding | None:
    e = facts.explanation
    one = next((one for one in (e.straggler, *e.stragglers) if one is not None and one.cause == LINK), None)
    if one is None:
        return None
    who = f"of rank {one.rank}" if one.rank >= 0 else f"of {one.group}"
    return Finding(
        rule="slow_link",
        title=f"the link {who} is slow: {one.because}",
        values={"rank": one.rank, "late_ns": one.late_ns},
        saving_ns=one.saving_ns,
        arithmetic=f"the step replayed with transfers as fast as in the other groups: {units.duration(one.saving_ns)} less",
        evidence=(f"{one.last} of {one.collectives} collectives go over it",),
        code=CODE,
        confidence=MEDIUM,
        draws_on={"link": one.saving_ns},
    )
