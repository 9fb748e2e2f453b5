"""Rules for several ranks of a job, one file each: `check(facts)` gives a finding, or None where the traces have no evidence."""

from flopwise.advice.rank_rules import (
    gathers_ahead,
    group_order,
    missing_ranks,
    rank_overlap,
    sharding_group,
    slow_link,
    small_collectives,
    straggler,
    uneven_ranks,
)

ALL_RANK_RULES = (
    *(straggler, uneven_ranks, slow_link, small_collectives, rank_overlap, gathers_ahead, sharding_group),
    *(group_order, missing_ranks),
)
