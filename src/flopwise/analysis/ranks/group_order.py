"""Groups whose collectives ranks call in different orders: two such groups can wait for each other, and deadlock."""

from collections import Counter
from itertools import combinations

from flopwise.analysis.ranks.waiting import Waits

_MOST_PAIRS = 200
_MOST_GROUPS = 16  # of one rank


def groups_out_of_order(found: Waits) -> tuple[int, ...]:
    """Of groups that share two ranks or more: those whose calls follow each other differently from rank to rank."""
    rows = found.rows.filter("matched").sort("rank", "launched_ns", maintain_order=True)
    order = {
        rank: list(zip(part["group"].to_list(), part["step"].to_list(), strict=True))
        for (rank,), part in rows.select("rank", "group", "step").group_by("rank", maintain_order=True)
    }
    shared: Counter[tuple[int, int]] = Counter()
    for calls in order.values():
        shared.update(combinations(sorted({group for group, _ in calls})[:_MOST_GROUPS], 2))
    wrong: set[int] = set()
    for pair, n in shared.most_common(_MOST_PAIRS):
        if n > 1 and _differ(pair, list(order.values())):
            wrong |= set(pair)
    return tuple(sorted(wrong))


def _differ(pair: tuple[int, int], order: list[list[tuple[int, int]]]) -> bool:
    both = [[call for call in calls if call[0] in pair] for calls in order]
    both = [calls for calls in both if {group for group, _ in calls} == set(pair)]
    return any(calls != both[0] and Counter(calls) == Counter(both[0]) for calls in both[1:])
