"""Ranks call the collectives of two groups in different orders.

Looks for: two groups that share two ranks or more, whose calls follow each other differently from rank to rank.
Saving: none is computed. Two groups in different orders wait for each other, and may deadlock.
Fix: call them in the same order on every rank.
"""

from flopwise.advice.rank_facts import RankFacts
from flopwise.records.finding import MEDIUM, Finding

_NAMED = 4


def check(facts: RankFacts) -> Finding | None:
    wrong = facts.explanation.late_groups
    if not wrong:
        return None
    named = ", ".join(wrong[:_NAMED]) + (f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
    return Finding(
        rule="group_order",
        title=f"ranks call the collectives of groups {named} in different orders",
        values={"groups": len(wrong)},
        arithmetic="no saving is computed: the groups wait for each other, and may deadlock",
        code="# the same calls in the same order on every rank",
        confidence=MEDIUM,
    )
