"""Ranks of the job have no trace here.

Looks for: ranks between 0 and the job's size that no file is of.
Saving: none. Who comes last may be one of them: waiting is then taken for transfer.
Fix: export the trace of every rank.
"""

from flopwise.advice.rank_facts import RankFacts
from flopwise.analysis.ranks.explained import numbers_text
from flopwise.records.finding import HIGH, Finding

CODE = 'profiler.export_chrome_trace(f"rank{dist.get_rank()}.json.gz")'


def check(facts: RankFacts) -> Finding | None:
    missing = facts.explanation.missing
    if not missing:
        return None
    n = len(facts.explanation.ranks) + len(missing)
    return Finding(
        rule="missing_ranks",
        title=f"{numbers_text(missing)} of {n} {'has' if len(missing) == 1 else 'have'} no trace here",
        values={"missing": len(missing)},
        arithmetic="no saving is computed: if one of them comes last, waiting for it is taken for transfer",
        code=CODE,
        confidence=HIGH,
    )
